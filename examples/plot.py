"""The picture of a run: cumulative tokens of every user against its limit."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from clients import BURST_SECONDS, User

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLORS = ("#0072B2", "#E69F00", "#009E73")  # of Okabe and Ito: distinct to colour-blind readers
WIDTHS = (1.5, 4.5, 2.0)  # equal curves lie on each other: the first is drawn inside the second
ZOOM_SECONDS = 3.0


def save_plot(users: Sequence[User], start: float, path: Path) -> None:
    """Draw the whole run, and beside it the first seconds, where single tokens can be seen."""
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (whole, zoom) = plt.subplots(
        1, 2, figsize=(10, 4.4), width_ratios=(3, 2), layout="constrained"
    )
    figure.suptitle(
        "A limited user stays on its line, with one stream or four; the unlimited one runs on",
        fontsize=13,
    )
    end = max(user.stamps[-1] - start for user in users)
    for axes, seconds in ((whole, end), (zoom, ZOOM_SECONDS)):
        _draw(axes, users, start, seconds)
    whole.set(title="whole run", ylabel="tokens received")
    zoom.set(title=f"first {ZOOM_SECONDS:.0f} seconds", ylim=(0, 30 * ZOOM_SECONDS))
    whole.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=160)


def _draw(axes: Axes, users: Sequence[User], start: float, seconds: float) -> None:
    order = sorted(zip(users, COLORS, WIDTHS, strict=True), key=lambda each: -each[2])
    for user, color, width in order:
        limit = f"limit {user.tokens_per_second}/s" if user.tokens_per_second else "no limit"
        streams = "1 stream" if user.streams == 1 else f"{user.streams} streams"
        times = [stamp - start for stamp in user.stamps]
        axes.step(
            [0.0, *times],
            range(len(times) + 1),
            where="post",
            color=color,
            linewidth=width,
            label=f"{user.name}: {streams}, {limit}",
        )
    for rate in sorted({user.tokens_per_second for user in users if user.tokens_per_second}):
        axes.plot(
            [0, seconds],
            [rate * (moment + BURST_SECONDS) + 1 for moment in (0, seconds)],
            color="black",
            linestyle=(0, (5, 3)),
            linewidth=1.2,
            label=f"most allowed: {rate}·(t + {BURST_SECONDS:g} s) + 1",
        )
    axes.set(xlabel="seconds", xlim=(0, seconds))
    axes.set_ylim(bottom=0)
