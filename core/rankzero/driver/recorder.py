"""`Recorder`: everything the driver writes into the run directory."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
import threading
import time
from collections import Counter
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from rankzero import bounds, store
from rankzero.bounds import DRIVER_DEAD_AFTER, HEARTBEAT_INTERVAL, STORE_OUTAGE
from rankzero.errors import ResultError
from rankzero.host.processes import process_namespace, process_start
from rankzero.masking import Mask
from rankzero.run.directory import Submission
from rankzero.run.growing import Appender, PieceWriter
from rankzero.run.names import EVENTS, LINES
from rankzero.run.output import stamped
from rankzero.run.reports import CHECK_PREFIX, MOST_METRICS
from rankzero.run.status import RunStatus, pace
from rankzero.threads import ActionThread
from rankzero.values.ref import ResultRef

OUTCOME_RETRY_INTERVAL = bounds.scaled(0.25)  # Between two writes of a status whose outcome is certain
HEARTBEAT_DELAY = 1.0  # Seconds for a write of lines to an object store to carry the heartbeat
MOST_QUEUED = 32 << 20  # Characters of lines that wait for a disk; later ones are lost
ROOM_TIMEOUT = bounds.scaled(1.0)  # That an agent's connection is not read while they wait
logger = logging.getLogger(__name__)


class Recorder:
    """Writes status, events and logs of one submission of a run.

    The driver's thread uses it and never waits for an object store: the status is written by a thread of its own
    (`StatusWriter`), and so are lines. A store that refuses writes while ranks train, such as a full disk, does not end
    the training: refused lines are counted as lost, and the status is written again later.
    """

    def __init__(self, own: Submission, mask: Mask) -> None:
        """Prepares the files of events and lines; nothing is written yet.

        Args:
            own: The submission that the driver drives.
            mask: Hides the secrets of the run.
        """
        self._own, job = own, own.job
        self._names = {"run_id": job.run_id}
        self.mask = mask
        self._streams = {name: PieceWriter(own.path(name)) for name in (EVENTS, LINES)} if own.is_remote else {}
        self._events, self._lines = (
            _Lines(self._streams.get(name) or Appender(own.path(name))) for name in (EVENTS, LINES)
        )
        self._finished = threading.Event()
        self._thread = ActionThread("rankzero-lines")
        # Each is changed by one thread alone.
        self._queued = self._appended = 0
        self._stuck_at = -1
        self._writer = StatusWriter(
            own,
            RunStatus(
                attempt=job.first_attempt,
                submission=job.submission,
                metrics=dict(job.metrics),
                driver_host=socket.gethostname(),
                driver_pid=os.getpid(),
                driver_namespace=process_namespace(),
                driver_start=process_start(os.getpid()),
                interval=pace(0.0) if own.is_remote else HEARTBEAT_INTERVAL,
            ),
        )
        self._started = self._held_at = time.monotonic()
        self._flusher = threading.Thread(target=self._flush, name="rankzero-flush", daemon=True)

    @property
    def status(self) -> RunStatus:
        """The current state of the run, which may not be written yet."""
        return self._writer.status

    @property
    def superseded(self) -> bool:
        """True if another process has ended the submission: this driver has lost the right to publish anything."""
        return self._writer.superseded

    @property
    def is_success(self) -> bool:
        """True once the success of this driver is the end of the submission."""
        return self._writer.has_end and not self.superseded and self.status.result is not None

    def update(self, **changes: Any) -> None:
        """Changes the status and writes it; a change of state is an event too."""
        before = self.status
        self._writer.change(**changes)
        if self.status.state != before.state or self.status.attempt != before.attempt:
            self._note_state(self.status.state)
        if self._own.is_remote and not self._flusher.ident:
            self._flusher.start()

    def note_thread(self) -> None:
        """Records whether the driver is a thread of its caller's process, which may outlive it."""
        self._writer.note(driver_thread=threading.current_thread() is not threading.main_thread())

    def note_places(self, ranks: int, *, held: bool) -> None:
        """Measures how long the ranks of an attempt occupy their slots, which is the cost of a training.

        Args:
            ranks: Number of ranks of the attempt.
            held: True when the slots are taken, False when they are free again.
        """
        # Monotonic, since the wall clock may be set meanwhile.
        before = time.monotonic() - self._held_at if self.status.held_since is not None else 0.0
        self._held_at = time.monotonic()
        held_seconds = self.status.held_seconds + ranks * before
        self._writer.note(held_seconds=held_seconds, held_since=time.time() if held else None)

    def commit(self, result: ResultRef, value: list[Any]) -> Future[None]:
        """Creates the end of the submission as a success, which holds even if this driver dies. `finish` comes later.

        Args:
            result: The value's handle.
            value: The value itself in a list, if it is small JSON; else empty.

        Returns:
            A future that completes as soon as the record is durable.
        """
        return self._writer.change(result=result.to_json(), value=value)

    def note_phase(self, phase: str) -> None:
        """Records the state of the attempt, which the next write of the status has."""
        if phase != self.status.phase:
            self._writer.note(phase=phase)

    def announce(self, kind: str, what: str, **facts: Any) -> None:
        """Records an event whose text followers of the run also see among the lines of rank 0."""
        logger.info("%s", what)
        self.event({"type": kind, **facts, "what": what})
        self.log(0, [f"rankzero: {what}"])

    def _flush(self) -> None:
        """Writes pieces to an object store in a thread of its own, so neither the heartbeat nor the driver waits.

        No other thread writes them: of two concurrent writes of one piece, the older one might arrive last.
        """
        problem: Exception | None = None
        while not (self._finished.wait(self.status.interval) or self.superseded):
            before, problem = problem, None
            for stream in self._streams.values():
                try:
                    stream.flush()
                except Exception as error:
                    problem = error
            if problem and not before:
                logger.warning("lines wait for the store: %s", problem)
            elif before and not problem:
                logger.warning("the store takes lines again")
            # This also writes a heartbeat and the position up to which followers may read.
            self._writer.change(**self._progress())
        try:
            pause = bounds.WRITE_RETRY_INTERVAL()
            for stream in self._streams.values():
                store.patiently(stream.flush, STORE_OUTAGE(), pause, lambda _: self.superseded)
        except Exception as error:
            logger.warning("lines are lost: %s", error)

    def _progress(self) -> dict[str, Any]:
        if not self._own.is_remote:
            return {}
        written = {name: stream.written for name, stream in self._streams.items()}
        return {"written": written, "interval": pace(time.monotonic() - self._started)}

    def _note_state(self, state: str) -> None:
        of_run = {"submission": self.status.submission, "attempt": self.status.attempt}
        self.event({"type": "state", "state": state, **of_run, **self._names})

    async def room(self) -> None:
        """Waits while many lines wait for a disk. Briefly, and once for one that takes nothing: agents report more."""
        before, deadline = self._appended, time.monotonic() + ROOM_TIMEOUT()
        while self._queued - self._appended > MOST_QUEUED / 2 and self._appended != self._stuck_at:
            if time.monotonic() >= deadline:
                self._stuck_at = before
                break
            await asyncio.sleep(bounds.POLL_INTERVAL_BRIEF)

    def _append(self, lines: _Lines, texts: list[str]) -> None:
        """Appends lines in a thread, since a disk may hang. Those that then find no room are lost."""
        size = sum(map(len, texts))
        if self._queued - self._appended + size > MOST_QUEUED:
            logger.warning("%d lines are lost: the disk of the run directory does not take them", len(texts))
            return
        self._queued += size

        def append() -> None:
            lines.append(texts)
            self._appended += size

        self._thread.submit(append)

    def event(self, event: dict[str, Any]) -> None:
        """Appends an event to the event log."""
        self._append(self._events, [json.dumps({"time": time.time(), **event})])

    def metrics(self, rank: int, rows: list[tuple[dict[str, Any], float]]) -> None:
        """Appends a rank's reported metrics with their times; rank 0's last values go into the status."""
        events = [{"time": when, "type": "metric", "rank": rank, "metrics": metrics} for metrics, when in rows]
        self._append(self._events, [json.dumps(event) for event in events])
        if rank == 0:
            last = dict(self.status.metrics)
            counts = Counter(name.startswith(CHECK_PREFIX) for name in last)
            for name, value in itertools.chain.from_iterable(metrics.items() for metrics, _ in rows):
                if name not in last:
                    if counts[name.startswith(CHECK_PREFIX)] >= MOST_METRICS:
                        continue
                    counts[name.startswith(CHECK_PREFIX)] += 1
                last[name] = value
            self._writer.note(metrics=last)

    def log(self, rank: int, lines: list[str]) -> None:
        """Appends lines of a rank, with the current time and the run's secrets masked."""
        lines = self.mask.lines(lines)
        self._append(self._lines, [f"[{rank}] {line}" for line in stamped(lines, time.time())])

    def finish(self, **changes: Any) -> None:
        """Closes the files, then writes the final status: a reader who sees it sees everything.

        An unreachable object store gets `STORE_OUTAGE` seconds to take the last lines.

        Raises:
            ResultError: the store refused the final status for `STORE_OUTAGE` seconds.
        """
        self._note_state(changes["state"])
        self.note_phase("final")

        def close() -> None:
            for lines in (self._events, self._lines):
                lines.close()

        wait([self._thread.submit(close)], STORE_OUTAGE())
        self._thread.end()
        self._finished.set()
        if self._own.is_remote:
            if not self._flusher.ident:
                self._flusher.start()
            self._flusher.join(STORE_OUTAGE())
            if self._flusher.is_alive():
                logger.warning("lines are lost: the store has not taken them for %g s", STORE_OUTAGE())
        ended = max(time.time(), self.status.started or 0.0)
        written = self._writer.change(**changes, **self._progress(), ended=ended)
        if not wait([written], STORE_OUTAGE()).done:
            problem = self._writer.problem
            what = f"the run ended as {changes['state']}, but its status could not be written"
            raise ResultError(f"{what}: {problem or 'the store does not answer'}") from problem


class _Lines:
    """A growing file that survives a full disk: refused lines are counted, and reported when there is room again."""

    def __init__(self, appender: Appender | PieceWriter) -> None:
        self._appender = appender
        self._lost = 0

    def append(self, lines: list[str]) -> None:
        note = stamped([f"rankzero: {self._lost} lines could not be written here"] if self._lost else [], time.time())
        try:
            self._appender.append([*note, *lines])
            self._lost = 0
        except Exception as error:
            if not self._lost:
                logger.warning("lines are lost: %s", error)
            self._lost += len(lines)

    def close(self) -> None:
        try:
            if self._lost:
                self.append([])
            if isinstance(self._appender, Appender):
                self._appender.close()
        except Exception as error:
            logger.warning("lines are lost: %s", error)


class StatusWriter:
    """Keeps the status, and writes it when it has changed and with every heartbeat; creates the end once it is certain.

    A driver that was stopped or cut off may have been replaced. So it reads the end of its submission before each
    heartbeat, and before it creates the end itself.

    Writes are asynchronous, so neither a slow store nor a large result makes a live driver look dead or blocks it.
    Writes are sequential, so none overtakes a later one. A refused write is repeated with the next heartbeat.
    """

    def __init__(self, own: Submission, status: RunStatus) -> None:
        """Prepares the thread, which the first `change` starts.

        Args:
            own: The submission.
            status: The first status.
        """
        self._own = own
        self._end: RunStatus | None = None
        self._changed = threading.Condition()
        self._has_changed = False
        self._unwritten: list[Future[None]] = []
        self._thread = threading.Thread(target=self._work, name="rankzero-heartbeat", daemon=True)
        self.status = status
        self.superseded = False
        """True if another process has ended the submission, or removed the run."""
        self.problem: Exception | None = None
        """The error of the last write; None if it succeeded."""

    @property
    def has_end(self) -> bool:
        """True once the submission has an end."""
        return self._end is not None

    def note(self, **changes: Any) -> None:
        """Changes the status, which the next heartbeat writes."""
        with self._changed:
            self.status = replace(self.status, **changes)

    def change(self, **changes: Any) -> Future[None]:
        """Changes the status and writes it immediately. No write follows a final status.

        Args:
            changes: New values of fields of the status.

        Returns:
            A future that completes once the change is written.
        """
        written: Future[None] = Future()
        with self._changed:
            self.status = replace(self.status, **changes)
            self._has_changed = True
            self._unwritten.append(written)
            self._changed.notify_all()
        if not self._thread.ident:
            self._thread.start()
        return written

    def _work(self) -> None:
        next_beat, checked_at = time.monotonic() + self._beat_interval(), time.time()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_changed, max(0.0, next_beat - time.monotonic()))
                self._has_changed, due = False, list(self._unwritten)
                status = self.status = replace(self.status, heartbeat=time.time())
            try:
                # Wall-clock time, since it also advances while a machine sleeps. It may also be set back.
                is_due = not 0 <= time.time() - checked_at < DRIVER_DEAD_AFTER()
                if not self._own.is_remote or is_due:
                    self.superseded = self.superseded or self._own.is_lost()
                    # Each check is a request to an object store, and no driver is replaced sooner while it writes.
                    checked_at = time.time()
                status = self._with_end(status)
                # Of a run that was removed nothing is written again.
                if not self.superseded or self._end or self._own.end():
                    self._own.write_status(status)
            except Exception as error:
                # Drivers of object stores raise exceptions of their own types.
                if self.problem is None:
                    logger.warning("the status could not be written: %s: %s; trying again", type(error).__name__, error)
                self.problem = error
                next_beat = time.monotonic() + (OUTCOME_RETRY_INTERVAL() if status.certain else self._beat_interval())
                continue
            self.problem = None
            next_beat = time.monotonic() + self._beat_interval()
            with self._changed:
                del self._unwritten[: len(due)]
            for written in due:
                written.set_result(None)
            if status.final:
                return

    def _beat_interval(self) -> float:
        """Returns the seconds between heartbeats, longer on an object store, where writes of lines carry most."""
        return self.status.interval + (HEARTBEAT_DELAY if self._own.is_remote else 0.0)

    def _with_end(self, status: RunStatus) -> RunStatus:
        """Returns the status to write; if it is certain, with the end that counts, which is created if necessary."""
        if not status.certain:
            return status
        if self._end is None and not (self.superseded and self._own.end() is None):
            self._end = self._own.finish(status if status.final else replace(status, state="succeeded"))
            self.superseded = self._end.ended_by != self._own.me
        if not (status.final and self._end):
            return status
        end = self._end
        status = replace(status, state=end.state, error=end.error, ended_by=end.ended_by)
        return replace(status, result=end.result, value=end.value)
