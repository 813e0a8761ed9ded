"""Whatever bytes a rank writes, in whatever pieces, the lines are right."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.agent.output import MAX_LINE, LineSplitter, is_own_frame


def split(*pieces: bytes) -> list[str]:
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece)]
    return lines + splitter.feed(b"", final=True)


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb\rc\r\nd"], ["a", "b", "c", "d"]),
        ([b"a\r", b"\nb\n"], ["a", "b"]),
        ([b"10%\r", b"20%\r", b"\n"], ["10%", "20%"]),
        ([b"a\n\nb\n"], ["a", "", "b"]),
        ([b"a\r\n\r\nb\r\n"], ["a", "", "b"]),
        ([b"caf\xe9\nok\n"], ["caf\ufffd", "ok"]),
        ([b"\xe2\x82", b"\xac\n"], ["\u20ac"]),
        ([b"x" * (1 << 20), b"\n"], ["x" * (1 << 20)]),
    ],
)
def test_lines_of_any_bytes_in_any_pieces(pieces: list[bytes], lines: list[str]) -> None:
    assert split(*pieces) == lines


def test_a_progress_bar_becomes_a_line_in_some_seconds() -> None:
    seconds = [0.0]
    splitter = LineSplitter(lambda: seconds[0])
    lines = []
    for step in range(36_000):
        seconds[0] = step / 10
        lines += splitter.feed(f"\r{step}".encode())
    lines += splitter.feed(b"\rdone\nnext\n")
    assert len(lines) < 500
    assert lines[:2] == ["0", "100"]
    assert lines[-2:] == ["done", "next"]
    assert splitter.feed(b"1\r2\r3\r") == []
    assert splitter.feed(b"", final=True) == ["3"]


def test_endless_output_without_newline_is_passed_on_in_pieces() -> None:
    lines = split(*[b"x" * (1 << 20)] * 20)
    assert len(lines) > 1
    assert "".join(lines) == "x" * (20 << 20)
    assert max(map(len, lines)) <= MAX_LINE + (1 << 20)


@given(st.text(alphabet="ab\r\n\u20ac"), st.lists(st.integers(0, 60)))
def test_the_way_the_bytes_are_cut_does_not_matter(text: str, cuts: list[int]) -> None:
    data = text.encode()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in itertools.pairwise(edges)]
    assert split(*pieces) == split(data)


def test_frames_of_ours_are_told_from_those_of_the_user() -> None:
    assert is_own_frame('  File "/x/core/rankzero/agent/worker.py", line 210 in _call')
    assert is_own_frame('  File "/x/rankzero.zip/rankzero/agent/warm.py", line 9 in run')
    assert is_own_frame('  File "<string>", line 1 in <module>')
    assert not is_own_frame('  File "/home/me/rankzero/train.py", line 210 in train')
    assert not is_own_frame('  File "<ipython-input-3>", line 1 in train')
