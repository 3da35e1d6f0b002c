"""The modes in which limits are refused, and those in which they are proved, as tables of data.

A mode is refused until a test proves that limits hold in it. The documentation is made from both.
"""

from collections.abc import Callable
from dataclasses import dataclass

from vllm import envs
from vllm.config import VllmConfig


class UnsupportedModeError(ValueError):
    """Limits were asked for in a mode in which they are not proved to hold."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A mode in which the server does not start with limits.

    Attributes:
        setting: What the operator set.
        reason: Why limits do not hold.
        way_out: What to do instead.
        applies: Whether a configuration is in this mode.
    """

    setting: str
    reason: str
    way_out: str
    applies: Callable[[VllmConfig], bool]


@dataclass(frozen=True, slots=True)
class Support:
    """A mode in which limits hold.

    Attributes:
        mode: What the operator may set or the client ask for.
        how: On what it is proved.
        proof: The test, by its path in the repository.
    """

    mode: str
    how: str
    proof: str


_SERVED = "served"
_SCHEDULER = "the real scheduler and KV cache manager"
_UPSTREAM = "upstream's own tests, run with our scheduler"

SUPPORTED = (
    Support(
        "synchronous and asynchronous scheduling",
        _SERVED,
        "tests/e2e/test_rates.py::test_rate_is_the_limit",
    ),
    Support(
        "first come first served and priority",
        _SCHEDULER,
        "tests/engine/test_any_history.py::test_any_history",
    ),
    Support(
        "chunked prefill, on or off",
        _SCHEDULER,
        "tests/engine/test_pacing.py::test_unchunked_prefill_waits_whole",
    ),
    Support("prefix caching", _SERVED, "tests/e2e/test_texts.py::test_text_is_the_same"),
    Support(
        "--speculative-config with drafts from the text (ngram)",
        _SERVED,
        "tests/e2e/test_drafts.py::test_rate_is_the_limit",
    ),
    Support(
        "--speculative-config with a draft model, EAGLE or MTP, synchronous and asynchronous",
        _SCHEDULER,
        "tests/engine/test_drafts.py::test_a_user_gets_its_rate",
    ),
    Support(
        "--speculative-config with a number of drafts that depends on the load",
        _UPSTREAM,
        "tests/upstream/test_suites.py::test_no_test_that_passes_on_stock_is_lost",
    ),
    Support(
        "--pipeline-parallel-size > 1",
        _SCHEDULER,
        "tests/engine/test_pipeline.py::test_a_user_gets_its_rate",
    ),
    Support(
        "--pipeline-parallel-size > 1 with --speculative-config, scheduled asynchronously",
        _SCHEDULER,
        "tests/engine/test_pipeline.py::test_a_user_that_drafts_gets_its_rate",
    ),
    Support(
        "--tensor-parallel-size > 1",
        _SERVED,
        "tests/e2e/test_tensor_parallel.py::test_rate_is_the_limit",
    ),
    Support(
        "--enable-lora",
        _SERVED,
        "tests/e2e/test_adapters.py::test_the_limited_user_gets_its_rate",
    ),
    Support(
        "models with a sliding window, with latent attention (MLA), without attention (Mamba), and "
        "hybrids of them",
        _SCHEDULER,
        "tests/engine/test_layers.py::test_a_user_gets_its_rate",
    ),
    Support(
        "a hybrid with --mamba-cache-mode align",
        _SCHEDULER,
        "tests/engine/test_layers.py::test_chunks_end_where_a_state_is_kept",
    ),
    Support(
        "multimodal models",
        _SCHEDULER,
        "tests/engine/test_images.py::test_a_paused_prompt_keeps_its_images",
    ),
    Support(
        "encoder-decoder models",
        _SCHEDULER,
        "tests/engine/test_images.py::test_a_recording_is_encoded_when_its_request_begins",
    ),
    Support(
        "--kv-transfer-config, with prompts that are loaded while the engine goes on",
        _SERVED,
        "tests/e2e/test_kv_transfer.py::test_text_is_the_same",
    ),
    Support(
        "--kv-transfer-config, with prompts that are loaded before a step",
        _SCHEDULER,
        "tests/engine/test_connectors.py::test_a_user_gets_its_rate",
    ),
    Support(
        "--kv-offloading-size",
        _UPSTREAM,
        "tests/upstream/test_suites.py::test_no_test_that_passes_on_stock_is_lost",
    ),
    Support(
        "prefill and decode in different engines",
        _SCHEDULER,
        "tests/engine/test_connectors.py::test_a_prefill_for_another_engine_takes_no_token",
    ),
    Support(
        "steps longer than the burst",
        _SCHEDULER,
        "tests/engine/test_pacing.py::test_slow_steps_reach_the_rate",
    ),
    Support(
        "structured output (JSON schema)",
        _SERVED,
        "tests/e2e/test_features.py::test_paused_json_follows_its_schema",
    ),
    Support(
        "log probabilities, `n` > 1, `min_tokens`, stop strings, echo",
        _SERVED,
        "tests/e2e/test_features.py::test_answer_is_the_same",
    ),
    Support(
        "several API servers (--api-server-count)",
        _SERVED,
        "tests/e2e/test_charges.py::test_charges_are_emitted_and_aborted_in_flight",
    ),
    Support(
        "an engine that is paused and goes on, a prefix cache that is reset under running requests",
        _SCHEDULER,
        "tests/engine/test_any_history.py::test_any_history",
    ),
    Support(
        "streaming-input sessions",
        _SCHEDULER,
        "tests/engine/test_sessions.py::test_a_session_is_answered_turn_by_turn",
    ),
    Support(
        "a pooling model: nothing to limit",
        "its configuration",
        "tests/upstream/test_configuration.py::test_a_pooling_model_is_served_as_stock",
    ),
)


def _drafts_are_charged(config: VllmConfig) -> bool:
    if config.speculative_config is None:
        return True
    method = str(config.speculative_config.method)
    return method in ("ngram", "draft_model", "eagle", "eagle3") or method.endswith("mtp")


_ANOTHER_MODEL = "serve this model without limits, or limit another one"

REFUSALS = (
    Refusal(
        "--speculative-config with medusa, suffix, dflash or another method that is not named here",
        "what it drafts is not proved to be charged",
        "use ngram, draft_model, eagle, eagle3 or mtp",
        lambda config: not _drafts_are_charged(config),
    ),
    Refusal(
        "--speculative-config with --pipeline-parallel-size > 1 and synchronous scheduling",
        "drafts are scheduled there before the token that they follow is known",
        "leave out one of them, or schedule asynchronously, with a drafter for which vLLM can",
        lambda config: (
            config.speculative_config is not None
            and config.parallel_config.pipeline_parallel_size > 1
            and not config.scheduler_config.async_scheduling
        ),
    ),
    Refusal(
        "--speculative-config with a hybrid or attention-free model on the first model runner",
        "it forgets how many drafts were accepted when a request sits out a step",
        "leave it out, or let vLLM choose the second model runner",
        lambda config: (
            config.speculative_config is not None
            and (config.model_config.is_hybrid or config.model_config.is_attention_free)
            and not config.use_v2_model_runner
        ),
    ),
    Refusal(
        "--data-parallel-size > 1",
        "every rank would grant each user the whole quota",
        "start one server per rank and pin each user to one of them",
        lambda config: config.parallel_config.data_parallel_size > 1,
    ),
    Refusal(
        "--distributed-executor-backend external_launcher",
        "every rank schedules for itself and would pause by its own clock",
        "use the mp or ray backend",
        lambda config: config.parallel_config.distributed_executor_backend == "external_launcher",
    ),
    Refusal(
        "VLLM_USE_RUST_FRONTEND=1",
        "it takes requests without the checks of their users' names",
        "unset it",
        lambda config: envs.VLLM_USE_RUST_FRONTEND,
    ),
    Refusal(
        "a diffusion model",
        "it does not generate token by token",
        _ANOTHER_MODEL,
        lambda config: config.model_config.is_diffusion,
    ),
    Refusal(
        "--ec-transfer-config",
        "the encoder outputs of a paused request may be waited for elsewhere",
        "leave it out",
        lambda config: config.ec_transfer_config is not None,
    ),
    Refusal(
        "--aux-output-config",
        "the outputs of a paused request may be waited for elsewhere",
        "leave it out",
        lambda config: config.aux_output_config.enabled,
    ),
    Refusal(
        "--prefill-schedule-interval > 1",
        "a paused prefill would hold up the admission of others",
        "leave it out",
        lambda config: config.scheduler_config.prefill_schedule_interval > 1,
    ),
    Refusal(
        "--scheduler-cls",
        "limits need a scheduler class of their own",
        "leave it out",
        lambda config: config.scheduler_config.scheduler_cls is not None,
    ),
)


def is_limitable(config: VllmConfig) -> bool:
    """Whether the model generates tokens at all; a pooling model is served as stock."""
    return config.model_config.runner_type != "pooling"


def refuse_unsupported(config: VllmConfig) -> None:
    """Stop if limits are not proved to hold in a configuration.

    Raises:
        UnsupportedModeError: Names every setting, the reason and the way out.
    """
    problems = [
        f"{refusal.setting}: {refusal.reason}; {refusal.way_out}."
        for refusal in REFUSALS
        if refusal.applies(config)
    ]
    if problems:
        raise UnsupportedModeError(
            "vllm-pacer cannot limit generation speed with these settings. " + " ".join(problems)
        )
