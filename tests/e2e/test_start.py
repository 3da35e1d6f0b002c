"""A server that cannot limit as told does not start, and says what to write instead."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from served.server import MODEL_ARGS, START_SECONDS, environment, stop

DEFAULT = "--default-user-output-tokens-per-second"
USERS = "--user-output-tokens-per-second"
ADDRESS = ("--host", "127.0.0.1", "--port", "0")  # any free port
FILE = "--user-output-rate-config"
RATE_HELP = "write a number from 0.001 to 1,000,000,000"

BAD_FLAGS: dict[str, tuple[list[str], list[str]]] = {
    "zero": ([DEFAULT, "0"], [DEFAULT, "got 0", RATE_HELP]),
    "negative": ([f"{DEFAULT}=-1"], [DEFAULT, "got -1", RATE_HELP]),
    "NaN": ([DEFAULT, "NaN"], [DEFAULT, "'NaN'", RATE_HELP]),
    "infinite": ([DEFAULT, "Infinity"], [DEFAULT, "'Infinity'", RATE_HELP]),
    "text": ([DEFAULT, "fast"], [DEFAULT, "'fast'", RATE_HELP]),
    "boolean": ([DEFAULT, "true"], [DEFAULT, "got true", RATE_HELP]),
    "huge": ([DEFAULT, "1e99"], [DEFAULT, "got 1E+99", RATE_HELP]),
    "broken JSON": ([DEFAULT, "1", USERS, '{"a": 1'], [USERS, "not valid JSON", "for example"]),
    "list of users": ([DEFAULT, "1", USERS, "[1]"], [USERS, "write a mapping"]),
    "zero for a user": ([DEFAULT, "1", USERS, '{"a": 0}'], [USERS, "a: got 0", RATE_HELP]),
    "user given twice": ([DEFAULT, "1", USERS, '{"a": 1, "a": 2}'], [USERS, "'a' is given twice"]),
    "users without default": ([USERS, '{"a": 1}'], [DEFAULT, "is missing", "or null"]),
    "missing file": ([FILE, "/nowhere/limits.yaml"], [FILE, "cannot read", "No such file"]),
    "unknown key": ([FILE, "{folder}/unknown.yaml"], [FILE, "'defualt'", "did you mean 'default'"]),
    "file and flags": ([FILE, "{folder}/good.yaml", DEFAULT, "1"], [FILE, "cannot be combined"]),
    "active above resident": (
        [DEFAULT, "1", "--max-num-seqs", "8", "--max-num-active-seqs", "9"],
        ["max_num_active_seqs", "max_num_seqs"],
    ),
    "prefill interval": (
        [DEFAULT, "1", "--prefill-schedule-interval", "2"],
        ["vllm-pacer cannot limit", "--prefill-schedule-interval > 1", "leave it out"],
    ),
    "data parallel": (
        [DEFAULT, "1", "--data-parallel-size", "2"],
        ["vllm-pacer cannot limit", "--data-parallel-size > 1", "start one server per rank"],
    ),
}


@pytest.fixture(scope="module")
def outcomes(
    vllm_version: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str]]:
    """The exit status and output of a server started with each of the bad flags."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "unknown.yaml").write_text("defualt: 10\n")
    (folder / "good.yaml").write_text("default: 10\n")
    commands = [
        [*MODEL_ARGS, *ADDRESS, *(each.replace("{folder}", str(folder)) for each in flags)]
        for flags, _ in BAD_FLAGS.values()
    ]
    commands.append(["--help=vllm-pacer"])
    with (folder / "printed").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "served" / "start_many.py")],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(vllm_version, "sync"),
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(commands).encode(), START_SECONDS)
        finally:
            stop(process)  # and a server that was not to start
    printed = (folder / "printed").read_text(errors="replace")
    assert process.returncode == 0, printed
    results = json.loads(printed.splitlines()[-1])
    return {name: tuple(each) for name, each in zip([*BAD_FLAGS, "help"], results, strict=True)}


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags_end_the_server(outcomes: dict[str, tuple[int, str]], name: str) -> None:
    """The process ends with an error that names the setting and says what to write."""
    status, printed = outcomes[name]
    assert status != 0
    text = " ".join(printed.split())
    for expected in BAD_FLAGS[name][1]:
        assert expected in text


def test_help_shows_the_flags(outcomes: dict[str, tuple[int, str]]) -> None:
    """`--help` explains the three flags."""
    status, printed = outcomes["help"]
    assert status == 0
    for flag in (DEFAULT, USERS, FILE):
        assert flag in printed
