"""OpenTelemetry: what arrives at a receiver that speaks OTLP over HTTP, by OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner

from rankzero import InvalidJobError, Launcher, RunHandle, bounds
from rankzero.cli import main
from rankzero.tracking import OpenTelemetry

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider


class Receiver(ThreadingHTTPServer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}
        self.logins: set[str | None] = set()
        self.instances: set[str] = set()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        self.server.logins.add(self.headers.get("x-team"))
        if self.path == "/v1/traces":
            for found in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.server.instances.add(attributes(found.resource)["service.instance.id"])
                self.server.spans += [span for scope in found.scope_spans for span in scope.spans]
        elif self.path == "/v1/metrics":
            for of_resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope in of_resource.scope_metrics:
                    self.server.metrics |= {metric.name: metric for metric in scope.metrics}
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    # A thread of the driver's process, which may stand still together with the exporter.
    monkeypatch.setattr(bounds, "EXPORT_TIMEOUT", 60.0)
    monkeypatch.setattr(bounds, "TRACKERS_TIMEOUT", 60.0)
    with Receiver() as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def attributes(of: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


def test_a_trace_and_metrics_of_a_restarted_run(
    receiver: Receiver, tmp_path: Path, training: Callable[..., Any]
) -> None:
    tracker = OpenTelemetry(receiver.url, headers={"x-team": "vision"})
    launcher = Launcher(2, store=tmp_path, run_id="one", max_restarts=1, trackers=[tracker], labels={"dag": "digits"})
    launcher.run(training, 0.5)
    assert receiver.logins == {"vision"}
    spans = {span.name: span for span in receiver.spans}
    assert set(spans) == {"run train", "attempt 0", "attempt 1"}
    run, killed, succeeded = spans["run train"], spans["attempt 0"], spans["attempt 1"]
    assert attributes(run)["rankzero.run_id"] == "one"
    assert attributes(run)["rankzero.label.dag"] == "digits"
    assert killed.parent_span_id == succeeded.parent_span_id == run.span_id
    assert killed.trace_id == run.trace_id
    assert attributes(killed)["rankzero.outcome"] == "killed"
    assert killed.status.code == 2
    assert "rank 1" in killed.status.message
    assert (succeeded.status.code, run.status.code) == (0, 0)
    assert run.start_time_unix_nano <= killed.start_time_unix_nano < killed.end_time_unix_nano
    assert killed.end_time_unix_nano <= succeeded.start_time_unix_nano < run.end_time_unix_nano
    assert {"failure", "restart"} <= {event.name for event in run.events}
    ended = receiver.metrics["rankzero.attempts.ended"].sum.data_points
    assert {attributes(point)["outcome"]: point.as_int for point in ended} == {"killed": 1, "succeeded": 1}
    assert receiver.metrics["rankzero.attempts"].sum.data_points[0].as_int == 2
    assert attributes(receiver.metrics["rankzero.runs.ended"].sum.data_points[0]) == {"state": "succeeded"}
    assert receiver.metrics["rankzero.start.duration"].histogram.data_points[0].count == 2
    hours = receiver.metrics["rankzero.rank.hours"].sum.data_points[0].as_double
    seconds = sum(span.end_time_unix_nano - span.start_time_unix_nano for span in (killed, succeeded)) / 1e9
    assert 0 < hours * 3600 < 2 * seconds
    assert "rankzero.gpu.hours" not in receiver.metrics, "there was none"


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_run_continues_the_trace_of_its_submitter(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> str:
        import os

        return os.environ["TRACEPARENT"]

    monkeypatch.setenv("TRACEPARENT", PARENT)
    launcher = Launcher(1, store=tmp_path, run_id="one", trackers=[OpenTelemetry(receiver.url)])
    assert launcher.run(train) == PARENT
    (span,) = (span for span in receiver.spans if span.name == "run train")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    shown = CliRunner().invoke(main, ["status", str(tmp_path / "one")]).stdout
    assert f"trace      {PARENT.split('-')[1]}" in shown
    trace_id = PARENT.split("-")[1]
    for command in (["status", str(tmp_path / "one"), "--json"], ["runs", str(tmp_path), "--json"]):
        assert json.loads(CliRunner().invoke(main, command).stdout)["trace_id"] == trace_id
    handle = RunHandle.attach(tmp_path / "one")
    states = [event for event in handle.events() if event["type"] == "state"]
    assert {(event["run_id"], event["trace_id"]) for event in states} == {("one", trace_id)}
    (shown,) = json.loads(CliRunner().invoke(main, ["report", handle.directory, "--json"]).stdout)["runs"]
    assert shown["trace"] == handle.trace_id == trace_id
    with TracerProvider().get_tracer("caller").start_as_current_span("step") as step:
        assert launcher.options(run_id="two").run(train).split("-")[2] == f"{step.get_span_context().span_id:016x}"


def test_runs_of_one_name_on_two_disks_are_two_instances(receiver: Receiver, tmp_path: Path) -> None:
    """Else a backend would take the counters of the second one for a reset of the first one's."""
    for disk in ("one", "two"):
        Launcher(1, store=tmp_path / disk, run_id="nightly", trackers=[OpenTelemetry(receiver.url)]).run(float, 0.5)
    assert len(receiver.instances) == 2
    assert {instance.rpartition("-")[0] for instance in receiver.instances} == {"nightly"}


def test_without_the_exporter_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(InvalidJobError, match="pip install opentelemetry-exporter-otlp-proto-http"):
        OpenTelemetry().check()


def test_an_endpoint_that_is_no_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError, match=r"the endpoint 'collector:4318'; give a URL, such as http://"):
        Launcher(1, store=tmp_path, trackers=[OpenTelemetry("collector:4318")]).run(int)
