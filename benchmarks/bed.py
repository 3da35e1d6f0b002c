"""Real schedulers without a model: what one engine step costs outside the forward pass."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from least import LeastAsyncScheduler, LeastScheduler
from vllm_pacer import PacerConfig
from vllm_pacer.clock import Clock
from vllm_pacer.engine.scheduler import PacedAsyncScheduler, PacedScheduler

TESTBED = Path(__file__).parents[1] / ".testbed"
TINY_MODEL = TESTBED / "models" / "tiny-llama"

BLOCK_SIZE = 16
TOKEN = 7

Pacing = PacerConfig | Literal["least"] | None
"""Limits, the least of limiters, or stock."""


def make_scheduler(
    pacing: Pacing,
    *,
    is_async: bool = False,
    residents: int = 256,
    active: int | None = None,
    blocks: int = 200_000,
    clock: Clock | None = None,
) -> Scheduler:
    """Build vLLM's own scheduler, or one with limits."""
    model_config = ModelConfig(model=str(TINY_MODEL), dtype="float32", max_model_len=4096)
    scheduler_config = SchedulerConfig(
        max_num_seqs=residents,
        max_num_active_seqs=active,
        max_num_batched_tokens=max(8192, residents),
        max_model_len=4096,
        is_encoder_decoder=False,
        async_scheduling=is_async,
    )
    config = VllmConfig(
        model_config=model_config,
        scheduler_config=scheduler_config,
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False),
    )
    scheduler_config.async_scheduling = is_async  # vLLM's CPU platform switches it off
    config.cache_config.num_gpu_blocks = blocks
    register_all_kvcache_specs(config)
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    kwargs: dict[str, Any] = {
        "vllm_config": config,
        "kv_cache_config": KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": BLOCK_SIZE,
        "log_stats": False,
    }
    if pacing is None:
        return (AsyncScheduler if is_async else Scheduler)(**kwargs)
    if pacing == "least":
        return (LeastAsyncScheduler if is_async else LeastScheduler)(**kwargs)
    return (PacedAsyncScheduler if is_async else PacedScheduler)(
        pacing=pacing, clock=clock, **kwargs
    )


def add_requests(
    scheduler: Scheduler, users: Iterable[str], max_tokens: int = 4000, first: int = 0
) -> None:
    """Add one request with a short prompt for each name in `users`, numbered from `first` on."""
    for index, user in enumerate(users, first):
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args={"output_rate_user": user}
        )
        params.update_from_generation_config({}, 0)
        scheduler.add_request(
            Request(
                request_id=f"{user}-{index}",
                prompt_token_ids=[TOKEN] * 8,
                sampling_params=params,
                pooling_params=None,
            )
        )


def result_of(scheduler: Scheduler, output: Any) -> ModelRunnerOutput:
    """Return what a model would: a token for each request whose known tokens are all computed."""
    request_ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
        sampled_token_ids=[
            [] if scheduler.requests[request_id].is_prefill_chunk else [TOKEN]
            for request_id in request_ids
        ],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
