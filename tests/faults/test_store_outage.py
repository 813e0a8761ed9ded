"""An object store that cannot be reached for a while: training goes on, and what was refused is written later."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until, wait_until_gone
from tests.faults import kit
from tests.faults.trainings import HOLD_AT, LOOK, STEPS, expected, note, train

from rankzero import Launcher, ResultError, RetryableError, RunCancelledError, RunHandle, WorkerFailedError
from rankzero.pipeline import open_run
from rankzero.run.directory import RunDirectory
from rankzero.store import files

WAIT = 120.0

OUTAGE = 5.0  # Seconds; longer than two heartbeats, and than who only follows would wait


class Store:
    """Lets requests for some places wait while it is stalled, and refuses all of them while it is away."""

    def __init__(self) -> None:
        self._through = files.filesystem_of
        self._open = threading.Event()
        self._open.set()
        self.places = ""
        self.is_away = False
        self.hurt = 0

    def filesystem(self, location: str) -> tuple[Any, str]:
        if self.is_away:
            self.hurt += 1
            raise ConnectionResetError("the store cannot be reached")
        if re.search(self.places, location) and not self._open.is_set():
            self.hurt += 1
            self._open.wait()
        return self._through(location)

    def stall(self, places: str = "") -> None:
        self.places = places
        self._open.clear()

    def heal(self) -> None:
        self.is_away = False
        self._open.set()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The store of this process."""
    made = Store()
    monkeypatch.setattr(files, "filesystem_of", made.filesystem)
    yield made
    made.heal()


def newest(handle: RunHandle[Any]) -> int:
    return max((int(manifest.metrics["step"]) for manifest in handle.checkpoints()), default=-1)


def test_a_run_outlives_an_outage_of_its_store(
    launcher: Launcher, tmp_path: Path, faulty: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The caller gives up a read after a second.
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.07")
    launcher = launcher.options(num_processes=1, store=f"memory://{tmp_path.name}", run_id="run")
    with ThreadPoolExecutor(1) as executor:
        value = executor.submit(lambda: launcher.run(train, str(tmp_path), "training"))
        until(lambda: kit.arrival(tmp_path, "training") or value.done(), WAIT, "a rank")
        handle = RunHandle.attach(f"memory://{tmp_path.name}/run")
        until(lambda: newest(handle) == HOLD_AT - 1, WAIT, "a checkpoint")
        faulty.is_away = True
        until(lambda: faulty.hurt or value.done(), WAIT, "a request that is refused")
        (tmp_path / "go").touch()
        with pytest.raises(TimeoutError):
            # Nobody gives up meanwhile.
            value.result(OUTAGE)
        faulty.heal()
        result = value.result(WAIT)
    assert (result["value"], result["history"]) == (expected(STEPS, 1), [[0, 0]])
    assert handle.status().state == "succeeded"
    # What was printed and recorded during the outage is written behind it.
    assert list(handle.logs(0))[-1:] == ["trained"]
    assert any(event.get("state") == "succeeded" for event in handle.events())
    # What was reported during the outage may be lost; what was committed before is not.
    assert newest(handle) >= HOLD_AT - 1


def test_a_value_that_was_on_its_way_when_the_run_was_ended_is_the_result_and_stays(
    launcher: Launcher, tmp_path: Path, marker: str, faulty: Store
) -> None:
    def train(size: int) -> bytes:
        return b"a value" * size

    # In which the value must be on its way.
    launcher = launcher.options(store=f"memory://{tmp_path.name}", run_id="run", timeout=10.0)
    faulty.stall(r"/result/value-")
    with ThreadPoolExecutor(1) as executor:
        value = executor.submit(lambda: launcher.run(train, 1 << 14))
        try:
            until(lambda: faulty.hurt or value.done(), WAIT, "a value that stalls")
            # The timeout, and not the success, ends the ranks.
            assert wait_until_gone(f"MARK={marker}", WAIT) == []
            with pytest.raises(TimeoutError):
                # The driver has turned to what is on its way.
                value.result(1.0)
        finally:
            faulty.heal()
        assert value.result(WAIT) == train(1 << 14)
    handle = RunHandle.attach(f"memory://{tmp_path.name}/run")
    assert handle.status().state == "succeeded"
    assert handle.result() == train(1 << 14)


def test_a_value_that_the_store_never_takes_ends_the_run(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faulty: Store
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.01")
    launcher = launcher.options(store=f"memory://{tmp_path.name}", run_id="run", num_processes=1)
    faulty.stall(r"/result/value-")
    with pytest.raises(ResultError, match="does not answer"):
        launcher.run(lambda: b"a value" * (1 << 14))


def fail_when_told(folder: str) -> None:
    """Rank 1 fails when it may, and rank 0 would stay for ever."""
    import rankzero.train as rt

    rank = rt.get_context().rank
    note(Path(folder, f"rank-{rank}"), "")
    while rank == 0 or not Path(folder, "go").exists():
        time.sleep(LOOK)
    print("the first line")
    raise ValueError("as told")


@contextmanager
def hung(path: Path) -> Iterator[None]:
    """A file whose reader gets no answer, as on a mount whose server has gone; begins when there is a reader."""

    def opened() -> int | None:
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return None

    os.mkfifo(path)
    writer = until(opened, WAIT, "a reader")
    try:
        yield
    finally:
        os.close(writer)


def wait_without_end(folder: str) -> None:
    Path(folder, "trains").touch()
    threading.Event().wait()


@pytest.mark.parametrize("silent", ["caller", "run", "path"])
def test_a_cancel_reaches_the_driver_that_this_process_started_although_the_store_does_not_answer(
    launcher: Launcher, bucket: str, tmp_path: Path, marker: str, faulty: Store, silent: str
) -> None:
    stores = {"caller": bucket, "run": f"memory://{tmp_path.name}", "path": str(tmp_path / "store")}
    launcher = launcher.options(store=stores[silent], num_processes=1, run_id="run")
    with ThreadPoolExecutor(1) as executor, ExitStack() as stack:
        if silent == "run":
            # A driver in a thread of this process.
            handle = stack.enter_context(open_run(launcher, wait_without_end, (str(tmp_path),), {}))
        else:
            handle = launcher.submit(wait_without_end, str(tmp_path))
        until(lambda: (tmp_path / "trains").exists(), WAIT, "a rank")
        if silent == "path":
            stack.enter_context(hung(Path(RunDirectory(str(tmp_path / "store/run")).current().path("cancel"))))
        else:
            faulty.stall()
        try:
            cancelled = executor.submit(handle.cancel, reason="a user ended it")
            assert wait_until_gone(f"MARK={marker}", WAIT) == []
            assert cancelled.done() == (silent == "path")
        finally:
            faulty.heal()
        cancelled.result(WAIT)
        with pytest.raises(RunCancelledError, match="the run was cancelled on request") as raised:
            handle.result(WAIT)
        assert raised.value.requested


def test_a_rank_fails_while_a_path_of_the_store_hangs(launcher: Launcher, tmp_path: Path, marker: str) -> None:
    handle = launcher.options(store=str(tmp_path / "store"), run_id="run").submit(fail_when_told, str(tmp_path))
    for rank in range(2):
        until(lambda rank=rank: (tmp_path / f"rank-{rank}").exists(), WAIT, "two ranks")
    with hung(Path(RunDirectory(str(tmp_path / "store/run")).current().path("cancel"))):
        (tmp_path / "go").touch()
        with pytest.raises(WorkerFailedError, match="ValueError: as told"):
            handle.result(WAIT)


COMMAND = """
import sys
from rankzero.cli import main
from rankzero.store import waiting
from rankzero.submit import start
waiting.SILENCE = start._RECORD_TIMEOUT = 0.5
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        (["run", "--run-id", "one", "train.py"], signal.SIGTERM, 130),
        (["run", "train.py"], signal.SIGINT, 130),
        (["cancel", "s3://bucket/one"], signal.SIGINT, 1),
        (["status", "s3://bucket/one"], signal.SIGTERM, -signal.SIGTERM),
        (["status", "path/one"], signal.SIGINT, 1),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else None,
)
def test_a_command_says_that_the_store_does_not_answer_and_can_be_interrupted(
    tmp_path: Path, command: list[str], number: int, code: int
) -> None:
    (tmp_path / "train.py").write_text("pass")
    # A reader of a pipe waits for a process that writes into it, as with a mount whose server has gone.
    place = tmp_path / "path/one/submissions/0.json"
    place.parent.mkdir(parents=True)
    os.mkfifo(place)
    # The system accepts connections, and no process reads from them.
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "RANKZERO_STORE": "s3://bucket"}
        address = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.getsockname()[1]}"}
        with (
            (tmp_path / "output").open("wb") as output,
            subprocess.Popen(
                [sys.executable, "-c", COMMAND, *command],
                cwd=tmp_path,
                env={**os.environ, **keys, **address},
                stdout=output,
                stderr=output,
            ) as process,
        ):
            try:
                said = f"the store {'s3://bucket' if 'path' not in command[-1] else place} does not answer"
                until(lambda: said in (tmp_path / "output").read_text() or process.poll() is not None, WAIT, "a line")
                process.send_signal(number)
                assert process.wait(WAIT / 2) == code
            finally:
                process.kill()
    assert (tmp_path / "output").read_text().count(said) == 1


READ_AT_A_RESTART = {"checkpoints", "result", "driver"}


def test_a_store_that_refuses_what_a_restart_reads_delays_the_restart(
    launcher: Launcher, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_once() -> int:
        import rankzero.train as rt

        if rt.get_context().attempt == 0:
            raise RetryableError("again")
        return rt.get_context().attempt

    through, refused = files.filesystem_of, set[str]()

    def refuse_once(location: str) -> tuple[Any, str]:
        name = location.rpartition("/")[2]
        if name in READ_AT_A_RESTART - refused and "attempt 1 follows" in caplog.text:
            refused.add(name)
            raise ConnectionResetError("the store cannot be reached")
        return through(location)

    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.1")
    monkeypatch.setattr(files, "filesystem_of", refuse_once)
    launcher = launcher.options(num_processes=1, store=f"memory://{tmp_path.name}", run_id="run", max_restarts=1)
    assert launcher.run(fail_once) == 1
    assert refused == READ_AT_A_RESTART
