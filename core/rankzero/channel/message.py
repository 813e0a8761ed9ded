"""`Message`: the base of all kinds of messages, and their form on the wire.

On the wire a message is a JSON object with its kind under ``type`` and its fields. A field whose value is None is left
out, and the receiver ignores fields that its version does not have. An agent adds ``local_rank`` to the messages of its
ranks, so that the driver can tell the sender. Standard library only: this module travels to executors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, Self, dataclass_transform

from rankzero.channel.frames import FrameError

KINDS: dict[str, type[Message]] = {}
"""The class of each kind of message."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Message:
    """The base of all messages: a frozen dataclass for type checkers, with the ``type`` that it has on the wire.

    `dataclasses` would compile functions for each of the 37 kinds. That takes 25 ms at the start of every driver, and
    of every agent and rank that is no fork.
    """

    kind: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    defaults: ClassVar[dict[str, Any]]
    """Values of attributes that may be left out, or a `dataclasses.field` that makes one."""

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind, cls.names = kind, tuple(cls.__annotations__)
        cls.defaults = {name: vars(cls)[name] for name in cls.names if name in vars(cls)}
        KINDS[kind] = cls

    def __init__(self, *values: Any, **named: Any) -> None:
        """Takes the values in the order of the names, or by name. Raises TypeError if they do not fit the names."""
        own = vars(self)
        own.update(zip(self.names, values, strict=False), **named)
        has_lost_one = len(own) < len(values) + len(named)
        for name, default in self.defaults.items():
            if name not in own:
                make = getattr(default, "default_factory", None)
                own[name] = make() if make else default
        if has_lost_one or own.keys() != set(self.names):
            raise TypeError(f"{values} and {named} are no values of {', '.join(self.names)}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of a message cannot be changed")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def facts(self) -> dict[str, Any]:
        """Returns the fields whose value is not None."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def having(self, **changes: Any) -> Self:
        """Returns a copy with other values of some fields."""
        return type(self)(**{**vars(self), **changes})


def encode(message: Message, local_rank: int | None = None) -> dict[str, Any]:
    """Returns a message as a JSON object.

    Args:
        message: The message.
        local_rank: The rank that sent it, if an agent forwards it.
    """
    sender = {} if local_rank is None else {"local_rank": local_rank}
    return {"type": message.kind, **message.facts(), **sender}


def decode(wire: Mapping[str, Any]) -> Message:
    """Returns the message in a JSON object. Raises FrameError for an unknown kind or if a field is missing."""
    kind = KINDS.get(wire["type"])
    if kind is None:
        raise FrameError(f"{wire['type']!r} is not a kind of message")
    try:
        return kind(**{name: wire[name] for name in kind.names if name in wire})
    except TypeError as error:
        raise FrameError(f"a message of the kind {kind.kind!r} is incomplete: {error}") from None
