"""A run directory that the ranks cannot see: everything goes through the channel, and nothing is different."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import of_ranks, until

from rankzero import Launcher, ResultError, ResultRef, RunHandle, store
from rankzero.channel.connection import Connection
from rankzero.channel.server import Server
from rankzero.pipeline import open_run
from rankzero.submit.durable import start_driver


@pytest.fixture
def remote(launcher: Launcher, tmp_path: Path) -> Launcher:
    """A store that exists in this process only, so that the driver must pass everything on."""
    return launcher.options(store=f"memory://{tmp_path.name}/runs")


def test_payload_modules_logs_metrics_and_result_pass_through_the_driver(remote: Launcher) -> None:
    def train(data: bytes, ref: Any) -> dict[str, Any]:
        import torch

        import rankzero.train as rt

        print(f"got {len(data)} bytes")
        rt.report({"size": len(data)})
        return {"weights": torch.arange(3_000_000), "bias": ref["bias"] + 1}

    import torch

    ref = ResultRef.save({"bias": torch.ones(2)}, os.environ["RANKZERO_STORE"])
    state = remote.options(run_id="far").run(train, bytes(5 << 20), ref)
    assert torch.equal(state["weights"], torch.arange(3_000_000))
    assert torch.equal(state["bias"], torch.full((2,), 2.0))
    handle = RunHandle.attach(f"{remote.store}/far")
    assert sorted(of_ranks(handle.logs())) == [f"[{rank}] got {5 << 20} bytes" for rank in range(2)]
    assert [row["size"] for row in handle.metrics()] == [5 << 20] * 2
    ref = handle.result_ref()
    assert ref.uri == f"{handle.own.directory}/result/value-0.torch"
    assert handle.status().state == "succeeded"
    assert f"got {5 << 20} bytes".encode() in store.read_bytes(f"{handle.directory}/report.html")


def test_a_cancel_does_not_wait_for_the_drivers_next_look_at_the_store(
    launcher: Launcher, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless() -> None:
        import threading

        threading.Event().wait()

    start = start_driver.__globals__["DriverProcess"]

    def that_does_not_look(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        program = command.index("-c") + 1
        begin, end = command[program].split("; import rank")
        never = "from rankzero.driver import recorder; recorder.pace = lambda _: 600.0"
        command[program] = f"{begin}; {never}; import rank{end}"
        process: subprocess.Popen[bytes] = start(command, **options)
        return process

    # Not by an environment of its own, which would need a zygote of its own.
    monkeypatch.setattr("rankzero.submit.durable.DriverProcess", that_does_not_look)
    handle = launcher.options(store=f"{bucket}/far", num_processes=1).submit(endless)
    until(lambda: handle.status().state == "running", 60, "a rank")
    handle.cancel()
    assert handle.wait(30)
    assert handle.status().state == "cancelled"


def test_a_run_on_s3_is_restarted_from_its_checkpoint_and_opened_by_another_process(
    launcher: Launcher, bucket: str
) -> None:
    def train() -> dict[str, Any]:
        import os
        import signal

        import torch

        import rankzero.train as rt

        checkpoint = rt.get_checkpoint()
        if checkpoint is None:
            rt.report({"loss": 2.0}, checkpoint={"w": torch.ones(3)} if rt.get_context().rank == 0 else None)
            # A checkpoint that was reported counts once it is committed, which takes the store a moment.
            until(rt.get_checkpoint, 60, "the checkpoint")
            os.kill(os.getpid(), signal.SIGKILL)
        return {"w": checkpoint.load()["w"] * 2}

    handle = launcher.options(store=f"{bucket}/runs", max_restarts=1, run_id="far").submit(train)
    assert handle.result(timeout=120)["w"].tolist() == [2.0, 2.0, 2.0]
    attached = RunHandle.attach(f"{bucket}/runs/far")
    assert attached.status().attempt == 1
    assert [row["loss"] for row in attached.metrics()][:1] == [2.0]


@pytest.mark.parametrize("value", [{"plain": [1, 2]}, {1, 2}], ids=["json", "pickle"])
def test_a_process_that_is_killed_while_it_loads_a_value_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    ref = ResultRef.save(value, "memory://bucket/values")
    monkeypatch.setenv("RANKZERO_SCRATCH", str(tmp_path))
    seen: list[list[str]] = []
    open_read = store.open_read

    class Noting:
        """Notes the files on the disk with each read."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> "Noting":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def read(self, size: int) -> bytes:
            seen.append(os.listdir(tmp_path))
            return self.file.read(size)  # type: ignore[no-any-return]

    monkeypatch.setattr(store, "open_read", lambda location: Noting(open_read(location)))
    assert ref.load() == value
    assert seen
    assert not any(seen)
    store.write_bytes(ref.uri, b"other")
    with pytest.raises(ResultError, match=f"^{ref.uri} has the digest"):
        ref.load()


PROGRAM = """
import sys, threading, time
from pathlib import Path
from rankzero import Launcher

go = Path(sys.argv[1])

def train():
    while not go.exists():
        time.sleep(0.02)
    return 42

def run():
    print("result", Launcher(1, store="memory://bucket", run_id="r").run(train), flush=True)

if __name__ == "__main__":
    thread = threading.Thread(target=run)
    thread.start()
    from rankzero import RunHandle
    while True:
        try:
            if RunHandle.attach("memory://bucket/r", follows=False).status().state == "running":
                break
        except Exception:
            pass
        time.sleep(0.05)
    def release():
        # Python has begun to wait for its threads.
        while not threading.main_thread()._is_stopped:
            time.sleep(0.02)
        go.touch()
    threading.Thread(target=release).start()
"""


def test_a_value_arrives_after_the_main_thread_has_ended(tmp_path: Path) -> None:
    """Python then starts no thread for the file any more."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(tmp_path / "go")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "result 42" in done.stdout, done.stderr


def test_a_run_waits_for_the_checkpoints_that_ranks_still_send(
    remote: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has no access to the store, and its last checkpoint takes longer than its way to the end."""

    def train() -> int:
        import torch

        import rankzero.train as rt

        rank = rt.get_context().rank
        for step in range(2):
            state = {"w": torch.full((1_000_000 * step * rank + 1,), float(step))}
            rt.report({"step": step}, checkpoint=state, sharded=True)
        return rank

    take = Server._take

    async def slowly(server: Server, name: str, size: int, connection: Connection) -> None:
        await asyncio.sleep(0.3)
        await take(server, name, size, connection)

    monkeypatch.setattr(Server, "_take", slowly)
    with open_run(remote.options(run_id="sends"), train, (), {}) as handle:
        assert handle.result(60) == 0
        assert [manifest.metrics["step"] for manifest in handle.checkpoints()] == [0, 1]
