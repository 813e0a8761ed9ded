"""What a report takes is the state of that moment, whatever becomes of it."""

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from rankzero import ResultError
from rankzero.channel.messages import Lost, Part, Start
from rankzero.train.parts import Parts
from rankzero.train.writer import CheckpointWriter
from rankzero.values import formats


def test_later_changes_are_no_part_of_it(tmp_path: Path) -> None:
    weights, array, steps = torch.ones(3), numpy.ones(3), [1]
    sent: list[Any] = []
    writer = CheckpointWriter(
        Parts(Start(str(tmp_path), run_token="", shared=True, scratch=""), str), 0, 0, 1, sent.append
    )
    for state in ({"w": weights, "again": weights, "steps": steps}, {"w": weights, "array": array, "same": steps}):
        writer.write(state, {}, 0.0, sharded=False)
    with pytest.raises(ResultError, match="cannot pickle '_thread.lock' object"):
        writer.write({"lock": threading.Lock()}, {}, 0.0, sharded=False)
    weights.zero_()
    array[:] = 0
    steps.append(2)
    writer.finish()
    written = [message for message in sent if isinstance(message, Part)]
    first, second = (formats.read(part.path, part.format, part.sha256) for part in written)
    assert first["w"].tolist() == second["w"].tolist() == second["array"].tolist() == [1.0, 1.0, 1.0]
    assert first["steps"] == second["same"] == [1]
    assert first["w"].data_ptr() == first["again"].data_ptr()


class TwoWords(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def shrunk() -> torch.Tensor:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(40)
    return tensor


@pytest.mark.parametrize(
    ("make", "reason"), [(lambda: TwoWords("a", "b"), "cannot be read back: TypeError"), (shrunk, "memory .* freed")]
)
def test_what_cannot_be_read_back_is_no_checkpoint(tmp_path: Path, make: Any, reason: str) -> None:
    sent: list[Any] = []
    parts = Parts(Start(str(tmp_path), run_token="", shared=True, scratch=""), str)
    writer = CheckpointWriter(parts, 0, 0, 1, sent.append)
    with pytest.raises(ResultError, match=reason):
        writer.write({"value": make()}, {}, 0.0, sharded=False)
    assert sent == [Lost(0)]
    # What was read back may hold the memory of the file.
    loop: list[Any] = [numpy.ones(1 << 16)]
    loop.append(loop)
    for _ in range(2):
        writer.write({"value": loop}, {}, 0.0, sharded=False)
    writer.finish()
    assert len([message for message in sent if isinstance(message, Part)]) == 2


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
    writer.committed({**facts, "id": "0001-000001", "attempt": 1, "index": 1})
    writer.write({"step": 4}, {}, 0.0, sharded=False)
    assert writer.last.id == "0001-000000", "not the one that rank 0 alone has reported"
    writer.write({"step": 5}, {}, 0.0, sharded=False)
    assert writer.last.id == "0001-000001"


def test_a_copy_that_does_not_fit_into_memory_is_a_part_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def take(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(formats, "dump", take)
    sent: list[Any] = []
    parts = Parts(Start(str(tmp_path), run_token="", shared=True, scratch=""), str)
    writer = CheckpointWriter(parts, 1, 0, 1, sent.append)
    with pytest.raises(MemoryError, match="no room"):
        writer.write({}, {}, 0.0, sharded=False)
    assert sent == [Lost(0)]
    # The driver alone knows whether the checkpoint before this one is committed.
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.0001")
    writer.await_settled()
    assert "checkpoint 0001-000000 is not complete" in capsys.readouterr().out
    writer.on_message(Lost(0))
    writer.await_settled()
    assert not capsys.readouterr().out


def test_a_host_without_room_for_another_checkpoint_leaves_it_out_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.0001")
    sent: list[Any] = []
    parts = Parts(Start(str(tmp_path / "run"), run_token="", shared=False, scratch=str(tmp_path)), str)
    writer = CheckpointWriter(parts, 0, 0, 2, sent.append)
    for step in range(2):
        writer.write({"step": step}, {}, 0.0, sharded=True)
        writer.finish()
    assert [message.index for message in sent if isinstance(message, Lost)] == [1]
    assert "0000-000001 of rank 0 is left out: 0000-000000 is not committed after 0.06 s" in capsys.readouterr().out
    # The peers have reported at last.
    writer.on_message(Lost(0))
    writer.write({"step": 2}, {}, 0.0, sharded=True)
    writer.finish()
    assert sent[-1].index == 2


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
    ends = sorted((type(message).__name__, message.index) for message in sent)
    assert ends == ([("Lost", 0)] if raises else [("Part", 0), ("Part", 1)])
