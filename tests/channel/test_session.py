"""The rules of a session by themselves: order, lanes, turns, windows, counts, and what a cut changes."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankzero.channel import frames, session
from rankzero.channel.frames import FrameError
from rankzero.channel.session import ACK, BULK, CONTENT, CONTROL, LOGS, UPLOADS, Session


def pair(window: int = 1000) -> tuple[Session, Session]:
    return Session(window, window), Session(window, window)


def drain(end: Session) -> list[bytes]:
    return list(iter(end.next, None))


def control(number: int) -> bytes:
    return CONTROL + b"%d" % number


def bulk(number: int, size: int = 100) -> bytes:
    return BULK + (b"%d" % number).ljust(size - 1)


def test_control_goes_before_bulk_that_is_not_on_the_wire() -> None:
    ours, _ = pair()
    ours.queue_bulk(LOGS, bulk(1))
    ours.queue_bulk(LOGS, bulk(2))
    assert ours.next() == bulk(1)
    ours.queue(control(1))
    assert drain(ours) == [control(1), bulk(2)]


def test_bulk_stops_at_the_window_and_goes_on_with_credit() -> None:
    ours, theirs = pair(window=300)
    for number in range(10):
        ours.queue_bulk(LOGS, bulk(number))
    sent = drain(ours)
    assert sent == [bulk(number) for number in range(3)]
    ours.queue(control(1))
    assert drain(ours) == [control(1)]
    for body in [*sent, control(1)]:
        theirs.take(body)
    theirs.ping()
    ours.take(drain(theirs)[0])
    # All of it arrived, none of it was accepted.
    assert drain(ours) == []
    theirs.grant(100)
    theirs.ping()
    ours.take(drain(theirs)[0])
    assert drain(ours) == [bulk(3)]


def test_streams_take_turns_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "CHUNK", 200)
    ours, _ = pair(window=10_000)
    for number in range(6):
        ours.queue_bulk(LOGS, bulk(number))
    for number in range(2):
        ours.queue_bulk(UPLOADS, CONTENT + bytes([number]) * 199)
    kinds = b"".join(body[:1] for body in drain(ours))
    assert kinds == BULK * 2 + CONTENT + BULK * 2 + CONTENT + BULK * 2


def test_counts_are_sent_after_enough_bytes_and_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "ACK_EVERY", 250)
    _, theirs = pair()
    theirs.take(bulk(1))
    theirs.take(bulk(2))
    assert drain(theirs) == []
    theirs.take(bulk(3))
    assert [body[:1] for body in drain(theirs)] == [ACK]
    theirs.ping()
    assert [body[:1] for body in drain(theirs)] == [ACK]


def test_what_was_not_acknowledged_is_sent_again() -> None:
    ours, theirs = pair()
    for number in range(5):
        ours.queue(control(number))
    sent = drain(ours)
    for body in sent[:2]:
        theirs.take(body)
    ours.queue(control(5))
    ours.resume(theirs.received)
    assert [body for body in drain(ours) if body[:1] != ACK] == [control(number) for number in range(2, 6)]


def test_bulk_bytes_count_what_is_not_acknowledged() -> None:
    ours, theirs = pair()
    for number in range(4):
        ours.queue_bulk(LOGS, bulk(number))
    assert ours.bulk_bytes == 400
    for body in drain(ours)[:3]:
        theirs.take(body)
    theirs.ping()
    ours.take(drain(theirs)[0])
    assert ours.bulk_bytes == 100


@pytest.mark.parametrize("received", [-1, 0, 4])
def test_impossible_counts_are_refused(received: int) -> None:
    ours, _ = pair()
    for number in range(3):
        ours.queue(control(number))
    drain(ours)
    ours.resume(1)
    assert not ours.can_resume(received)
    with pytest.raises(FrameError, match="cannot have arrived"):
        ours.resume(received)


def test_what_was_not_sent_again_yet_cannot_be_acknowledged() -> None:
    ours, _ = pair()
    ours.queue(control(1))
    drain(ours)
    ours.resume(0)
    with pytest.raises(FrameError, match="cannot have arrived"):
        ours.take(ACK + session._ACK.pack(1, 0))


@pytest.mark.parametrize("body", [b"", b"X", b"A", b"A" + b"\0" * 15, ACK + session._ACK.pack(0, 1)])
def test_frames_that_break_the_rules_are_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        pair()[0].take(body)


def test_bulk_without_credit_is_refused() -> None:
    _, theirs = pair(window=150)
    theirs.take(bulk(1))
    theirs.take(bulk(2))
    with pytest.raises(FrameError, match="more bulk than"):
        theirs.take(bulk(3))


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 30))
def test_any_number_of_cuts_loses_doubles_and_reorders_nothing(seed: int, cuts: int) -> None:
    """Two ends over a wire that loses what is on it, whatever the order of events."""
    chance = random.Random(seed)
    ends = pair(window=chance.choice([100, 1000]))
    queued: list[dict[bytes, list[bytes]]] = [{CONTROL: [], BULK: []}, {CONTROL: [], BULK: []}]
    arrived: list[dict[bytes, list[bytes]]] = [{CONTROL: [], BULK: []}, {CONTROL: [], BULK: []}]
    wires: list[deque[bytes]] = [deque(), deque()]

    def take(side: int) -> None:
        body = wires[1 - side].popleft()
        kind = ends[side].take(body)
        if kind != ACK:
            arrived[side][kind].append(body)
        if kind == BULK:
            ends[side].grant(len(body))

    def step(side: int) -> None:
        action = chance.randrange(6)
        if action == 0:
            body = control(len(queued[side][CONTROL]))
            queued[side][CONTROL].append(body)
            ends[side].queue(body)
        elif action == 1:
            body = bulk(len(queued[side][BULK]))
            queued[side][BULK].append(body)
            ends[side].queue_bulk(LOGS, body)
        elif action == 2:
            ends[side].ping()
        elif action in (3, 4) and (sent := ends[side].next()) is not None:
            wires[side].append(sent)
        elif wires[1 - side]:
            take(side)

    for _ in range(cuts):
        for _ in range(chance.randrange(60)):
            step(chance.randrange(2))
        for wire in wires:
            wire.clear()
        counts = [end.received for end in ends]
        ends[0].resume(counts[1])
        ends[1].resume(counts[0])
    for _ in range(500):
        for side in (0, 1):
            ends[side].ping()
            wires[side].extend(drain(ends[side]))
        for side in (0, 1):
            while wires[1 - side]:
                take(side)
    assert arrived == [queued[1], queued[0]]
    assert all(end.is_idle and end.bulk_bytes == 0 for end in ends)
