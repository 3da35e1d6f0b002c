"""Guards what this package relies on in the installed vLLM; run once per supported version.

Seams are checked by name and parameters, behaviour by the syntax tree of vLLM's own source. What
neither can see is a changed meaning behind the same shape; `test_suites.py` and the laws on the
real scheduler are there for that.
"""

import ast
import inspect
from typing import Any

import pytest
import vllm
from own_names import wrapped_methods
from stock_scheduler import engine_args, new_request, new_scheduler
from upstream_source import (
    always_runs,
    calls,
    enclosing,
    method,
    module_tree,
    outermost_loop,
    parents,
    statements_before,
)
from vllm.config import LoRAConfig, SchedulerConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.request import RequestStatus

from vllm_pacer.config import PacerConfig, make_config
from vllm_pacer.engine import seams
from vllm_pacer.engine.factory import PacedSchedulerFactory
from vllm_pacer.engine.flags import install_engine_config
from vllm_pacer.engine.scheduler import PacedScheduler
from vllm_pacer.engine.seams import (
    REQUEST_ATTRIBUTES,
    SCHEDULER_ATTRIBUTES,
    SEAMS,
    Seam,
    SeamError,
    check_seams,
    version_problem,
)

pytestmark = pytest.mark.usefixtures("stock_vllm")

SCHEDULER = scheduler_module.__name__
CORE = "vllm.v1.engine.core"

every_seam = pytest.mark.parametrize(
    ("seam", "owner", "name"),
    [(seam, *place) for seam, place in zip(SEAMS, wrapped_methods(), strict=True)],
    ids=[seam.name for seam in SEAMS],
)


def schedule() -> ast.FunctionDef:
    """Return vLLM's `Scheduler.schedule`."""
    return method(SCHEDULER, "Scheduler", "schedule")


# --- names and parameters -----------------------------------------------------------------------


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_seam_is_there(seam: Seam) -> None:
    """The installed vLLM has the name, with parameters that the table lists."""
    assert seam.problem() is None


def test_all_is_well_with_the_installed_version() -> None:
    """The check as a whole lets the installed vLLM pass."""
    check_seams()


@every_seam
def test_a_missing_seam_stops_with_its_name(
    monkeypatch: pytest.MonkeyPatch, seam: Seam, owner: Any, name: str
) -> None:
    """Without one of the names the check stops and says which, even if a base class has it too."""
    monkeypatch.delattr(owner, name)
    with pytest.raises(SeamError, match=f"{seam.full_name} is missing"):
        check_seams()


@every_seam
def test_a_changed_signature_stops_with_its_name(
    monkeypatch: pytest.MonkeyPatch, seam: Seam, owner: Any, name: str
) -> None:
    """A name that takes something else stops the check, unless its parameters do not matter."""
    monkeypatch.setattr(owner, name, lambda self, something_new: None)
    if seam.parameters:
        with pytest.raises(SeamError, match=rf"{seam.full_name} takes \(self, something_new\)"):
            check_seams()
    else:
        check_seams()


def test_the_message_names_versions_and_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads the error learns what is installed, what is supported and what to do."""
    monkeypatch.delattr(scheduler_module.Scheduler, "_preempt_request")
    with pytest.raises(SeamError) as error:
        check_seams()
    for part in (vllm.__version__, "0.32.0", "0.34.0", "Install", "leave out the"):
        assert part in str(error.value)


def test_a_missing_seam_stops_the_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits no engine configuration is made on a vLLM that lacks a name."""
    install_engine_config()
    args = engine_args(scheduler_cls=PacedSchedulerFactory(make_config({"default": 5}, "test")))
    monkeypatch.delattr(scheduler_module.Scheduler, "_preempt_request")
    with pytest.raises(SeamError, match="_preempt_request is missing"):
        args.create_engine_config()


def test_a_missing_seam_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits no scheduler is built on a vLLM that lacks a name, wherever the engine runs."""
    monkeypatch.delattr(scheduler_module.Scheduler, "_preempt_request")
    with pytest.raises(SeamError, match="_preempt_request is missing"):
        PacedSchedulerFactory(make_config({"default": 5}, "test"))()


@pytest.mark.parametrize("name", SCHEDULER_ATTRIBUTES)
def test_scheduler_attribute_is_there(name: str) -> None:
    """A scheduler of vLLM's own has the attribute once it is built."""
    assert hasattr(new_scheduler(), name)


@pytest.mark.parametrize("name", REQUEST_ATTRIBUTES)
def test_request_attribute_is_there(name: str) -> None:
    """A request of vLLM's own has the attribute."""
    assert hasattr(new_request(), name)


def _owners() -> dict[str, object]:
    """Return for each table of attributes an object that has them, or its class."""
    scheduler = new_scheduler()
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    return {
        "KV_CACHE_MANAGER": scheduler.kv_cache_manager,
        "KV_CACHE_COORDINATOR": scheduler.kv_cache_manager.coordinator,
        "SINGLE_TYPE_KV_CACHE_MANAGER": manager,
        "KV_CACHE_SPEC": manager.kv_cache_spec,
        "BLOCK_POOL": scheduler.kv_cache_manager.block_pool,
        "REQUEST_QUEUE": scheduler.waiting,
        "KV_CONNECTOR": KVConnectorBase_V1,
        "KV_CACHE_BLOCKS": KVCacheBlocks(()),
        "KV_CACHE_BLOCK": KVCacheBlock(0),
        "SAMPLING_PARAMS": new_request().sampling_params,
        "SCHEDULER_OUTPUT": SchedulerOutput.make_empty(),
        "CACHED_REQUEST_DATA": CachedRequestData.make_empty(),
        "ENGINE_CORE_OUTPUTS": EngineCoreOutputs(),
        "ENGINE_CORE_OUTPUT": EngineCoreOutput("id", []),
        "VLLM_CONFIG": scheduler.vllm_config,
        "PARALLEL_CONFIG": scheduler.vllm_config.parallel_config,
        "SCHEDULER_CONFIG": scheduler.scheduler_config,
        "REQUEST_STATUS": RequestStatus,
        "SCHEDULING_POLICY": SchedulingPolicy,
        "PAUSE_STATE": PauseState,
        "LORA_CONFIG": LoRAConfig(),
        "LORA_REQUEST": LoRARequest("adapter", 1, "path"),
        "MULTI_MODAL_FEATURE": MultiModalFeatureSpec(None, "image", "id", PlaceholderRange(0, 1)),
        "PLACEHOLDER_RANGE": PlaceholderRange(0, 1),
        "NEW_REQUEST_DATA": NewRequestData.from_request(new_request(), ((),)),
        "PLATFORM": current_platform,
    }


def test_other_attributes_are_there() -> None:
    """vLLM's own objects have every attribute in the tables."""
    missing = [
        f"{table}: {name}"
        for table, owner in _owners().items()
        for name in getattr(seams, f"{table}_ATTRIBUTES")
        if not hasattr(owner, name)
    ]
    assert not missing


def test_vllm_asks_its_queue_nothing_else() -> None:
    """What a queue has to offer is what ours was written for: nothing more, nothing less."""
    assert RequestQueue.__abstractmethods__ == {*seams.REQUEST_QUEUE_ATTRIBUTES}


@pytest.mark.parametrize(
    ("owner", "table"),
    [(EngineCoreProc, "ENGINE_CORE"), (InprocClient, "INPROC_CLIENT")],
)
def test_engine_attributes_are_set(owner: type, table: str) -> None:
    """vLLM's engine sets the attributes when it is built, by its source."""
    source = "".join(map(inspect.getsource, owner.__mro__[:-1]))
    for name in getattr(seams, f"{table}_ATTRIBUTES"):
        assert f"self.{name} = " in source or f"self.{name}: " in source


@pytest.mark.parametrize("name", SCHEDULER_ATTRIBUTES)
def test_a_missing_scheduler_attribute_stops_with_its_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that lacks one of the attributes is not built, and does not fail otherwise."""
    init = scheduler_module.Scheduler.__init__

    def init_without(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        init(scheduler, *args, **kwargs)
        delattr(scheduler, name)

    monkeypatch.setattr(scheduler_module.Scheduler, "__init__", init_without)
    with pytest.raises(SeamError, match=rf"has no {name}\."):
        new_scheduler(PacedScheduler, pacing=PacerConfig(default=1))


# --- versions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version",
    ["0.32.0", "0.32.1", "0.33.0", "0.33.0+cpu", "0.32.1.dev7+gabc123", "0.33.0rc1", "0.33.9"],
)
def test_version_inside_the_window(version: str) -> None:
    """Proved releases, their patches, local builds and previews of a proved release are let in."""
    assert version_problem(version) is None


@pytest.mark.parametrize(
    "version",
    ["0.31.0", "0.31.9", "0.32.0rc1", "0.32.0.dev5", "0.34.0", "0.34.0.dev1", "0.34.0rc1", "1.0"],
)
def test_version_outside_the_window(version: str) -> None:
    """Older, newer, and previews of what nobody has proved are kept out."""
    assert version_problem(version) == "this version has not been proved"


@pytest.mark.parametrize("version", ["dev", "", "0.33.0-unknown-build"])
def test_version_that_cannot_be_read(version: str) -> None:
    """A build without a readable version is kept out, not waved through."""
    assert "cannot be read" in str(version_problem(version))


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0"])
def test_a_version_outside_the_window_stops(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """The check stops for the version alone, all names being there."""
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(SeamError, match=rf"on vLLM {version}: this version has not been proved"):
        check_seams()


# --- behaviour ----------------------------------------------------------------------------------


def test_each_loop_asks_for_the_charge_once_before_it_allocates() -> None:
    """`schedule` has two loops; each reserves once per candidate, and allocates blocks after it.

    In the loop over waiting requests the call is skipped for asynchronous KV loads alone.
    """
    reserves = calls(schedule(), "self._reserve_prefill_lookahead")
    allocations = calls(schedule(), "self.kv_cache_manager.allocate_slots")
    loops = [outermost_loop(call) for call in reserves]
    assert len(loops) == 2
    assert loops[0] is not loops[1]
    assert loops == [outermost_loop(call) for call in allocations]
    assert all(a.lineno < b.lineno for a, b in zip(reserves, allocations, strict=True))


def test_the_reserved_number_is_what_is_allocated() -> None:
    """Both loops take the answer for the number of new tokens, and skip the request at 0."""
    for call in calls(schedule(), "self._reserve_prefill_lookahead"):
        assignment = enclosing(call, ast.Assign)
        assert ast.unparse(assignment.targets[0]) == "num_new_tokens"
        block = outermost_loop(call)
        tests = [ast.unparse(node.test) for node in ast.walk(block) if isinstance(node, ast.If)]
        assert "num_new_tokens == 0" in tests


def test_a_waiting_request_is_asked_once_and_skipped_without_blocking() -> None:
    """`schedule` asks once whether a waiting request is blocked, and goes on to the next if so."""
    (call,) = calls(schedule(), "self._handle_blocked_waiting_request")
    assignment = enclosing(call, ast.Assign)
    block = enclosing(assignment, ast.While).body
    decision = block[block.index(assignment) + 1]
    assert isinstance(decision, ast.If)
    assert ast.unparse(decision.test) == f"not {ast.unparse(assignment.targets[0])}"
    assert ast.unparse(decision.body[0]).startswith("skip_request(")
    assert isinstance(decision.body[-1], ast.Continue)


def test_the_limit_of_active_requests_is_read_once_to_stop_admission() -> None:
    """All that `schedule` does with `max_num_active_reqs` is to end the loop over waiting ones."""
    (read,) = [
        node
        for node in ast.walk(schedule())
        if isinstance(node, ast.Attribute) and node.attr == "max_num_active_reqs"
    ]
    decision = enclosing(read, ast.If)
    assert ast.unparse(decision.test).endswith(">= self.max_num_active_reqs")
    assert isinstance(decision.body[0], ast.Break)


def test_what_schedule_reads_of_running() -> None:
    """Hiding paused residents is safe for the uses of `self.running` pinned here.

    A new one has to be looked at: does it hold when only part of the residents is there?
    """
    uses = {
        ast.unparse(node.parent)  # type: ignore[attr-defined]
        for node in ast.walk(schedule())
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "self.running"
    }
    comprehensions = {use for use in uses if use.startswith(" for ")}
    assert {use.split()[-1] for use in comprehensions} == {"self.running"} | (
        {each.split()[-1] for each in comprehensions if " if " in each}
    )
    assert uses - comprehensions == {
        "bool(self.running)",
        "len(self.running)",
        "max(self.running, key=lambda r: (r.priority, r.arrival_time))",
        "self.running.append",
        "self.running.index",
        "self.running.pop",
        "self.running[-1]",
        "self.running[req_index]",
        "self.running[victim_index]",
    }


def test_a_victim_has_left_running_when_it_is_preempted() -> None:
    """Whoever calls `_preempt_request` has taken the request out of `running` before."""
    preemptions = calls(module_tree(scheduler_module), "self._preempt_request")
    assert [enclosing(call, ast.FunctionDef).name for call in preemptions] == [
        "schedule",
        "reset_prefix_cache",
    ]
    for call in preemptions:
        before = statements_before(call)
        assert any(always_runs(each, "self.running.pop(", "del self.running[") for each in before)


def test_tokens_are_emitted_in_update_from_output_alone() -> None:
    """Outputs for clients come from `update_from_output`, where charges are settled."""
    emissions = calls(module_tree(scheduler_module), "EngineCoreOutput")
    assert {enclosing(call, ast.FunctionDef).name for call in emissions} == {"update_from_output"}


def test_a_request_is_freed_in_free_request_alone() -> None:
    """A request leaves `requests` in `_free_blocks`, which `_free_request` calls."""
    removals = [
        node
        for node in ast.walk(module_tree(scheduler_module))
        if isinstance(node, ast.Delete) and "self.requests[" in ast.unparse(node)
    ]
    assert {enclosing(node, ast.FunctionDef).name for node in removals} == {"_free_blocks"}


@pytest.mark.parametrize("cls", ["EngineCoreProc", "DPEngineCoreProc"])
def test_the_busy_loop_steps_through_the_wrapped_method(cls: str) -> None:
    """Each round of the loop goes through `_process_engine_step`, where an idle engine waits."""
    (step,) = calls(method(CORE, cls, "run_busy_loop"), "self._process_engine_step")
    assert any(isinstance(each, ast.While) for each in parents(step))


def test_a_request_from_the_queue_is_handled_as_the_wait_does() -> None:
    """The loop takes a request from `input_queue` and unpacks it into `_handle_client_request`."""
    process = method(CORE, "EngineCoreProc", "_process_input_queue")
    handled = {ast.unparse(call) for call in calls(process, "self._handle_client_request")}
    assert handled == {"self._handle_client_request(*req)"}
    assert calls(process, "self.input_queue.get")


def test_a_scheduler_class_that_is_no_string_is_used_as_it_is() -> None:
    """`get_scheduler_cls` returns any other object unchanged, so a factory can stand there."""
    factory = PacedSchedulerFactory(make_config({"default": 5}, "test"))
    config = SchedulerConfig.default_factory(is_encoder_decoder=False, max_model_len=64)
    config.scheduler_cls = factory  # type: ignore[assignment]
    assert config.get_scheduler_cls() is factory
