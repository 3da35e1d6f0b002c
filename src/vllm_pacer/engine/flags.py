"""The flags, and how their values get into vLLM's configuration.

The flags are always there, so that `--help` shows them. Everything else is installed when one of
them is given.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from vllm_pacer.config import ConfigError, PacerConfig, config_from_flags, format_rate
from vllm_pacer.engine.factory import PacedSchedulerFactory
from vllm_pacer.engine.patches import wrap
from vllm_pacer.engine.refusals import is_limitable, refuse_unsupported
from vllm_pacer.engine.seams import (
    FLAG_SEAMS,
    SeamError,
    check_names,
    check_seams,
    check_version,
    vllm_imports,
)
from vllm_pacer.engine.snapshot import create_snapshot_file
from vllm_pacer.quota import ANONYMOUS_USER

logger = init_logger(f"vllm.{__name__}")  # vLLM configures the loggers below its own name

_DEFAULT = "default_user_output_tokens_per_second"
_USERS = "user_output_tokens_per_second"
_FILE = "user_output_rate_config"

_ENVIRONMENT = "VLLM_PACER_SERVER"
"""The process that started an engine with limits, and its snapshot, for its own children."""


def install_flags() -> None:
    """Add the flags to vLLM's argument parser.

    Raises:
        SeamError: This vLLM cannot have them.
    """
    check_names(FLAG_SEAMS)
    wrap(EngineArgs, "add_cli_args", _add_flags)
    wrap(EngineArgs, "from_cli_args", _engine_args_with_limits)
    if _inherited_snapshot():
        install_engine_config()


def limit_engine_args(engine_args: EngineArgs, factory: PacedSchedulerFactory) -> None:
    """Make an engine that is built from these arguments limit its users."""
    if engine_args.scheduler_cls is not None:
        raise ConfigError(
            f"--scheduler-cls {engine_args.scheduler_cls} cannot be combined with limits, which "
            "need a scheduler class of their own; leave it out"
        )
    engine_args.scheduler_cls = factory
    install_engine_config()


def install_engine_config() -> None:
    """Let vLLM's configuration carry the limits from the engine arguments to the engine."""
    wrap(EngineArgs, "create_engine_config", _engine_config_with_limits)


def _add_flags(add_cli_args: Callable[[Any], Any], parser: Any) -> Any:
    parser = add_cli_args(parser)
    group = parser.add_argument_group(
        title="vllm-pacer",
        description="Caps the generation speed of each user. A request says whose it is with "
        '"vllm_xargs": {"output_rate_user": "user-a"}; all that do not share one user, '
        f"{ANONYMOUS_USER}.",
    )
    group.add_argument(
        f"--{_DEFAULT.replace('_', '-')}",
        type=lambda text: _checked(_DEFAULT, text, text, None, None),
        metavar="N",
        help="Output tokens per second of every user that is not named, or null for no limit. "
        "Switches the limits on.",
    )
    group.add_argument(
        f"--{_USERS.replace('_', '-')}",
        type=lambda text: _checked(_USERS, text, "null", text, None),
        metavar="JSON",
        help="Output tokens per second by user, for example "
        '\'{"user-a": 100, "user-b": 500, "user-c": null}\'.',
    )
    group.add_argument(
        f"--{_FILE.replace('_', '-')}",
        type=lambda text: _checked(_FILE, text, None, None, text),
        metavar="FILE",
        help="The same from a YAML or JSON file with the keys default, users, burst (seconds), "
        "weights and fairness.",
    )
    return parser


class _CheckedText(str):
    """The text of a flag, with the limits that it gives.

    They are kept because the file cannot be read again if it is a pipe, and might say something
    else if it can.
    """

    pacing: PacerConfig


def _checked(name: str, text: str, *flags: str | None) -> str:
    try:
        # Here too, and not only when the engine is built: who asks for limits has to be refused
        # even if this vLLM does not come past what is wrapped for that.
        check_version()
    except SeamError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    checked = _CheckedText(text)
    try:
        checked.pacing = config_from_flags(*flags)
    except ConfigError as error:
        # The parser puts the flag before the message.
        message = str(error).removeprefix(f"--{name.replace('_', '-')}: ")
        raise argparse.ArgumentTypeError(message) from None
    return checked


def _pacing_of(args: argparse.Namespace) -> PacerConfig | None:
    default, users, file = values = [
        getattr(args, name, None) for name in (_DEFAULT, _USERS, _FILE)
    ]
    if values == [None] * 3:
        return None
    if isinstance(file, _CheckedText) and default is None and users is None:
        return file.pacing
    return config_from_flags(default, users, file)


def _engine_args_with_limits(
    from_cli_args: Callable[[Any, Any], EngineArgs], cls: type, args: argparse.Namespace
) -> EngineArgs:
    engine_args = from_cli_args(cls, args)
    pacing = _pacing_of(args)
    if pacing is not None:
        check_seams()
        snapshot_path = _inherited_snapshot() or create_snapshot_file()
        limit_engine_args(engine_args, PacedSchedulerFactory(pacing, snapshot_path))
    return engine_args


def _engine_config_with_limits(
    create_engine_config: Callable[..., VllmConfig], engine_args: EngineArgs, *args: Any, **kw: Any
) -> VllmConfig:
    factory = engine_args.scheduler_cls
    if not isinstance(factory, PacedSchedulerFactory):
        config = create_engine_config(engine_args, *args, **kw)
        if (snapshot_path := _inherited_snapshot()) and is_limitable(config):
            _frontend_installer()(snapshot_path)
        return config
    install_frontend = _frontend_installer()
    engine_args.scheduler_cls = None
    try:
        config = create_engine_config(engine_args, *args, **kw)
    finally:
        engine_args.scheduler_cls = factory
    if is_limitable(config):
        refuse_unsupported(config)
        config.scheduler_config.scheduler_cls = factory
        install_frontend(factory.snapshot_path)
        _bequeath_snapshot(factory.snapshot_path)
        _warn_anonymous(factory.pacing)
    else:
        logger.info("vllm-pacer: a pooling model generates no tokens; nothing is limited.")
    return config


def _frontend_installer() -> Callable[[Path | None], None]:
    check_seams()
    # Imported here, so that a name that it misses is in nobody's way who wants no limits.
    with vllm_imports():
        from vllm_pacer.engine.frontend import install_frontend
    return install_frontend


def _bequeath_snapshot(snapshot_path: Path | None) -> None:
    """Tell the API servers that this process may start that its engine limits users.

    They read their arguments before vLLM loads any plugin, so they do not see the flags.
    """
    if snapshot_path is not None:
        os.environ[_ENVIRONMENT] = f"{os.getpid()}:{snapshot_path}"


def _inherited_snapshot() -> Path | None:
    """Return the snapshot of the engine whose API server this process is, if it is one."""
    owner, _, path = os.environ.get(_ENVIRONMENT, "").partition(":")
    return Path(path) if owner == str(os.getppid()) else None


def _warn_anonymous(pacing: PacerConfig) -> None:
    if pacing.default is not None and ANONYMOUS_USER not in pacing.users:
        logger.warning(
            "All requests without vllm_xargs.output_rate_user share one quota of %s. To change "
            "that, name the user %s in the limits; null means no limit.",
            format_rate(pacing.default),
            ANONYMOUS_USER,
        )
