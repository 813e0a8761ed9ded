"""A pickle with its large buffers beside it comes back as it was, without having been copied."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest

from rankzero import Launcher
from rankzero.envelope import LARGE, beside, open_sealed, seal


def sealed(value: object, path: Path) -> list[memoryview]:
    """Writes a value; the buffers that lie beside the pickle."""
    stream, buffers = io.BytesIO(), []  # type: ignore[var-annotated]
    pickle.Pickler(stream, protocol=5, buffer_callback=beside(buffers)).dump(value)
    path.write_bytes(b"".join(seal(stream.getvalue(), buffers)))
    return buffers


ARRAYS = {
    "large": numpy.arange(LARGE, dtype=numpy.uint8),
    "odd length": numpy.arange(LARGE + 13, dtype=numpy.uint8),
    "fortran": numpy.asfortranarray(numpy.random.default_rng(0).random((700, 300))),
    "strided": numpy.arange(LARGE, dtype=numpy.float64)[::3],
    "small": numpy.arange(5),
    "empty": numpy.empty((0, 3)),
    "read only": numpy.broadcast_to(numpy.arange(3.0), (100_000, 3)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    array = ARRAYS[name]
    sealed({"a": array, "b": [array, 1]}, tmp_path / "file")
    loaded = open_sealed(str(tmp_path / "file"))
    numpy.testing.assert_array_equal(loaded["a"], array)
    assert loaded["a"].dtype == array.dtype
    assert loaded["a"].flags.f_contiguous >= array.flags.f_contiguous
    assert loaded["b"][0] is loaded["a"]


def test_only_large_buffers_lie_beside_and_they_are_the_arrays_own(tmp_path: Path) -> None:
    buffers = sealed(ARRAYS, tmp_path / "file")
    assert {buffer.nbytes for buffer in buffers} >= {LARGE, LARGE + 13}
    assert numpy.shares_memory(numpy.frombuffer(buffers[0], dtype=numpy.uint8), ARRAYS["large"])
    assert all(buffer.nbytes >= LARGE for buffer in buffers)


def test_what_is_loaded_can_be_written_to_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    sealed(ARRAYS["large"], path)
    before = path.read_bytes()
    loaded = open_sealed(str(path))
    loaded += 1
    assert loaded[0] == 1
    assert path.read_bytes() == before
    assert open_sealed(str(path))[0] == 0


def test_many_small_values_need_no_buffers(tmp_path: Path) -> None:
    value = {"a": [1, "x", None, b"y"] * 1000}
    assert sealed(value, tmp_path / "file") == []
    assert open_sealed(str(tmp_path / "file")) == value


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
