"""`LLM(**llm_kwargs(...))` limits its users too, and does not spin while they wait."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from served.offline import RATES, STREAMS, TOKENS
from served.rates import BURST_NS, rate_of
from served.record import Record
from served.server import environment, stop

from paths import TINY_LLAMA

ENGINES = {"one process": "0", "engine process": "1"}
SCRIPT = Path(__file__).parent / "served" / "offline.py"


@pytest.fixture(scope="module")
def results(vllm_version: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script printed and the probe recorded, with the engine in its process or another."""
    folder = tmp_path_factory.mktemp("offline")
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for engine, multiprocessing in ENGINES.items():
            variables = environment(vllm_version, "sync", record=folder / f"{engine}.jsonl")
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = multiprocessing
            if multiprocessing == "0":
                # In one process vLLM does not bind its threads, and they spin for each other.
                variables["OMP_NUM_THREADS"] = "1"
            with (folder / engine).open("wb") as output:
                processes[engine] = subprocess.Popen(
                    [sys.executable, str(SCRIPT), str(TINY_LLAMA)],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=variables,
                    start_new_session=True,
                )
        return {
            engine: {
                **_result(process, folder / engine),
                "excerpt": Record(folder / f"{engine}.jsonl").since(),
            }
            for engine, process in processes.items()
        }
    finally:
        for process in processes.values():
            stop(process)


def _result(process: subprocess.Popen[bytes], output: Path) -> dict[str, Any]:
    status = process.wait(240)
    printed = output.read_text(errors="replace")
    assert status == 0, printed
    (line,) = [each for each in printed.splitlines() if each.startswith('{"tokens"')]
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("user", TOKENS)
def test_offline_rate_is_the_limit(results: dict[str, Any], engine: str, user: str) -> None:
    """All tokens come, and from the end of the burst on at the limit within 0.5 %."""
    excerpt = results[engine]["excerpt"]
    instants_ns = excerpt.dispatch_ns_by_user()[user]
    assert results[engine]["tokens"][user] == len(instants_ns) == TOKENS[user]
    needed_steps = math.ceil(BURST_NS / 1e9 * RATES[user] / STREAMS[user])
    rate = rate_of(instants_ns, excerpt.steps_ns, RATES[user], needed_steps)
    rate.check(RATES[user], least_tokens=TOKENS[user] // 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_offline_engine_rests_while_all_are_paused(results: dict[str, Any], engine: str) -> None:
    """All processes together use less than 6 % of a core."""
    assert results[engine]["paused_load"] < 0.06
