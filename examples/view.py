"""What the demo shows: a live table with the text as it streams, and the summary."""

import asyncio
import io
import re
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from clients import User
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

STYLES = ("dodger_blue1", "orange1", "spring_green3")
FRAMES_PER_SECOND = 5
TEXT_LINES = 12
BOX = box.SIMPLE_HEAD


def limit_text(user: User) -> str:
    """Return a user's limit in words."""
    return f"{user.tokens_per_second} tok/s" if user.tokens_per_second else "none"


@contextmanager
def progress(console: Console, task: str) -> Iterator[Callable[[str], None]]:
    """Give a function that shows what is being waited for, and for how long."""
    start, shown = time.monotonic(), ""

    def report(state: str) -> None:
        nonlocal shown
        text = f"{task} {time.monotonic() - start:4.0f} s: {state}"[: console.width - 3]
        status.update(Text(text))
        if not console.is_terminal and state != shown:
            console.print(Text(text))
        shown = state

    with console.status(task) as status:
        yield report


async def show_live(console: Console, users: Sequence[User], start: float) -> None:
    """Show the run until cancelled; on anything but a terminal as one line a second."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(1)
            console.print(_line(users, start), highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(frame(users, start, console.width), refresh=True)
            await asyncio.sleep(1 / FRAMES_PER_SECOND)


def frame(users: Sequence[User], start: float, width: int) -> RenderableType:
    """Return the live view at this moment."""
    now = time.monotonic()
    table = Table(
        "user", title=f"tokens per second, after {now - start:.1f} s", box=BOX, expand=True
    )
    for heading in ("streams", "limit", "last second", "average", "tokens"):
        table.add_column(heading, justify="right")
    for user, style in zip(users, STYLES, strict=True):
        count = len(user.stamps)
        rates = f"{user.tokens_since(now - 1)}", f"{count / (now - start):.1f}"
        table.add_row(
            user.name, str(user.streams), limit_text(user), *rates, str(count), style=style
        )
    texts = Table.grid(expand=True)
    for _ in users:
        texts.add_column(ratio=1)
    panels = []
    for user, style in zip(users, STYLES, strict=True):
        text = _tails(user, width // len(users) - 4)
        panels.append(Panel(text, title=str(user), border_style=style, height=TEXT_LINES + 2))
    texts.add_row(*panels)
    return Group(table, texts)


def _tails(user: User, width: int) -> Text:
    """Return the last lines of each of a user's texts, every other text in a weaker tone."""
    # A `Text`, since rich would read a plain string as markup.
    count, shown = TEXT_LINES // user.streams, Text()
    for number, text in enumerate(user.texts):
        lines = [line for part in text.splitlines() for line in textwrap.wrap(part, width)]
        padded = lines[-count:] + [""] * (count - len(lines))
        shown.append("\n".join(padded) + "\n", style="dim" if number % 2 else "")
    return shown


def _line(users: Sequence[User], start: float) -> str:
    now = time.monotonic()
    rates = (f"{user.name} {user.tokens_since(now - 1):3} tok/s" for user in users)
    return f"{now - start:5.1f} s   " + "   ".join(rates)


def summary(users: Sequence[User]) -> Table:
    """Return the table shown at the end."""
    table = Table("user", title="the whole run; rate: after the burst", box=BOX, expand=True)
    for heading in ("streams", "limit", "tokens", "rate", "first token", "answers ended by"):
        table.add_column(heading, justify="right")
    for user, style in zip(users, STYLES, strict=True):
        reasons = ", ".join(f"{count} {why}" for why, count in user.finish_reasons.most_common())
        table.add_row(
            user.name,
            str(user.streams),
            limit_text(user),
            str(len(user.stamps)),
            f"{user.settled_rate():.2f} tok/s",
            f"{statistics.median(user.first_token_seconds) * 1000:.0f} ms",
            reasons,
            style=style,
        )
    return table


def save_svg(picture: RenderableType, path: Path, width: int) -> None:
    """Save a picture of a terminal."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(picture)
    svg = console.export_svg(title="make demo")
    # The fonts are looked for on the reader's machine only, never fetched.
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))
