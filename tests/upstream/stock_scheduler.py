"""Real vLLM objects on a model of two layers that needs no weights here."""

from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from paths import TINY_LLAMA

BLOCK_SIZE = 16
BLOCKS = 64


def engine_args(**changes: Any) -> EngineArgs:
    """Return engine arguments for the small model."""
    settings = {"model": str(TINY_LLAMA), "max_model_len": 256, "max_num_seqs": 8}
    return EngineArgs(**settings | changes)


def new_scheduler(cls: type[Scheduler] = Scheduler, **kwargs: Any) -> Scheduler:
    """Return a scheduler, vLLM's own if no other class is named."""
    config = engine_args(block_size=BLOCK_SIZE).create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    kv_cache_config = KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return cls(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        **kwargs,
    )


def new_request() -> Request:
    """Return a request of vLLM's own."""
    return Request(
        request_id="request",
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
    )
