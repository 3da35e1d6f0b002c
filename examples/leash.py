"""Runs a command that ends when its starter does, however the starter ends.

The leash is a pipe: the starter holds one end, this file run as a script watches the other. When
the starter closes it, or dies and the kernel closes it, the command and all its children are ended.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

GRACE_SECONDS = 5.0


@contextmanager
def leashed(
    *command: str | Path, env: Mapping[str, str] | None = None, output: IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command, and end it with all its children on leaving the context."""
    process = subprocess.Popen(
        [sys.executable, __file__, *command],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        env=env,
        start_new_session=True,  # so that a terminal's Ctrl-C reaches the starter alone
    )
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait()


def main(command: list[str]) -> int:
    """Run the command until it ends or the leash is let go, and leave nothing of it behind."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    threading.Thread(target=_end_when_let_go, args=[child.pid], daemon=True).start()
    code = child.wait()
    _end_group(child.pid)
    return code


def _end_when_let_go(group: int) -> None:
    # Not through `sys.stdin`, whose lock a waiting reader would still hold when Python ends.
    os.read(0, 1)
    _end_group(group)


def _end_group(group: int) -> None:
    # A server that is still starting waits for its engine and does not heed SIGTERM.
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_SECONDS
        try:
            os.killpg(group, number)
            while time.monotonic() < deadline:
                os.killpg(group, 0)
                time.sleep(0.05)
        except ProcessLookupError:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
