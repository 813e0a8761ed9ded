"""`run_inline`: a training function with rank 0 in this thread, where breakpoints work and coverage counts."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankzero import bounds
from rankzero.errors import InvalidJobError, WorkerFailedError
from rankzero.testing import rank as ranks
from rankzero.worker.failures import describe

if TYPE_CHECKING:
    from rankzero.train.checkpoint import Checkpoint

HOST = "127.0.0.1"


@dataclass(frozen=True)
class InlineRun:
    """Result of a training function under `run_inline`.

    Attributes:
        value: The object that rank 0 returned, or gave to `rankzero.train.set_result`.
        values: Return values of the ranks, by rank.
        metrics: A row for each report of a rank: ``rank``, ``time`` and the metrics.
        checkpoint: Last checkpoint that rank 0 reported, as a new attempt would get it; None if there is none.
    """

    value: Any
    values: list[Any]
    metrics: list[dict[str, Any]]
    checkpoint: Checkpoint | None = field(default=None, repr=False)
    _home: Any = field(default=None, repr=False, compare=False)


def run_inline(
    train: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    world_size: int = 1,
    checkpoint: object = None,
    env: Mapping[str, str] | None = None,
) -> InlineRun:
    """Calls a training function as ranks of a run do, with rank 0 in this thread.

    Nothing is pickled for rank 0, and its exceptions are raised unchanged, so breakpoints work and coverage counts its
    lines. The other ranks are processes of this machine, which connect to rank 0 by the same environment variables as
    in a run, on CPUs, with gloo. The environment of this process and `rankzero.train` are restored afterwards.
    When another rank fails, rank 0's wait for it in torch.distributed ends, and the remaining ranks are killed.

    Args:
        train: The function.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
        world_size: Number of ranks. With more than one the function must be picklable by cloudpickle.
        checkpoint: Checkpoint that `rankzero.train.get_checkpoint` returns: a directory or a dict, as for
            `rankzero.train.report`.
        env: Environment variables for the ranks.

    Returns:
        An `InlineRun`.

    Raises:
        InvalidJobError: ``world_size`` is not a positive number.
        WorkerFailedError: another rank failed first.
        Exception: the exception that rank 0 raised.

    Example:
        >>> import torch
        >>> import rankzero.train as rt
        >>> from rankzero.testing import run_inline
        >>> def train(lr: float) -> float:
        ...     rt.report({"loss": lr}, checkpoint={"weight": torch.ones(1)})
        ...     return lr * 2
        >>> run = run_inline(train, (0.5,))
        >>> run.value, run.metrics[0]["loss"], run.checkpoint.load()["weight"]
        (1.0, 0.5, tensor([1.]))
    """
    if type(world_size) is not int or world_size < 1:
        raise InvalidJobError(f"world_size is {world_size!r}; it must be a positive integer")
    import torch.distributed as dist

    home = tempfile.TemporaryDirectory(prefix="rankzero-inline-", ignore_cleanup_errors=True)
    seeded = ranks.seed_checkpoint(home.name, checkpoint) if checkpoint is not None else None
    # This process keeps the store open, so that no rank has to guess a free port.
    store: list[Any] = [dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)]  # type: ignore[attr-defined]
    common = {
        **dict(env or {}),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store[0].port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"inline-{secrets.token_hex(4)}",
    }
    try:
        peers = _Peers(home.name, world_size, common, (train, args, dict(kwargs or {})), seeded)
    except BaseException:
        home.cleanup()
        raise
    had_group, found = dist.is_initialized(), []
    try:
        with _environment({**common, "RANK": "0", "LOCAL_RANK": "0"}), peers.watched(store):
            outcome = ranks.call(0, world_size, home.name, seeded, lambda: train(*args, **dict(kwargs or {})))
    except BaseException as error:
        if not (had_group or dist.is_initialized()):
            _count_groups_anew()
        if isinstance(error, Exception) and (failure := peers.failure_behind(error)):
            raise failure from error
        raise
    else:
        found = [outcome, *peers.outcomes()]
    finally:
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()
        peers.kill()
        store.clear()
        if not found:
            # The exception's traceback would keep it.
            home.cleanup()
    metrics = sorted((row for one in found for row in one.metrics), key=lambda row: row["time"])
    return InlineRun(outcome.value, [one.value for one in found], metrics, outcome.checkpoint, home)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _count_groups_anew() -> None:
    """A group that could not be made has had a number, and the next one would wait under another than the others'."""
    import torch.distributed as dist

    alone: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
    dist.destroy_process_group()


class _Peers:
    """The ranks but 0, each a process of its own that ends with this one."""

    def __init__(
        self,
        home: str,
        world_size: int,
        common: Mapping[str, str],
        call: tuple[Any, ...],
        seeded: dict[str, Any] | None,
    ) -> None:
        self._home = home
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._first: WorkerFailedError | None = None
        if world_size == 1:
            return
        payload = os.path.join(home, "payload.pkl")
        with open(payload, "wb") as file:
            ranks.dump(call, file)
        path = os.pathsep.join(filter(None, sys.path))
        for rank in range(1, world_size):
            start = {"rank": rank, "world_size": world_size, "home": home, "payload": payload, "seeded": seeded}
            # A rank that is killed leaves files where they are removed with the run.
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": path, "RANKZERO_SCRATCH": home}
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-c", "from rankzero.testing.rank import main; main()", json.dumps(start)],
                stdin=subprocess.PIPE,
                env={**os.environ, **common, **own},
            )

    @contextlib.contextmanager
    def watched(self, store: list[Any]) -> Iterator[None]:
        """Ends rank 0's waits for the others once one has failed: before they have a group, nothing else would.

        Args:
            store: Where they meet; emptied then.
        """
        is_over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(store, is_over), name="rankzero-inline", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()

    def _watch(self, store: list[Any], is_over: threading.Event) -> None:
        while not self._first:
            if is_over.wait(bounds.POLL_INTERVAL):
                return
            self._first = self.failure()
        # torch would retry a closed store until the group's timeout, so a rank 0 that connects later gets no address.
        os.environ.pop("MASTER_PORT", None)
        if not is_over.wait(bounds.INLINE_ARRIVAL_TIMEOUT):
            # This is the last reference, so the store is closed.
            store.clear()
            for process in self._processes.values():
                process.kill()

    def outcomes(self) -> list[ranks.Outcome]:
        """Returns the outcomes of the ranks; raises WorkerFailedError for the rank that failed first."""
        for process in self._processes.values():
            if process.stdin:
                process.stdin.close()
        for rank, process in self._processes.items():
            try:
                process.wait(bounds.INLINE_PEER_TIMEOUT)
            except subprocess.TimeoutExpired:
                what = f"rank {rank} has not ended {bounds.INLINE_PEER_TIMEOUT:g} s after rank 0"
                raise self.failure() or WorkerFailedError(what, rank=rank, host=HOST) from None
        if failure := self.failure():
            raise failure
        return [ranks.read_outcome(self._home, rank) for rank in self._processes]

    def failure(self) -> WorkerFailedError | None:
        """Returns the error of the rank that failed first or was killed; None if none has failed."""
        if self._first:
            # Later failures are of ranks that were killed because of it.
            return self._first
        # Before the files: a rank writes its failure before it exits.
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        failures = [ranks.read_failure(self._home, rank) for rank in self._processes]
        known = sorted((one for one in failures if one), key=lambda one: one["time"])
        if known:
            first = known[0]
            text = f"rank {first['rank']} failed: {first['exception_type']}: {first['message']}\n{first['traceback']}"
            facts = {name: first[name] for name in ("rank", "exception_type", "traceback")}
            return WorkerFailedError(text, host=HOST, **facts)
        for rank, code in codes.items():
            if code:
                return WorkerFailedError(f"rank {rank} ended with code {code}", rank=rank, host=HOST, exit_code=code)
        return None

    def failure_behind(self, error: Exception) -> WorkerFailedError | None:
        """Returns the failure that caused an error of rank 0, which may see a broken collective before its cause."""
        deadline = time.monotonic() + (bounds.CAUSE_WINDOW if describe(error).collateral else 0.0)
        while True:
            # Before the failures are read: a rank writes its own before it exits.
            has_ended = all(process.poll() is not None for process in self._processes.values())
            if (found := self.failure()) or has_ended or time.monotonic() >= deadline:
                return found
            time.sleep(bounds.POLL_INTERVAL)

    def kill(self) -> None:
        """Ends those that live."""
        for process in self._processes.values():
            process.kill()
            process.wait()
            if process.stdin:
                process.stdin.close()
