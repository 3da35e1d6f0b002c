"""Starts the real engine with limits, and says what it is waiting for meanwhile."""

import asyncio
import json
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from clients import User, ask
from leash import leashed

from paths import PYTHON, SMOLLM2, engine_environment

POLL_SECONDS = 0.25
LOG_LINES_SHOWN = 20


class ServerError(Exception):
    """The server ended before it was ready; the message is the end of its log."""


@dataclass
class Server:
    """A server that has been started."""

    process: subprocess.Popen[bytes]
    client: httpx.AsyncClient
    log_path: Path

    async def ready(self, report: Callable[[str], None]) -> None:
        """Wait until the server answers; meanwhile `report` gets what it is doing."""
        while self.process.poll() is None:
            report(self._last_message())
            try:
                if (await self.client.get("/health")).is_success:
                    # The first request of all pays for lazy initialisation, not for a limit.
                    return await ask(self.client, User("warm-up", None, 1), 0, "Hello!", 4)
            except httpx.TransportError:
                await asyncio.sleep(POLL_SECONDS)
        raise ServerError("\n".join(self._log().splitlines()[-LOG_LINES_SHOWN:]))

    def _last_message(self) -> str:
        # Of a line only the process's name and the message matter, not its time and place.
        pattern = r"^\((\w+)[^)]*\) [A-Z]+ \S+ \S+ \[[^]]*\] ([A-Za-z].*)"
        messages = re.findall(pattern, self._log(), re.MULTILINE)
        return ": ".join(messages[-1]) if messages else "importing vLLM"

    def _log(self) -> str:
        return self.log_path.read_text(errors="replace")


@asynccontextmanager
async def serve(users: Iterable[User], log_path: Path) -> AsyncIterator[Server]:
    """Start a server with the users' limits; stop it on leaving the context."""
    port = _free_port()
    environment = engine_environment() | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",  # for the log file, which tells what is being waited for
    }
    with (
        log_path.open("wb") as log,
        leashed(*_command(users, port), env=environment, output=log) as process,
    ):
        base_url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=base_url, timeout=None) as client:
            yield Server(process, client, log_path)


def _command(users: Iterable[User], port: int) -> list[str | Path]:
    limits = {user.name: user.tokens_per_second for user in users}
    return [
        PYTHON,
        # vLLM's console script stops at its own version look-up when the CPU build is installed.
        *("-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--model", SMOLLM2, "--served-model-name", "smollm2", "--max-model-len", "2048"),
        # Compiling would make the first run wait a minute longer and change nothing to be seen.
        "--enforce-eager",
        *("--max-num-seqs", "16", "--max-num-active-seqs", "8"),
        *("--default-user-output-tokens-per-second", "null"),
        *("--user-output-tokens-per-second", json.dumps(limits)),
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
