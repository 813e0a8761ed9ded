"""An action of Spark on a DataFrame, with progress, cancellation and translated errors."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rankzero import bounds
from rankzero.engines.spark import part
from rankzero.engines.spark.errors import first_lines
from rankzero.errors import EngineError
from rankzero.host.flag import Flag

_FULL = ("No space left on device", "Disk quota exceeded")


def context_of(frame: Any) -> Any:
    """Returns the SparkContext of a DataFrame; None for one of Spark Connect, which has none."""
    return frame.sparkSession.sparkContext if hasattr(frame, "_jdf") else None


def action(
    run: Callable[[], Any],
    frame: Any,
    where: str,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> Any:
    """Returns the result of an action of Spark, which ends with this call, however that ends.

    The action runs in a thread, because py4j cannot be interrupted while it waits.

    Args:
        run: The action.
        frame: The DataFrame.
        where: Display name of the DataFrame.
        say: Receives lines about progress.
        check: Called periodically; an exception that it raises ends Spark's work.

    Raises:
        EngineError: Spark failed.
    """
    tag = f"rankzero-data-{secrets.token_hex(8)}"
    found: list[Any] = []
    failed: list[BaseException] = []
    done = Flag()

    def act() -> None:
        try:
            with _tagged(frame, tag):
                found.append(run())
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    threading.Thread(target=act, name="rankzero-data", daemon=True).start()
    try:
        begun = time.monotonic()
        say_at = begun + bounds.DATAFRAME_PROGRESS_INTERVAL
        while not done.wait(bounds.POLL_INTERVAL):
            check()
            now = time.monotonic()
            if now >= say_at:
                say_at = now + bounds.DATAFRAME_PROGRESS_INTERVAL
                say(f"Spark computes {where}: {_progress(frame)}, {now - begun:.0f} s")
    except BaseException:
        # Repeated, because a single cancel would not reach a job that Spark has not started yet.
        threading.Thread(target=_cancel_until, args=(done, frame, tag), name="rankzero-cancel", daemon=True).start()
        done.wait(bounds.DATAFRAME_PROGRESS_INTERVAL)
        raise
    if failed:
        raise _explained(failed[0], where) from failed[0]
    return found[0]


def _explained(error: BaseException, where: str) -> Exception:
    text = str(error)
    if "No module named 'pyarrow'" in text or ("PyArrow" in text and "must be installed" in text):
        return EngineError(f"Spark's executors have no pyarrow, which {where} needs: install it there")
    if f"/{part.TOKEN}" in text or part.ELSEWHERE in text:
        return EngineError(
            f"Spark's executors do not see the store for {where}, or may not write there: "
            f"choose a store that they and this process see: {first_lines(text)}"
        )
    if full := next((line.strip() for line in text.splitlines() if any(word in line for word in _FULL)), None):
        return EngineError(f"there is no room where Spark writes {where}, or on its local disks: {full}")
    return EngineError(f"Spark could not compute {where}: {first_lines(text)}")


@contextlib.contextmanager
def _tagged(frame: Any, tag: str) -> Iterator[None]:
    """Marks the jobs of this thread, so that they can be cancelled."""
    if context := context_of(frame):
        # A job group and not a tag: a tag does not interrupt tasks, which may wait for their Python for minutes.
        context.setJobGroup(tag, "rankzero: dataset", interruptOnCancel=True)
        yield
        return
    frame.sparkSession.addTag(tag)
    try:
        yield
    finally:
        frame.sparkSession.removeTag(tag)


def _cancel_until(done: Flag, frame: Any, tag: str) -> None:
    while not done.is_set():
        _cancel(frame, tag)
        done.wait(bounds.POLL_INTERVAL)


def _cancel(frame: Any, tag: str) -> None:
    with contextlib.suppress(Exception):
        if context := context_of(frame):
            context.cancelJobGroup(tag)
        else:
            frame.sparkSession.interruptTag(tag)


def _progress(frame: Any) -> str:
    """Returns how many tasks have ended, if this Spark reports it."""
    with contextlib.suppress(Exception):
        tracker = context_of(frame).statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        done = sum(stage.numCompletedTasks for stage in stages if stage)
        return f"{done} of {sum(stage.numTasks for stage in stages if stage)} tasks"
    return "running"
