"""Lines on an object store: few pieces, nothing lost, doubled or out of order, whatever the store refuses."""

import contextlib
from pathlib import Path

import pytest

from rankzero import store
from rankzero.run.lines import PieceWriter, Position, Stream
from rankzero.run.status import RunStatus

WAIT = 30.0


@pytest.fixture
def location(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/lines"


def stream_of(*locations: str) -> Stream:
    places, names = zip(*(location.rsplit("/", 1) for location in locations), strict=True)
    return Stream(places, names[0], lambda read: read())


def read_all(location: str, position: Position, end: list[int] | None) -> tuple[list[str], Position]:
    stream = stream_of(location)
    stream.position = position
    status = None if end is None else RunStatus("running", written={"lines": end})
    return list(stream.new(status)), stream.position


def test_a_piece_is_written_again_until_it_is_large(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankzero.run.lines.PIECE", 100)
    writer = PieceWriter(location)
    for number in range(50):
        writer.append([f"line {number}"])
        writer.flush()
    assert len(store.list_names(location)) == 4
    lines, end = read_all(location, Position(), None)
    assert lines == [f"line {number}" for number in range(50)]
    assert [end.piece, end.offset] == writer.written


def test_a_follower_reads_each_line_once_and_asks_for_nothing_in_vain(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankzero.run.lines.PIECE", 30)
    asked: list[str] = []
    read_bytes, read_from = store.read_bytes, store.read_from
    monkeypatch.setattr(store, "read_bytes", lambda name: asked.append(name) or read_bytes(name))
    monkeypatch.setattr(store, "read_from", lambda name, offset: asked.append(name) or read_from(name, offset))
    writer, position, seen, written = PieceWriter(location), Position(), [], 0
    for number in range(20):
        # Looks come before, between and after two writes.
        for _ in range(number % 3):
            lines, position = read_all(location, position, writer.written)
            seen += lines
        writer.append([f"line {number}"])
        if number % 4:
            writer.flush()
            written += 1
    writer.flush()
    lines, position = read_all(location, position, writer.written)
    assert [*seen, *lines] == [f"line {number}" for number in range(20)]
    assert read_all(location, position, writer.written) == ([], position)
    # One request for each write that was seen, and one for each piece that was left.
    assert len(asked) <= written + 1 + len(store.list_names(location))


def test_what_the_store_refuses_waits_and_an_answer_that_was_lost_doubles_nothing(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankzero.run.lines.PIECE", 20)
    through, calls = store.write_bytes, 0

    def write(name: str, data: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 != 1:
            through(name, data)
        if calls % 3 != 0:
            raise TimeoutError("no answer")

    monkeypatch.setattr(store, "write_bytes", write)
    writer = PieceWriter(location)
    for number in range(10):
        writer.append([f"line {number}"])
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                writer.flush()
    while writer._waiting:
        with contextlib.suppress(TimeoutError):
            writer.flush()
    assert read_all(location, Position(), None)[0] == [f"line {number}" for number in range(10)]


def test_a_second_driver_writes_behind_the_first(location: str) -> None:
    first = PieceWriter(location)
    first.append(["of the first"])
    first.flush()
    start = Position(0, 1)
    second = PieceWriter(location)
    assert second.written == []
    second.append(["of the second"])
    second.flush()
    assert read_all(location, start, second.written)[0] == ["of the second"]
    assert read_all(location, Position(), second.written)[0] == ["of the first", "of the second"]


def test_more_than_can_wait_is_refused(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankzero.run.lines.WAITING_LIMIT", 10)
    writer = PieceWriter(location)
    writer.append(["12345678"])
    with pytest.raises(OSError, match="takes no lines"):
        writer.append(["9"])


@pytest.mark.parametrize(
    ("start", "most", "begin"),
    [
        (Position(0, 0, 2), 30, None),
        (Position(0, 1, 0), 8, None),
        (Position(0, 0, 2), 8, Position(0, 0, 19)),
        (Position(0, 0, 2), 6, Position(0, 1, 1)),
        (Position(0, 0, 2), 5, Position(0, 2, 0)),
        (Position(0, 0, 2), 1, Position(0, 2, 4)),
        (Position(0, 2, 1), 3, Position(0, 2, 2)),
    ],
)
def test_the_last_bytes_of_a_stream_begin_in_whatever_piece(
    start: Position, most: int, begin: Position | None, location: str
) -> None:
    # One flush may write any number of bytes.
    for number, size in enumerate((20, 2, 5)):
        store.write_bytes(f"{location}/{number:08}", bytes(size))
    stream = stream_of(location)
    stream.position = start
    assert stream.skip(Position(0, 2, 5), most) is (begin is not None)
    assert stream.position == (begin or start)
