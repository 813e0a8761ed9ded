"""Ends a rank whose training function has returned: exit handlers and non-daemon threads, within a time limit."""

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
    """Runs what a normal exit of Python runs; the rank's result is committed already.

    Args:
        bound: Seconds after which this process exits and logs what it cut off.
    """
    timer = threading.Timer(bound, _cut_off, (bound,))
    timer.daemon = True
    timer.start()
    with contextlib.suppress(BaseException):
        # Ends idle threads of concurrent.futures, which wait for this call, and joins non-daemon threads.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _cut_off(bound: float) -> None:
    try:
        # Not by sys.stderr, whose lock the thread that is cut off may hold.
        os.write(2, f"{cut_off_message(bound, _what_runs())}\n".encode(errors="replace"))
    finally:
        os._exit(0)


def cut_off_message(bound: float, what: str) -> str:
    """Returns the log line that names what ``exit_timeout`` cut off."""
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
    """Returns the outermost function of the user in a thread's stack and its current line."""
    found = None
    while frame and frame.f_code is not run_exit_handlers.__code__:
        path = frame.f_code.co_filename
        if found is None or not path.startswith(_STDLIB) or any(part in path for part in _NOT_STDLIB):
            found = frame
        frame = frame.f_back
    if found is None:
        return ""
    return f" in {found.f_code.co_name}, {found.f_code.co_filename}:{found.f_lineno}"
