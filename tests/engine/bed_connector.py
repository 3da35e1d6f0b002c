"""A KV connector whose other side is a script: how much of a prompt it has, and how it loads."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

NAME = "BedConnector"


class BedConnector(KVConnectorBase_V1):
    """The scheduler's side: it loads `external_tokens` of a prompt, if a request asks for that.

    A request asks with `kv_transfer_params`: `{"tokens": 30, "is_async": True}`. What is loaded
    asynchronously is there when `Bed` says so. With `{"undecided": 3}` it has to ask so often
    before it is told how much there is.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loading: list[str] = []
        self.broken: set[str] = set()  # requests whose loads fail
        self._has_loaded: set[str] = set()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return what there is beyond what is cached here."""
        params = request.kv_transfer_params or {}
        if params.get("undecided", 0):
            params["undecided"] -= 1
            return None, False
        tokens = min(params.get("tokens", 0), request.num_prompt_tokens) - num_computed_tokens
        # The last position of the prompt is computed here: its token is sampled.
        is_async = params.get("is_async", False)
        if request.request_id in self.broken & self._has_loaded:
            return 0, False  # it is not tried again
        if request.num_tokens == 1:
            return 0, False  # vLLM would load it again and again
        tokens = min(tokens, request.num_tokens - (not is_async) - num_computed_tokens)
        return max(tokens, 0), is_async and tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        """Note that a load begins."""
        if num_external_tokens and request.kv_transfer_params["is_async"]:
            self.loading.append(request.request_id)
            self._has_loaded.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Say nothing to the workers."""
        return KVConnectorMetadata()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Give the blocks up."""
        return False, None

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Not called: there are no workers."""

    def wait_for_layer_load(self, *args: Any, **kwargs: Any) -> None:
        """Not called: there are no workers."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Not called: there are no workers."""

    def wait_for_save(self) -> None:
        """Not called: there are no workers."""


KVConnectorFactory.register_connector(NAME, __name__, BedConnector.__name__)
