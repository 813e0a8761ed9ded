"""What a report takes is the state of that moment, whatever becomes of it."""

import contextlib
import os
import signal
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from rankzero import ResultError
from rankzero.channel.messages import NotCommitted, Part, PartBegun, PartFailed, Start
from rankzero.train import snapshot
from rankzero.train.parts import Parts
from rankzero.train.writer import CheckpointWriter
from rankzero.values import formats


def test_later_changes_are_no_part_of_it() -> None:
    weights, array, steps = torch.ones(3), numpy.ones(3), [1]
    state = {"w": weights, "again": weights, "array": array, "steps": steps, "same": steps}
    copy, has_shards = snapshot.take(state)
    weights.zero_()
    array[:] = 0
    steps.append(2)
    assert not has_shards
    assert copy["w"].tolist() == [1.0, 1.0, 1.0]
    assert copy["array"].tolist() == [1.0, 1.0, 1.0]
    assert copy["steps"] == [1]
    assert copy["steps"] is copy["same"]
    assert copy["w"] is copy["again"]


def test_kinds_of_tensors_come_back_as_they_were() -> None:
    base = torch.arange(6.0)
    state: dict[str, Any] = {
        "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "grown": torch.ones(2, requires_grad=True) * 2,
        "leaf": torch.ones(2, requires_grad=True),
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "expanded": torch.ones(1).expand(4),
        "sparse": torch.eye(3).to_sparse(),
        "half": torch.ones(2, dtype=torch.float8_e4m3fn),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "empty": torch.empty(0, 3),
        "other empty": torch.empty(0),
        "number": torch.tensor(7),
        "whole": base,
        "other view": base.view(2, 3).t(),
        "part": base[3:],
        "ordered": OrderedDict(b=1, a=2),
    }
    copy, _ = snapshot.take(state)
    assert type(copy["parameter"]) is torch.nn.Parameter
    assert [copy[name].requires_grad for name in ("parameter", "grown", "leaf")] == [False, False, True]
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert copy[name].shape == value.shape
            then, now = (tensor.detach().to_dense().to(torch.complex64) for tensor in (value, copy[name]))
            assert torch.equal(then, now), name
    assert list(copy["ordered"]) == ["b", "a"]
    # What shares the whole of a memory shares it in the copy.
    copy["whole"][3] = 40.0
    assert copy["other view"][0, 1] == 40.0
    assert copy["part"].tolist() == [3.0, 4.0, 5.0]
    assert copy["part"].untyped_storage().nbytes() == 12
    assert base[3] == 3.0


def test_tied_weights_stay_tied() -> None:
    embedding = torch.nn.Embedding(4, 2)
    head = torch.nn.Linear(2, 4, bias=False)
    head.weight = embedding.weight
    model = torch.nn.ModuleDict({"embedding": embedding, "head": head})
    copy, _ = snapshot.take(model.state_dict())
    assert copy["embedding.weight"].data_ptr() == copy["head.weight"].data_ptr()
    assert copy["embedding.weight"].data_ptr() != embedding.weight.data_ptr()


def test_a_state_that_holds_itself_is_copied() -> None:
    state: dict[str, Any] = {"w": torch.ones(1)}
    state["self"] = state
    copy, _ = snapshot.take(state)
    assert copy["self"] is copy


def test_what_cannot_be_pickled_is_refused_at_once() -> None:
    with pytest.raises(ResultError, match="cannot pickle '_thread.lock' object"):
        snapshot.take({"lock": threading.Lock()})


def test_who_waits_for_a_checkpoint_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(str(tmp_path), run_token="", shared=True, scratch="")
    parts = Parts(start, str)
    writer = CheckpointWriter(parts, 1, 0, 1, print)
    part = {"file": "rank-0.json", "format": "json", "size": 2, "sha256": ""}
    facts: dict[str, Any] = {"id": "0000-000000", "attempt": 0, "metrics": {}, "world_size": 1, "sharded": False}
    facts |= {"parts": {"0": part}, "formats": ["json"], "tables": []}
    writer.committed(facts)
    assert writer.last
    busy = []
    monkeypatch.setattr(formats, "read", lambda *_: busy.append(writer.busy))
    (tmp_path / "checkpoints" / "0000-000000").mkdir(parents=True)
    (tmp_path / "checkpoints" / "0000-000000" / "rank-0.json").write_text("{}")
    writer.last.load()
    assert busy == [True]
    assert not writer.busy


def test_a_rank_that_reports_late_has_the_checkpoint_that_was_committed_before(tmp_path: Path) -> None:
    """Rank 0's part is all of a whole checkpoint, so its commit may overtake the other ranks' reports."""
    writer = CheckpointWriter(Parts(Start(str(tmp_path), run_token="", shared=True, scratch=""), str), 1, 1, 2, print)
    facts: dict[str, Any] = {"metrics": {}, "world_size": 2, "sharded": False, "tables": [], "formats": ["json"]}
    facts["parts"] = {"0": {"file": "rank-0.json", "format": "json", "size": 2, "sha256": ""}}
    writer.committed({**facts, "id": "0000-000003", "attempt": 0, "index": 3})
    writer.committed({**facts, "id": "0001-000000", "attempt": 1, "index": 0})
    assert writer.last is not None
    assert writer.last.id == "0000-000003"
    writer.write({"step": 4}, {}, 0.0, sharded=False)
    assert writer.last.id == "0001-000000"


def test_a_copy_that_does_not_fit_into_memory_is_a_part_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def take(state: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(snapshot, "take", take)
    sent: list[Any] = []
    parts = Parts(Start(str(tmp_path), run_token="", shared=True, scratch=""), str)
    writer = CheckpointWriter(parts, 1, 0, 1, sent.append)
    with pytest.raises(MemoryError, match="no room"):
        writer.write({}, {}, 0.0, sharded=False)
    assert sent == [PartBegun(0), PartFailed(0)]
    # The driver alone knows whether the checkpoint before this one is committed.
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.0001")
    writer.await_settled()
    assert "checkpoint 0001-000000 is not complete" in capsys.readouterr().out
    writer.on_message(NotCommitted(0))
    writer.await_settled()
    assert not capsys.readouterr().out


def test_a_host_without_room_for_another_checkpoint_leaves_it_out_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.0001")
    sent: list[Any] = []
    parts = Parts(Start(str(tmp_path / "run"), run_token="", shared=False, scratch=str(tmp_path)), str)
    writer = CheckpointWriter(parts, 0, 0, 2, sent.append)
    for step in range(3):
        writer.write({"step": step}, {}, 0.0, sharded=True)
        writer.finish()
    assert [message.index for message in sent if isinstance(message, PartFailed)] == [2]
    assert "0000-000002 of rank 0 is left out: after 0.06 s 0000-000000, 0000-000001 is" in capsys.readouterr().out
    # The peers have reported at last.
    writer.on_message(NotCommitted(1))
    writer.write({"step": 3}, {}, 0.0, sharded=True)
    writer.finish()
    assert sent[-1].index == 3


def test_a_report_returns_when_the_agent_has_the_part_before(tmp_path: Path) -> None:
    """A process that is killed right behind its second report must not lose the first checkpoint, too."""
    sent: list[Any] = []
    delivered: list[list[int]] = []
    may_deliver = threading.Event()

    def flush() -> None:
        may_deliver.wait(60.0)
        delivered.append([message.index for message in sent if isinstance(message, Part)])

    parts = Parts(Start(str(tmp_path), run_token="", shared=True, scratch=""), str)
    writer = CheckpointWriter(parts, 0, 0, 1, sent.append, flush)
    writer.write({"step": 0}, {}, 0.0, sharded=False)
    assert not delivered
    threading.Timer(0.2, may_deliver.set).start()
    writer.write({"step": 1}, {}, 0.0, sharded=False)
    assert delivered[0] == [0]
    writer.finish()
    assert delivered == [[0], [0, 1]]


@pytest.mark.parametrize("raises", [False, True])
def test_a_signal_handler_that_reports_or_raises_leaves_no_report_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    parts = Parts(Start(str(tmp_path), run_token="", shared=True, scratch=""), str)
    sent: list[Any] = []
    writer = CheckpointWriter(parts, 0, 0, 1, sent.append)

    def handle(*_: object) -> None:
        if raises:
            raise RuntimeError("of the user's handler")
        writer.write({"step": 1}, {}, 0.0, sharded=False)

    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        monkeypatch.undo()
        start(thread)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
        with pytest.raises(RuntimeError) if raises else contextlib.nullcontext():
            writer.write({"step": 0}, {}, 0.0, sharded=False)
    finally:
        signal.signal(signal.SIGUSR1, before)
    ended = threading.Event()
    threading.Thread(target=lambda: (writer.finish(), ended.set()), daemon=True).start()
    assert ended.wait(60.0)
    ends = sorted((type(message).__name__, message.index) for message in sent if not isinstance(message, PartBegun))
    assert ends == ([("PartFailed", 0)] if raises else [("Part", 0), ("Part", 1)])


def test_a_script_beside_a_part_of_a_memory_comes_back(tmp_path: Path) -> None:
    base = torch.arange(100_000.0)
    state, _ = snapshot.take(
        {"model": torch.jit.script(torch.nn.Linear(2, 1)), "first": base[:30], "last": base[20:50]}
    )
    chosen, path = formats.choose(state), tmp_path / "checkpoint"
    with path.open("wb") as file:
        snapshot.write_to(state, chosen, file)
    loaded = formats.read(str(path), chosen, None)
    assert loaded["model"](torch.ones(2)).shape == (1,)
    assert (float(loaded["first"][25]), float(loaded["last"][5])) == (25.0, 25.0)


def test_arrays_that_begin_at_one_address_are_each_copied() -> None:
    array = numpy.arange(100_000.0)
    copy, _ = snapshot.take({"begin": torch.from_numpy(array[:10]), "all": torch.from_numpy(array)})
    assert numpy.array_equal(copy["all"].numpy(), array)
    assert numpy.array_equal(copy["begin"].numpy(), array[:10])


def test_a_tensor_whose_memory_was_freed_is_refused() -> None:
    freed = torch.ones(10)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ResultError, match=r"shape \(10,\) ends at byte 40 of a storage of 0 bytes"):
        snapshot.take({"w": freed})
