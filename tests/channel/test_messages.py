"""Every kind of message on the wire: what is sent is what arrives, and what does not fit is refused."""

import json
import socket
from typing import Any

import pytest

from rankzero.channel import messages
from rankzero.channel.frames import Decoder, FrameError
from rankzero.channel.server import DISCONNECTED, LOST, RECONNECTED
from rankzero.channel.session import MADE_UP
from rankzero.worker.control import Control

VALUES: dict[str, Any] = {
    "str": "text",
    "int": 7,
    "float": 1.5,
    "bool": True,
    "str | None": "text",
    "int | None": 3,
    "float | None": 0.5,
}
"""A value for a field of each simple type; every other field is a list or a dict."""


def example(kind: type[messages.Message]) -> messages.Message:
    """Returns a message of a kind in which every field has a value."""
    values = {}
    for name, annotation in kind.__annotations__.items():
        empty: Any = [] if annotation.startswith("list") else {}
        values[name] = VALUES.get(annotation, empty)
    return kind(**values)


@pytest.mark.parametrize("kind", messages.KINDS.values(), ids=list(messages.KINDS))
def test_every_kind_of_message_arrives_as_it_was_sent(kind: type[messages.Message]) -> None:
    message = example(kind)
    wire = json.loads(json.dumps(messages.encode(message)))
    assert wire["type"] == kind.kind
    assert messages.decode(wire) == message
    assert messages.encode(message, local_rank=3) == {**wire, "local_rank": 3}


def test_a_message_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="grace of a message"):
        messages.Stop(2.0).grace = 0.0  # type: ignore[misc]


def test_fields_without_a_value_are_not_sent_and_are_none_again_when_read() -> None:
    failed = messages.Failed(time=1.0, signal="SIGKILL")
    wire = messages.encode(failed)
    assert "exit_code" not in wire
    assert messages.decode(wire) == failed


def test_fields_of_a_later_version_are_ignored() -> None:
    assert messages.decode({"type": "stop", "grace": 2.0, "colour": "red"}) == messages.Stop(2.0)


@pytest.mark.parametrize("wire", [{"type": "begone"}, {"type": "stop"}])
def test_what_is_no_message_is_refused(wire: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        messages.decode(wire)


@pytest.mark.parametrize(("values", "named"), [((2.0, 3.0), {}), ((2.0,), {"grace": 3.0}), ((), {}), ((), {"g": 1})])
def test_a_message_has_the_values_of_its_names(values: tuple[float, ...], named: dict[str, float]) -> None:
    with pytest.raises(TypeError, match="no values of grace"):
        messages.Stop(*values, **named)


def test_rows_that_a_rank_sends_as_text_are_a_message_of_metrics() -> None:
    agent, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with agent:
        agent.settimeout(10)
        Control(rank.detach()).report('[{"loss":0.5},7.0]')
        decoder = Decoder()
        decoder.trust(None)
        decoder.feed(agent.recv(1 << 20))
        [wire] = decoder
    assert isinstance(wire, dict)
    assert wire == messages.encode(messages.Metrics([[{"loss": 0.5}, 7.0]]))  # type: ignore[list-item]


def test_what_the_channel_itself_says_is_a_message() -> None:
    synthesized = (messages.Disconnected, messages.Reconnected, messages.Lost, messages.Uploaded, messages.Fetched)
    assert {kind.kind for kind in synthesized} == MADE_UP
    assert {DISCONNECTED, RECONNECTED, LOST} < MADE_UP
