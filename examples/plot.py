"""The picture of a run: cumulative tokens of every user against its limit."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from clients import BURST_SECONDS, User

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLORS = ("#0072B2", "#E69F00", "#009E73")  # of Okabe and Ito: distinct to colour-blind readers
WIDTHS = (1.5, 5, 2)  # equal curves lie on each other: the first is drawn inside the second
ZOOM_SECONDS = 1.5


def save_plot(users: Sequence[User], start: float, path: Path) -> None:
    """Draw the whole run, and beside it the first moments, where single tokens can be seen."""
    plt.rcParams.update({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False})
    figure, (whole, zoom) = plt.subplots(
        1, 2, figsize=(10, 4.4), width_ratios=(3, 2), layout="constrained"
    )
    figure.suptitle(_title(users))
    _draw(whole, users, start, max(user.stamps[-1] - start for user in users))
    _draw(zoom, users, start, ZOOM_SECONDS)
    whole.set(title="the whole run", ylabel="tokens received")
    zoom.set(title=f"its first {ZOOM_SECONDS} seconds", ylim=(0, 24 * ZOOM_SECONDS))
    whole.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=160)


def _title(users: Sequence[User]) -> str:
    limited = [user for user in users if user.tokens_per_second]
    if any(user.settled_rate() < 0.9 * user.tokens_per_second for user in limited):
        return "This machine was too busy or too slow for the limits to show"
    return "Limited to 8 tokens/s, four streams get no more than one"


def _draw(axes: Axes, users: Sequence[User], start: float, seconds: float) -> None:
    for user, color, width in zip(users, COLORS, WIDTHS, strict=True):
        times = [0.0, *(stamp - start for stamp in user.stamps)]
        limit = f"limit {user.tokens_per_second}/s" if user.tokens_per_second else "no limit"
        label = f"{user}, {limit}"
        style = {"color": color, "linewidth": width, "zorder": 3 - width / 10}
        axes.step(times, range(len(times)), where="post", label=label, **style)
    for rate in sorted({user.tokens_per_second for user in users if user.tokens_per_second}):
        most_tokens = [rate * (moment + BURST_SECONDS) + 1 for moment in (0, seconds)]
        label = f"most allowed: ({BURST_SECONDS:g} s + t) · {rate}/s + 1"
        style = {"color": "black", "linewidth": 1.3, "linestyle": (0, (5, 3)), "zorder": 4}
        axes.plot([0, seconds], most_tokens, label=label, **style)
    axes.set(xlabel="seconds", xlim=(0, seconds))
    axes.set_ylim(bottom=0)
