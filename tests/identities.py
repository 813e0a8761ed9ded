"""The identity of a training."""

from __future__ import annotations

from typing import Any

from rankzero.kinds import NumProcesses
from rankzero.run.identity import Identity
from rankzero.submit.pack import build
from rankzero.submit.pack_archive import UserCode


def identity_of(
    train: object,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    world_size: NumProcesses,
    code_version: str | None = None,
    user_code: UserCode | None = None,
) -> Identity:
    """Returns the identity of a training: that of its payload, which `build` makes of the first three arguments."""
    packed = build(train, args, kwargs, is_alone=world_size == 1)
    return packed.identity(world_size, code_version, user_code)
