"""Counters that the engine process hands to the API server, for `/metrics`.

vLLM's own statistics have no room for a plugin's figures, so they travel through a small file that
both map into memory: the engine writes three integers per step, the server reads them when it is
scraped.
"""

import atexit
import mmap
import os
import struct
import tempfile
from pathlib import Path
from typing import NamedTuple

_LAYOUT = struct.Struct("=QQQ")


class Snapshot(NamedTuple):
    """What the engine counted up to its last step."""

    paused_requests: int
    charged_tokens: int
    refunded_tokens: int


def create_snapshot_file() -> Path:
    """Create an empty snapshot that is removed when this process ends."""
    descriptor, name = tempfile.mkstemp(prefix="vllm-pacer-")
    with os.fdopen(descriptor, "wb") as file:
        file.write(bytes(_LAYOUT.size))
    path, owner = Path(name), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in a forked child
            path.unlink(missing_ok=True)

    atexit.register(remove)
    return path


class SnapshotWriter:
    """The engine's side. Raises `OSError` if the file cannot be opened."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._pack_into = _LAYOUT.pack_into

    def write(self, paused_requests: int, charged_tokens: int, refunded_tokens: int) -> None:
        """Replace the snapshot."""
        self._pack_into(self._map, 0, paused_requests, charged_tokens, refunded_tokens)


class SnapshotReader:
    """The server's side. Raises `OSError` if the file cannot be opened."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size, access=mmap.ACCESS_READ)

    def read(self) -> Snapshot:
        """Return the newest snapshot."""
        return Snapshot(*_LAYOUT.unpack_from(self._map))
