"""Ports behind a firewall, names that stand for other hosts, IPv6, a driver that is slow to take lines."""

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.conftest import free_ports

from rankzero import EngineError, Launcher, RunHandle, WorkerFailedError
from rankzero.agent import output
from rankzero.agent.output import Output
from rankzero.channel import messages
from rankzero.driver.recorder import Recorder
from rankzero.engines.local import LocalSession
from rankzero.host.processes import OPEN_FILES

WAIT = 90.0


def reduce() -> list[Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    names = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return [tensor.item(), *(os.environ.get(name) for name in names)]


def test_driver_and_rendezvous_keep_to_their_ports(launcher: Launcher) -> None:
    first, last = free_ports(3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        total, _, port, *_ = launcher.options(ports=(first, last)).run(reduce)
        assert total == 2.0
        assert int(port) == last
        with pytest.raises(EngineError, match=f"none of the ports.*{first}"):
            launcher.options(ports=(first, first)).run(reduce)


def test_a_range_without_room_for_the_rendezvous_is_named(launcher: Launcher) -> None:
    first, last = free_ports(1)
    with pytest.raises(WorkerFailedError, match=rf"none of the ports {first} to {last} on 127.0.0.1 is free"):
        launcher.options(ports=(first, last)).run(reduce)


def test_ranks_of_one_machine_meet_where_nobody_else_can_join(launcher: Launcher) -> None:
    # torch's own socket takes connections of the whole network, and asks a DNS for the name of each.
    def listening() -> set[str]:
        reduce()
        port = f":{int(os.environ['MASTER_PORT']):04X}"
        lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
        return {line[1] for line in lines if line[1].endswith(port) and line[3] == "0A"}

    (address,) = launcher.run(listening)
    assert address.startswith("0100007F:")


def test_the_interface_is_chosen_where_the_user_did_not(launcher: Launcher) -> None:
    assert launcher.run(reduce)[3:] == ["lo", "=lo"]
    env = {**(launcher.env or {}), "NCCL_SOCKET_IFNAME": "eth7"}
    assert launcher.options(env=env).run(reduce)[3:] == ["lo", "eth7"]


def test_an_agent_that_finds_no_driver_is_a_loss_after_which_a_restart_may_help(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalSession, "driver_hosts", property(lambda _: ["127.0.0.3"], lambda *_: None), raising=False)
    with pytest.raises(EngineError, match=r"no driver was found on port \d+ within [89][.0-9]* s: 127.0.0.3") as caught:
        launcher.options(start_timeout=10.0).run(reduce)
    assert caught.value.cause == "lost"


def test_ranks_may_open_more_files_than_a_shell_allows(launcher: Launcher) -> None:
    def limit() -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        assert launcher.options(num_processes=1).run(limit) == min(hard, OPEN_FILES)
        # Nothing changes for the process that called.
        assert limit() == 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_ipv6_will_do(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalSession, "bind_host", "::1")
    monkeypatch.setattr("rankzero.engines.local.LOOPBACK", "::1")
    total, address, *_ = launcher.run(reduce)
    assert (total, address) == (2.0, "::1")


def test_a_slow_driver_neither_stalls_a_rank_nor_loses_a_line(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Long ones: bytes make the delay, and lines make the work.
    lines, much = 20_000, "of a rank that has much to say, more than the driver takes in this time, " * 6

    def chatter() -> float:
        started = time.monotonic()
        for number in range(lines):
            print(f"line {number:08d} {much}")
        return time.monotonic() - started

    log = Recorder.log

    def slow(self: Recorder, rank: int, lines: list[str]) -> None:
        time.sleep(0.05)
        log(self, rank, lines)

    monkeypatch.setattr(Recorder, "log", slow)
    launcher = launcher.options(num_processes=1, run_id="chatter", timeout=WAIT)
    spent = launcher.run(chatter)
    handle = RunHandle.attach(Path(str(launcher.store)) / "chatter")
    status = handle.status()
    assert status.started is not None
    assert status.ended is not None
    # The rank was done long before the driver had its lines.
    assert spent < status.ended - status.started
    assert [line.split()[1] for line in handle.logs(rank=0)] == [f"{number:08d}" for number in range(lines)]
    capfd.readouterr()


class SlowConnection:
    """A connection whose kernel takes nothing while `unsent` is large."""

    def __init__(self) -> None:
        self.unsent = 0
        self.lines: list[str] = []

    def send(self, message: messages.Log, local_rank: int) -> None:
        self.lines += message.lines

    async def drain(self) -> None:
        while self.unsent:
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def sending(directory: Path) -> AsyncIterator[tuple[SlowConnection, Output]]:
    connection = SlowConnection()
    out = Output(0, str(directory), cast("Any", connection))
    yield connection, out
    connection.unsent = 0
    await out.send_waiting()
    out.finish()


def test_what_was_sent_is_released_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "BATCH", 1 << 15)

    async def main() -> None:
        async with sending(tmp_path) as (connection, out):
            connection.unsent = output.HIGH_WATER + 1
            for _ in range(5000):
                out.feed(b"x" * 1000 + b"\n")
            spool, whole = out._spool, out.waiting
            assert spool is not None
            full = os.fstat(spool.fileno()).st_blocks
            while out.waiting > whole * 0.1:
                out._next()
            assert os.fstat(spool.fileno()).st_blocks < full / 2

    asyncio.run(main())


def test_a_full_scratch_disk_drops_and_counts_lines(tmp_path: Path) -> None:
    lines = [f"{number} {'x' * 99}" for number in range(300)]

    async def main() -> None:
        async with sending(tmp_path) as (connection, out):
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            connection.unsent = output.HIGH_WATER + 1
            # Like a disk that is full in the middle of a batch of lines, and then has room again for a shorter one.
            resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, before[1]))
            try:
                for start in range(0, 300, 100):
                    out.feed("".join(f"{line}\n" for line in lines[start : start + 100]).encode())
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            out.feed(b"short\n")
        dropped = "rankzero: 200 log lines were dropped, the driver was too slow"
        assert connection.lines == [*lines[:100], "short", dropped]

    asyncio.run(main())


def test_lines_beyond_the_limit_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "SPOOL_LIMIT", 500)

    async def main() -> None:
        async with sending(tmp_path) as (connection, out):
            connection.unsent = output.HIGH_WATER + 1
            for number in range(100):
                out.feed(f"line {number:04d}\n".encode())
        kept = len(connection.lines) - 1
        assert connection.lines[:kept] == [f"line {number:04d}" for number in range(kept)]
        assert connection.lines[kept] == f"rankzero: {100 - kept} log lines were dropped, the driver was too slow"

    asyncio.run(main())
