"""Sharded checkpoints: written by a world of one size, read by worlds of others."""

import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import find, until
from tests.contract.kinds_of_values import same

import rankzero.train as rt
from rankzero import Launcher, ResultError, RetryableError, RunHandle
from rankzero.testing import run_inline
from rankzero.train.sharded import Shard, load, split

WRITERS = 2


def checkpoint_of(directory: str) -> Any:
    """The newest checkpoint of another run, as a rank of this one would get it."""
    import rankzero.train as rt
    from rankzero.channel.messages import Start
    from rankzero.run.checkpoints import Manifest
    from rankzero.train.parts import Parts
    from rankzero.train.writer import CheckpointWriter

    context = rt.get_context()
    manifest = max(Path(directory, "checkpoints").glob("*/checkpoint.json"))
    start = Start(directory, run_token="", shared=True, scratch="")
    writer = CheckpointWriter(Parts(start, str), -1, context.rank, context.world_size, print)
    writer.committed(Manifest(**json.loads(manifest.read_text())).for_ranks([context.rank]))
    return writer.last


def make_state(*, filled: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model of FSDP2, its optimizer and more, after a step or as new, as a state. Then what is to be in it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0 if filled else 1)
    # Sizes that no world divides.
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
    if filled:
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    states = get_state_dict(model, optimizer)
    whole = torch.arange(22.0).reshape(11, 2) if filled else torch.zeros(11, 2)
    state = {
        "model": states[0],
        "optimizer": states[1],
        "more": [distribute_tensor(whole, mesh, [one]) for one in (Shard(0), Replicate(), Shard(1))],
        "plain": torch.ones(2) * filled,
        "epoch": 3 if filled else 0,
        "rank": dist.get_rank(),
    }
    return state, numbers(state)


def numbers(state: Any) -> Any:
    """A state with whole tensors, as lists."""
    if isinstance(state, dict):
        return {key: numbers(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [numbers(value) for value in state]
    value = state.full_tensor() if hasattr(state, "full_tensor") else state
    return value.tolist() if hasattr(value, "tolist") else value


def write() -> dict[str, Any]:
    """Reports the state, and changes it before it can be written."""
    import torch

    import rankzero.train as rt

    state, expected = make_state(filled=True)
    rt.report({"loss": 1.0}, checkpoint=state)
    with torch.no_grad():
        for tensor in [*state["model"].values(), *state["more"]]:
            tensor.zero_()
    return expected


def read(directory: str, expected: dict[str, Any]) -> list[Any]:
    """Whether what is filled, and what is whole, is what was written."""
    checkpoint = checkpoint_of(directory)
    state, _ = make_state(filled=False)
    loaded = checkpoint.load(into=state)
    is_same = loaded["model"]["0.weight"] is state["model"]["0.weight"]
    return [numbers(loaded) == expected, is_same, numbers(checkpoint.load()) == expected]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunHandle[Any], dict[str, Any]]:
    """A run of two ranks that has written a state."""
    launcher = Launcher(WRITERS, store=tmp_path_factory.mktemp("store"), run_id="written")
    expected = launcher.run(write)
    handle = find(launcher)
    assert handle
    return handle, expected


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak), 4]
)
def test_a_state_of_two_ranks_is_read_by_any_number(
    launcher: Launcher, written: tuple[RunHandle[Any], dict[str, Any]], ranks: int
) -> None:
    handle, expected = written
    (manifest,) = handle.checkpoints()
    assert manifest.sharded
    assert sorted(manifest.parts) == ["0", "1"]
    directory = handle.own.directory

    def read_all() -> list[Any]:
        import torch.distributed as dist

        import rankzero.train as rt

        # What is not sharded is each rank's own.
        own = {**expected, "rank": rank if (rank := rt.get_context().rank) < WRITERS else 0}
        found = read(directory, own)
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, found)
        return gathered

    assert launcher.options(num_processes=ranks).run(read_all) == [[True, True, True]] * ranks


def test_a_state_to_be_filled_that_lacks_something_is_refused(
    launcher: Launcher, written: tuple[RunHandle[Any], dict[str, Any]]
) -> None:
    directory = written[0].own.directory

    def read_less(shape: int) -> Any:
        import torch

        checkpoint = checkpoint_of(directory)
        partial = checkpoint.load(into={"more": [*torch.zeros(2, 11, 2), torch.zeros(11, shape)]})
        try:
            checkpoint.load(into={"model": {}})
        except ResultError as error:
            return [sorted(partial), str(error)]

    more, error = launcher.options(num_processes=1).run(read_less, 2)
    # What is left out at the top is not read if it is sharded.
    assert more == ["epoch", "more", "plain", "rank"]
    assert "'model.0.weight' has the shape [7, 5] in the checkpoint, and None in the state" in error
    with pytest.raises(ResultError, match=r"'more.2' has the shape \[11, 2\] in the checkpoint, and \[11, 3\]"):
        launcher.options(num_processes=1).run(read_less, 3)


def test_a_whole_checkpoint_fills_shards(launcher: Launcher) -> None:
    def train() -> list[Any]:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        import rankzero.train as rt

        checkpoint = rt.get_checkpoint()
        dist.init_process_group("gloo")
        if checkpoint is None:
            rt.report({}, checkpoint={"w": torch.arange(5), "epoch": 1})
            while rt.get_context().rank == 0 and rt.get_checkpoint() is None:
                pass
            dist.barrier()
            raise RetryableError("now in pieces")
        sharded = distribute_tensor(torch.zeros(5, dtype=torch.int64), init_device_mesh("cpu", (2,)), [Shard(0)])
        state = checkpoint.load(into={"w": sharded})
        return [state["epoch"], state["w"].full_tensor().tolist()]

    assert launcher.options(max_restarts=1).run(train) == [1, [0, 1, 2, 3, 4]]


def test_a_sharded_state_passes_through_the_driver_where_the_store_is_out_of_reach(launcher: Launcher) -> None:
    def train() -> list[Any]:
        import time

        import torch.distributed as dist

        import rankzero.train as rt

        checkpoint = rt.get_checkpoint()
        state, _ = make_state(filled=checkpoint is None)
        if checkpoint:
            return [checkpoint.load(into=state)["epoch"], state["more"][0].full_tensor().tolist()]
        rt.report({}, checkpoint=state)
        while rt.get_checkpoint() is None:
            time.sleep(0.01)
        dist.barrier()
        raise RetryableError("again")

    launcher = launcher.options(store="memory://bucket/sharded", run_id="far", max_restarts=1)
    assert launcher.run(train) == [3, torch.arange(22.0).reshape(11, 2).tolist()]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_parts_that_only_the_training_understands_are_never_half_loaded(launcher: Launcher, ranks: int) -> None:
    def write_parts() -> None:
        import rankzero.train as rt

        rt.report({}, checkpoint={"half": rt.get_context().rank}, sharded=True)

    def read_parts(load: Callable[[Any], Any]) -> Any:
        return load(checkpoint_of(directory))

    launcher.options(run_id="parts").run(write_parts)
    directory = RunHandle.attach(f"{launcher.store}/parts").own.directory
    other = launcher.options(num_processes=ranks)
    with pytest.raises(ResultError, match=f"a part of each of 2 ranks, and this world has {ranks}"):
        other.run(read_parts, lambda checkpoint: checkpoint.load())
    assert other.run(read_parts, lambda checkpoint: checkpoint.load(rank=1)["half"]) == 1


def test_pipeline_stages_that_name_their_tensors_alike_are_their_ranks_own(launcher: Launcher) -> None:
    def write_stages() -> list[float]:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        import rankzero.train as rt

        rank = rt.get_context().rank
        rt.barrier()
        stages = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
        weights = distribute_tensor(torch.full((4,), float(rank)), stages["dp"], [Shard(0)])
        rt.report({}, checkpoint={"w": weights}, sharded=True)
        rt.context.await_checkpoint()
        checkpoint = rt.get_checkpoint()
        assert checkpoint is not None
        return rt.all_gather_object(float(checkpoint.load()["w"].sum()))

    stages = launcher.options(run_id="stages")
    assert stages.run(write_stages) == [0.0, 4.0]
    directory = RunHandle.attach(f"{launcher.store}/stages").own.directory
    with pytest.raises(ResultError, match="ranks 0 and 1 wrote different values of 'w'"):
        launcher.options(num_processes=1).run(lambda: checkpoint_of(directory).load())


def _await_a_later_one(file: str) -> str:
    import rankzero.train as rt

    rt.report({}, checkpoint={"step": 0})
    rt.context.await_checkpoint()
    if rt.get_context().rank == 0:
        until(lambda: os.path.exists(file), 60.0, "the other rank's report")
    rt.report({}, checkpoint={"step": 1})
    if rt.get_context().rank == 1:
        Path(file).touch()
    rt.context.await_checkpoint()
    checkpoint = rt.get_checkpoint()
    assert checkpoint is not None
    return str(rt.all_gather_object(checkpoint.load()["step"]))


def test_every_rank_awaits_rank_zeros_checkpoint_of_the_same_number(launcher: Launcher, tmp_path: Path) -> None:
    assert launcher.run(_await_a_later_one, str(tmp_path / "reported")) == "[1, 1]"


def _await_one_more() -> None:
    import rankzero.train as rt

    for step in range(1 + rt.get_context().rank):
        rt.report({}, checkpoint={"step": step})
    rt.context.await_checkpoint()


def test_no_rank_awaits_a_checkpoint_that_rank_zero_did_not_report(launcher: Launcher) -> None:
    launcher.options(timeout=100).run(_await_one_more)


def _report_in_two_ways() -> None:
    import rankzero.train as rt

    rt.report({}, checkpoint={"step": 1}, sharded=rt.get_context().rank == 1)
    time.sleep(20)


def test_ranks_that_report_whole_and_sharded_checkpoints_end_the_run(launcher: Launcher) -> None:
    with pytest.raises(ResultError, match="rank 0 has reported a whole checkpoint, and other ranks sharded ones"):
        launcher.run(_report_in_two_ways)


def test_a_whole_checkpoint_that_every_rank_reports_needs_no_word(launcher: Launcher) -> None:
    def train() -> None:
        import rankzero.train as rt

        rt.report({"loss": 1.0}, checkpoint={"step": 1})

    handle = launcher.submit(train)
    handle.result(60)
    assert not [line for rank in (0, 1) for line in handle.logs(rank) if "checkpoint" in line]


def test_what_is_not_sharded_comes_back_with_its_types_and_fills_a_target() -> None:
    state = OrderedDict(
        optimizer={"state": {0: {"step": torch.tensor(3.0)}}, 1: (torch.ones(1), [None])},
        more=[torch.tensor([True]), torch.empty(0, 3), torch.ones(3).to(torch.float8_e4m3fn), (0.5, ["a"])],
        none={},
    )
    part = split(state)
    target = {"optimizer": {"state": {0: {"step": torch.tensor(0.0)}}, 1: (torch.zeros(1),)}}
    whole, filled = load(0, [], lambda _: part), load(0, [], lambda _: part, target)
    assert same(whole, state)
    assert same(filled, state)
    assert filled["optimizer"]["state"][0]["step"] is target["optimizer"]["state"][0]["step"]  # type: ignore[index]
    shard = split([torch.ones(2)]), {"w": Shard((2,), (0,), torch.ones(2)), "rng": torch.arange(3)}
    assert same(load(0, [], lambda _: shard[0], [torch.zeros(2)]), [torch.ones(2)])
    assert same(load(0, [], lambda _: shard[1], {}), {"rng": torch.arange(3)})
    with torch.device("meta"):
        assert load(0, [], lambda _: [shard[1]])[0]["w"].sum() == 2


def test_tensors_that_a_checkpoint_lacks_are_named_and_nothing_is_filled() -> None:
    def train() -> None:
        checkpoint = rt.get_checkpoint()
        assert checkpoint
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        before = model[0].weight.clone()
        with pytest.raises(ResultError, match=r"'model\.1\.weight' has the shape None in the checkpoint, and \[2, 2\]"):
            checkpoint.load(into={"model": model.state_dict()})
        with pytest.raises(ResultError, match="'ema' has the shape None"):
            checkpoint.load(into={"ema": torch.zeros(2)})
        assert torch.equal(model[0].weight, before)
        # Values that are not filled are no error.
        filled = checkpoint.load(into={"model": model[:1].state_dict(), "steps": 0})
        assert torch.equal(model[0].weight, torch.ones(2, 2))
        assert filled["epoch"] == 3

    weights = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}
    run_inline(train, checkpoint={"model": weights, "epoch": 3})
