"""A vLLM that lacks a name is refused in our words, and left alone where nothing is limited.

Each module and each name that `engine/` imports from vLLM is taken away in turn, and this package
is loaded anew, as in a process that vLLM has just started.
"""

import argparse
import ast
import logging
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import vllm
from own_names import ENGINE, ENGINE_FILES
from stock_scheduler import engine_args
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

import vllm_pacer.engine
from vllm_pacer import PacerConfig, llm_kwargs

pytestmark = pytest.mark.usefixtures("stock_vllm")

FLAG = "--default-user-output-tokens-per-second"
START = f"vllm-pacer cannot limit generation speed on vLLM {vllm.__version__}: "
WINDOW = "It supports vLLM 0.32.0 up to, not including, 0.34.0."
OPTIONAL = "vllm.utils.watch_dog"
"""What one of the supported versions does without."""


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of everything that a file imports from vLLM."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
            yield from ((str(node.module), alias.name) for alias in node.names)


IMPORTS = sorted({each for path in ENGINE_FILES for each in imports(path) if OPTIONAL not in each})
MODULES = sorted({module for module, _ in IMPORTS})
NAMES = [each for each in IMPORTS if each != ("vllm.platforms", "current_platform")]
"""Without that one, which its module makes when it is asked for, so that it cannot be removed."""
FRONTEND_MODULES = sorted({module for module, _ in imports(ENGINE / "frontend.py")})


@pytest.fixture
def take_away(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A function that removes a module of vLLM's, or a name in it, and unloads `engine/`."""
    loaded = engine_modules()
    attributes = dict(vars(vllm_pacer.engine))

    def remove(module: str, name: str = "") -> None:
        if name:
            monkeypatch.delattr(import_module(module), name)
        else:
            monkeypatch.setitem(sys.modules, module, None)
        unload_engine()

    yield remove
    unload_engine()
    sys.modules.update(loaded)
    vars(vllm_pacer.engine).update(attributes)


def engine_modules() -> dict[str, ModuleType]:
    """Return the modules of `engine/` that are loaded."""
    return {
        name: each for name, each in sys.modules.items() if name.startswith("vllm_pacer.engine.")
    }


def unload_engine() -> None:
    """Let the next import load each module of `engine/` anew."""
    for name in engine_modules():
        del sys.modules[name]


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """What is logged below vLLM's name, whether or not vLLM keeps it from the root."""
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    caplog.set_level(logging.WARNING, logger="vllm")
    return caplog


def engine_module(name: str) -> ModuleType:
    """Return a module of `engine/` as it is loaded now."""
    return import_module(f"vllm_pacer.engine.{name}")


def register() -> None:
    """Call the entry point, as each of vLLM's processes does."""
    engine_module("plugin").register()


def install_frontend() -> None:
    """Load the front end, as the process with the flags does if it could have them."""
    if "vllm_pacer.engine.flags" in sys.modules:
        engine_module("flags")._frontend_installer()


def build_scheduler() -> None:
    """Call the factory, as the engine's process does."""
    engine_module("factory").PacedSchedulerFactory(PacerConfig(default=5))()


def refusal(way_in: Callable[[], object]) -> str:
    """Return the message with which a way into the package is refused, or nothing."""
    try:
        way_in()
    except engine_module("seams").SeamError as error:
        return str(error)
    except KeyError as error:
        if error.args != ("vllm_config",):  # what the factory asks for after its checks
            raise
    return ""


def parsed(*words: str) -> argparse.Namespace:
    """Return what vLLM's parser makes of these words."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return parser.parse_args(["--model", engine_args().model, *words])


@pytest.mark.parametrize(("module", "name"), [*((each, "") for each in MODULES), *NAMES])
def test_what_is_missing_is_named_with_the_window(
    take_away: Callable[..., None], log: pytest.LogCaptureFixture, module: str, name: str
) -> None:
    """Every way into the package either works or names what is missing and the window."""
    take_away(module, name)
    register()
    ways_in = (lambda: llm_kwargs(5), install_frontend, build_scheduler)
    refusals = [record.getMessage() for record in log.records] + [*map(refusal, ways_in)]
    assert any(refusals)
    for message in filter(None, refusals):
        assert message.startswith(START)
        assert WINDOW in message
        assert re.search(rf"\b{re.escape(name or module)}\b", message)


def test_there_is_something_to_take_away() -> None:
    """The test above removes what the tables list, and what is only imported."""
    assert "vllm.entrypoints.generate.beam_search.online" in MODULES
    assert ("vllm.v1.outputs", "ModelRunnerOutput") in NAMES


@pytest.mark.parametrize("module", FRONTEND_MODULES)
def test_what_the_front_end_lacks_is_in_nobodys_way(
    take_away: Callable[..., None], log: pytest.LogCaptureFixture, module: str
) -> None:
    """Without limits vLLM is untouched; with a flag no engine is configured."""
    stock = vars(EngineArgs)["create_engine_config"]
    take_away(module)
    register()
    assert EngineArgs.from_cli_args(parsed()).scheduler_cls is None
    assert vars(EngineArgs)["create_engine_config"] is stock
    assert log.records == []
    with pytest.raises(RuntimeError, match=f"{re.escape(module)}.*{re.escape(WINDOW)}"):
        EngineArgs.from_cli_args(parsed(FLAG, "5")).create_engine_config()


@pytest.mark.parametrize("name", ["add_cli_args", "from_cli_args"])
def test_a_vllm_that_cannot_have_the_flags_refuses_them(
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """If a method for the flags has changed none is wrapped; the log and the parser say no."""
    changed = classmethod(lambda cls, args, more=None: cls(args.model))
    if name == "add_cli_args":
        stock = EngineArgs.add_cli_args
        changed = staticmethod(lambda parser, more=None: stock(parser))
    monkeypatch.setattr(EngineArgs, name, changed)
    before = dict(vars(EngineArgs))
    register()
    assert dict(vars(EngineArgs)) == before
    (record,) = log.records
    assert record.getMessage().startswith(f"{START}vllm.engine.arg_utils.EngineArgs.{name} takes")
    assert WINDOW in record.getMessage()
    parsed()
    with pytest.raises(SystemExit):
        parsed(FLAG, "5")
    assert f"unrecognized arguments: {FLAG} 5" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0"])
@pytest.mark.parametrize(
    "words",
    [[FLAG, "5"], ["--user-output-tokens-per-second", "{}"], ["--user-output-rate-config", "f"]],
    ids=lambda words: words[0],
)
def test_a_flag_on_a_version_outside_the_window_is_refused_by_the_parser(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: str,
    words: list[str],
) -> None:
    """Each flag ends the process where it is read, with the window; without one nothing happens."""
    register()
    monkeypatch.setattr(vllm, "__version__", version)
    assert EngineArgs.from_cli_args(parsed()).scheduler_cls is None
    with pytest.raises(SystemExit) as ended:
        parsed(*words)
    assert ended.value.code == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert f"argument {words[0]}: vllm-pacer cannot limit generation speed on vLLM" in printed
    assert f"{version}: this version has not been proved. {WINDOW}" in printed
