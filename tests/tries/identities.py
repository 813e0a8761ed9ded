"""The identity of a training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rankzero import Launcher
from rankzero.kinds import NumProcesses
from rankzero.submit.code_files import UserCode
from rankzero.submit.pack import build
from rankzero.submit.start import Submitter


def identity_of(
    train: object,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    world_size: NumProcesses,
    code_version: str | None = None,
    user_code: UserCode | None = None,
) -> dict[str, str]:
    """Returns the identity of a training: that of its payload, which `build` makes of the first three arguments."""
    return build(train, args, kwargs).identity(world_size, code_version, user_code)


def identity_by(
    launcher: Launcher, train: object, args: tuple[Any, ...], kwargs: dict[str, Any], generation: str = ""
) -> dict[str, str]:
    """Returns the identity of a training that a launcher submits in a chain of tries."""
    request = launcher._for(train)._request()
    request = replace(request, template=replace(request.template, generation=generation))
    submitter = Submitter(request, train, args, kwargs, detached=False)
    return submitter._asked(submitter._sources.digests())
