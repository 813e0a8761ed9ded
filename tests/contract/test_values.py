"""What crosses over: every kind of value comes back as it was, as a result, in a checkpoint and as an argument."""

import functools
import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.contract.kinds_of_values import KINDS, Score, same
from tests.runs import folder_of

from rankzero import InvalidJobError, Launcher, ResultError, ResultRef
from rankzero.submit import pack
from rankzero.submit.pack import Contents
from rankzero.values import formats
from rankzero.values.pickled import LARGE, open_packed
from rankzero.values.plain import is_json

pytestmark = pytest.mark.filterwarnings("ignore")


def back(value: Any, directory: Path) -> Any:
    return ResultRef.save(value, directory).load()


def as_argument(value: Any, directory: Path) -> Any:
    path = directory / "payload"
    path.write_bytes(b"".join(pack.build(len, (value,), {}).data))
    return open_packed(str(path))["args"][0]


@pytest.mark.parametrize("name", KINDS)
def test_it_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    value = KINDS[name]()
    assert same(value, value)
    for each in (value, {"state": value, "epoch": 1}):
        ref = ResultRef.save(each, tmp_path)
        assert same(loaded := ref.load(), each)
        # An exception gets a dict when it is looked at; an array with gaps has none once it is loaded.
        is_other = name in ("exceptions", "large arrays")
        assert is_other or ResultRef.save(loaded, tmp_path).digest == ref.digest
        if ref.format == "torch":
            assert same(torch.load(ref.uri, weights_only=True, mmap=True), each)
    assert same(as_argument(value, tmp_path), value)
    assert len(Contents().digest_of(value)) == 64


def test_the_whole_table_crosses_by_a_launch(launcher: Launcher) -> None:
    def turn(table: dict[str, Any]) -> dict[str, Any]:
        import time

        import rankzero.train as rt

        rt.report({}, checkpoint={"table": table})
        while (checkpoint := rt.get_checkpoint()) is None:
            time.sleep(0.01)
        kept = checkpoint.load()["table"]
        assert [name for name in table if not same(kept[name], table[name])] == []
        return table

    table = {name: make() for name, make in KINDS.items()}
    returned = launcher.options(num_processes=1).run(turn, table)
    assert [name for name in table if not same(returned[name], table[name])] == []


# -- memory that tensors share -------------------------------------------------------------------


def test_tensors_that_show_all_of_a_memory_share_it_and_of_a_part_only_that_is_written(tmp_path: Path) -> None:
    base = torch.arange(1_000_000, dtype=torch.float32)
    for turn in (back, as_argument):
        whole, square, numbers, part = turn(
            [base, base.view(1000, 1000).t(), base.view(torch.int32), base[:2]], tmp_path
        )
        whole[1] = 7.0
        assert (float(square[1, 0]), float(numbers.view(torch.float32)[1]), part.tolist()) == (7.0, 7.0, [0.0, 1.0])
        assert part.untyped_storage().nbytes() == 8
    assert ResultRef.save([base[:2]], tmp_path).size < 3000
    assert ResultRef.save({"a": base[:2], "b": base[1:3]}, tmp_path).size < 3000
    assert ResultRef.save([base[:2], {1}], tmp_path).size < 1000
    assert ResultRef.save([base[:2], base], tmp_path).size < base.nbytes + 3000
    assert sum(map(len, pack.build(len, ([base[5:7]],), {}).data)) < 1000


class WithLock:
    """An object that pickle alone refuses before Python 3.12, and rankzero's picklers take."""

    @functools.cached_property
    def steps(self) -> int:
        return 3


def test_an_argument_beside_a_part_of_a_memory_travels_as_beside_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # By value, as the classes of a script or notebook.
    monkeypatch.setattr(WithLock, "__module__", "__main__")
    assert pack.build(len, ([torch.zeros(100_000)[:30], WithLock()],), {}).data


@pytest.mark.parametrize("part", [1_000_000, 30])
def test_what_was_pickled_is_freed_without_a_collection_of_garbage(tmp_path: Path, part: int) -> None:
    gc.collect()
    gc.disable()
    try:
        for turn in (back, as_argument):
            value = torch.arange(1_000_000.0)[:part]
            freed = weakref.ref(value)
            turn([value, len], tmp_path)
            del value
            assert freed() is None
    finally:
        gc.enable()


# -- what cannot be loaded -----------------------------------------------------------------------


class TwoWords(Exception):
    """Pickle writes it, and calls it with one word."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def test_what_cannot_be_read_back_is_refused_when_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="cannot be read back: TypeError"):
        ResultRef.save({"error": TwoWords("a", "b")}, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def does_not_fit() -> Any:
    import resource
    import signal

    # As on a disk with 1 MiB left.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return {"weights": torch.zeros(1 << 20)}


def is_unreadable() -> Any:
    return {"error": TwoWords("a", "b"), "weights": torch.zeros(1 << 20)}


@pytest.mark.parametrize(
    ("train", "reason"), [(does_not_fit, "could not be written"), (is_unreadable, "cannot be read back")]
)
def test_a_value_that_cannot_be_stored_takes_no_room(
    launcher: Launcher, tmp_path: Path, train: Any, reason: str
) -> None:
    with pytest.raises(ResultError, match=reason):
        launcher.options(num_processes=1, run_id="one").run(train)
    assert list((folder_of(tmp_path / "store" / "one") / "result").iterdir()) == []


def write_elsewhere(program: str, tmp_path: Path) -> ResultRef:
    """What a process that knows more than this one has saved."""
    (tmp_path / "only_there.py").write_text("class Thing:\n    pass\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    code = f"""
import json, sys
from rankzero import ResultRef
{program}
print(json.dumps(ResultRef.save(value, sys.argv[1]).to_json()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    return ResultRef.from_json(json.loads(done.stdout.splitlines()[-1]))


def test_a_module_that_is_missing_here_is_named(tmp_path: Path) -> None:
    ref = write_elsewhere("import only_there\nvalue = only_there.Thing()", tmp_path)
    with pytest.raises(ResultError, match=r"No module named 'only_there'\. .* can be imported"):
        ref.load()


def test_a_directory_is_archived_with_what_its_links_point_to(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    (folder / "inner").mkdir(parents=True)
    (folder / "model").write_text("weights")
    (folder / "linked").symlink_to("model")
    os.mkfifo(folder / "pipe")
    (folder / "gone").symlink_to("missing")
    (folder / "inner" / "loop").symlink_to(folder)
    (tmp_path / "latest").symlink_to(folder.name)
    with (tmp_path / "tar").open("wb") as archive:
        formats.write_directory(str(tmp_path / "latest"), archive)
    formats.read_directory(archive.name, formats.digest_of_file(archive.name), str(tmp_path / "again"))
    assert sorted(path.name for path in (tmp_path / "again").rglob("*")) == ["inner", "linked", "model"]


def test_a_parallel_model_arrives_as_the_model_inside(launcher: Launcher) -> None:
    def train() -> Any:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        model = torch.nn.Linear(2, 2)
        return DistributedDataParallel(model), model

    parallel, model = launcher.run(train)
    assert type(model) is torch.nn.Linear
    assert parallel is model


@pytest.mark.parametrize("file_format", ["json", "torch", "pickle", "made up"])
@pytest.mark.parametrize("data", [b"", b"{", b"\0" * 100, b"\x80\x05.", b"\xff" * 100])
def test_a_file_of_anything_else_is_a_result_error(file_format: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    ref = ResultRef(str(tmp_path / "file"), file_format, formats.digest_of([data]), len(data))
    with pytest.raises(ResultError, match="file"):
        ref.load()


def test_a_file_that_may_not_be_read_is_a_result_error(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="cannot be read"):
        ResultRef(str(tmp_path), "json", "", 0).load()


# -- bookkeeping ---------------------------------------------------------------------------------


def test_containers_that_hold_themselves_come_back(tmp_path: Path) -> None:
    loop: dict[str, Any] = {"a": [1]}
    loop["a"].append(loop)
    for turn in (back, as_argument):
        loaded = turn(loop, tmp_path)
        assert loaded["a"][1] is loaded
    assert Contents().digest_of(loop)


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def test_deep_containers_come_back_or_say_what_to_do(tmp_path: Path) -> None:
    assert back(nested(300), tmp_path) == nested(300)
    with pytest.raises(ResultError, match="cannot be pickled: .*deep recursion"):
        ResultRef.save(nested(100_000), tmp_path)
    with pytest.raises(InvalidJobError, match="cannot be pickled"):
        pack.build(len, (nested(100_000),), {})


def test_containers_that_are_there_many_times_over_are_written_once(tmp_path: Path) -> None:
    value: Any = [1]
    for _ in range(60):
        value = [value, value]
    assert not is_json(value)
    assert ResultRef.save(value, tmp_path).size < 10_000
    best = {"loss": 0.5}
    assert is_json({"best": best, "all": [best] * 100})


def test_arguments_that_were_one_object_are_one_beside_a_reference(launcher: Launcher, tmp_path: Path) -> None:
    def train(first: list[Any], *, second: list[Any], loop: dict[str, Any]) -> list[bool]:
        return [first is second, loop["loop"] is loop, first[0]["x"].tolist() == [1.0], loop["ref"] is first[0]]

    ref = ResultRef.save({"x": torch.ones(1)}, tmp_path)
    twice, loop = [ref], {"ref": ref}
    loop["loop"] = loop  # type: ignore[assignment]
    assert launcher.options(num_processes=1).run(train, twice, second=twice, loop=loop) == [True] * 4


def test_a_dataclass_twice_is_one(tmp_path: Path) -> None:
    score = Score(0.5)
    for turn in (back, as_argument):
        first, second = turn([score, score], tmp_path)
        assert first is second


# -- large buffers beside the pickle of arguments --------------------------------------------------


def test_a_tensor_that_gets_other_numbers_meanwhile_is_written_as_it_was(tmp_path: Path) -> None:
    tensor, path = torch.full((8 * LARGE,), 7.0), tmp_path / "file"
    parts = pack.build(len, ([tensor],), {}).data
    tensor.data = torch.zeros(1)
    path.write_bytes(b"".join(parts))
    (loaded,) = open_packed(str(path))["args"][0]
    assert float(loaded.min()) == 7.0


def test_the_numbers_of_a_module_lie_beside_the_pickle(tmp_path: Path) -> None:
    model, path = torch.nn.Linear(1024, 1024), tmp_path / "file"
    parts = pack.build(len, ([model],), {}).data
    assert len(parts[2]) < LARGE // 8
    path.write_bytes(b"".join(parts))
    (loaded,) = open_packed(str(path))["args"][0]
    loaded.weight.data += 1
    torch.testing.assert_close(loaded.weight - 1, model.weight)
    assert torch.equal(loaded(torch.zeros(1024)), model(torch.zeros(1024)))


def test_memory_of_a_tensor_that_pickling_made_lives_as_long_as_its_parts() -> None:
    class Lazy:
        """Makes its tensor when it is pickled."""

        def __reduce__(self) -> Any:
            return torch.clone, (torch.full((LARGE,), 7.0),)

    parts = pack.build(len, ([Lazy()],), {}).data
    gc.collect()
    torch.full((LARGE,), 1.0)
    assert numpy.frombuffer(parts[4], dtype=numpy.float32).min() == 7.0


def test_an_array_as_argument_is_every_ranks_own(launcher: Launcher) -> None:
    def change(array: Any) -> list[float]:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        before = float(array.sum())
        array[:] = dist.get_rank()
        dist.barrier()
        sums = torch.zeros(2, dtype=torch.float64)
        sums[dist.get_rank()] = float(array.sum())
        dist.all_reduce(sums)
        return [before, *sums.tolist()]

    array = numpy.ones(2 * LARGE // 8)
    assert launcher.run(change, array) == [len(array), 0.0, float(len(array))]
    assert array.sum() == len(array)
