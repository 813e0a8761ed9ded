"""The end of a rank that has returned: exit handlers and threads that are no daemons, within a bound."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import sysconfig
import threading
from types import FrameType

_STDLIB = sysconfig.get_path("stdlib") + os.sep
_NOT_STDLIB = ("site-packages", "dist-packages")


def run_exit_handlers(bound: float) -> None:
    """What a normal exit would run: the value is safe already. What the bound cuts off is named in the rank's log.

    Args:
        bound: Seconds, after which this process ends where it stands.
    """
    timer = threading.Timer(bound, _cut_off, (bound,))
    timer.daemon = True
    timer.start()
    with contextlib.suppress(BaseException):
        # Ends idle executor threads, which wait for exactly this, and joins non-daemon ones.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _cut_off(bound: float) -> None:
    try:
        # Not by sys.stderr, whose lock the thread that is cut off may hold.
        os.write(2, f"{cut_off_message(bound, _what_runs())}\n".encode(errors="replace"))
    finally:
        os._exit(0)


def cut_off_message(bound: float, what: str) -> str:
    """The line of the log."""
    return (
        f"rankzero: this rank had returned, and was ended after exit_timeout={bound:g} s, which cut off {what}. "
        "The run's result is safe; a larger exit_timeout lets this finish"
    )


def _what_runs() -> str:
    frames = sys._current_frames()
    main = threading.main_thread()
    threads = [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]
    if threads:
        return " and ".join(f"the thread {thread.name!r}{_place(frames.get(thread.ident or 0))}" for thread in threads)
    return f"an exit handler{_place(frames.get(main.ident or 0))}"


def _place(frame: FrameType | None) -> str:
    """The user's function that a thread began with, and where in it that is."""
    found = None
    while frame and frame.f_code is not run_exit_handlers.__code__:
        path = frame.f_code.co_filename
        if found is None or not path.startswith(_STDLIB) or any(part in path for part in _NOT_STDLIB):
            found = frame
        frame = frame.f_back
    if found is None:
        return ""
    return f" in {found.f_code.co_name}, {found.f_code.co_filename}:{found.f_lineno}"
