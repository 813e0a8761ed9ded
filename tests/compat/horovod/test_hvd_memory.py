"""What a coordinator keeps of rounds that have ended: as much after many as after some."""

import pickle
from pathlib import Path

import pytest
import torch

from rankzero import Launcher
from rankzero.compat.horovod.torch import messages
from rankzero.compat.horovod.torch.messages import Numbers, Request, meta_of

PARAMETERS = [f"layer{index}.weight" for index in range(24)]


def tensors_alive_after(steps: tuple[int, ...]) -> list[list[int]]:
    """Rounds of gradients whose hooks fire in another order on each rank."""
    import gc
    import random

    import torch

    import rankzero.compat.horovod.torch as hvd

    hvd.init()
    order = random.Random(hvd.rank())
    found = []
    for step in range(1, max(steps) + 1):
        names = PARAMETERS[:]
        order.shuffle(names)
        for handle in [hvd.allreduce_async_(torch.ones(8), name=name) for name in names]:
            hvd.synchronize(handle)
        if step in steps:
            gc.collect()
            found.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))
    return hvd.allgather_object(found)


def test_orders_that_differ_from_round_to_round_leave_no_tensors_behind(tmp_path: Path) -> None:
    for some, many in Launcher(2, store=tmp_path).run(tensors_alive_after, (25, 75)):
        assert many <= some + 10


def test_names_that_are_made_up_for_each_step_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "KNOWN", 4000)
    numbers = Numbers()
    meta = meta_of("allreduce", "torch.float32", (1,), "Sum")
    sizes = []
    for step in range(6 * messages.KNOWN // 1000):
        requests = [Request(f"loss.{step}.{part}", 0, meta, torch.ones(1)) for part in range(1000)]
        said = numbers.decode(memoryview(numbers.encode(0, requests)))
        assert list(said.issued) == [request.name for request in requests]
        sizes.append(len(pickle.dumps(numbers)))
    half = len(sizes) // 2
    assert max(sizes[half:]) <= max(sizes[:half]) * 1.1


def steps_with_new_names() -> list[list[str]]:
    """Rank 0 issues one operation that rank 1 issues when all names have been forgotten, many times."""
    import random

    import torch

    import rankzero.compat.horovod.torch as hvd
    from rankzero.compat.horovod.torch import messages

    messages.KNOWN = 16
    hvd.init()
    order = random.Random(hvd.rank())
    handles, wrong = {}, []

    def issue(name: str) -> None:
        handles[name] = hvd.allreduce_async_(torch.full((2,), hvd.rank() + 1.0), name=name, op=hvd.Sum)

    issue("known to all")
    for step in range(40):
        names = ["accuracy", f"loss.{step}", *PARAMETERS[:5]]
        names += ["late"] if step == (0 if hvd.rank() == 0 else 30) else []
        order.shuffle(names)
        for name in names:
            issue(name)
        for name in [name for name in handles if name != "late" or step >= 30]:
            if hvd.synchronize(handles.pop(name)).tolist() != [3.0, 3.0]:
                wrong.append(f"{name} in step {step}")
    return hvd.allgather_object(wrong)


def test_what_waits_for_a_rank_outlives_the_numbers_of_names(tmp_path: Path) -> None:
    assert Launcher(2, store=tmp_path).run(steps_with_new_names) == [[], []]
