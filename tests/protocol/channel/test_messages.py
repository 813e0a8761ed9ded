"""Every kind of message on the wire: what is sent is what arrives, and what does not fit is refused."""

import dataclasses
from typing import Any

import pytest

from rankzero.channel import messages
from rankzero.channel.messages import Decoder, MessageError

VALUES: dict[str, Any] = {
    "str": "text\n\ud800",
    "int": 7,
    "float": 1.5,
    "bool": True,
    "str | None": None,
    "int | None": 3,
    "float | None": 0.5,
}
"""A value for a field of each simple type; every other field is a list or a dict."""


def example(kind: Any) -> messages.Message:
    """Returns a message of a kind in which every field has a value."""
    values = {}
    for field in dataclasses.fields(kind):
        empty: Any = [] if str(field.type).startswith("list") else {}
        values[field.name] = VALUES.get(str(field.type), empty)
    made: messages.Message = kind(**values)
    return made


@pytest.mark.parametrize("kind", messages.KINDS.values(), ids=list(messages.KINDS))
def test_every_kind_of_message_arrives_as_it_was_sent(kind: type[messages.Message]) -> None:
    message = example(kind)
    line = messages.encode(message, 3)
    assert line.count(b"\n") == 1
    assert messages.decode(line) == (message, 3)
    decoder = Decoder()
    assert decoder.feed(line[:5]) == []
    assert decoder.feed(line[5:] + line) == [(message, 3), (message, 3)]


def test_a_message_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        messages.Stop(2.0).grace = 0.0  # type: ignore[misc]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b'["Begone",null,{}]',
        b'["Stop",null,{}]',
        b'["Stop","x",{"grace":1}]',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(MessageError):
        messages.decode(line)


def test_a_message_that_is_too_long_is_refused_by_both_ends() -> None:
    with pytest.raises(MessageError, match="is over the limit"):
        messages.encode(messages.Log(["x" * messages.LINE_MAX]))
    decoder = Decoder(limit=1000)
    for _ in range(10):
        decoder.feed(b"x" * 100)
    with pytest.raises(MessageError, match="longer than 1000 bytes"):
        decoder.feed(b"x" * 100)
