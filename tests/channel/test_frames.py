"""Frames come out as they went in, and nothing that was tampered with comes out at all."""

import json
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.channel import frames
from rankzero.channel.frames import Decoder, FrameError, Sealer

KEY = b"k" * 32


def opened(data: bytes, sealer: Sealer | None = None, step: int = 1 << 20) -> list[object]:
    decoder = Decoder()
    decoder.trust(sealer)
    found: list[object] = []
    for start in range(0, len(data), step):
        decoder.feed(data[start : start + step])
        found += list(decoder)
    return found


@given(
    st.lists(st.one_of(st.binary(max_size=50), st.dictionaries(st.text(), st.integers())), max_size=5),
    st.integers(1, 7),
)
def test_frames_survive_any_cut(bodies: list[object], step: int) -> None:
    sent = [{**body, "type": "t"} if isinstance(body, dict) else body for body in bodies]
    ours, theirs = Sealer(KEY, b"up"), Sealer(KEY, b"up")
    data = b"".join(frames.encode(frame, ours) for frame in sent)  # type: ignore[arg-type]
    assert opened(data, theirs, step) == sent


def test_a_replayed_frame_is_found() -> None:
    data = frames.encode({"type": "commit"}, Sealer(KEY, b"up"))
    with pytest.raises(FrameError, match="wrong MAC"):
        opened(data + data, Sealer(KEY, b"up"))


def test_a_frame_sent_back_is_found() -> None:
    data = frames.encode({"type": "commit"}, Sealer(KEY, b"up"))
    with pytest.raises(FrameError, match="wrong MAC"):
        opened(data, Sealer(KEY, b"down"))


@pytest.mark.parametrize("length", [0, frames.MAX_FRAME + 1, 0xFFFFFFFF])
def test_a_length_out_of_bounds_is_refused_before_its_bytes_arrive(length: int) -> None:
    with pytest.raises(FrameError, match="frame length"):
        opened(struct.pack(">I", length))


def test_a_stranger_gets_no_large_frame() -> None:
    decoder = Decoder()
    decoder.feed(struct.pack(">I", frames.MAX_HANDSHAKE_FRAME + 1))
    with pytest.raises(FrameError, match="frame length"):
        list(decoder)


@pytest.mark.parametrize("body", [b"J[]", b"J{}", b'J{"type":1}', b"J{", b"X", b"J" + b"[" * 4000])
def test_messages_are_objects_with_a_type(body: bytes) -> None:
    with pytest.raises(FrameError):
        opened(struct.pack(">I", len(body)) + body)


def test_an_oversized_frame_is_refused_by_the_sender() -> None:
    with pytest.raises(FrameError, match="over the limit"):
        frames.encode(b"x" * frames.MAX_FRAME)


def test_frames_are_json_not_pickle() -> None:
    data = frames.encode({"type": "t", "value": [1, None, "x"]})
    assert json.loads(data[5:]) == {"type": "t", "value": [1, None, "x"]}


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6), st.integers(0), st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_refused(bodies: list[bytes], where: int, bit: int) -> None:
    """What comes before the damage is right, and nothing comes after it."""
    ours, theirs = Sealer(KEY, b"up"), Sealer(KEY, b"up")
    data = bytearray(b"".join(frames.pack(body, ours) for body in bodies))
    data[where % len(data)] ^= 1 << bit
    decoder = Decoder()
    decoder.trust(theirs)
    decoder.feed(bytes(data))
    got = []
    try:
        while (body := decoder.next_body()) is not None:
            got.append(body)
    except FrameError:
        pass
    # A length that was damaged upwards may wait for bytes that never come.
    assert len(got) < len(bodies)
    assert got == bodies[: len(got)]


@given(st.lists(st.binary(max_size=60), max_size=20), st.booleans())
def test_any_bytes_in_any_pieces_give_frames_or_a_frame_error(pieces: list[bytes], sealed: bool) -> None:
    decoder = Decoder()
    decoder.trust(Sealer(KEY, b"up") if sealed else None)
    try:
        for piece in pieces:
            decoder.feed(piece)
            for frame in decoder:
                assert not sealed
                assert isinstance(frame, bytes | dict)
    except FrameError:
        pass


def fuzz(count: int, seed: int) -> int:
    """Throws frames and garbage at decoders; returns how many frames came out."""
    chance = random.Random(seed)
    good = [frames.pack(body) for body in (b'J{"type":"x"}', b"Bdata", b'J{"type":"y","n":[1,{"a":null}]}')]
    out = 0
    # A damaged length may have a decoder wait for bytes that never come, so each gets only a few.
    for _ in range(count // 20):
        pieces = chance.choices(good, k=20)
        for _ in range(4):
            where = chance.randrange(20)
            kind = chance.randrange(3)
            if kind == 0:
                pieces[where] = frames.pack(chance.choice([b"J", b"B", b""]) + chance.randbytes(1 + where))
            elif kind == 1:
                spoiled = bytearray(pieces[where])
                spoiled[chance.randrange(len(spoiled))] ^= 1 << chance.randrange(8)
                pieces[where] = bytes(spoiled)
            else:
                pieces[where] = chance.randbytes(1 + where)
        decoder = Decoder()
        decoder.feed(b"".join(pieces))
        try:
            for frame in decoder:
                assert isinstance(frame, bytes) or isinstance(frame["type"], str)
                out += 1
        except FrameError:
            pass
    return out


def test_a_million_frames_and_garbage() -> None:
    assert fuzz(1_000_000, seed=3) > 100_000
