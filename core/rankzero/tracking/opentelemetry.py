"""`OpenTelemetry`: a trace of each run, and metrics of its attempts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankzero import bounds
from rankzero.advice import require
from rankzero.errors import InvalidJobError
from rankzero.run.directory import RunDirectory
from rankzero.tracking.tracker import Tracker

if TYPE_CHECKING:
    from rankzero.run.handle import RunHandle
    from rankzero.run.status import RunStatus

_HOUR = 3600.0


@dataclass(frozen=True)
class Attempt:
    """An attempt that has ended.

    Attributes:
        number: Its number, from 0.
        began: Unix time at which the driver began to start it.
        started: Unix time at which every rank had started; None if that never happened.
        ended: Unix time of its end.
        cause: ``"succeeded"``, ``"cancelled"``, ``"failed"``, or the reason for a restart, such as ``"lost"``,
            ``"hang"`` or ``"killed"``.
        what: The display message of a failure; otherwise empty.
    """

    number: int
    began: float
    started: float | None
    ended: float
    cause: str
    what: str = ""

    @property
    def seconds(self) -> float:
        """The seconds for which its ranks held their slots."""
        return 0.0 if self.started is None else self.ended - self.started


class Outcomes:
    """Collects attempts from the events of one driver."""

    def __init__(self) -> None:
        self._number = 0
        self._began: float | None = None
        self._started: float | None = None
        self._what = ""

    def of(self, events: Iterable[Mapping[str, Any]]) -> Iterator[Attempt]:
        """Yields the attempts that ended in the next events."""
        for event in events:
            kind, now = event["type"], event["time"]
            if kind == "failure" and not self._what:
                self._what = str(event.get("what", ""))
            elif kind == "restart":
                yield from self._end(now, str(event.get("cause") or "failed"), str(event.get("what", "")))
            elif kind == "state" and event["state"] == "starting":
                self._number, self._began, self._started, self._what = event["attempt"], now, None, ""
            elif kind == "state" and event["state"] == "running":
                self._started = now
            elif kind == "state":
                yield from self._end(now, event["state"], self._what if event["state"] == "failed" else "")

    def _end(self, now: float, cause: str, what: str) -> Iterator[Attempt]:
        if self._began is not None:
            yield Attempt(self._number, self._began, self._started, now, cause, what)
        self._began = self._started = None


@dataclass(eq=False)
class OpenTelemetry(Tracker):
    """Sends a trace of each run and metrics of its attempts to a collector, by OTLP over HTTP.

    The run continues the trace of its submitter (its current span, or ``$TRACEPARENT``). The ranks have the variable
    ``TRACEPARENT``, too. The trace has a span for the run and one for each attempt, with failures, restarts and
    checkpoints as events. The metrics: ``rankzero.attempts`` and ``rankzero.attempts.ended`` (by ``outcome``:
    ``succeeded``, ``failed``, ``cancelled``, or the cause of a restart), ``rankzero.runs.ended`` (by ``state``),
    ``rankzero.start.duration`` and ``rankzero.run.duration`` in seconds, ``rankzero.rank.hours``, and
    ``rankzero.gpu.hours`` of runs with GPUs.

    Attributes:
        endpoint: The address of the collector, such as ``http://collector:4318``. None uses
            ``$OTEL_EXPORTER_OTLP_ENDPOINT`` of the process that drives the run. The other variables of OpenTelemetry's
            exporters apply in both cases.
        headers: Headers of each request, such as those that authenticate it.
        attributes: Attributes of the resource, in addition to ``service.name``, which is ``rankzero``.

    Example:
        >>> from rankzero import Launcher
        >>> launcher = Launcher(2, trackers=[OpenTelemetry("http://collector:4318")])
    """

    endpoint: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    attributes: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raises InvalidJobError if the exporter is not installed, or the endpoint is no URL."""
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise InvalidJobError(
                f"trackers has OpenTelemetry with the endpoint {self.endpoint!r}; give a URL, such as "
                "http://collector:4318"
            )
        exporter = "opentelemetry-exporter-otlp-proto-http"
        require("trackers has OpenTelemetry, which needs", exporter, "opentelemetry.exporter.otlp.proto.http")

    def begin(self, run: RunHandle[Any]) -> None:
        """Creates providers for this run. The providers that the process has set up stay unchanged."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        job = RunDirectory(run.directory).job()
        self._use_gpu = job.use_gpu
        self._outcomes = Outcomes()
        resource = Resource.create(
            {"service.name": "rankzero", "service.instance.id": f"{run.id}-{job.nonce}", **self.attributes}
        )
        root = self.endpoint and self.endpoint.rstrip("/")
        options: dict[str, Any] = {"timeout": bounds.EXPORT_TIMEOUT, "headers": dict(self.headers) or None}
        spans = OTLPSpanExporter(endpoint=root and f"{root}/v1/traces", **options)
        points = OTLPMetricExporter(endpoint=root and f"{root}/v1/metrics", **options)
        self._tracing = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._tracing.add_span_processor(BatchSpanProcessor(spans))
        reader = PeriodicExportingMetricReader(
            points, bounds.TRACKER_UPLOAD_INTERVAL * 1000, bounds.EXPORT_TIMEOUT * 1000
        )
        self._metering = MeterProvider([reader], resource, shutdown_on_exit=False)
        self._tracer = self._tracing.get_tracer("rankzero")
        self._make_instruments()
        shown = {"rankzero.run_id": run.id, "rankzero.name": job.name, "rankzero.directory": run.directory}
        labels = {f"rankzero.label.{name}": value for name, value in run.labels.items()}
        caller = TraceContextTextMapPropagator().extract({"traceparent": job.traceparent})
        self._span = self._tracer.start_span(
            f"run {job.name}", caller, attributes={**shown, **labels}, start_time=_ns(job.created)
        )

    def _make_instruments(self) -> None:
        meter = self._metering.get_meter("rankzero")
        self._starts = meter.create_counter("rankzero.attempts", description="Attempts that began")
        self._ends = meter.create_counter("rankzero.attempts.ended", description="Attempts that ended, by outcome")
        self._runs = meter.create_counter("rankzero.runs.ended", description="Runs that ended, by state")
        self._start = meter.create_histogram(
            "rankzero.start.duration", "s", "Until every rank of an attempt had started"
        )
        self._duration = meter.create_histogram(
            "rankzero.run.duration", "s", "From the first start to the end of a run"
        )
        self._rank_hours = meter.create_counter("rankzero.rank.hours", "h", "Ranks times hours")
        self._gpu_hours = meter.create_counter("rankzero.gpu.hours", "h", "GPUs times hours")

    def add(self, run: RunHandle[Any], events: list[dict[str, Any]]) -> None:
        """Counts attempts, and creates a span for each one that has ended."""
        for event in events:
            if event["type"] == "state" and event["state"] == "starting":
                self._starts.add(1)
            if event["type"] in ("failure", "restart", "checkpoint", "left-out"):
                facts = {name: value for name, value in event.items() if isinstance(value, (str, int, float))}
                self._span.add_event(event["type"], facts, _ns(event["time"]))
        for attempt in self._outcomes.of(events):
            self._ended(attempt, run.world_size)

    def _ended(self, attempt: Attempt, world_size: int) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        facts: dict[str, Any] = {
            "rankzero.attempt": attempt.number,
            "rankzero.world_size": world_size,
            "rankzero.outcome": attempt.cause,
        }
        span = self._tracer.start_span(
            f"attempt {attempt.number}",
            set_span_in_context(self._span),
            attributes=facts,
            start_time=_ns(attempt.began),
        )
        if attempt.cause not in ("succeeded", "cancelled"):
            span.set_status(Status(StatusCode.ERROR, attempt.what))
        span.end(_ns(attempt.ended))
        self._ends.add(1, {"outcome": attempt.cause})
        if attempt.started is not None:
            self._start.record(attempt.started - attempt.began)
        hours = attempt.seconds * world_size / _HOUR
        self._rank_hours.add(hours)
        if self._use_gpu:
            self._gpu_hours.add(hours)

    def end(self, run: RunHandle[Any], status: RunStatus) -> None:
        """Ends the span of the run and sends everything that is still buffered."""
        from opentelemetry.trace import Status, StatusCode

        if status.final:
            self._runs.add(1, {"state": status.state})
            if status.started is not None and status.ended is not None:
                self._duration.record(status.ended - status.started)
            if status.error and status.state == "failed":
                what = str(status.error.get("message", "")).partition("\n")[0]
                self._span.set_status(Status(StatusCode.ERROR, what))
        self._span.end(None if status.ended is None else _ns(status.ended))
        try:
            self._tracing.shutdown()
        finally:
            self._metering.shutdown(bounds.EXPORT_TIMEOUT * 1000)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
