"""`everywhere`: interrupts a function wherever a signal handler may raise an exception in it."""

from __future__ import annotations

import dis
import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_CHECKS = {"RESUME", "JUMP_BACKWARD", "CALL", "CALL_FUNCTION_EX", "CALL_KW"}
"""The instructions of CPython after which the interpreter runs signal handlers."""


class Interrupt(BaseException):
    """Raised after one instruction."""


def everywhere(make: Callable[[], Callable[[], object]]) -> Iterator[int]:
    """Calls functions, each of which is interrupted one moment later than the one before, until one completes.

    Args:
        make: Makes the function; called for every interrupt.

    Yields:
        The number of the moment, after the function has been interrupted there.
    """
    for number in itertools.count():
        try:
            _call(make(), number)
        except Interrupt:
            pass
        else:
            return
        yield number


def _call(function: Callable[[], object], left: int) -> None:
    """Calls a function, in which Interrupt is raised after ``left`` moments."""
    last: dict[FrameType, str] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            is_moment = last.get(frame) in _CHECKS
            last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if is_moment and not left:
                # An interrupt comes once.
                sys.settrace(None)
                raise Interrupt
            left -= is_moment
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        # The frames hold what the function held.
        last.clear()
