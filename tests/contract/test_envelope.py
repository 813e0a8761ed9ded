"""A pickle with its large buffers beside it comes back as it was, without having been copied."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy

from rankzero import Launcher
from rankzero.submit import pack
from rankzero.values import pickled
from rankzero.values.pickled import LARGE, beside, open_packed


def opened(path: Path) -> Any:
    return open_packed(str(path))


def sealed(value: object, path: Path) -> list[memoryview]:
    """Writes a value; the buffers that lie beside the pickle."""
    stream, buffers = io.BytesIO(), []  # type: ignore[var-annotated]
    pickle.Pickler(stream, protocol=5, buffer_callback=beside(buffers)).dump(value)
    path.write_bytes(b"".join(pickled.pack(stream.getvalue(), buffers)))
    return buffers


ARRAYS = {
    "large": numpy.arange(LARGE, dtype=numpy.uint8),
    "odd length": numpy.arange(LARGE + 13, dtype=numpy.uint8),
    "small": numpy.arange(5),
}


def test_only_large_buffers_lie_beside_and_they_are_the_arrays_own(tmp_path: Path) -> None:
    buffers = sealed(ARRAYS, tmp_path / "file")
    assert {buffer.nbytes for buffer in buffers} >= {LARGE, LARGE + 13}
    assert numpy.shares_memory(numpy.frombuffer(buffers[0], dtype=numpy.uint8), ARRAYS["large"])
    assert all(buffer.nbytes >= LARGE for buffer in buffers)


def test_what_is_loaded_can_be_written_to_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    sealed(ARRAYS["large"], path)
    before = path.read_bytes()
    loaded = opened(path)
    loaded += 1
    assert loaded[0] == 1
    assert path.read_bytes() == before
    assert opened(path)[0] == 0


def test_a_tensor_that_gets_other_numbers_meanwhile_is_written_as_it_was(tmp_path: Path) -> None:
    import torch

    tensor, path = torch.full((8 * LARGE,), 7.0), tmp_path / "file"
    parts = pack.build(len, ([tensor],), {}).data
    tensor.data = torch.zeros(1)
    path.write_bytes(b"".join(parts))
    (loaded,) = opened(path)["args"][0]
    assert float(loaded.min()) == 7.0


def test_the_numbers_of_a_module_lie_beside_the_pickle(tmp_path: Path) -> None:
    import torch

    model, path = torch.nn.Linear(1024, 1024), tmp_path / "file"
    parts = pack.build(len, ([model],), {}).data
    assert len(parts[2]) < LARGE // 8
    path.write_bytes(b"".join(parts))
    (loaded,) = opened(path)["args"][0]
    loaded.weight.data += 1
    torch.testing.assert_close(loaded.weight - 1, model.weight)
    assert torch.equal(loaded(torch.zeros(1024)), model(torch.zeros(1024)))


def test_memory_of_a_tensor_that_pickling_made_lives_as_long_as_its_parts() -> None:
    import gc

    import torch

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
