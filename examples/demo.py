"""Three users of one real engine: two limited ones, with one stream and with four, and a free one.

    python3.11 examples/demo.py [--output FOLDER] [--seconds N]

Needs nothing but Python: it builds the test bed first, and goes on inside it.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))

from leash import leashed  # noqa: E402

from paths import PYTHON, TESTBED, VENV  # noqa: E402

SECONDS_PER_PROGRESS_LINE = 10
SVG_WIDTH = 110


def prepare() -> None:
    """Build the engine's environment and the model, unless they are there already."""
    start = time.monotonic()
    with leashed(sys.executable, ROOT / "tools" / "testbed.py", "env", "models") as process:
        while True:
            try:
                code = process.wait(timeout=SECONDS_PER_PROGRESS_LINE)
                break
            except subprocess.TimeoutExpired:
                print(f"  {time.monotonic() - start:4.0f} s: {last_log_line()}", flush=True)
    if code:
        sys.exit("The test bed could not be built; the reason is above.")


def last_log_line() -> str:
    """Return what was logged last while building the test bed."""
    logs = (TESTBED / "logs").glob("*.log")
    newest = max(logs, key=lambda log: log.stat().st_mtime, default=None)
    lines = newest.read_text(errors="replace").split("\n") if newest else []
    return next((line.strip()[:90] for line in reversed(lines) if line.strip()), "waiting")


async def run(output: Path, seconds: float) -> None:
    """Start the engine, run the users, show and save what they got."""
    # Imported here, since only the test bed has what these need.
    from clients import User, run_user, save_stamps
    from plot import save_plot
    from rich.console import Console, Group
    from server import serve
    from view import frame, progress, save_svg, show_live, summary

    console = Console()
    users = [User("alice", 8, streams=1), User("bob", 8, streams=4), User("carol", None, 1)]
    async with serve(users, output / "server.log") as server:
        with progress(console, "starting vLLM") as report:
            await server.ready(report)
        start = time.monotonic()
        view = asyncio.create_task(show_live(console, users, start))
        runs = asyncio.gather(*(run_user(server.client, user, seconds) for user in users))
        await asyncio.wait([runs], timeout=seconds / 2)
        halfway = frame(users, start, SVG_WIDTH)
        await runs
        view.cancel()
        with suppress(asyncio.CancelledError):
            await view
    console.print(summary(users))
    save_svg(Group(halfway, summary(users)), output / "demo.svg", SVG_WIDTH)
    save_plot(users, start, output / "tokens.png")
    save_stamps(users, start, output / "tokens.json")
    console.print(f"Saved tokens.png, tokens.json and demo.svg in {output}", highlight=False)


def main() -> None:
    """Parse the arguments, prepare, and go on in the test bed's Python."""
    parser = argparse.ArgumentParser(description="Show three users of one engine.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=22, help="how long the users ask")
    arguments = parser.parse_args()
    # Set even where a shell started this in the background and made it ignore Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        if Path(sys.prefix) != VENV:
            prepare()
            os.execv(PYTHON, [PYTHON, *sys.argv])
        arguments.output.mkdir(parents=True, exist_ok=True)
        asyncio.run(run(arguments.output, arguments.seconds))
    except KeyboardInterrupt:
        print("\nStopped, and everything that was started with it.")
        sys.exit(130)


if __name__ == "__main__":
    main()
