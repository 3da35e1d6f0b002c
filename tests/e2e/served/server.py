"""The server process: started once, watched, and stopped whatever happens."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from paths import TINY_LLAMA, engine_environment
from served.record import Record

PLUGIN = Path(__file__).resolve().parent.parent / "plugin"
API_SERVER = ("-m", "vllm.entrypoints.openai.api_server")
VLLM_SERVE = (str(PLUGIN / "vllm_cli.py"), "serve")
LANES = ("sync", "async")
ACTIVE_LIMIT = 16
RESIDENT_LIMIT = 64

MODEL_ARGS = ("--model", str(TINY_LLAMA), "--served-model-name", "m", "--load-format", "dummy")
SERVER_ARGS = (
    *MODEL_ARGS,
    *("--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"),
    *("--max-num-seqs", str(RESIDENT_LIMIT), "--max-num-active-seqs", str(ACTIVE_LIMIT)),
)
START_SECONDS = 240
STOP_SECONDS = 20


def environment(version: str, lane: str, record: Path | None = None) -> dict[str, str]:
    """Return the environment of an engine in a lane, with the probe on its path."""
    variables = engine_environment(version)
    overlay = variables.get("PYTHONPATH")
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [overlay, str(PLUGIN)]))
    variables["VLLM_CPU_KVCACHE_SPACE"] = "1"
    variables["VLLM_LOGGING_LEVEL"] = "INFO"
    variables["PACER_PROBE_ASYNC"] = "1" if lane == "async" else "0"
    if record:
        variables["PACER_PROBE_RECORD"] = str(record)
    return variables


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        process: The API server; it leads a process group of its own.
        url: Its address.
        log: What it and its children print.
        record: What its scheduler did.
        lane: `sync` or `async`.

    """

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    record: Record
    lane: str

    def get(self, path: str) -> str:
        """Return the body of a GET."""
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return str(response.read().decode())

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Return the status and body of a POST, errors included."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        """Return this package's samples of `/metrics`."""
        return {
            name: float(value)
            for name, _, value in (
                line.partition(" ")
                for line in self.get("/metrics").splitlines()
                if line.startswith("vllm_pacer:")
            )
        }

    def engine_processes(self) -> list[psutil.Process]:
        """Return the engine's process and its workers."""
        engine = psutil.Process(self.record.engine()["engine"])
        return [engine, *engine.children(recursive=True)]


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Return the processor time that the processes have used so far."""
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


@contextmanager
def launched(
    folder: Path,
    version: str,
    lane: str,
    command: tuple[str, ...],
    *args: str,
    is_recorded: bool = True,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start a server and stop it at the end. It may not answer yet."""
    port = _free_port()
    log = folder / "server.log"
    record = folder / "record.jsonl"
    record.touch()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command, *SERVER_ARGS, "--port", str(port), *args],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(version, lane, record if is_recorded else None) | (variables or {}),
            start_new_session=True,
        )
    server = Server(process, f"http://127.0.0.1:{port}", log, Record(record), lane)
    try:
        yield server
    finally:
        stop(process)


def wait_until_ready(server: Server) -> None:
    """Wait for the health check; show the log if the process ends first."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            server.get("/health")
        except OSError:
            time.sleep(0.25)
        else:
            return
    raise AssertionError(f"The server did not start:\n{tail(server.log)}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, by its process group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log: Path, characters: int = 6000) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-characters:]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
