"""What the process that takes requests does: checks names, refuses beam search, shows counters."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_pacer.engine.identity import FIELD, check_user
from vllm_pacer.engine.patches import wrap
from vllm_pacer.engine.snapshot import Snapshot, SnapshotReader


def install_frontend(snapshot_path: Path | None) -> None:
    """Install the checks, and the counters if there is a snapshot to read them from."""
    wrap(InputProcessor, "_validate_params", _validate_params)
    wrap(BeamSearchOnlineMixin, "beam_search", _refuse_beam_search)
    wrap(BeamSearchOfflineMixin, "beam_search", _refuse_beam_search)
    if snapshot_path is not None:
        _COUNTERS.show(snapshot_path)


def _validate_params(
    validate_params: Callable[..., Any],
    processor: InputProcessor,
    params: Any,
    *args: Any,
    **kw: Any,
) -> Any:
    if isinstance(params, SamplingParams):
        try:
            check_user(params)
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter=f"vllm_xargs.{FIELD}") from None
    return validate_params(processor, params, *args, **kw)


def _refuse_beam_search(*_: Any, **__: Any) -> Any:
    raise VLLMValidationError(
        "Beam search is not available while output tokens are limited per user: vLLM does not "
        "pass the user on to its candidates. Leave out use_beam_search.",
        parameter="use_beam_search",
    )


class _Counters(Collector):
    """Reads the engine's counters when the server is scraped."""

    def __init__(self) -> None:
        self._reader: SnapshotReader | None = None

    def show(self, snapshot_path: Path) -> None:
        """Show the counters of one engine from now on."""
        is_new = self._reader is None
        self._reader = SnapshotReader(snapshot_path)
        if is_new:
            REGISTRY.register(self)
            # Where there are several API servers, each scrape builds a registry of its own.
            wrap(MultiProcessCollector, "collect", self._collect_with_counters)

    def _collect_with_counters(
        self, collect: Callable[[Any], Iterable[Metric]], collector: MultiProcessCollector
    ) -> Iterable[Metric]:
        return [*collect(collector), *self.collect()]

    def describe(self) -> Iterator[Metric]:
        return self._metrics(Snapshot(0, 0, 0))

    def collect(self) -> Iterator[Metric]:
        assert self._reader is not None
        return self._metrics(self._reader.read())

    def _metrics(self, snapshot: Snapshot) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "vllm_pacer:paused_requests",
            "Resident requests that sat out the last step: their users were over quota, or more "
            "could run than --max-num-active-seqs allows.",
            value=snapshot.paused_requests,
        )
        yield CounterMetricFamily(
            "vllm_pacer:charged_tokens",
            "Output tokens charged to users when steps were dispatched.",
            value=snapshot.charged_tokens,
        )
        yield CounterMetricFamily(
            "vllm_pacer:refunded_tokens",
            "Output tokens charged and given back because they were not emitted.",
            value=snapshot.refunded_tokens,
        )


_COUNTERS = _Counters()
