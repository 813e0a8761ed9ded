"""Ranks read and write an object store themselves, and whoever dies or is away, no half checkpoint counts."""

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from rankzero import Launcher, ResultRef, RunHandle
from rankzero.channel.connection import Connection
from rankzero.channel.server import Server

if TYPE_CHECKING:
    from tests.s3 import S3Server

NUMBERS = 3_000_000  # Of 4 bytes: several pieces of a multipart upload


@pytest.fixture
def through_driver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that come to a driver in this process over the channel."""
    names: list[str] = []
    take = Server._take

    async def spying(server: Server, name: str, size: int, connection: Connection) -> None:
        names.append(name)
        await take(server, name, size, connection)

    monkeypatch.setattr(Server, "_take", spying)
    return names


@pytest.fixture(scope="module", params=[["fsspec"], pytest.param(["fsspec", "pyarrow"], marks=pytest.mark.soak)])
def missing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], bool]:
    """Returns an environment without some modules, and whether ranks in it have a client of the store."""
    folder = tmp_path_factory.mktemp("without")
    for name in request.param:
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError({f'No module named {name!r}'!r})\n")
    if is_direct := "pyarrow" not in request.param:
        return {"PYTHONPATH": str(folder)}, is_direct
    # The suite's zygotes have pyarrow loaded, and so would their forks.
    return {"PYTHONPATH": str(folder), "RANKZERO_PRELOAD": ""}, is_direct


def keys(bucket: str) -> list[str]:
    """Every object of a bucket."""
    import s3fs

    filesystem = s3fs.S3FileSystem()
    filesystem.invalidate_cache()
    return sorted(filesystem.find(bucket))


def unfinished(bucket: str) -> list[Any]:
    """Uploads of a bucket that were begun and neither completed nor aborted."""
    import s3fs

    name = bucket.removeprefix("s3://")
    return s3fs.S3FileSystem().call_s3("list_multipart_uploads", Bucket=name).get("Uploads", [])


def train(steps: int) -> list[Any]:
    """Reports a sharded state at each step; restarts once, and goes on from the last."""
    import time

    import torch

    import rankzero.train as rt
    from rankzero import RetryableError

    context = rt.get_context()
    checkpoint = rt.get_checkpoint()
    if checkpoint:
        state = checkpoint.load()
        other = checkpoint.load(rank=1)["numbers"]
        return [context.attempt, state["step"], state["numbers"].sum().item(), other.sum().item()]
    for step in range(steps):
        numbers = torch.full((NUMBERS,), context.rank + 1.0)
        rt.report({"step": step}, checkpoint={"step": step, "numbers": numbers}, sharded=True)
        numbers.zero_()
    while (last := rt.get_checkpoint()) is None or last.metrics["step"] < steps - 1:
        time.sleep(0.01)
    # What was committed in this attempt can be opened, too.
    assert last.load()["step"] == steps - 1
    raise RetryableError("again")


def test_ranks_write_and_read_parts_by_what_they_have(
    launcher: Launcher, bucket: str, missing: tuple[dict[str, str], bool], through_driver: list[str]
) -> None:
    env, is_direct = missing
    launcher = launcher.options(store=f"{bucket}/runs", run_id="run", env={**(launcher.env or {}), **env})
    assert launcher.options(max_restarts=1).run(train, 2) == [1, 1, NUMBERS, 2.0 * NUMBERS]
    handle = RunHandle.attach(f"{bucket}/runs/run")
    assert [manifest.index for manifest in handle.checkpoints()] == [0, 1]
    # The value itself is small.
    assert (set(through_driver) != {"rank-0-value"}) != is_direct
    assert len([key for key in keys(bucket) if "/checkpoints/" in key]) == 6
    assert unfinished(bucket) == []


def shard(tensors: int) -> tuple[list[float], int]:
    """Reports a state in shards, restarts, and fills another one from it."""
    import time

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import rankzero.train as rt
    from rankzero import RetryableError

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    checkpoint = rt.get_checkpoint()
    fill = 0.0 if checkpoint else 1.0
    state = {str(name): distribute_tensor(torch.full((64,), fill), mesh, [Shard(0)]) for name in range(tensors)}
    if checkpoint:
        loaded = checkpoint.load(into=state)
        return [tensor.full_tensor().sum().item() for tensor in loaded.values()], dist.get_world_size()
    rt.report({}, checkpoint=state)
    while rt.get_checkpoint() is None:
        time.sleep(0.01)
    dist.barrier()
    raise RetryableError("again")


def test_a_rank_reads_only_its_own_part_in_an_equal_world(
    launcher: Launcher, s3_server: "S3Server", bucket: str
) -> None:
    ranks, tensors = 2, 8
    launcher = launcher.options(num_processes=ranks, store=f"{bucket}/runs", max_restarts=1)
    assert launcher.run(shard, tensors) == ([64.0] * tensors, ranks)
    path = f"{bucket.removeprefix('s3:/')}/runs"
    parts = [line for line in s3_server.requests("GET", path) if "/rank-" in line]
    assert len(parts) == ranks


def test_a_reference_to_an_object_store_is_an_argument_whatever_executors_have(
    launcher: Launcher, bucket: str, missing: tuple[dict[str, str], bool]
) -> None:
    import torch

    def use(weights: Any) -> list[float]:
        return weights["w"].tolist()  # type: ignore[no-any-return]

    ref = ResultRef.save({"w": torch.arange(3.0)}, f"{bucket}/values")
    env = {**(launcher.env or {}), **missing[0]}
    assert launcher.options(env=env).run(use, ref) == [0.0, 1.0, 2.0]


def test_a_rank_that_the_store_refuses_sends_its_parts_to_the_driver(
    launcher: Launcher, bucket: str, through_driver: list[str]
) -> None:
    def refused() -> list[Any]:
        from rankzero.store import remote

        def refuse(*_: object) -> None:
            raise PermissionError("no right to write here")

        remote.Upload.__init__ = refuse  # type: ignore[assignment,method-assign]
        return train(1)

    launcher = launcher.options(store=f"{bucket}/runs", run_id="run", max_restarts=1)
    assert launcher.run(refused) == [1, 0, NUMBERS, 2.0 * NUMBERS]
    assert sorted(through_driver) == ["0000-000000-rank-0.torch", "0000-000000-rank-1.torch", "rank-0-value"]


def test_rank_0_writes_its_value_to_the_store(
    launcher: Launcher, bucket: str, missing: tuple[dict[str, str], bool], through_driver: list[str]
) -> None:
    def value() -> Any:
        import torch

        return {"w": torch.arange(float(NUMBERS))}

    env, is_direct = missing
    launcher = launcher.options(store=f"{bucket}/runs", run_id="run", env={**(launcher.env or {}), **env})
    found = launcher.run(value)
    assert found["w"][-1].item() == NUMBERS - 1
    assert through_driver == ([] if is_direct else ["rank-0-value"])
    assert [key.rsplit("/", 1)[-1] for key in keys(bucket) if "/result/" in key] == ["value-0.torch"]


def half(bucket: str) -> list[Any]:
    """Commits a checkpoint; rank 1 dies in the middle of its upload of the second."""
    import time

    import torch

    import rankzero.train as rt
    from rankzero.store import remote

    context = rt.get_context()
    checkpoint = rt.get_checkpoint()
    if checkpoint:
        return [context.attempt, checkpoint.load()["step"]]
    rt.report({}, checkpoint={"step": 0}, sharded=True)
    while rt.get_checkpoint() is None:
        time.sleep(0.01)
    write = remote.Upload.write

    def stop(upload: remote.Upload, data: Any) -> int:
        # Pieces of the upload are with the store by now.
        view = memoryview(data).cast("B")
        if len(view) < 1 << 20:
            return write(upload, view)
        write(upload, view[: len(view) // 2 + (4 << 20)])
        upload._file.flush()
        # The store may still complete an upload whose rank has died meanwhile.
        while not any("0000-000001/rank-0." in key for key in keys(bucket)):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    if context.rank == 1:
        remote.Upload.write = stop  # type: ignore[method-assign]
    rt.report({}, checkpoint={"step": 1, "numbers": torch.ones(NUMBERS)}, sharded=True)
    while (last := rt.get_checkpoint()) is None or last.load()["step"] < 1:
        time.sleep(0.01)
    return [context.attempt, 1]


def test_a_rank_that_dies_in_its_upload_costs_that_checkpoint_and_leaves_nothing(
    launcher: Launcher, bucket: str
) -> None:
    launcher = launcher.options(store=f"{bucket}/runs", run_id="run", max_restarts=1)
    assert launcher.run(half, bucket) == [1, 0]
    folders = {key.split("/")[6] for key in keys(bucket) if "/checkpoints/" in key}
    assert folders == {"0000-000000"}
    assert unfinished(bucket) == []
