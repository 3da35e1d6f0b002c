"""Every name of vLLM's that this package relies on, and the check that they are there.

vLLM's classes are not a public interface. Whatever is subclassed, wrapped or read stands in these
tables with the parameters it had when it was proved. A missing or changed one stops the server:
running without a limit because a hook was no longer called would be worse.

A name that is only imported has no row. `vllm_imports` makes the same error of its absence.

The check sees names and parameters. It cannot see that a method is called at another time or means
something else; `tests/upstream` runs vLLM's own suites and this package's laws for that.
"""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import vllm
from packaging.version import InvalidVersion, Version

LOWEST_VLLM = Version("0.32.0")
BELOW_VLLM = Version("0.34.0.dev0")


class SeamError(RuntimeError):
    """The installed vLLM is not one that this package can work with."""


@dataclass(frozen=True, slots=True)
class Seam:
    """A function or method of vLLM's.

    Attributes:
        module: The module it lives in.
        name: Its qualified name there.
        parameters: Its parameter lists, one for each form in the supported window; none if the
            parameters do not matter.
        use: What it is needed for.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    use: str

    @property
    def full_name(self) -> str:
        """The dotted name."""
        return f"{self.module}.{self.name}"

    def problem(self) -> str | None:
        """Return what is wrong with it in the installed vLLM, or `None`."""
        try:
            found: Any = import_module(self.module)
            for part in self.name.split("."):
                found = vars(found)[part]  # not inherited: it is called and wrapped in its owner
        except (ImportError, KeyError):
            return f"{self.full_name} is missing"
        function = inspect.unwrap(getattr(found, "__func__", found))
        signature = ", ".join(inspect.signature(function).parameters)
        if not self.parameters or signature in self.parameters:
            return None
        return f"{self.full_name} takes ({signature}) instead of ({self.parameters[-1]})"


_SCHEDULER = "vllm.v1.core.sched.scheduler"
_CORE = "vllm.v1.engine.core"
_ARGS = "vllm.engine.arg_utils"
_BEAM = "vllm.entrypoints.generate.beam_search"

_ALLOCATE = (
    "self, request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, "
    "num_lookahead_tokens, num_external_computed_tokens, delay_cache_blocks, num_encoder_tokens, "
    "full_sequence_must_fit, reserved_blocks, has_scheduled_reqs, skip_zeroing_group_ids"
)

FLAG_SEAMS = (
    Seam(_ARGS, "EngineArgs.add_cli_args", ("parser",), "the flags"),
    Seam(_ARGS, "EngineArgs.from_cli_args", ("cls, args",), "the flags"),
)
"""What has to be there for the flags to be offered; the rest is checked when one is given."""

SEAMS = (
    Seam(_SCHEDULER, "Scheduler.schedule", ("self, throttle_prefills",), "one step"),
    Seam(
        _SCHEDULER,
        "Scheduler._reserve_prefill_lookahead",
        ("self, request, num_computed_tokens, num_new_tokens",),
        "the charge, just before KV blocks are allocated",
    ),
    Seam(
        _SCHEDULER,
        "Scheduler._handle_blocked_waiting_request",
        ("self, request",),
        "skipping a waiting request without blocking those behind it",
    ),
    Seam(
        _SCHEDULER,
        "Scheduler._preempt_request",
        ("self, request, timestamp, drop_stale_output",),
        "preempting paused requests first",
    ),
    Seam(
        _SCHEDULER,
        "Scheduler._request_blocks_can_be_freed",
        ("self, request",),
        "not preempting a request whose blocks stay in use",
    ),
    Seam(_SCHEDULER, "Scheduler._free_request", ("self, request, delay_free_blocks",), "its end"),
    Seam(_SCHEDULER, "Scheduler._handle_stopped_request", ("self, request",), "its end"),
    Seam(_SCHEDULER, "Scheduler.add_request", ("self, request",), "its beginning"),
    Seam(
        _SCHEDULER,
        "Scheduler.finish_requests",
        ("self, request_ids, finished_status",),
        "aborts keep their charge",
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.update_from_output",
        ("self, scheduler_output, model_runner_output",),
        "settling charges",
    ),
    Seam(
        _SCHEDULER,
        "Scheduler._handle_invalid_blocks",
        ("self, invalid_block_ids, num_scheduled_tokens",),
        "noticing that prompts are to be computed again",
    ),
    Seam(_SCHEDULER, "Scheduler.set_pause_state", ("self, pause_state",), "ending an idle wait"),
    Seam(
        _SCHEDULER,
        "Scheduler.has_finished_requests",
        ("self",),
        "not waiting while a connector keeps the blocks of requests that have ended",
    ),
    Seam(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.allocate_slots",
        (_ALLOCATE, _ALLOCATE.replace(", skip_zeroing_group_ids", "")),
        "preempting paused requests when blocks run out",
    ),
    Seam(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.get_computed_blocks",
        ("self, request", "self, request, max_cache_hit_length"),
        "recognising a prompt of which only the sampling position is left",
    ),
    Seam(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.get_blocks",
        ("self, request_id",),
        "knowing what a request that was loaded lacks",
    ),
    Seam("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks", ("self",), "the same"),
    Seam(
        "vllm.v1.kv_cache_interface",
        "KVCacheSpec.max_memory_usage_bytes",
        ("self, vllm_config",),
        "counting the blocks of windows and states",
    ),
    Seam(
        _CORE,
        "EngineCoreProc._process_engine_step",
        ("self",),
        "waiting while everybody is paused",
    ),
    Seam(
        _CORE,
        "EngineCoreProc._handle_client_request",
        ("self, request_type, request",),
        "the request that ends the wait",
    ),
    Seam("vllm.v1.engine.core_client", "InprocClient.get_output", ("self",), "the same, offline"),
    Seam(
        "vllm.config.scheduler",
        "SchedulerConfig.get_scheduler_cls",
        ("self",),
        "choosing the scheduler when the engine is built",
    ),
    *FLAG_SEAMS,
    Seam(
        _ARGS,
        "EngineArgs.create_engine_config",
        ("self, usage_context, headless",),
        "carrying the limits to the engine",
    ),
    Seam(
        "vllm.v1.engine.input_processor",
        "InputProcessor._validate_params",
        ("self, params, supported_tasks",),
        "HTTP 400 for a bad user name",
    ),
    Seam(f"{_BEAM}.online", "BeamSearchOnlineMixin.beam_search", (), "refusing beam search"),
    Seam(f"{_BEAM}.offline", "BeamSearchOfflineMixin.beam_search", (), "refusing beam search"),
    Seam(
        "prometheus_client.multiprocess",
        "MultiProcessCollector.collect",
        ("self",),
        "the counters in /metrics with several API servers",
    ),
)

SCHEDULER_ATTRIBUTES = (
    "_pause_state",
    "connector",
    "finished_recving_kv_req_ids",
    "kv_cache_manager",
    "kv_holding_waiting",
    "lora_config",
    "max_model_len",
    "max_num_active_reqs",
    "max_num_running_reqs",
    "need_mamba_block_aligned_split",
    "num_lookahead_tokens",
    "num_prefill_lookahead",
    "num_spec_tokens",
    "num_waiting_for_streaming_input",
    "policy",
    "requests",
    "requires_kv_delivery",
    "running",
    "scheduler_config",
    "vllm_config",
    "waiting",
)
"""What `Scheduler.__init__` sets; checked when the scheduler is built."""

REQUEST_ATTRIBUTES = (
    "arrival_time",
    "drop_stale_output",
    "is_prefill_chunk",
    "kv_transfer_params",
    "lora_request",
    "max_tokens",
    "mm_features",
    "num_computed_tokens",
    "num_in_flight_tokens",
    "num_output_placeholders",
    "num_output_tokens",
    "num_preemptions",
    "num_prompt_tokens",
    "num_stale_output_tokens",
    "num_tokens",
    "priority",
    "request_id",
    "resumable",
    "sampling_params",
    "spec_token_ids",
    "status",
)
KV_CACHE_MANAGER_ATTRIBUTES = ("block_pool", "coordinator", "watermark_blocks")
KV_CACHE_COORDINATOR_ATTRIBUTES = ("single_type_managers",)
SINGLE_TYPE_KV_CACHE_MANAGER_ATTRIBUTES = ("block_size", "kv_cache_spec")
KV_CACHE_SPEC_ATTRIBUTES = ("page_size_bytes",)
BLOCK_POOL_ATTRIBUTES = ("num_gpu_blocks",)
REQUEST_QUEUE_ATTRIBUTES = (
    "__bool__",
    "__iter__",
    "__len__",
    "add_request",
    "peek_request",
    "pop_request",
    "prepend_request",
    "prepend_requests",
    "remove_request",
    "remove_requests",
)
"""What vLLM asks its waiting queue, whose place ours takes."""
KV_CONNECTOR_ATTRIBUTES = ("has_pending_block_frees", "has_pending_push_work")
KV_CACHE_BLOCKS_ATTRIBUTES = ("blocks",)
KV_CACHE_BLOCK_ATTRIBUTES = ("is_null",)
SAMPLING_PARAMS_ATTRIBUTES = ("extra_args", "seed")
SCHEDULER_OUTPUT_ATTRIBUTES = (
    "num_scheduled_tokens",
    "scheduled_cached_reqs",
    "scheduled_new_reqs",
    "scheduled_spec_decode_tokens",
    "total_num_scheduled_tokens",
)
CACHED_REQUEST_DATA_ATTRIBUTES = ("resumed_req_ids",)
ENGINE_CORE_OUTPUTS_ATTRIBUTES = ("outputs",)
ENGINE_CORE_OUTPUT_ATTRIBUTES = ("new_token_ids", "request_id")
ENGINE_CORE_ATTRIBUTES = ("input_queue", "scheduler", "vllm_config")
INPROC_CLIENT_ATTRIBUTES = ("engine_core",)
VLLM_CONFIG_ATTRIBUTES = ("max_concurrent_batches", "parallel_config", "scheduler_config")
PARALLEL_CONFIG_ATTRIBUTES = ("data_parallel_size", "pipeline_parallel_size")
SCHEDULER_CONFIG_ATTRIBUTES = ("async_scheduling", "enable_chunked_prefill", "scheduler_cls")
REQUEST_STATUS_ATTRIBUTES = (
    "FINISHED_ABORTED",
    "PREEMPTED",
    "RUNNING",
    "WAITING",
    "WAITING_FOR_REMOTE_KVS",
    "WAITING_FOR_STREAMING_REQ",
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
)
SCHEDULING_POLICY_ATTRIBUTES = ("PRIORITY",)
PAUSE_STATE_ATTRIBUTES = ("UNPAUSED",)
LORA_CONFIG_ATTRIBUTES = ("max_loras",)
LORA_REQUEST_ATTRIBUTES = ("lora_int_id",)
MULTI_MODAL_FEATURE_ATTRIBUTES = ("mm_position",)
PLACEHOLDER_RANGE_ATTRIBUTES = ("length", "offset")
NEW_REQUEST_DATA_ATTRIBUTES = ("req_id",)
PLATFORM_ATTRIBUTES = ("is_cpu",)
WATCH_DOG_ATTRIBUTES = ("feed",)  # since 0.33


def check_seams() -> None:
    """Stop unless the installed vLLM is one this package can work with.

    Raises:
        SeamError: A version outside the window, or a missing or changed name.
    """
    check_version()
    check_names(SEAMS)


def check_version() -> None:
    """Stop unless the version of the installed vLLM is supported.

    Raises:
        SeamError: It is not.
    """
    problem = version_problem(vllm.__version__)
    if problem:
        raise _unsupported([problem])


def check_names(seams: Iterable[Seam]) -> None:
    """Stop unless the installed vLLM has these functions, whatever its version.

    Raises:
        SeamError: One is missing or changed.
    """
    problems = [each for seam in seams if (each := seam.problem())]
    if problems:
        raise _unsupported(problems)


@contextmanager
def vllm_imports() -> Iterator[None]:
    """Stop if an import in this block fails: vLLM has lost a name.

    Raises:
        SeamError: It names what could not be imported.
    """
    try:
        yield
    except ImportError as error:
        raise _unsupported([str(error)]) from error


def _unsupported(problems: Iterable[str]) -> SeamError:
    return SeamError(
        f"vllm-pacer cannot limit generation speed on vLLM {vllm.__version__}: "
        + "; ".join(problems)
        + f". It supports vLLM {LOWEST_VLLM} up to, not including, {BELOW_VLLM.base_version}. "
        "Install one of these or a vllm-pacer that knows this one; to serve without limits, "
        "leave out the --*user-output-* flags."
    )


def version_problem(version: str) -> str | None:
    """Return what is wrong with a version of vLLM, or `None`."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return f"its version {version!r} cannot be read"
    if LOWEST_VLLM <= parsed < BELOW_VLLM:
        return None
    return "this version has not been proved"


def check_scheduler_attributes(scheduler: object) -> None:
    """Stop unless a scheduler that was just built has the attributes that are relied on.

    Raises:
        SeamError: One is missing.
    """
    missing = [name for name in SCHEDULER_ATTRIBUTES if not hasattr(scheduler, name)]
    if missing:
        raise SeamError(
            f"vllm-pacer cannot limit generation speed on vLLM {vllm.__version__}: its scheduler "
            f"has no {', '.join(missing)}. It supports vLLM {LOWEST_VLLM} up to, not including, "
            f"{BELOW_VLLM.base_version}."
        )
