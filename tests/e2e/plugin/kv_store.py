"""A KV connector that keeps the KV blocks of prompts in memory, and gives them back later.

Blocks are saved when a request ends, which keeps them until that is done, and loaded while the
engine goes on: what offloading does, and both sides of an engine that is split.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

LOAD_SECONDS = 0.05

_Prompt = tuple[int, ...]


@dataclass
class Transfer:
    """What one step is to move, by request: the part of the prompt, and its blocks."""

    loads: dict[str, tuple[_Prompt, list[int]]] = field(default_factory=dict)
    saves: dict[str, tuple[_Prompt, list[int]]] = field(default_factory=dict)


@dataclass
class StoreMetadata(KVConnectorMetadata):
    """What a step's output says to the worker."""

    transfer: Transfer


class StoreConnector(KVConnectorBase_V1):
    """Both sides: each process role uses its half."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._num_blocks = kv_cache_config.num_blocks
        self._transfer = Transfer()
        self._is_loading: set[str] = set()
        self._saving: dict[str, _Prompt] = {}
        self._stored: set[_Prompt] = set()
        self._caches: list[torch.Tensor] = []
        self._blocks: dict[_Prompt, list[torch.Tensor]] = {}
        self._loads_at: dict[str, tuple[float, _Prompt, list[int]]] = {}
        self._sent: set[str] = set()

    # --- the scheduler's side -----------------------------------------------------------------

    def _whole_blocks(self, request: Request) -> _Prompt:
        """Return the prompt up to the last block boundary before the position that samples."""
        tokens = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
        return tuple(request.all_token_ids[:tokens])

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how much of the prompt is stored beyond what is computed."""
        prompt = self._whole_blocks(request)
        tokens = len(prompt) - num_computed_tokens if prompt in self._stored else 0
        return max(tokens, 0), tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        """Load into the blocks that were allocated."""
        if num_external_tokens:
            prompt = self._whole_blocks(request)
            count = len(prompt) // self._block_size
            own = blocks.get_block_ids()[0][:count]
            self._transfer.loads[request.request_id] = prompt, own
            self._is_loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Send the worker what has come up since the last step."""
        transfer, self._transfer = self._transfer, Transfer()
        return StoreMetadata(transfer)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Note what has been loaded and saved."""
        self._is_loading -= connector_output.finished_recving or set()
        for request_id in connector_output.finished_sending or ():
            self._stored.add(self._saving.pop(request_id))

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a prompt that is not stored yet until the worker has copied them."""
        prompt = self._whole_blocks(request)
        is_computed = request.num_computed_tokens >= len(prompt) > 0
        is_known = prompt in self._stored or prompt in self._saving.values()
        if not is_computed or request.request_id in self._is_loading or is_known:
            return False, None
        self._saving[request.request_id] = prompt
        own = block_ids[: len(prompt) // self._block_size]
        self._transfer.saves[request.request_id] = prompt, own
        return True, None

    # --- the worker's side --------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Note where the KV blocks of each layer lie."""
        self._caches = [*kv_caches.values()]

    def _blocks_of(self, cache: torch.Tensor) -> torch.Tensor:
        """Return a view of a layer's cache that is indexed by block."""
        return cache.movedim(cache.shape.index(self._num_blocks), 0)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Save at once, and load a little later."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StoreMetadata)
        for request_id, (prompt, blocks) in metadata.transfer.saves.items():
            self._blocks[prompt] = [
                self._blocks_of(cache)[blocks].clone() for cache in self._caches
            ]
            self._sent.add(request_id)
        for request_id, (prompt, blocks) in metadata.transfer.loads.items():
            self._loads_at[request_id] = time.monotonic() + LOAD_SECONDS, prompt, blocks

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return whose blocks have been saved and loaded."""
        loaded = {*self._due()}
        for request_id in loaded:
            _, prompt, blocks = self._loads_at.pop(request_id)
            for cache, stored in zip(self._caches, self._blocks[prompt], strict=True):
                self._blocks_of(cache)[blocks] = stored
        sent, self._sent = self._sent, set()
        return sent, loaded

    def _due(self) -> Iterable[str]:
        now = time.monotonic()
        return (each for each, (at, _, _) in self._loads_at.items() if at <= now)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Not needed: a load has ended before its request is computed."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Not needed: what is saved is whole."""

    def wait_for_save(self) -> None:
        """Not needed: it is saved at once."""
