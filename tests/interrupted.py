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


def interrupt() -> None:
    """Raises the exception, as a handler of a signal may."""
    raise Interrupt


def everywhere(
    make: Callable[[], Callable[[], object]],
    file: str = "",
    step: int = 1,
    handle: Callable[[], object] = interrupt,
) -> Iterator[int]:
    """Calls functions, each of which is interrupted one moment later than the one before, until one completes.

    Args:
        make: Makes the function; called for every interrupt.
        file: Part of the name of the file whose moments count.
        step: Number of moments from one interrupt to the next.
        handle: Called at the moment, as a handler of a signal.

    Yields:
        The number of the moment, after the function has been interrupted there.
    """
    for number in itertools.count(step=step):
        if not _call(make(), file, number, handle):
            return
        yield number


def _call(function: Callable[[], object], file: str, left: int, handle: Callable[[], object]) -> bool:
    """Calls a function, and a handler after ``left`` moments in it; returns False if it has no more moments."""
    last: dict[FrameType, str] = {}
    is_reached = False

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left, is_reached
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            name = frame.f_code.co_filename
            is_moment = last.get(frame) in _CHECKS and file in name and not any(never in name for never in _NEVER)
            last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if is_moment and not left:
                # An interrupt comes once.
                sys.settrace(None)
                is_reached = True
                handle()
            left -= is_moment
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except Interrupt:
        pass
    except RuntimeError as error:
        # Of CPython, whose Condition.wait had released its lock when the exception came.
        if not (isinstance(error.__context__, Interrupt) and "release unlocked lock" in str(error)):
            raise
    finally:
        sys.settrace(before)
        # The frames hold what the function held.
        last.clear()
    return is_reached
