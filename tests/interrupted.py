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


class Interrupt(KeyboardInterrupt):
    """Raised after one instruction."""


_NEVER = ("<frozen importlib", "weakref")
"""Parts of the names of CPython's files where an exception of a handler is lost, or leaves the lock of imports held."""


def everywhere(make: Callable[[], Callable[[], object]], file: str = "", step: int = 1) -> Iterator[int]:
    """Calls functions, each of which is interrupted one moment later than the one before, until one completes.

    Args:
        make: Makes the function; called for every interrupt.
        file: Part of the name of the file whose moments count.
        step: Number of moments from one interrupt to the next.

    Yields:
        The number of the moment, after the function has been interrupted there.
    """
    for number in itertools.count(step=step):
        try:
            _call(make(), file, number)
        except Interrupt:
            pass
        else:
            return
        yield number


def _call(function: Callable[[], object], file: str, left: int) -> None:
    """Calls a function, in which Interrupt is raised after ``left`` moments."""
    last: dict[FrameType, str] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            name = frame.f_code.co_filename
            is_moment = last.get(frame) in _CHECKS and file in name and not any(never in name for never in _NEVER)
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
