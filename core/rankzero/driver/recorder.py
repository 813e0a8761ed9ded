"""`Recorder`: everything the driver writes into the run directory."""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from rankzero import bounds, store
from rankzero.bounds import DRIVER_DEAD_AFTER, HEARTBEAT_INTERVAL, STORE_OUTAGE
from rankzero.errors import ResultError
from rankzero.host.processes import process_namespace, process_start
from rankzero.masking import Mask
from rankzero.run.directory import EVENTS, LINES, Submission
from rankzero.run.lines import Appender, PieceWriter, stamped
from rankzero.run.reports import CHECK_PREFIX, MOST_METRICS
from rankzero.run.status import RunStatus, pace
from rankzero.threads import ActionThread

OUTCOME_RETRY_INTERVAL = bounds.scaled(0.25)  # Between two writes of a status whose outcome is certain
HEARTBEAT_DELAY = 1.0  # Seconds for a write of lines to an object store to carry the heartbeat
MOST_QUEUED = 32 << 20  # Characters of lines that wait for a disk; later ones are lost
logger = logging.getLogger(__name__)


class Recorder:
    """Writes status, events and lines of one submission of a run; creates its end once that is certain.

    The driver's thread uses it and never waits for a store. One thread writes the status, when it has changed and with
    every heartbeat, so no write overtakes a later one; others write lines. A store that refuses writes, such as a full
    disk, does not end the training: lines are counted as lost, and the status is written again later.

    A driver that was stopped or cut off may have been replaced. So the end of the submission is read before each
    heartbeat, and before it is created.

    Attributes:
        mask: Hides the secrets of the run.
        status: The current state of the run, which may not be written yet.
        superseded: True if another process has ended the submission, or removed the run.
        end: How the submission has ended; None before that.
    """

    def __init__(self, own: Submission, mask: Mask) -> None:
        """Prepares the files of a submission; nothing is written yet."""
        self._own, self.mask, job = own, mask, own.job
        self.status = RunStatus(
            attempt=job.first_attempt,
            submission=job.submission,
            metrics=dict(job.metrics),
            driver_host=socket.gethostname(),
            driver_pid=os.getpid(),
            driver_namespace=process_namespace(),
            driver_start=process_start(os.getpid()),
            interval=pace(0.0) if own.is_remote else HEARTBEAT_INTERVAL,
        )
        self.superseded = False
        self.end: RunStatus | None = None
        self._problem: Exception | None = None
        self._changed = threading.Condition()
        self._has_changed = self._drives = False
        self._unwritten: list[Future[None]] = []
        self._writing = threading.Thread(target=self._work, name="rankzero-heartbeat", daemon=True)
        self._checked_at = time.time()
        self._streams = {name: PieceWriter(own.path(name)) for name in (EVENTS, LINES) if own.is_remote}
        self._files = {name: Appender(own.path(name)) for name in (EVENTS, LINES) if not own.is_remote}
        self._appending = ActionThread("rankzero-lines")
        # Each is changed by one thread alone.
        self._queued = self._appended = self._lost = 0
        self._started = self._phase_at = time.monotonic()
        self._finished = threading.Event()
        self._flusher = threading.Thread(target=self._flush, name="rankzero-flush", daemon=True)

    def note(self, **changes: Any) -> None:
        """Changes the status, which the next heartbeat writes."""
        with self._changed:
            self.status = replace(self.status, **changes)

    def update(self, **changes: Any) -> Future[None]:
        """Changes the status and writes it immediately; a change of state is an event, too.

        Returns:
            A future that completes once the change is written. No write follows a final status.
        """
        written: Future[None] = Future()
        with self._changed:
            before = self.status
            status = self.status = replace(before, **changes)
            self._has_changed = True
            self._unwritten.append(written)
            self._changed.notify_all()
        if not self._writing.ident:
            self._writing.start()
            if self._own.is_remote and not self._flusher.ident:
                self._flusher.start()
        # `finish` notes the final state before it closes the files.
        if (status.state, status.attempt) != (before.state, before.attempt) and not status.final:
            self._note_state(status.state)
        return written

    def _work(self) -> None:
        pause = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_changed, pause)
                self._has_changed, due = False, list(self._unwritten)
                status = self.status = replace(self.status, heartbeat=time.time())
            # On an object store, writes of lines carry most heartbeats.
            pause = self.status.interval + (HEARTBEAT_DELAY if self._own.is_remote else 0.0)
            try:
                status = self._write(status)
            except Exception as error:
                # Drivers of object stores raise exceptions of their own types.
                if self._problem is None:
                    logger.warning("the status could not be written: %s: %s; trying again", type(error).__name__, error)
                self._problem = error
                pause = OUTCOME_RETRY_INTERVAL() if status.certain else pause
                continue
            self._problem = None
            with self._changed:
                del self._unwritten[: len(due)]
            for written in due:
                written.set_result(None)
            if status.final:
                return

    def _write(self, status: RunStatus) -> RunStatus:
        """Writes the status and returns it; if it is certain, with the end that counts, which is created if needed."""
        # Wall-clock time, since it also advances while a machine sleeps. It may also be set back.
        is_due = not 0 <= time.time() - self._checked_at < DRIVER_DEAD_AFTER()
        # Each check is a request to an object store, and no driver is replaced sooner while it writes.
        if not self._own.is_remote or is_due:
            self.superseded = self.superseded or self._own.is_lost()
            self._checked_at = time.time()
        if status.certain and self.end is None and not (self.superseded and self._own.end() is None):
            self.end = self._own.finish(status if status.final else replace(status, state="succeeded"))
            self.superseded = self.end.ended_by != self._own.me
        if status.final and (end := self.end):
            status = replace(status, state=end.state, error=end.error, ended_by=end.ended_by)
            status = replace(status, result=end.result, value=end.value)
        # Of a run that was removed nothing is written again.
        if not self.superseded or self.end or self._own.end():
            self._own.write_status(status)
        return status

    def _note_state(self, state: str) -> None:
        of_run = {"submission": self.status.submission, "attempt": self.status.attempt, "run_id": self._own.job.run_id}
        self.event({"type": "state", "state": state, **of_run})

    def note_thread(self) -> None:
        """Records whether the driver is a thread of its caller's process, which may outlive it."""
        self._drives = True
        self.note(driver_thread=threading.current_thread() is not threading.main_thread())

    def note_cancelling(self) -> None:
        """Records that the run is about to be cancelled, so that no other try attaches to it while its ranks stop."""
        # A success stands, whatever the driver is asked for behind it. Before `note_thread`, another process may drive.
        if self._drives and not (self.status.cancelling or self.status.certain):
            self.update(cancelling=True)

    def note_phase(self, phase: str) -> None:
        """Records the state of the attempt, which the next write of the status has."""
        self._phase_at = time.monotonic()
        self.note(phase=phase)

    def note_waiting(self, what: str) -> None:
        """Announces what the run waits for, if its phase has lasted for long, and repeats that now and then."""
        if time.monotonic() - self._phase_at > bounds.WAITING_INTERVAL():
            self._phase_at = time.monotonic()
            self.announce("waiting", what)

    def announce(self, kind: str, what: str, **facts: Any) -> None:
        """Records an event whose text followers of the run also see among the lines of rank 0."""
        logger.info("%s", what)
        self.event({"type": kind, **facts, "what": what})
        self.log(0, [f"rankzero: {what}"])

    def _flush(self) -> None:
        """Writes pieces to an object store, as the only thread: of two writes of one piece, the older might win."""
        has_failed = False
        while not (self._finished.wait(self.status.interval) or self.superseded):
            try:
                for stream in self._streams.values():
                    stream.flush()
                has_failed = False
            except Exception as error:
                if not has_failed:
                    logger.warning("lines wait for the store: %s", error)
                has_failed = True
            # This also writes a heartbeat and the position up to which followers may read.
            self.update(**self._progress())
        try:
            pause = bounds.WRITE_RETRY_INTERVAL()
            for stream in self._streams.values():
                store.patiently(stream.flush, STORE_OUTAGE(), pause, lambda _: self.superseded)
        except Exception as error:
            logger.warning("lines are lost: %s", error)

    def _progress(self) -> dict[str, Any]:
        """Returns up to where an object store has lines, and the seconds until the next ones."""
        written = {name: stream.written for name, stream in self._streams.items()}
        return {"written": written, "interval": pace(time.monotonic() - self._started)}

    def _append(self, name: str, texts: list[str]) -> None:
        """Appends lines in a thread, since a disk may hang, or be full: lines of ranks that find no room are lost."""
        size, dropped = sum(map(len, texts)), 0
        # Events are few, and what shows a run needs all of them.
        if name == LINES and self._queued - self._appended + size > MOST_QUEUED:
            logger.warning("%d lines are lost: the disk of the run directory does not take them", len(texts))
            texts, size, dropped = [], 0, len(texts)
        self._queued += size

        def append() -> None:
            self._lost += dropped
            is_told = bool(self._lost) and name == LINES and not dropped
            note = [f"rankzero: {self._lost} lines could not be written here"] if is_told else []
            try:
                if note or texts:
                    (self._streams.get(name) or self._files[name]).append(stamped(note, time.time()) + texts)
                self._lost = 0 if is_told else self._lost
            except Exception as error:
                if not self._lost:
                    logger.warning("lines are lost: %s", error)
                self._lost += len(texts)
            self._appended += size

        self._appending.submit(append)

    def event(self, event: dict[str, Any]) -> None:
        """Appends an event to the event log."""
        self._append(EVENTS, [json.dumps({"time": time.time(), **event})])

    def metrics(self, rank: int, rows: list[tuple[dict[str, Any], float]]) -> None:
        """Appends a rank's reported metrics with their times; rank 0's last values go into the status."""
        events = [{"time": when, "type": "metric", "rank": rank, "metrics": metrics} for metrics, when in rows]
        self._append(EVENTS, [json.dumps(event) for event in events])
        if rank == 0:
            last = dict(self.status.metrics)
            for name, value in itertools.chain.from_iterable(metrics.items() for metrics, _ in rows):
                # Checks of an orchestrator have room behind all others.
                most = MOST_METRICS * (2 if name.startswith(CHECK_PREFIX) else 1)
                if name in last or len(last) < most:
                    last[name] = value
            self.note(metrics=last)

    def log(self, rank: int, lines: list[str]) -> None:
        """Appends lines of a rank, with the current time and the run's secrets masked."""
        lines = self.mask.facts(lines)
        self._append(LINES, [f"[{rank}] {line}" for line in stamped(lines, time.time())])

    def finish(self, **changes: Any) -> None:
        """Closes the files, then writes the final status: a reader who sees it sees everything.

        An unreachable object store gets `STORE_OUTAGE` seconds to take the last lines.

        Raises:
            ResultError: the store refused the final status for `STORE_OUTAGE` seconds.
        """
        self._note_state(changes["state"])
        self.note_phase("final")
        self._append(LINES, [])

        for file in self._files.values():
            self._appending.submit(file.close)
        self._appending.end(STORE_OUTAGE())
        self._finished.set()
        progress = {}
        if self._own.is_remote:
            if not self._flusher.ident:
                self._flusher.start()
            self._flusher.join(STORE_OUTAGE())
            if self._flusher.is_alive():
                logger.warning("lines are lost: the store has not taken them for %g s", STORE_OUTAGE())
            progress = self._progress()
        ended = max(time.time(), self.status.started or 0.0)
        written = self.update(**changes, **progress, ended=ended)
        if not wait([written], STORE_OUTAGE()).done:
            problem = self._problem
            what = f"the run ended as {changes['state']}, but its status could not be written"
            raise ResultError(f"{what}: {problem or 'the store does not answer'}") from problem
