"""The real engine core on a clock that only the test moves.

Real are `EngineCore` with its own `__init__`, `step` and `step_with_batch_queue`, the schedulers,
the KV cache manager and the requests. Controlled are two things: the clock, and the executor, whose
`Worker` answers from a script and takes a fixed time per step.

The bed keeps books of its own and compares them with the scheduler after every step, so each test
here tests the laws too:

* charged = emitted + in flight + aborted in flight, for every user;
* no step computes more requests than may be active;
* every resident stands in `running` exactly once, the paused ones at the end;
* every answer is a prefix of its script, computed without computing any position twice;
* what `sharing_laws` says.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from bed_connector import NAME as BED_CONNECTOR
from bed_connector import BedConnector
from sharing_laws import SharingLaws
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    DraftTokenIds,
    KVConnectorOutput,
    ModelRunnerOutput,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
)

from vllm_pacer.clock import NS_PER_SECOND, FakeClock
from vllm_pacer.config import PacerConfig
from vllm_pacer.engine.scheduler import PacedAsyncScheduler, PacedScheduler
from vllm_pacer.quota import ANONYMOUS_USER

NS_PER_MS = 1_000_000
EOS = 2
STOP = 3
MOST_IN_FLIGHT = 4
_WRONG = 99  # in no script
_FIRST_WORD = 100
_WORDS = 50_000
_NAP_NS = NS_PER_MS  # what vLLM's loop sleeps after a step that computed nothing
_MODEL = Path(__file__).parents[2] / ".testbed" / "models" / "facebook" / "opt-125m"


def word(position: int) -> int:
    """The token every script has at this place of the answer, unless it ends there."""
    return _FIRST_WORD + position % _WORDS


@dataclass
class Script:
    """What the model says to one request, in all its turns, and whose it is."""

    user: str
    max_tokens: int = 0
    ends: dict[int, int] = field(default_factory=dict)  # EOS or STOP in the place of a last word

    def add_turn(self, tokens: int, ends_with: int | None) -> None:
        """Say something more."""
        self.max_tokens += tokens
        if ends_with is not None:
            self.ends[self.max_tokens - 1] = ends_with

    def token(self, position: int) -> int:
        """Return the token at a position of the answer."""
        return self.ends.get(position) or word(position)

    @property
    def ends_by_itself(self) -> bool:
        """Whether its last word is an end."""
        return self.max_tokens - 1 in self.ends


@dataclass
class StepRecord:
    """One dispatched step: when, how many positions of each request, and who got tokens.

    `sampled` has the most tokens that each request that samples can get: one, and its drafts.
    """

    at_ns: int
    computed: dict[str, int]
    sampled: dict[str, int]
    preempted: frozenset[str] = frozenset()


@dataclass
class _Context:
    """A request as the worker knows it."""

    prompt_tokens: int
    tokens: int  # prompt and all that was sampled, in flight or not
    computed: int
    blocks: list[int]
    images: list[MultiModalFeatureSpec] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)  # drafts, by step
    said_before: int = 0  # tokens of the answer that are in the prompt by now, or were given up

    @property
    def position(self) -> int:
        """The place in the answer of the next token."""
        return self.said_before + self.tokens - self.prompt_tokens


class Worker:
    """What a model runner knows of its requests, and the tokens it samples.

    It decides by itself which requests sample, from nothing but the scheduler's outputs, and fails
    where a real runner would go wrong: a request it does not know, a position skipped or computed
    again, a position without a KV block, a history that it needs and was not given.

    With drafts it accepts as many as `accepted` says for a position, but none that is wrong, nor
    any of its own making that it has forgotten: the first model runner keeps those of the last step
    only, the second one those of every request that has a slot.
    """

    def __init__(
        self,
        scripts: Mapping[str, Script],
        answers: Mapping[str, Sequence[int]],
        max_num_seqs: int,
        accepted: Callable[[int], int],
    ) -> None:
        self._scripts = scripts
        self._answers = answers
        self._max_num_seqs = max_num_seqs
        self.block_size = 0
        self._contexts: dict[str, _Context] = {}
        self._resident: set[str] = set()
        self._last_step: set[str] = set()
        self._drafted: set[str] = set()  # requests with drafts of its own making
        self._encoded: set[str] = set()  # images
        self._accepted = accepted
        self.is_v2 = False
        self.is_encoder_decoder = False

    @property
    def residents(self) -> frozenset[str]:
        """The requests that hold a slot."""
        return frozenset(self._resident)

    def blocks(self, request_id: str) -> list[int]:
        """Return the KV blocks that a request was given."""
        return self._contexts[request_id].blocks

    def run(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Compute a step and return the sampled tokens of each request that sampled."""
        self._resident -= output.finished_req_ids | (output.preempted_req_ids or set())
        for new in output.scheduled_new_reqs:
            known = new.prefill_token_ids or new.prompt_token_ids or []
            before = self._contexts.get(new.req_id)
            self._admit(new.req_id, new.prompt_len, len(known), new.num_computed_tokens)
            context = self._contexts[new.req_id]
            context.blocks = list(new.block_ids[0])
            context.images = new.mm_features
            if before is not None:
                # Of a session's next turn the prompt is longer, and all before has been delivered.
                is_next_turn = new.prompt_len != before.prompt_tokens
                context.said_before = (
                    len(self._answers[new.req_id]) if is_next_turn else before.said_before
                )
        self._go_on(output.scheduled_cached_reqs)
        self._encode(output)
        drafts = output.scheduled_spec_decode_tokens
        sampled = {
            request_id: tokens
            for request_id, count in output.num_scheduled_tokens.items()
            if (tokens := self._compute(request_id, count, drafts.get(request_id, ())))
        }
        self._last_step = set(output.num_scheduled_tokens)
        self._drafted = (self._drafted | sampled.keys()) if self.is_v2 else self._last_step
        return sampled

    def drafts(self, most: int) -> DraftTokenIds:
        """Guess what comes next for each request of the last step that samples."""
        drafts = {
            request_id: [
                self._scripts[request_id].token(position + each) if each < right else _WRONG
                for each in range(most)
            ]
            for request_id in self._last_step
            if (context := self._contexts[request_id]).computed >= context.tokens - 1
            for position in [context.position]
            for right in [self._accepted(position)]
        }
        return DraftTokenIds([*drafts], [*drafts.values()])

    def _go_on(self, cached: CachedRequestData) -> None:
        for request_id, computed, new_blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            context = self._contexts[request_id]
            history = cached.all_token_ids.get(request_id)
            if request_id in cached.resumed_req_ids:
                assert history is not None, f"{request_id} resumes without its history"
                images, said_before = context.images, context.said_before
                self._admit(request_id, context.prompt_tokens, len(history), computed)
                context = self._contexts[request_id]
                context.images, context.said_before = images, said_before
            assert request_id in self._resident, f"{request_id} has no slot"
            # Of the steps in flight the scheduler does not know yet what was rejected.
            ahead = [sum(context.rejected[-steps:]) for steps in range(1, MOST_IN_FLIGHT + 1)]
            assert computed - context.computed in (0, *ahead), f"{request_id} goes on elsewhere"
            if not self.is_v2 and request_id not in self._last_step:
                # The first model runner forgets what it sampled for those that sit out a step.
                assert history is not None, f"{request_id} is not given its history"
                assert len(history) == context.tokens, f"the history of {request_id} has a gap"
            context.blocks += new_blocks[0] if new_blocks else []

    def _encode(self, output: SchedulerOutput) -> None:
        self._encoded -= set(output.free_encoder_mm_hashes)
        for request_id, numbers in output.scheduled_encoder_inputs.items():
            for number in numbers:
                image = self._contexts[request_id].images[number].identifier
                assert image not in self._encoded, f"{image} is encoded twice"
                self._encoded.add(image)

    def _look_at_images(self, context: _Context, begin: int) -> None:
        for image in context.images:
            place = image.mm_position
            is_needed = (
                begin == 0 if self.is_encoder_decoder else begin < place.offset + place.length
            )
            if is_needed and place.offset < context.computed:
                assert image.identifier in self._encoded, f"{image.identifier} is not encoded"

    def _admit(self, request_id: str, prompt_tokens: int, tokens: int, computed: int) -> None:
        self._resident.discard(request_id)
        self._last_step.discard(request_id)
        self._drafted.discard(request_id)
        assert len(self._resident) < self._max_num_seqs, "no free slot"
        self._resident.add(request_id)
        self._contexts[request_id] = _Context(prompt_tokens, tokens, computed, [])

    def _compute(self, request_id: str, count: int, drafts: Sequence[int]) -> list[int]:
        context = self._contexts[request_id]
        context.computed += count
        self._look_at_images(context, context.computed - count)
        known = context.tokens + len(drafts)
        assert context.computed <= known, f"{request_id} computes what is not there"
        assert context.computed <= len(context.blocks) * self.block_size, "no block to write to"
        if context.computed < context.tokens:
            return []
        position = context.position
        script = self._scripts[request_id]
        accepted = 0
        while accepted < len(drafts):
            guess = drafts[accepted]
            is_right = guess == script.token(position + accepted)
            is_own = guess == -1 and request_id in self._drafted  # known to the worker alone
            if not is_right and not (is_own and accepted < self._accepted(position)):
                break
            accepted += 1
        context.rejected.append(len(drafts) - accepted)
        context.computed -= len(drafts) - accepted
        context.tokens += 1 + accepted
        return [script.token(position + each) for each in range(1 + accepted)]


class _Result(Future[Any]):
    """A result that is there at an instant of the fake clock; waiting for it moves the clock."""

    def __init__(self, value: Any, at_ns: int, clock: FakeClock) -> None:
        super().__init__()
        self._value, self._at_ns, self._clock = value, at_ns, clock

    def result(self, timeout: float | None = None) -> Any:
        self._clock.advance_ns(max(self._at_ns - self._clock.now_ns(), 0))
        return self._value


class _Grammar(StructuredOutputGrammar):
    """Accepts the words of a script, each once and in order."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._position = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Go on by some tokens, if they are those of the script."""
        is_right = self.validate_tokens(tokens) == tokens
        self._position += len(tokens) * is_right
        return is_right

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return those of the tokens that the script begins with here."""
        for index, token in enumerate(tokens):
            if token != self._script.token(self._position + index):
                return tokens[:index]
        return tokens

    def rollback(self, num_tokens: int) -> None:
        """Go back."""
        self._position -= num_tokens

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """Do nothing: the worker follows its script."""

    def is_terminated(self) -> bool:
        """Never: a script ends with a token of its own or by its length."""
        return False

    def reset(self) -> None:
        """Go back to the beginning."""
        self._position = 0


class _Backend(StructuredOutputBackend):
    """Makes the bit masks that nobody reads here; grammars come with their requests."""

    def compile_grammar(self, *args: Any, **kwargs: Any) -> StructuredOutputGrammar:
        """Not used."""
        raise NotImplementedError

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        """Return one word for each row."""
        return torch.zeros((max_num_seqs, 1), dtype=torch.int32)

    def destroy(self) -> None:
        """Do nothing."""


class _Compiling(_Result):
    """A grammar that is there at an instant of the fake clock."""

    def done(self) -> bool:
        return self._clock.now_ns() >= self._at_ns


class ScriptedExecutor(Executor):
    """One worker that takes `step_ns` per step and computes steps in the order of dispatch.

    With several stages the next step begins when this one has left the first.
    """

    worker: Worker
    clock: FakeClock
    step_ns: int
    layers: dict[str, KVCacheSpec]
    stages: int
    num_drafts: int
    on_dispatch: Callable[[StepRecord], None]
    observers: list[Callable[[SchedulerOutput], None]]
    connector: BedConnector | None = None
    load_ns: int

    def _init_executor(self) -> None:
        self._free_at_ns = 0
        self._loaded_ns: dict[str, int] = {}
        self._next: tuple[ModelRunnerOutput, int]

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Compute a step; as in vLLM, its tokens come from `sample_tokens`."""
        now_ns = self.clock.now_ns()
        for observe in self.observers:
            observe(scheduler_output)
        sampled = self.worker.run(scheduler_output)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        comes_in = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        comes_in |= scheduler_output.scheduled_cached_reqs.resumed_req_ids
        record = StepRecord(
            now_ns,
            dict(scheduler_output.num_scheduled_tokens),
            {each: 1 if each in comes_in else 1 + len(drafts.get(each, ())) for each in sampled},
            frozenset(scheduler_output.preempted_req_ids or ()),
        )
        self.on_dispatch(record)
        transfers = self._transfers(now_ns)
        if not record.computed:
            empty = replace(EMPTY_MODEL_RUNNER_OUTPUT, kv_connector_output=transfers)
            return _Result(empty, max(now_ns, self._free_at_ns), self.clock)
        begins_at_ns = max(now_ns, self._free_at_ns)
        self._free_at_ns = begins_at_ns + self.step_ns // self.stages
        request_ids = list(record.computed)
        result = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={each: index for index, each in enumerate(request_ids)},
            sampled_token_ids=[sampled.get(each, []) for each in request_ids],
            kv_connector_output=transfers,
        )
        self._next = result, begins_at_ns + self.step_ns
        return _Result(None, now_ns, self.clock)

    def _transfers(self, now_ns: int) -> KVConnectorOutput | None:
        """Return whose KV blocks have been loaded by now."""
        if self.connector is None:
            return None
        while self.connector.loading:
            self._loaded_ns[self.connector.loading.pop()] = now_ns + self.load_ns
        loaded = {each for each, at_ns in self._loaded_ns.items() if at_ns <= now_ns}
        for each in loaded:
            del self._loaded_ns[each]
        failed = loaded & self.connector.broken
        return KVConnectorOutput(finished_recving=loaded, failed_recving=failed)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Return the tokens of the step that was computed last."""
        result = _Result(*self._next, self.clock)
        return result if non_block else result.result()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafts for the next step."""
        return self.worker.drafts(self.num_drafts) if self.num_drafts else None

    def get_kv_cache_specs(self) -> Any:
        """Return the small layers of the bed's model."""
        return [self.layers]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Return the usual layout."""
        return [["LBNHC"]]

    def determine_available_memory(self) -> list[int]:
        """Return plenty: the number of blocks is set by the bed."""
        return [1 << 40]

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing: there are no worker processes."""
        return []

    def check_health(self) -> None:
        """Do nothing."""


@dataclass
class Books:
    """Tokens by user, counted without looking into the ledger of the scheduler."""

    taken: Counter[str] = field(default_factory=Counter)
    given_back: Counter[str] = field(default_factory=Counter)
    delivered: Counter[str] = field(default_factory=Counter)
    aborted_in_flight: Counter[str] = field(default_factory=Counter)

    def charged(self, user: str) -> int:
        """Return what the user was charged and not given back."""
        return self.taken[user] - self.given_back[user]


class Bed:
    """An engine core, its clock and its books.

    Args:
        rates: Tokens per second by user; the rest has no limit.
        is_async: Whether steps overlap, at depth 2.
        paced: Whether the scheduler is ours or vLLM's own.
        pipeline: How many batches are computed at once, each in a stage of its own.
        drafts: How many tokens are drafted for each request and step.
        accepted: How many of the drafts for a position of an answer are right, at most.
        layers: What the model is made of, a key of `LAYERS`.
        max_loras: How many LoRA adapters a step can have; none without.
        load_ms: How long the KV blocks of a prompt are being loaded; no connector if not given.
        encoder_tokens: How many tokens of images are encoded in a step, and kept, at most.
        scheduler_cls: What builds our scheduler, if not the class itself on the bed's clock.

    """

    def __init__(
        self,
        rates: Mapping[str, int | float | Fraction | None] | None = None,
        *,
        is_async: bool = False,
        paced: bool = True,
        default_rate: int | float | None = None,
        burst_seconds: float = 0.1,
        weights: Mapping[str, int | float | Fraction] | None = None,
        fairness: bool = True,
        step_ms: int = 30,
        max_num_seqs: int = 16,
        max_num_active_seqs: int | None = None,
        max_num_batched_tokens: int = 8192,
        num_blocks: int = 10_000,
        block_size: int = 16,
        policy: str = "fcfs",
        chunked_prefill: bool = True,
        v2_model_runner: bool = False,
        pipeline: int = 1,
        drafts: int = 0,
        accepted: Callable[[int], int] = lambda position: position % 3,
        layers: str = "full",
        max_loras: int | None = None,
        encoder_tokens: int = 0,
        load_ms: int | None = None,
        scheduler_cls: Any = None,
    ) -> None:
        self.clock = FakeClock()
        self.pacing = PacerConfig(
            default=default_rate,
            users=dict(rates or {}),
            burst=burst_seconds,
            weights=dict(weights or {}),
            fairness=fairness,
        )
        self.scripts: dict[str, Script] = {}
        self.delivered_elsewhere: set[str] = set()  # requests: nobody is charged for those
        self.requests: dict[str, Request] = {}
        self.users: dict[str, None] = {}  # in the order in which they came
        self.answers: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.finished_ns: dict[str, int] = {}
        self.steps: list[StepRecord] = []
        self.books = Books()
        self.naps = 0
        self.last_grammar_ns = 0  # when all are compiled
        self.longest_burst_ns = 0  # that steps have made necessary
        self.kept_stamps: dict[str, list[int]] = {}
        self.observers: list[Callable[[SchedulerOutput], None]] = []
        self._in_flight: list[StepRecord] = []
        self._is_async = is_async
        self._paced = paced

        config = _vllm_config(
            max_num_seqs=max_num_seqs,
            max_num_active_seqs=max_num_active_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_blocks=num_blocks,
            block_size=block_size,
            policy=policy,
            chunked_prefill=chunked_prefill,
            pipeline=pipeline,
            drafts=drafts,
            layers=layers,
            max_loras=max_loras,
            has_connector=load_ms is not None,
        )
        # vLLM's CPU platform switches it off, whatever was asked for.
        config.scheduler_config.async_scheduling = is_async
        if paced:
            config.scheduler_config.scheduler_cls = scheduler_cls or partial(
                PacedAsyncScheduler if is_async else PacedScheduler,
                pacing=self.pacing,
                clock=self.clock,
            )
        self.load_ns = (load_ms or 0) * NS_PER_MS
        self.pipeline = pipeline
        self.layer_groups = layer_groups(layers)
        self.max_loras = max_loras
        self.max_active = max_num_active_seqs or max_num_seqs
        self.max_num_seqs = max_num_seqs
        self.num_blocks = num_blocks
        executor_class = type(
            "BedExecutor",
            (ScriptedExecutor,),
            {
                "worker": Worker(self.scripts, self.answers, max_num_seqs, accepted),
                "clock": self.clock,
                "step_ns": step_ms * NS_PER_MS,
                "layers": LAYERS[layers](block_size, config),
                "stages": pipeline,
                "num_drafts": drafts,
                "on_dispatch": staticmethod(self._note_dispatch),
                "observers": self.observers,
                "load_ns": self.load_ns,
            },
        )
        self.core = EngineCore(config, executor_class, log_stats=False)
        self.core.structured_output_manager.backend = _Backend(config, None, 0)  # type: ignore[arg-type]
        self.scheduler: Any = self.core.scheduler
        self.scheduler.max_num_encoder_input_tokens = encoder_tokens
        is_encoder_decoder = layers == "encoder decoder"
        self.scheduler.is_encoder_decoder = is_encoder_decoder
        encoder_cache = EncoderDecoderCacheManager if is_encoder_decoder else EncoderCacheManager
        self.scheduler.encoder_cache_manager = encoder_cache(encoder_tokens)
        self.executor: Any = self.core.model_executor
        self.executor.connector = self.scheduler.connector
        first_group = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self.executor.worker.block_size = first_group.block_size
        if is_async and pipeline > 1:
            v2_model_runner = True  # vLLM's first one cannot do both
            self.core.batch_queue_size = pipeline + 1
            self.core.batch_queue = deque(maxlen=pipeline + 1)
        self.scheduler.use_v2_model_runner = v2_model_runner
        self.executor.worker.is_v2 = v2_model_runner
        self.executor.worker.is_encoder_decoder = is_encoder_decoder
        self._watch_limiter()
        self._watch_aborts()
        self.laws = SharingLaws(self) if paced else None

    # --- requests -----------------------------------------------------------------------------

    def add(
        self,
        user: str | None = "a",
        *,
        prompt: int | Sequence[int] = 10,
        tokens: int = 16,
        ends_with: int | None = None,
        priority: int = 0,
        adapter: int | None = None,
        grammar_ms: int | None = None,
        images: Sequence[tuple[int, int, str]] = (),
        loads: tuple[int, bool] | None = None,
        load_fails: bool = False,
        undecided: int = 0,
        for_another_engine: bool = False,
        is_session: bool = False,
        request_id: str | None = None,
        params: SamplingParams | None = None,
    ) -> str:
        """Add a request whose answer has `tokens` tokens.

        Args:
            user: Whose it is; `None` names nobody.
            prompt: The prompt, or its length; prompts of other requests share no prefix with it.
            tokens: The length of the answer.
            ends_with: `EOS` or `STOP` if the answer ends by itself, not by `max_tokens`.
            priority: vLLM's priority, less is better.
            adapter: The number of the LoRA adapter that it uses.
            grammar_ms: How long its grammar is being compiled; `None` for free text.
            loads: How much of its prompt is loaded from elsewhere: tokens, and whether the engine
                goes on meanwhile.
            load_fails: Whether the load turns out to have failed, so the prompt is computed here.
            undecided: How often the connector has to be asked what can be loaded.
            for_another_engine: Whether another engine goes on with the request, after one token.
            is_session: Whether more may be said to it, with `say`.
            images: What in its prompt stands for images: offset, length and name of each.
            request_id: Its id.
            params: Sampling parameters in the place of those that follow from the rest.

        """
        request_id = request_id or f"{user}-{len(self.requests)}"
        if params is None:
            params = sampling_params(user, tokens if ends_with is None else tokens + 100)
        if grammar_ms is not None:
            params.structured_outputs = StructuredOutputsParams(json_object=True)
        if isinstance(prompt, int):
            first = _FIRST_WORD + len(self.requests)
            prompt = [first, *[_FIRST_WORD + each % 7 for each in range(prompt - 1)]]
        request = Request(
            request_id,
            list(prompt),
            params,
            None,
            arrival_time=self.clock.now_ns() / NS_PER_SECOND,
            mm_features=[
                MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
                for offset, length, name in images
            ],
            priority=priority,
            lora_request=adapter and LoRARequest(f"adapter-{adapter}", adapter, "nowhere"),
            block_hasher=self.core.request_block_hasher,
            resumable=is_session,
        )
        if loads is not None:
            request.kv_transfer_params = {"tokens": loads[0], "is_async": loads[1]}
        if undecided:
            request.kv_transfer_params = {"undecided": undecided}
        if load_fails:
            self.scheduler.connector.broken.add(request_id)
        if for_another_engine:
            request.kv_transfer_params = {"do_remote_decode": True}
            if self._paced and request.max_tokens == 1:
                self.delivered_elsewhere.add(request_id)
        self.scripts[request_id] = script = Script(user or ANONYMOUS_USER)
        script.add_turn(tokens, ends_with)
        self.users[script.user] = None
        self.requests[request_id] = request
        self.answers[request_id] = []
        if grammar_ms is not None:
            ready_ns = self.now_ns + grammar_ms * NS_PER_MS
            self.last_grammar_ns = max(self.last_grammar_ns, ready_ns)
            request.structured_output_request.grammar = _Compiling(
                _Grammar(script), ready_ns, self.clock
            )
        self.core.add_request(request)
        return request_id

    def say(self, request_id: str, *, prompt: int, tokens: int, ends_with: int | None) -> None:
        """Give a session its next input, whose answer has `tokens` tokens."""
        script = self.scripts[request_id]
        script.add_turn(tokens, ends_with)
        most = tokens if ends_with is None else tokens + 100
        words = [_FIRST_WORD + each % 7 for each in range(prompt)]
        self._tell(request_id, words, sampling_params(script.user, most), is_session=True)

    def hang_up(self, request_id: str) -> None:
        """End a session: when all is answered that was said, or at once if it is."""
        self._tell(request_id, [0], sampling_params(self.user_of(request_id), 1), is_session=False)

    def _tell(
        self, request_id: str, prompt: list[int], params: SamplingParams, is_session: bool
    ) -> None:
        update = Request(request_id, prompt, params, None, resumable=is_session)
        self.core.add_request(update)

    def abort(self, *request_ids: str, during_step: bool = False) -> None:
        """Abort requests, at once or while the next step is being computed."""
        if during_step:
            self.core.aborts_queue.put_nowait(list(request_ids))
        else:
            self.core.abort_requests(list(request_ids))

    def user_of(self, request_id: str) -> str:
        """Return whose request it is."""
        return self.scripts[request_id].user

    def steps_of(self, request_id: str) -> list[StepRecord]:
        """Return the steps that computed anything of a request."""
        return [step for step in self.steps if request_id in step.computed]

    def first_token_ms(self, request_id: str) -> float | None:
        """Return when the step that gave the request its first token was dispatched."""
        for step in self.steps:
            if request_id in step.sampled:
                return step.at_ns / NS_PER_MS
        return None

    def is_paused(self, request_id: str) -> bool:
        """Return whether a request is paused."""
        return self.requests[request_id] in self.scheduler._pauses.requests

    def is_loaded(self, request_id: str) -> bool:
        """Return whether a request's prompt, or some of it, is loaded while the engine goes on."""
        params = self.requests[request_id].kv_transfer_params or {}
        return params.get("is_async", False)

    def residents(self) -> list[str]:
        """Return the resident requests in the scheduler's order."""
        return [each.request_id for each in self.scheduler.running]

    def blocks(self, request_id: str) -> list[int]:
        """Return the KV blocks that a request holds."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])

    # --- running ------------------------------------------------------------------------------

    @property
    def now_ns(self) -> int:
        """The time."""
        return self.clock.now_ns()

    @property
    def now_ms(self) -> float:
        """The time in milliseconds."""
        return self.clock.now_ns() / NS_PER_MS

    @property
    def has_work(self) -> bool:
        """Whether the engine's loop would step."""
        return self.scheduler.has_requests() or bool(self.core.batch_queue)

    def step(self) -> list[str]:
        """Let the engine step once, and return the requests that were computed.

        With overlapping steps vLLM's loop either dispatches one or processes one, or both.
        """
        dispatched_before = len(self.steps)
        outputs, was_executed = self.core.step_fn()
        self.core.post_step(was_executed)
        if outputs is not None:
            self._note_outputs(outputs)
        new_steps = self.steps[dispatched_before:]
        if not was_executed and not outputs and self.scheduler.has_requests():
            self._nap()
        self.check()
        return [each for step in new_steps for each in step.computed]

    def run(self, until_ms: float | None = None, most_steps: int = 1_000_000) -> None:
        """Step until no work is left, or until an instant; waits as the engine's loop would."""
        until_ns = None if until_ms is None else round(until_ms * NS_PER_MS)
        for _ in range(most_steps):
            if until_ns is not None and self.now_ns >= until_ns:
                return
            if not self.has_work:
                break
            quiet_ns = self.scheduler.quiet_until_ns() if self._paced else None
            if quiet_ns is not None and quiet_ns > self.now_ns:
                if self.laws is not None:
                    self.laws.check_wait(quiet_ns)
                if until_ns is not None and quiet_ns > until_ns:
                    break
                self.clock.advance_ns(quiet_ns - self.now_ns)
            self.step()
        else:
            raise AssertionError(f"still working after {most_steps} steps")
        if until_ns is not None:
            self.clock.advance_ns(until_ns - self.now_ns)

    def _nap(self) -> None:
        quiet_ns = self.scheduler.quiet_until_ns() if self._paced else None
        if quiet_ns is not None and quiet_ns > self.now_ns:
            return  # the loop waits for that instant instead
        self.naps += 1
        self.clock.advance_ns(_NAP_NS)

    # --- books --------------------------------------------------------------------------------

    @property
    def in_flight(self) -> Counter[str]:
        """The tokens of each user in steps that are not processed yet."""
        tokens: Counter[str] = Counter()
        for step in self._in_flight:
            for request_id, most in step.sampled.items():
                if request_id not in self.delivered_elsewhere:
                    tokens[self.user_of(request_id)] += most
        return tokens

    def _watch_limiter(self) -> None:
        if not self._paced:
            return
        limiter, ledger, books = self.scheduler._limiter, self.scheduler._ledger, self.books
        take_granted, repeat = limiter.take_granted, limiter.repeat
        give_back, dispatch = limiter.give_back, ledger.dispatch

        def counted_dispatch(step: int, charges: Any, flight: object) -> None:
            for account, tokens in charges.by_request.values():
                if not account.limited:  # the limiter is not asked
                    books.taken[account.user] += tokens
            dispatch(step, charges, flight)

        def counted_take(tokens_of: Any, *args: Any) -> Any:
            for account, tokens in tokens_of.items():
                books.taken[account.user] += tokens
            return take_granted(tokens_of, *args)

        def counted_repeat(tokens_of: Any, now_ns: int) -> Any:
            step = repeat(tokens_of, now_ns)
            if step is not None:
                for account, tokens in tokens_of.items():
                    books.taken[account.user] += tokens
            return step

        def counted_give_back(account: Any, step: int, now_ns: int, tokens: int = 1) -> None:
            give_back(account, step, now_ns, tokens)
            books.given_back[account.user] += tokens

        set_least_burst = limiter.set_least_burst

        def noted_least_burst(least_ns: int) -> None:
            self.longest_burst_ns = max(self.longest_burst_ns, least_ns)
            set_least_burst(least_ns)

        limiter.take_granted, limiter.repeat = counted_take, counted_repeat
        limiter.give_back = counted_give_back
        limiter.set_least_burst = noted_least_burst
        ledger.dispatch = counted_dispatch

    def _watch_aborts(self) -> None:
        abort_requests = self.core.abort_requests

        def counted_abort(request_ids: list[str]) -> None:
            live = [each for each in set(request_ids) if self._awaits_tokens(each)]
            abort_requests(request_ids)
            for step in self._in_flight:
                for request_id in live:
                    tokens = step.sampled.pop(request_id, 0)
                    if request_id in self.delivered_elsewhere:
                        continue
                    user = self.user_of(request_id)
                    self.books.aborted_in_flight[user] += tokens
                    self.kept_stamps.setdefault(user, []).extend([step.at_ns] * tokens)

        self.core.abort_requests = counted_abort  # type: ignore[method-assign]

    def _awaits_tokens(self, request_id: str) -> bool:
        """Return whether what is in flight for a request would be delivered, or some of it."""
        request = self.scheduler.requests.get(request_id)
        return request is not None and not (
            request.drop_stale_output
            and request.num_stale_output_tokens == request.num_in_flight_tokens
        )

    def _note_dispatch(self, record: StepRecord) -> None:
        self.steps.append(
            StepRecord(record.at_ns, record.computed, dict(record.sampled), record.preempted)
        )
        if record.computed:
            self._in_flight.append(record)
        assert len(record.computed) <= self.max_active, "more active requests than allowed"
        adapters = {self.requests[each].lora_request for each in record.computed} - {None}
        assert len(adapters) <= (self.max_loras or 0), "more adapters than fit"

    def _note_outputs(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        emitted: Counter[str] = Counter()
        for client_outputs in outputs.values():
            for each in client_outputs.outputs:
                answer = self.answers[each.request_id]
                script = self.scripts[each.request_id]
                for token in each.new_token_ids:
                    assert token == script.token(len(answer)), f"{each.request_id} went astray"
                    answer.append(token)
                    if each.request_id not in self.delivered_elsewhere:
                        self.books.delivered[script.user] += 1
                    emitted[each.request_id] += 1
                if each.finish_reason is not None:
                    self.finished[each.request_id] = each.finish_reason
                    self.finished_ns[each.request_id] = self.now_ns
        if emitted:
            assert self._in_flight, "tokens from nowhere"
        if self._in_flight and len(self._in_flight) > self._steps_in_flight():
            step = self._in_flight.pop(0)
            for request_id, tokens in emitted.items():
                assert tokens <= step.sampled[request_id], "more tokens than were charged"
                if request_id in self.delivered_elsewhere:
                    continue
                stamps = self.kept_stamps.setdefault(self.user_of(request_id), [])
                stamps += [step.at_ns] * tokens

    def _steps_in_flight(self) -> int:
        queue = self.core.batch_queue or ()
        return sum(output.total_num_scheduled_tokens > 0 for _, output, _ in queue)

    # --- laws ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the laws that hold after every step."""
        scheduler = self.scheduler
        running = scheduler.running
        residents = {
            each for each in scheduler.requests.values() if each.status == RequestStatus.RUNNING
        }
        assert len(running) == len(residents), "a resident is missing or there twice"
        assert set(running) == residents
        assert len(running) <= self.max_num_seqs
        for each in self.residents():
            for own, workers in zip(
                self.blocks(each), self.executor.worker.blocks(each), strict=True
            ):
                # What a window or a state has left behind is given up.
                assert own in (workers, NULL_BLOCK), f"{each} lost its KV"
        if not self._paced:
            return
        assert self.laws is not None
        self.laws.check()
        pauses = scheduler._pauses.requests
        visible = len(running) - len(pauses)
        assert all(each in pauses for each in running[visible:]), "paused ones come last"
        in_flight, books = self.in_flight, self.books
        for user in self.users:
            assert books.charged(user) == (
                books.delivered[user] + in_flight[user] + books.aborted_in_flight[user]
            ), f"the books of {user} do not balance"

    def check_window_bound(self) -> None:
        """Check tokens ≤ (W + burst) * N + 1 for every user and every window of dispatch stamps.

        The burst is the longest that was in force.
        """
        quotas = self.pacing.quotas()
        for user in self.users:
            quota = quotas.of(user)
            if quota is not None:
                stamps = self.dispatched_ns(user)
                burst_ns = max(quota.burst_ns, self.longest_burst_ns)
                assert_window_bound(stamps, quota.tokens_per_second, burst_ns)

    def check_empty(self) -> None:
        """Check that nothing is left of any request once all have ended and a step went by."""
        scheduler = self.scheduler
        assert not scheduler.requests
        assert not scheduler.running
        assert len(scheduler.waiting) == 0
        assert not scheduler.deferred_waiting
        assert not self.core.batch_queue
        assert not self._in_flight
        images = scheduler.encoder_cache_manager
        assert scheduler.is_encoder_decoder or images.num_freeable_slots == images.cache_size
        free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free_blocks == self.num_blocks - 1  # one is vLLM's own null block
        if not self._paced:
            return
        scheduler.update_from_output(scheduler.schedule(), EMPTY_MODEL_RUNNER_OUTPUT)
        assert not scheduler._users
        assert not scheduler._owner_of
        assert not scheduler._payer_of
        assert not scheduler._loads
        assert scheduler._pauses.next_wake_ns() is None
        assert _held_by(scheduler._pauses) == {}
        assert _held_by(scheduler._ledger) == {}
        assert not scheduler._limiter._open_steps
        assert not scheduler._spent
        assert not scheduler._refused
        assert not scheduler._prefills
        assert not scheduler._held_back
        assert not scheduler._shown
        assert _held_by(scheduler._holdings).keys() == {"_groups"}
        assert _held_by(scheduler.waiting) == {}
        assert scheduler.waiting.next_wake_ns() is None
        assert all(not each.slots + each.blocks for each in scheduler._fair._members.values())
        assert all(each.requests == 0 for each in scheduler._limiter._accounts.values())
        for user in self.users:
            assert self.books.charged(user) == (
                self.books.delivered[user] + self.books.aborted_in_flight[user]
            )

    def dispatched_ns(self, user: str) -> list[int]:
        """Return when each token that the user is charged for was dispatched, in flight or not."""
        stamps = list(self.kept_stamps.get(user, []))
        for step in self._in_flight:
            for request_id, tokens in step.sampled.items():
                is_paid = request_id not in self.delivered_elsewhere
                stamps += [step.at_ns] * tokens * (is_paid and self.user_of(request_id) == user)
        return sorted(stamps)

    def dispatched_ms(self, user: str) -> list[float]:
        """Do the same in milliseconds."""
        return [each / NS_PER_MS for each in self.dispatched_ns(user)]


def _held_by(bookkeeper: object) -> dict[str, Any]:
    """Return what its containers still hold."""
    held = vars(bookkeeper).items()
    return {name: each for name, each in held if isinstance(each, Collection) and len(each)}


def sampling_params(user: str | None, max_tokens: int, **kwargs: Any) -> SamplingParams:
    """Build sampling parameters that name a user and know the two ways an answer ends by itself."""
    params = SamplingParams(
        max_tokens=max_tokens,
        stop_token_ids=[STOP],
        extra_args=None if user is None else {"output_rate_user": user},
        **kwargs,
    )
    params.update_from_generation_config({}, EOS)
    return params


def assert_window_bound(stamps_ns: Sequence[int], rate: Fraction, burst_ns: int) -> None:
    """Check every window at once.

    The tokens i..j satisfy j - i + 1 ≤ (t_j - t_i + burst) * N + 1 iff N * t - index never falls
    by more than burst * N below its highest value so far.
    """
    highest: Fraction | None = None
    slack = rate * burst_ns / NS_PER_SECOND
    for index, stamp_ns in enumerate(stamps_ns):
        level = rate * stamp_ns / NS_PER_SECOND - index
        if highest is None or level > highest:
            highest = level
        assert highest - level <= slack, f"token {index} at {stamp_ns} ns is too early"


def _attention(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )


def _latent(block_size: int) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)


def _window(block_size: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=1,
        dtype=torch.float32,
        sliding_window=WINDOW,
    )


def _cross(block_size: int) -> CrossAttentionSpec:
    return CrossAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )


def _state(block_size: int, config: VllmConfig) -> MambaSpec:
    mode = config.cache_config.mamba_cache_mode
    return MambaSpec(
        block_size=block_size if mode == "align" else config.model_config.max_model_len,
        shapes=((_attention(block_size).page_size_bytes,),),
        dtypes=(torch.int8,),
        mamba_cache_mode=mode,
        num_speculative_blocks=config.num_speculative_tokens,
    )


LAYERS: dict[str, Callable[[int, VllmConfig], dict[str, KVCacheSpec]]] = {
    "full": lambda size, config: {"full": _attention(size)},
    "latent": lambda size, config: {"latent": _latent(size)},
    "window": lambda size, config: {"full": _attention(size), "window": _window(size)},
    "hybrid": lambda size, config: {"full": _attention(size), "state": _state(size, config)},
    "aligned hybrid": lambda size, config: {
        "full": _attention(size),
        "state": _state(size, config),
    },
    "state": lambda size, config: {"state": _state(size, config)},
    "encoder decoder": lambda size, config: {"full": _attention(size), "cross": _cross(size)},
}
"""What a model may be made of: attention to everything, to a window, latent, or a state."""

UNCACHED = ("hybrid", "state", "encoder decoder")
"""Models whose prefixes vLLM does not cache."""

WINDOW = 20
ENCODER_TOKENS = 32
NULL_BLOCK = 0


def layer_groups(layers: str) -> int:
    """Return how many groups of layers take blocks for themselves."""
    return 1 if layers in ("full", "latent", "state") else 2


@lru_cache
def _model_config(max_model_len: int) -> ModelConfig:
    return ModelConfig(
        model=str(_MODEL),
        dtype="float16",
        seed=0,
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
    )


def _vllm_config(
    *,
    max_num_seqs: int,
    max_num_active_seqs: int | None,
    max_num_batched_tokens: int,
    num_blocks: int,
    block_size: int,
    policy: str,
    chunked_prefill: bool,
    pipeline: int,
    drafts: int,
    layers: str,
    max_loras: int | None,
    has_connector: bool,
) -> VllmConfig:
    # vLLM wants room for one request of the greatest length; one block is its own.
    usable = (num_blocks - 1) // layer_groups(layers)
    model_config = _model_config(min(2048, usable * block_size))
    cache_config = CacheConfig(
        block_size=block_size,
        enable_prefix_caching=layers not in UNCACHED,
        num_gpu_blocks_override=num_blocks,
        mamba_cache_mode="align" if layers == "aligned hybrid" else "none",
    )
    scheduler_config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_active_seqs=max_num_active_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=model_config.max_model_len,
        enable_chunked_prefill=chunked_prefill,
        is_encoder_decoder=False,
        watermark=0.0,
        policy=policy,
    )
    if layers == "encoder decoder":
        # What each request takes for its recording, whatever its length.
        scheduler_config.max_num_encoder_input_tokens = ENCODER_TOKENS
    return VllmConfig(
        model_config=model_config,
        cache_config=cache_config,
        scheduler_config=scheduler_config,
        parallel_config=ParallelConfig(pipeline_parallel_size=pipeline),
        kv_transfer_config=KVTransferConfig(
            kv_connector=BED_CONNECTOR, kv_role="kv_both", kv_load_failure_policy="recompute"
        )
        if has_connector
        else None,
        lora_config=max_loras and LoRAConfig(max_loras=max_loras, max_lora_rank=8),
        speculative_config=SpeculativeConfig(model="ngram", num_speculative_tokens=drafts)
        if drafts
        else None,
    )
