"""`vllm-pacer check FILE` says what a file means, or why a server would not take it."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from vllm_pacer.__main__ import main

LIMITS = """
default: 20
users: {user-a: 0.5, batch: null, __anonymous__: 3}
weights: {batch: 0.5}
"""
MEANING = """\
each user that is not named: 20 tokens/s
all requests without a user (__anonymous__): 3 tokens/s
user user-a: 0.5 tokens/s
user batch: no limit
burst: 0.1 s
fairness: on
weight of batch: 0.5
"""


@pytest.fixture
def limits(tmp_path: Path) -> Path:
    """A file of limits."""
    file = tmp_path / "limits.yaml"
    file.write_text(LIMITS)
    return file


def test_a_good_file_is_told_in_one_line_per_fact(
    limits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The effective limits are printed, and the status is 0."""
    assert main(["check", str(limits)]) == 0
    assert capsys.readouterr() == (MEANING, "")


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("default: 20", "all requests without a user (__anonymous__): 20 tokens/s"),
        ("default: null", "each user that is not named: no limit"),
        ("default: 1\nburst: 0", "warning: a burst of 0 s is shorter than any step"),
        ("default: 1\nfairness: off", "fairness: off"),
        (
            "default: 1\nfairness: off\nweights: {a: 2}",
            "warning: weights have no effect while fairness is off",
        ),
    ],
)
def test_what_is_effective(
    limits: Path, capsys: pytest.CaptureFixture[str], text: str, fact: str
) -> None:
    """Defaults are filled in, and what a server would warn of is a line too."""
    limits.write_text(text)
    assert main(["check", str(limits)]) == 0
    assert any(line.startswith(fact) for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("defualt: 3", "{file}: unknown key 'defualt'; did you mean 'default'?"),
        ("default: 0", "{file}: default: got 0; write a number from 0.001 to 1,000,000,000"),
        (None, "cannot read '{file}': No such file or directory; give the path of"),
    ],
)
def test_a_bad_file_ends_with_status_2(
    limits: Path, capsys: pytest.CaptureFixture[str], text: str | None, reason: str
) -> None:
    """The error is the server's, on standard error; nothing else is printed."""
    if text is None:
        limits.unlink()
    else:
        limits.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["check", str(limits)])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"vllm-pacer: {reason.replace('{file}', str(limits))}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["check"], ["chekc", "f"], ["check", "a", "b"]])
def test_a_wrong_command_ends_with_status_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A command line that is none is answered with the usage."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: vllm-pacer")


def test_the_module_can_be_run_and_needs_no_vllm(limits: Path) -> None:
    """`python -m vllm_pacer check` reads a pipe, and imports neither vLLM nor what needs it."""
    code = (
        "import runpy, sys\n"
        "sys.argv[1:] = ['check', '/dev/stdin']\n"
        "try:\n"
        "    runpy.run_module('vllm_pacer', run_name='__main__')\n"
        "except SystemExit as ended:\n"
        "    print(ended.code)\n"
        "print([name for name in sys.modules"
        " if name.split('.')[0] in ('vllm', 'torch') or name.startswith('vllm_pacer.engine')])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], input=LIMITS, capture_output=True, text=True, check=True
    )
    assert run.stdout == f"{MEANING}0\n[]\n"


def test_a_name_that_the_terminal_cannot_show_is_escaped(limits: Path) -> None:
    """Where only ASCII can be printed nothing is lost and nothing fails."""
    limits.write_text("default: 1\nusers: {ü: 2}", encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "vllm_pacer", "check", str(limits)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert b"user \\xfc: 2 tokens/s" in run.stdout


@pytest.mark.parametrize("is_unbuffered", [False, True])
def test_a_reader_that_leaves_is_no_error(limits: Path, is_unbuffered: bool) -> None:
    """Piped into something that reads no further, it ends without a word and with status 0."""
    users = "".join(f"  user-{number}: 1\n" for number in range(20_000))
    limits.write_text(f"default: 1\nusers:\n{users}")
    command = f"{sys.executable} -m vllm_pacer check {limits} | head -1; echo ${{PIPESTATUS[0]}}"
    run = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1" if is_unbuffered else ""},
        check=True,
    )
    assert run.stdout == "each user that is not named: 1 tokens/s\n0\n"
    assert run.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is full")
def test_a_full_disk_is_told_in_one_line(limits: Path) -> None:
    """What cannot be printed ends with status 2 and the reason."""
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "vllm_pacer", "check", str(limits)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert run.returncode == 2
    assert run.stderr == "vllm-pacer: cannot print: No space left on device\n"


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints the version that is installed."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{version('vllm-pacer')}\n"


def test_the_command_is_installed() -> None:
    """The script that the package declares is this function."""
    metadata = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, _, name = metadata["project"]["scripts"]["vllm-pacer"].partition(":")
    assert getattr(sys.modules[module], name) is main
