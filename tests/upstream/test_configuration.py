"""vLLM's configuration with limits: carried, not hashed, refused where limits are not proved.

Configurations are vLLM's own, made by `EngineArgs.create_engine_config` on a small model.
"""

import argparse
import copy
import inspect
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from own_names import wrapped_methods
from stock_scheduler import engine_args
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

import vllm_pacer
from vllm_pacer import PacerConfig, llm_kwargs
from vllm_pacer.config import ConfigError, make_config
from vllm_pacer.engine.factory import PacedSchedulerFactory
from vllm_pacer.engine.flags import limit_engine_args
from vllm_pacer.engine.patches import unwrap
from vllm_pacer.engine.plugin import register
from vllm_pacer.engine.refusals import REFUSALS, Refusal, UnsupportedModeError, refuse_unsupported

pytestmark = pytest.mark.usefixtures("stock_vllm")

OUR_FLAGS = {
    "default_user_output_tokens_per_second",
    "user_output_tokens_per_second",
    "user_output_rate_config",
}


def factory(rate: float | None = 20, users: Mapping[str, float] | None = None) -> Any:
    """Return what stands in `scheduler_cls` with these limits."""
    return llm_kwargs(rate, users)["scheduler_cls"]


def limited_config(**changes: Any) -> VllmConfig:
    """Return vLLM's configuration with limits."""
    return engine_args(scheduler_cls=factory(), **changes).create_engine_config()


# --- not configured -----------------------------------------------------------------------------


def test_only_the_parser_is_touched_until_a_flag_is_given() -> None:
    """After `register()` only the two methods that deal with flags are not vLLM's own objects."""
    before = [vars(owner).get(name) for owner, name in wrapped_methods()]
    register()
    engine_args().create_engine_config()
    changed = [
        f"{owner.__name__}.{name}"
        for (owner, name), old in zip(wrapped_methods(), before, strict=True)
        if vars(owner).get(name) is not old
    ]
    assert changed == ["EngineArgs.add_cli_args", "EngineArgs.from_cli_args"]


def test_vllms_methods_are_its_own_code() -> None:
    """What the test above calls vLLM's own comes from vLLM's files, or from its libraries'."""
    ours = Path(vllm_pacer.__file__).parent
    for owner, name in wrapped_methods():
        file = Path(inspect.getsourcefile(getattr(owner, name)))
        assert not file.is_relative_to(ours)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_without_a_flag_the_scheduler_is_vllms(is_async: bool) -> None:
    """Arguments parsed without our flags lead to vLLM's scheduler class itself."""
    register()
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", engine_args().model]))
    assert args.scheduler_cls is None
    scheduler_config = args.create_engine_config().scheduler_config
    scheduler_config.async_scheduling = is_async
    assert scheduler_config.get_scheduler_cls() is (AsyncScheduler if is_async else Scheduler)


def test_the_parser_has_three_more_flags_and_no_other_default() -> None:
    """Every argument of vLLM's is parsed as before; ours are there, shown, and off."""
    AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())  # loads vLLM's plugins: this one too
    unwrap(EngineArgs, "add_cli_args")
    stock = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([])
    register()
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    ours = parser.parse_args([])
    assert vars(ours).keys() - vars(stock).keys() == OUR_FLAGS
    assert {name: vars(ours)[name] for name in OUR_FLAGS} == dict.fromkeys(OUR_FLAGS)
    assert {name: str(vars(ours)[name]) for name in vars(stock)} == {
        name: str(value) for name, value in vars(stock).items()
    }
    for flag in OUR_FLAGS:
        assert f"--{flag.replace('_', '-')}" in parser.format_help()


def test_registering_again_changes_nothing() -> None:
    """Plugins may be loaded several times in a process: the second time has no effect."""
    register()
    once = vars(EngineArgs)["from_cli_args"]
    register()
    assert vars(EngineArgs)["from_cli_args"] is once


def test_an_engine_without_limits_beside_one_with_limits_is_stock() -> None:
    """Arguments without limits make vLLM's own configuration, also once limits are installed."""
    limited_config()
    assert engine_args().create_engine_config().scheduler_config.scheduler_cls is None


# --- flags --------------------------------------------------------------------------------------

DEFAULT_FLAG = "--default-user-output-tokens-per-second"
USERS_FLAG = "--user-output-tokens-per-second"
FILE_FLAG = "--user-output-rate-config"


def parsed(*words: str) -> argparse.Namespace:
    """Return what vLLM's parser, with our flags, makes of these words."""
    register()
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return parser.parse_args(["--model", engine_args().model, *words])


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        (DEFAULT_FLAG, "0", "default: got 0; write a number from"),
        (DEFAULT_FLAG, "x: y", "got 'x: y', which is not valid JSON: Expecting value"),
        (USERS_FLAG, '{"": 1}', "users: a user's name must not be empty"),
        (USERS_FLAG, '{"a: b": 0}', "users.a: b: got 0; write a number from"),
        (FILE_FLAG, "{folder}/a: b.yaml", "{folder}/a: b.yaml: unknown key 'x: y'; the keys are"),
        (FILE_FLAG, "{folder}/no: file", "cannot read '{folder}/no: file': No such file"),
    ],
)
def test_the_parser_shows_the_whole_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str, message: str
) -> None:
    """The flag is named once, and nothing of what was wrong is lost, whatever has a colon."""
    (tmp_path / "a: b.yaml").write_text("'x: y': 1\n")
    with pytest.raises(SystemExit):
        parsed(flag, value.replace("{folder}", str(tmp_path)))
    printed = capsys.readouterr().err
    assert f"error: argument {flag}: {message.replace('{folder}', str(tmp_path))}" in printed


@pytest.mark.parametrize(
    "duplicate",
    [lambda args: args, copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args))],
    ids=["same", "deepcopy", "pickle"],
)
def test_the_file_is_read_once(
    tmp_path: Path, duplicate: Callable[[argparse.Namespace], argparse.Namespace]
) -> None:
    """Limits may come from a pipe, and are those that the parser has checked."""
    pipe = tmp_path / "limits"
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_text, args=("default: 7\n",))
    writer.start()
    args = parsed(FILE_FLAG, str(pipe))
    writer.join()
    assert args.user_output_rate_config == str(pipe)
    pipe.unlink()
    for _ in range(2):
        scheduler_cls = EngineArgs.from_cli_args(duplicate(args)).scheduler_cls
        assert scheduler_cls.pacing == PacerConfig(default=7)


def test_a_path_that_no_parser_has_seen_is_read(tmp_path: Path) -> None:
    """Arguments that a program has put together itself name the file as a plain text."""
    limits = tmp_path / "limits.yaml"
    limits.write_text("default: 7\n")
    args = parsed()
    args.user_output_rate_config = str(limits)
    scheduler_cls = EngineArgs.from_cli_args(args).scheduler_cls
    assert scheduler_cls.pacing == PacerConfig(default=7)


def test_a_file_beside_a_flag_is_refused(tmp_path: Path) -> None:
    """Each may be fine by itself; together they are refused when the arguments are used."""
    limits = tmp_path / "limits.yaml"
    limits.write_text("default: 7\n")
    args = parsed(FILE_FLAG, str(limits), DEFAULT_FLAG, "1")
    with pytest.raises(ConfigError, match="cannot be combined"):
        EngineArgs.from_cli_args(args)


# --- carrying the limits ------------------------------------------------------------------------


def test_limits_are_no_part_of_the_hash() -> None:
    """Changing a limit does not invalidate compiled graphs: the hash is that without limits."""
    stock = engine_args().create_engine_config().compute_hash()
    for limits in (factory(5), factory(500, {"user": 7})):
        config = engine_args(scheduler_cls=limits).create_engine_config()
        assert config.scheduler_config.scheduler_cls is limits
        assert config.compute_hash() == stock
        assert config.scheduler_config.compute_hash() == (
            engine_args().create_engine_config().scheduler_config.compute_hash()
        )


def test_the_hash_can_change() -> None:
    """The hash of the test above does depend on what is compiled."""
    other = engine_args(dtype="float32").create_engine_config()
    assert (
        other.compute_hash() != engine_args(dtype="bfloat16").create_engine_config().compute_hash()
    )


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))],
    ids=["deepcopy", "pickle"],
)  # fmt: skip
def test_the_limits_survive_the_way_to_the_engine(
    duplicate: Callable[[VllmConfig], VllmConfig],
) -> None:
    """A copied or pickled configuration builds the scheduler with the same limits."""
    limits = factory(20, {"user": 7.5})
    config = duplicate(engine_args(scheduler_cls=limits).create_engine_config())
    arrived = config.scheduler_config.get_scheduler_cls()
    assert isinstance(arrived, PacedSchedulerFactory)
    assert arrived.pacing == limits.pacing


def test_arguments_can_make_several_configurations() -> None:
    """The same arguments may be asked twice; both configurations have the limits."""
    args = engine_args(scheduler_cls=factory())
    for _ in range(2):
        assert args.create_engine_config().scheduler_config.scheduler_cls is args.scheduler_cls


# --- refusals -----------------------------------------------------------------------------------

EC_CONNECTOR = {
    "ec_connector": "ECExampleConnector",
    "ec_role": "ec_both",
    "ec_connector_extra_config": {"shared_storage_path": "unused"},
}

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}

DRAFTS_IN_A_PIPELINE = (
    "--speculative-config with --pipeline-parallel-size > 1 and synchronous scheduling"
)

ARGUMENTS: dict[str, dict[str, Any]] = {
    DRAFTS_IN_A_PIPELINE: {
        "speculative_config": NGRAM,
        "pipeline_parallel_size": 2,
    },
    "--data-parallel-size > 1": {"data_parallel_size": 2},
    "--distributed-executor-backend external_launcher": {
        "distributed_executor_backend": "external_launcher"
    },
    "--ec-transfer-config": {"ec_transfer_config": EC_CONNECTOR},
    "--prefill-schedule-interval > 1": {"prefill_schedule_interval": 2},
}
"""Engine arguments by which an operator gets into the mode."""

OTHER_DRAFTS = (
    "--speculative-config with medusa, suffix, dflash or another method that is not named here"
)

RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND=1"

DRAFTS_WITH_STATES = (
    "--speculative-config with a hybrid or attention-free model on the first model runner"
)

MODEL_PROPERTIES = {
    "a diffusion model": "is_diffusion",
}
"""What vLLM's configuration says of a model that the test bed does not have."""


def refusal(setting: str) -> Refusal:
    """Return the row of a setting."""
    (found,) = (each for each in REFUSALS if each.setting == setting)
    return found


def assert_explained(message: str, row: Refusal) -> None:
    """Check that a message has all three parts of a row."""
    for part in (row.setting, row.reason, row.way_out):
        assert part in message


def test_every_refusal_is_tried() -> None:
    """No row of the table is left out below."""
    assert {row.setting for row in REFUSALS} == {
        *ARGUMENTS,
        *MODEL_PROPERTIES,
        "--aux-output-config",
        "--scheduler-cls",
        OTHER_DRAFTS,
        DRAFTS_WITH_STATES,
        RUST_FRONT_END,
    }


@pytest.mark.parametrize("setting", ARGUMENTS)
def test_arguments_are_refused(setting: str) -> None:
    """A server with limits does not start in this mode; the message says what to do."""
    with pytest.raises(UnsupportedModeError) as error:
        limited_config(**ARGUMENTS[setting])
    assert_explained(str(error.value), refusal(setting))


@pytest.mark.parametrize("setting", ARGUMENTS)
def test_refused_arguments_are_fine_without_limits(setting: str) -> None:
    """The same arguments make a configuration when nothing is limited."""
    config = engine_args(**ARGUMENTS[setting]).create_engine_config()
    assert refusal(setting).applies(config)


@pytest.mark.parametrize("setting", MODEL_PROPERTIES)
def test_models_are_refused(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """A model of this kind is not served with limits; the message says what to do."""
    config = engine_args().create_engine_config()
    refuse_unsupported(config)
    vars(config.model_config).pop(MODEL_PROPERTIES[setting], None)  # some are cached there
    monkeypatch.setattr(ModelConfig, MODEL_PROPERTIES[setting], True)
    with pytest.raises(UnsupportedModeError) as error:
        refuse_unsupported(config)
    assert_explained(str(error.value), refusal(setting))


@pytest.mark.parametrize("name", MODEL_PROPERTIES.values())
def test_model_property_is_vllms(name: str) -> None:
    """The property replaced above is one that vLLM works out itself."""
    assert inspect.getattr_static(ModelConfig, name) is not None


def test_another_scheduler_class_is_refused_with_the_flags() -> None:
    """`--scheduler-cls` together with limits is refused: there can be one scheduler only."""
    args = engine_args(scheduler_cls="some.other.Scheduler")
    with pytest.raises(
        ConfigError, match=r"--scheduler-cls some\.other\.Scheduler cannot be combined"
    ):
        limit_engine_args(args, PacedSchedulerFactory(make_config({"default": 5}, "test")))


def test_another_scheduler_class_from_the_platform_is_refused() -> None:
    """A platform that puts its own scheduler into the configuration is not overridden."""
    config = engine_args().create_engine_config()
    config.scheduler_config.scheduler_cls = "some.other.Scheduler"
    with pytest.raises(UnsupportedModeError) as error:
        refuse_unsupported(config)
    assert_explained(str(error.value), refusal("--scheduler-cls"))


def test_a_front_end_without_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits do not start with a front end that cannot be asked to check a user's name."""
    config = engine_args().create_engine_config()
    refuse_unsupported(config)
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(UnsupportedModeError) as error:
        refuse_unsupported(config)
    assert_explained(str(error.value), refusal(RUST_FRONT_END))


def test_auxiliary_outputs_are_refused() -> None:
    """A server with limits does not start with auxiliary outputs; the message says what to do."""
    # They need vLLM's second model runner, which no CPU has: changed once the rest is built.
    config = engine_args().create_engine_config()
    config.aux_output_config.enable_return_routed_experts = True
    with pytest.raises(UnsupportedModeError) as error:
        refuse_unsupported(config)
    assert_explained(str(error.value), refusal("--aux-output-config"))


@pytest.mark.parametrize(
    ("method", "is_refused"),
    [
        *[(method, False) for method in ("ngram", "draft_model", "eagle", "eagle3", "mtp")],
        *[(method, True) for method in ("medusa", "suffix", "dflash", "custom_class", "later")],
    ],
)
def test_other_ways_to_draft_are_refused(method: str, is_refused: bool) -> None:
    """Drafts are charged where that is tested; the message names the ways in which it is."""
    # Most need a model of their own: changed once the rest is built.
    config = engine_args().create_engine_config()
    config.speculative_config = SimpleNamespace(method=method)
    assert refusal(OTHER_DRAFTS).applies(config) == is_refused
    if is_refused:
        with pytest.raises(UnsupportedModeError) as error:
            refuse_unsupported(config)
        assert_explained(str(error.value), refusal(OTHER_DRAFTS))


def test_drafts_in_an_asynchronous_pipeline_are_not_refused() -> None:
    """There a draft stands behind a placeholder of the token that it follows."""
    config = engine_args(speculative_config=NGRAM, pipeline_parallel_size=2).create_engine_config()
    assert config.scheduler_config.async_scheduling is False
    assert refusal(DRAFTS_IN_A_PIPELINE).applies(config)
    config.scheduler_config.async_scheduling = True  # which vLLM's CPU platform does not
    assert not refusal(DRAFTS_IN_A_PIPELINE).applies(config)


@pytest.mark.parametrize("state", ["is_hybrid", "is_attention_free"])
@pytest.mark.parametrize(("is_v2", "is_refused"), [(False, True), (True, False)])
def test_drafts_with_states_are_refused_on_the_first_model_runner(
    monkeypatch: pytest.MonkeyPatch, state: str, is_v2: bool, is_refused: bool
) -> None:
    """Only the second model runner remembers how many drafts were accepted before a pause."""
    config = engine_args(speculative_config=NGRAM).create_engine_config()
    monkeypatch.setattr(type(config.model_config), state, True)
    monkeypatch.setattr(type(config), "use_v2_model_runner", is_v2)
    assert refusal(DRAFTS_WITH_STATES).applies(config) == is_refused
    if is_refused:
        with pytest.raises(UnsupportedModeError) as error:
            refuse_unsupported(config)
        assert_explained(str(error.value), refusal(DRAFTS_WITH_STATES))


def test_all_reasons_are_given_at_once() -> None:
    """Who has two settings to change need not find out one by one."""
    with pytest.raises(UnsupportedModeError) as error:
        limited_config(ec_transfer_config=EC_CONNECTOR, prefill_schedule_interval=2)
    for setting in ("--ec-transfer-config", "--prefill-schedule-interval > 1"):
        assert_explained(str(error.value), refusal(setting))


def test_dense_data_parallel_is_refused_in_the_front_end() -> None:
    """Each rank of a dense model will see a size of 1, so the configuration is where it stops."""
    assert not engine_args().create_engine_config().model_config.is_moe
    with pytest.raises(UnsupportedModeError, match="--data-parallel-size > 1"):
        limited_config(data_parallel_size=2)


def test_a_pooling_model_is_served_as_stock() -> None:
    """A model that generates nothing has nothing to limit: no refusal, and vLLM's scheduler."""
    config = limited_config(runner="pooling", convert="embed")
    assert config.scheduler_config.get_scheduler_cls() in (Scheduler, AsyncScheduler)
