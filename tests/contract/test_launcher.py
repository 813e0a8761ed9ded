"""Whole runs on this machine: values, logs, metrics, handles, the run directory."""

import errno
import io
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import free_port, of_ranks, until

from rankzero import (
    EngineError,
    InvalidJobError,
    Launcher,
    LocalEngine,
    ResultRef,
    RunCancelledError,
    RunHandle,
    RunTimeoutError,
    StartTimeoutError,
    WorkerFailedError,
)
from rankzero.engines.local import LocalSession
from rankzero.job import Job
from rankzero.pipeline import open_run

WAIT = 60.0


def all_reduce(value: float, times: int = 1) -> dict[str, Any]:
    import torch.distributed as dist

    import rankzero.train as rt

    dist.init_process_group("gloo")
    tensor = torch.full((1,), value * times)
    dist.all_reduce(tensor)
    context = rt.get_context()
    rt.report({"sum": tensor, "rank": context.rank})
    print(f"sum {tensor.item()}")
    return {"sum": tensor.item(), "rank": context.rank, "context": [context.world_size, context.local_rank]}


def follow_owned(launcher: Launcher, on_line: Callable[[str], None], train: Any, *args: Any) -> None:
    with open_run(launcher, train, args, {}) as handle:
        for line in handle.logs(follow=True):
            on_line(line)


def test_rank_0_returns_its_value_and_everything_is_recorded(
    launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    environment, directory, state = dict(os.environ), os.getcwd(), random.getstate()
    handler = signal.getsignal(signal.SIGINT)
    value = launcher.options(run_id="first").run(all_reduce, 1.5, times=2)
    assert value == {"sum": 6.0, "rank": 0, "context": [2, 0]}
    assert (dict(os.environ), os.getcwd(), random.getstate()) == (environment, directory, state)
    assert signal.getsignal(signal.SIGINT) is handler
    printed = capsys.readouterr().out
    assert "[0] sum 6.0\n" in printed
    assert "[1] sum 6.0\n" in printed

    handle = RunHandle.attach(os.path.join(str(launcher.store), "first"))
    assert handle.id == "first"
    assert handle.result() == value
    assert handle.result_ref().load() == value
    assert list(handle.logs(rank=1)) == ["sum 6.0"]
    assert sorted(of_ranks(handle.logs())) == ["[0] sum 6.0", "[1] sum 6.0"]
    assert sorted(row["rank"] for row in handle.metrics()) == [0, 1]
    assert all(row["sum"] == 6.0 for row in handle.metrics())
    states = [event["state"] for event in handle.events() if event["type"] == "state"]
    assert states == ["starting", "running", "succeeded"]
    assert handle.status().metrics == {"sum": 6.0, "rank": 0}
    assert stat.S_IMODE(os.stat(handle.directory).st_mode) == 0o700
    assert handle.result_ref().summary["metrics"] == {"sum": 6.0, "rank": 0}


def test_a_run_id_that_lives_is_not_run_twice(launcher: Launcher) -> None:
    launcher = launcher.options(num_processes=1, run_id="once")
    handle = launcher.submit(sleep_forever)
    with pytest.raises(InvalidJobError, match="run_id 'once' is running: attach to it with RunHandle.attach"):
        launcher.run(sleep_forever)
    with pytest.raises(InvalidJobError, match="run_id 'once' is running another training"):
        launcher.run(int)
    handle.cancel()
    assert handle.wait(WAIT)


@pytest.mark.parametrize("root", ["/proc/rankzero", "no-such-protocol://bucket/x"])
def test_a_store_that_cannot_be_written_is_refused(launcher: Launcher, root: str) -> None:
    with pytest.raises(InvalidJobError, match="cannot (be used|hold runs)"):
        launcher.options(store=root).run(int)


def test_output_of_every_kind_arrives(launcher: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        import sys

        sys.stdout.buffer.write(b"caf\xe9\n")
        sys.stdout.buffer.write(b"10%\r20%\r30%\n")
        sys.stdout.buffer.write(b"x" * (1 << 20) + b"\n")
        sys.stdout.buffer.flush()
        os.write(2, b"to standard error\n")
        subprocess.run(["echo", "a child"], check=True)
        sys.stdout.write("no newline at the end")

    handle = launcher.options(num_processes=1).submit(talk)
    assert handle.result(WAIT) is None
    lines = list(handle.logs(rank=0))
    assert lines == [
        "caf\ufffd", "10%", "30%", "x" * (1 << 20), "to standard error", "a child", "no newline at the end"
    ]  # fmt: skip


def test_many_lines_none_lost(launcher: Launcher) -> None:
    count = 50_000

    def talk() -> None:
        for number in range(count):
            print(f"line {number}")

    handle = launcher.submit(talk)
    seen: dict[str, list[str]] = {"[0]": [], "[1]": []}
    for line in handle.logs(follow=True):
        rank, _, text = line.partition(" ")
        seen[rank].append(text)
    expected = [f"line {number}" for number in range(count)]
    assert seen == {"[0]": expected, "[1]": expected}


def test_tensors_come_back_by_file_and_go_on_by_reference(launcher: Launcher) -> None:
    def make() -> dict[str, Any]:

        return {"weight": torch.arange(100_000), "bias": torch.ones(3)}

    def use(parts: dict[str, Any], nested: list[Any], scale: float) -> float:
        assert parts["weight"].shape == (100_000,)
        return float(nested[0]["model"]["bias"].sum()) * scale

    single = launcher.options(num_processes=1)
    ref = single.submit(make).result_ref(WAIT)
    assert ref.format == "torch"
    assert single.run(use, ref, nested=[{"model": ref}], scale=2.0) == 6.0  # type: ignore[arg-type]


def test_a_damaged_reference_fails_the_run_that_opens_it(launcher: Launcher, tmp_path: Path) -> None:
    from rankzero import ResultError

    ref = ResultRef.save((1, 2), tmp_path)
    Path(ref.uri).write_bytes(Path(ref.uri).read_bytes()[::-1])
    with pytest.raises(ResultError, match="changed or damaged"):
        launcher.options(num_processes=1).run(lambda value: value, ref)


def test_the_value_is_that_of_global_rank_0_whoever_ends_last(launcher: Launcher) -> None:
    def train() -> object:
        import time

        if os.environ["RANK"] == "1":
            time.sleep(0.5)
            # No other rank's value is pickled.
            return threading.Lock()
        return os.environ["RANK"]

    assert launcher.run(train) == "0"


def test_a_module_reference_runs(launcher: Launcher) -> None:
    assert launcher.options(num_processes=1).run("json:dumps", [1, 2]) == "[1, 2]"


def sleep_forever() -> None:
    import time

    print("asleep", flush=True)
    while True:
        time.sleep(0.1)


def started(handle: RunHandle[Any]) -> None:
    """Waits until rank 0 says that it sleeps."""
    assert any("asleep" in line for line in handle.logs(follow=True)), handle.status()


def test_a_submitted_run_is_followed_and_cancelled_by_another_handle(launcher: Launcher) -> None:
    handle = launcher.submit(sleep_forever)
    other = RunHandle.attach(handle.directory)
    assert any(event.get("state") == "running" for event in other.events(follow=True))
    # The driver writes its status in a thread of its own, perhaps after the event.
    until(lambda: other.status().state == "running", WAIT, "the status of the run")
    with pytest.raises(TimeoutError, match="is still running"):
        handle.result(timeout=0.1)
    other.cancel()
    other.cancel()
    with pytest.raises(RunCancelledError):
        handle.result(WAIT)
    assert handle.status().state == "cancelled"
    handle.cancel()


def submit_in_a_rank(root: str) -> None:
    Launcher(1, store=root, run_id="inner").submit(int)


def run_in_a_rank(root: str) -> int:
    return Launcher(1, store=root, run_id="inner").run(int)


def test_a_rank_runs_and_does_not_submit(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match=r"InvalidJobError.*submit\(\) was called in a rank.*call run\(\)"):
        launcher.options(num_processes=1).run(submit_in_a_rank, str(tmp_path / "inner"))
    assert not (tmp_path / "inner").exists()
    assert launcher.options(num_processes=1).run(run_in_a_rank, str(tmp_path / "inner")) == 0


def test_ranks_that_do_not_start_in_time_are_named(launcher: Launcher) -> None:
    with pytest.raises(StartTimeoutError, match=r"start_timeout=0.05 s") as caught:
        # A fork of a zygote may have started by then.
        launcher.options(start_timeout=0.05, warm_start=False).run(sleep_forever)
    assert caught.value.missing


def test_a_rank_that_never_stops_printing_is_ended_in_time(launcher: Launcher) -> None:
    def train() -> None:
        subprocess.run(["yes"], check=True)

    with pytest.raises(RunTimeoutError, match=r"timeout=0.5 s"):
        launcher.options(num_processes=1, timeout=0.5).submit(train).result(WAIT)


def test_ranks_may_leave_in_any_order(launcher: Launcher) -> None:
    """Rank 0 holds the rendezvous store; it must not leave while its peers still read it."""

    def train() -> int:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if os.environ["RANK"] != "0":
            store = dist.distributed_c10d._get_default_store()
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                store.set("still", "there")
        return int(os.environ["RANK"])

    assert launcher.options(num_processes=3).run(train) == 0


def test_an_interrupt_after_the_commit_loses_nothing(launcher: Launcher) -> None:
    class Stop(BaseException):
        pass

    def train() -> str:
        import atexit

        atexit.register(lambda: print("leaving", flush=True))
        return "value"

    def stop(line: str) -> None:
        if "leaving" in line:
            raise Stop

    with pytest.raises(Stop):
        follow_owned(launcher.options(num_processes=1, run_id="late"), stop, train)
    assert RunHandle.attach(os.path.join(str(launcher.store), "late")).result() == "value"


def test_exit_handlers_run_with_idle_executor_threads(launcher: Launcher, tmp_path: Path) -> None:
    witness = str(tmp_path / "flushed")

    def train() -> str:
        import atexit
        from concurrent.futures import ThreadPoolExecutor
        from pathlib import Path

        atexit.register(lambda: Path(witness).write_text("flushed"))
        executor = ThreadPoolExecutor()
        return str(executor.submit(lambda: "value").result())

    assert launcher.options(num_processes=1).run(train) == "value"
    assert Path(witness).read_text() == "flushed"


def test_a_reference_that_is_gone_is_refused_before_anything_starts(launcher: Launcher, tmp_path: Path) -> None:
    ref = ResultRef.save([1], tmp_path)
    Path(ref.uri).unlink()
    with pytest.raises(InvalidJobError, match="does not exist"):
        launcher.run(lambda value: value, ref)


def test_a_teardown_that_crashes_or_hangs_loses_nothing(launcher: Launcher) -> None:
    def train() -> str:
        import atexit

        atexit.register(os.abort if os.environ["RANK"] == "0" else threading.Event().wait)
        return "value"

    assert launcher.run(train) == "value"


def test_the_end_of_a_model_whose_group_was_destroyed_holds_nobody(launcher: Launcher) -> None:
    def train() -> int:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        # Nobody gets the interpreter's lock who could wait for it: so gloo's thread still waits when the model ends.
        sys.setswitchinterval(1000.0)
        rounds = 20
        for _ in range(rounds):
            dist.init_process_group("gloo")
            model = DistributedDataParallel(torch.nn.Linear(2, 1))
            model(torch.ones(1, 2)).sum().backward()
            dist.destroy_process_group()
            del model
        return rounds

    assert launcher.options(timeout=60).run(train) == 20


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_a_group_of_the_users_own_rendezvous_is_let_go(launcher: Launcher, scheme: str, tmp_path: Path) -> None:
    places = [f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else (tmp_path / str(n)).as_uri() for n in range(2)]

    def train() -> float:
        import gc
        import weakref

        import torch.distributed as dist

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        total = torch.ones(1)
        for place in places:
            dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size)
            dist.all_reduce(total)
            # Whether its store goes with it is torch's: now and then a thread of gloo keeps the last reference.
            group = weakref.ref(dist.distributed_c10d._get_default_group())
            dist.destroy_process_group()
            gc.collect()
            assert group() is None
        return float(total)

    assert launcher.options(timeout=60).run(train) == 4.0


def test_environment_reaches_the_ranks_only(launcher: Launcher) -> None:
    def read() -> list[str | None]:
        names = ("COLOUR", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
        return [os.environ.get(name) for name in names]

    single = launcher.options(env={**launcher.env, "COLOUR": "blue"})  # type: ignore[dict-item]
    assert single.run(read) == ["blue", "", "2", "0", "127.0.0.1"]
    assert "COLOUR" not in os.environ


class TamperingEngine(LocalEngine):
    """Changes a file of the run after the driver recorded its checksum."""

    def open(self, job: Job, env: Mapping[str, str]) -> LocalSession:
        location = job.files["payload.pkl"]["location"]
        data = bytearray(Path(location).read_bytes())
        data[-2] ^= 1
        Path(location).write_bytes(data)
        return super().open(job, env)


def test_a_payload_that_was_changed_is_not_unpickled(launcher: Launcher) -> None:
    with pytest.raises(EngineError, match=r"payload\.pkl does not carry the digest that the driver recorded") as caught:
        launcher.options(engine=TamperingEngine()).run(int)
    assert "Traceback" not in str(caught.value)


def save_and_return_when_asked() -> int:
    import signal
    import time

    import rankzero.train as rt

    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    print("listens")
    while not asked:
        time.sleep(0.05)
    rt.report({}, checkpoint={"step": 3})
    return 3


@pytest.mark.parametrize(
    "train",
    [
        save_and_return_when_asked,
        ["bash", "-c", "trap 'exit 0' TERM; echo listens; while :; do sleep 0.05; done"],
    ],
)
def test_a_polite_end_of_a_stopped_run_is_no_success(launcher: Launcher, train: Any) -> None:
    handle = launcher.options(run_id="polite", stop_grace=20.0).submit(train)
    until(lambda: sum("listens" in line for line in handle.logs()) == 2, WAIT, "both ranks")
    handle.cancel()
    with pytest.raises(RunCancelledError):
        handle.result(WAIT)
    assert len(handle.checkpoints()) == (train is save_and_return_when_asked)


def test_a_value_that_was_returned_before_a_cancel_is_the_result(launcher: Launcher, tmp_path: Path) -> None:
    class Slow:
        """Is written once the run has been cancelled, and takes a while."""

        def __init__(self, cancelled: Path) -> None:
            self.cancelled = cancelled

        def __reduce__(self) -> tuple[Any, ...]:
            until(self.cancelled.exists, 60.0, "the cancel")
            time.sleep(2)
            return str, ("whole",)

    handle = launcher.options(num_processes=1, stop_grace=20.0).submit(lambda: Slow(tmp_path / "cancelled"))
    # A value counts if the driver knew of its return before the cancel, not if the rank alone did.
    assert any(event["type"] == "returned" for event in handle.events(follow=True))
    handle.cancel()
    (tmp_path / "cancelled").touch()
    assert handle.result(WAIT) == "whole"


class Broken(io.StringIO):
    """A standard output behind which the disk is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("stream", [None, Broken()])
def test_no_run_ends_because_its_lines_cannot_be_shown(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: io.StringIO | None
) -> None:
    def train() -> str:
        print("one")
        print("two")
        return "trained"

    monkeypatch.setattr(sys, "stdout", stream)
    assert launcher.options(num_processes=1).run(train) == "trained"
    words = [record for record in caplog.records if "cannot be written to standard output" in record.getMessage()]
    assert len(words) == (stream is not None)


def leave_a_timer() -> None:
    """Changes its best weights after it has set them as the result, and leaves a default device and a timer."""
    import atexit
    import signal

    import rankzero.train as rt

    torch.set_default_device("meta")
    weights = {"weight": torch.ones(2, device="cpu")}
    weights["tied"] = weights["weight"]
    rt.set_result(weights)
    rt.report({"loss": 0.5}, checkpoint=weights)
    assert rt.all_gather_object(rt.get_context().rank) == [0, 1]
    assert rt.broadcast_object(7) == 7
    weights["weight"].fill_(-1)

    signal.setitimer(signal.ITIMER_REAL, 600)
    atexit.register(lambda: print("timer", signal.getitimer(signal.ITIMER_REAL)))


def test_a_result_is_what_was_set_whatever_the_function_leaves_behind(launcher: Launcher) -> None:
    handle: RunHandle[Any] = launcher.submit(leave_a_timer)
    assert [values.tolist() for values in handle.result(60).values()] == [[1.0, 1.0], [1.0, 1.0]]
    assert "[0] timer (0.0, 0.0)" in list(handle.logs())
