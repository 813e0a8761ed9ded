"""Ranks on two hosts: they find each other, and whatever is cut or killed, the run ends and says where."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.conftest import until
from tests.faults.two_hosts.conftest import INTERFACE, Cluster

from rankzero import EngineError, Launcher, RunHandle, WorkerFailedError

Submit = Callable[..., RunHandle[Any]]

WAIT = 180.0  # Seconds for a run to start or to end on a busy machine

LOST_WITHIN = 55.0
"""Seconds after which a host that is cut off has been given up, on both sides of the cut: no rank is left."""

KNOWN_WITHIN = 90.0
"""Seconds after which the run has ended: its SparkContext, which misses an executor, has stopped before. Spark itself
notices anything after 120."""


SHORT_CUT = 20.0  # Seconds for which a host may be cut off and nothing is lost


@pytest.fixture
def launcher(cluster: Cluster, marker: str) -> Launcher:
    """Two ranks, one on each host."""
    return Launcher(2, engine=cluster.engine(), store=cluster.shared, env={"MARK": marker}, start_timeout=WAIT)


@pytest.fixture
def submit(cluster: Cluster, marker: str) -> Iterator[Callable[..., RunHandle[Any]]]:
    """`Cluster.submit`; a run that its test leaves behind is cancelled."""
    handles: list[RunHandle[Any]] = []

    def submitted(launcher: Launcher, function: Callable[..., Any], *args: Any) -> RunHandle[Any]:
        handles.append(cluster.submit(launcher, function, *args))
        return handles[-1]

    yield submitted
    for handle in handles:
        handle.cancel()
    for handle in handles:
        handle.wait(WAIT)


def own_address() -> str:
    """This host's address on the switch."""
    shown = subprocess.run(["ip", "-json", "-4", "addr", "show", INTERFACE], capture_output=True, check=True)
    return str(json.loads(shown.stdout)[0]["addr_info"][0]["local"])


def announce() -> None:
    print(f"at {own_address()}", flush=True)


def reduce(run_directory: str) -> list[Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(total)
    me = {
        "address": own_address(),
        "gloo": os.environ.get("GLOO_SOCKET_IFNAME"),
        "nccl": os.environ.get("NCCL_SOCKET_IFNAME"),
        "sees": os.path.exists(run_directory),
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, me)
    return [total.sum().item(), everyone]


def test_ranks_on_two_hosts_reduce(cluster: Cluster, launcher: Launcher, submit: Submit) -> None:
    apart = launcher.options(store=cluster.hidden, run_id="reduce")
    handle = submit(apart, reduce, str(cluster.hidden / "reduce"))
    total, ranks = handle.result(WAIT)
    assert total == 3000.0
    assert {rank["address"] for rank in ranks} == {cluster.a.address, cluster.b.address}
    assert {rank["sees"] for rank in ranks} == {False}
    assert {rank["gloo"] for rank in ranks} == {INTERFACE}
    assert {rank["nccl"] for rank in ranks} == {f"={INTERFACE}"}


def train_together() -> None:
    """Reduces without end."""
    import torch
    import torch.distributed as dist

    announce()
    dist.init_process_group("gloo")
    while True:
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.05)


def train_apart(seconds: float) -> int:
    """Computes and reports, without a word to the other rank."""
    import rankzero.train as rt

    announce()
    steps = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        steps += 1
        rt.report({"step": steps})
        print(f"step {steps}", flush=True)
        time.sleep(0.2)
    return steps


def until_both_train(cluster: Cluster, handle: RunHandle[Any]) -> None:
    """Waits until both ranks have announced themselves, one on each host, and the run is under way."""
    assert {cluster.host_of(rank, handle) for rank in range(2)} == {cluster.a, cluster.b}, handle.status()
    until(lambda: handle.status().state != "starting", WAIT, "a run under way")
    time.sleep(1.0)


def ended_at(handle: RunHandle[Any]) -> float:
    ended = handle.status().ended
    assert ended is not None
    return ended


def fail_on(address: str) -> None:
    """Is killed on one host, as by a GPU that is broken; elsewhere waits for that."""
    if own_address() == address:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(WAIT)


@pytest.mark.soak
def test_a_host_that_failed_twice_is_named(cluster: Cluster, launcher: Launcher, submit: Submit) -> None:
    handle = submit(launcher.options(max_restarts=2), fail_on, cluster.b.address)
    with pytest.raises(WorkerFailedError):
        handle.result(WAIT)
    assert [event["host"] for event in handle.events() if event["type"] == "bad-host"] == [cluster.b.address]


@pytest.mark.soak
def test_a_short_cut_costs_nothing(cluster: Cluster, launcher: Launcher, submit: Submit) -> None:
    handle = submit(launcher.options(store=cluster.hidden), train_apart, SHORT_CUT + 6.0)
    until_both_train(cluster, handle)
    with cluster.network.without(cluster.b):
        time.sleep(SHORT_CUT)
        assert handle.status().state == "running"
    steps = handle.result(WAIT)
    assert steps > 10
    for rank in range(2):
        reported = [row["step"] for row in handle.metrics() if row["rank"] == rank]
        printed = [int(line.split()[1]) for line in handle.logs(rank) if line.startswith("step")]
        assert reported == printed == list(range(1, len(printed) + 1))


@pytest.mark.soak
def test_a_host_that_is_cut_off_for_good_is_named_and_no_rank_is_left(
    cluster: Cluster, launcher: Launcher, submit: Submit, marker: str
) -> None:
    handle = submit(launcher, train_together)
    until_both_train(cluster, handle)
    assert cluster.b.processes(marker)
    with cluster.network.without(cluster.b) as cut_at:
        left = {"a": cluster.a, "b": cluster.b}
        gone: dict[str, float] = {}
        while (left or not handle.status().final) and time.time() - cut_at < KNOWN_WITHIN:
            for name, host in list(left.items()):
                if not host.processes(marker):
                    gone[name] = round(time.time() - cut_at, 1)
                    del left[name]
            time.sleep(0.2)
        print(f"ranks gone after {gone}, state {handle.status()}")
        assert left == {}
        assert max(gone.values()) < LOST_WITHIN
        with pytest.raises((EngineError, WorkerFailedError)) as caught:
            handle.result(0.0)
        print(f"known after {ended_at(handle) - cut_at:.1f} s: {caught.value!r}")
        assert cluster.b.name in str(caught.value)
