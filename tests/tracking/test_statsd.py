"""StatsD: what arrives at a real UDP socket."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankzero import InvalidJobError, Launcher, RunHandle
from rankzero.tracking import StatsD
from rankzero.tracking.statsd import DATAGRAM


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.bind(("127.0.0.1", 0))
        found.settimeout(0.5)
        yield found


def received(server: socket.socket) -> list[bytes]:
    datagrams = []
    try:
        while True:
            datagrams.append(server.recv(65536))
    except TimeoutError:
        return datagrams


def test_what_a_restarted_run_counts(server: socket.socket, tmp_path: Path, training: Callable[..., Any]) -> None:
    tracker = StatsD(port=server.getsockname()[1], prefix="digits")
    Launcher(2, store=tmp_path, max_restarts=1, trackers=[tracker]).run(training, 0.5)
    lines = b"\n".join(received(server)).decode().splitlines()
    assert all(re.fullmatch(r"digits\.[\w.-]+:[\d.e-]+\|(c|g|ms)", line) for line in lines), lines
    assert sum(int(line.split(":")[1].split("|")[0]) for line in lines if line.startswith("digits.attempts:")) == 2
    assert [line for line in lines if ":1|c" in line and "attempts:" not in line] == [
        "digits.attempts.killed:1|c",
        "digits.attempts.succeeded:1|c",
        "digits.runs.succeeded:1|c",
    ]
    assert "digits.metric.loss:0.25|g" in lines
    assert {line.split(":")[0] for line in lines if line.endswith("|ms")} == {"digits.start", "digits.run"}


def test_datagrams_stay_whole_on_the_way(server: socket.socket, tmp_path: Path) -> None:
    Launcher(1, store=tmp_path, run_id="one").run(float, 0.5)
    tracker, run = StatsD(port=server.getsockname()[1]), RunHandle.attach(tmp_path / "one")
    tracker.begin(run)
    names = {f"a metric: number {number}": float(number) for number in range(200)}
    tracker.add(run, [{"type": "metric", "rank": 0, "time": 1.0, "metrics": names}])
    datagrams = received(server)
    assert len(datagrams) > 1
    assert all(len(datagram) <= DATAGRAM for datagram in datagrams)
    assert b"rankzero.metric.a_metric_number_199:199|g" in b"\n".join(datagrams).splitlines()


def test_a_value_below_zero_is_set_and_what_is_no_number_is_left_out(server: socket.socket, tmp_path: Path) -> None:
    """``-2|g`` takes two from what the gauge was."""
    Launcher(1, store=tmp_path, run_id="one").run(float, 0.5)
    tracker, run = StatsD(port=server.getsockname()[1]), RunHandle.attach(tmp_path / "one")
    tracker.begin(run)
    metrics = {"reward": -2.5, "loss": float("nan"), "norm": float("inf"), "lr": 0.1}
    tracker.add(run, [{"type": "metric", "rank": 0, "time": 1.0, "metrics": metrics}])
    (lines,) = (datagram.decode().splitlines() for datagram in received(server))
    assert lines == ["rankzero.metric.reward:0|g", "rankzero.metric.reward:-2.5|g", "rankzero.metric.lr:0.1|g"]


def test_a_port_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError, match="StatsD has port=0; it must be"):
        Launcher(1, store=tmp_path, trackers=[StatsD(port=0)]).run(float, 0.5)
