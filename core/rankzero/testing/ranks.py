"""The ranks of `run_inline`: rank 0 in the caller's thread, the others in processes of `rankzero.worker`.

Parts of `rankzero.driver` commit the checkpoints of all ranks and find the first cause of a failure, as in a run. Only
the way of the messages is another one: a call for rank 0, a socket for each other rank.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rankzero import bounds
from rankzero.agent.ranks import rank_environment
from rankzero.channel import frames, messages
from rankzero.driver.commits import Committer
from rankzero.driver.ending import Facts, Failure, first_cause, is_conclusive
from rankzero.driver.storage import Storage
from rankzero.engines.local import LOOPBACK
from rankzero.errors import WorkerFailedError
from rankzero.job import CheckpointConfig
from rankzero.run.directory import RunDirectory
from rankzero.submit.payload import build
from rankzero.train import context
from rankzero.train.parts import Parts
from rankzero.train.writer import CheckpointWriter
from rankzero.worker.failures import describe
from rankzero.worker.rendezvous import PATCH_TORCH

_MAIN = "import json, sys; from rankzero.worker.main import main; main(*map(json.loads, sys.argv[1:]))"


class Ranks:
    """The ranks of one call, and what agent and driver do for them in a run."""

    def __init__(self, home: str, world_size: int, env: dict[str, str], attempt: int) -> None:
        import torch.distributed as dist

        self._home, self._env, self._attempt = home, env, attempt
        # This process keeps the store open, so that no rank has to guess a free port.
        self._store: Any = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._peers: dict[int, tuple[subprocess.Popen[bytes], socket.socket, threading.Thread]] = {}
        self._is_over = False
        self._changed = threading.Condition()
        self.metrics: list[dict[str, Any]] = []
        run = RunDirectory(home)
        self._facts = Facts(world_size, home)
        self._committer = Committer(run, attempt, world_size, CheckpointConfig(), 0, wake=self._send_settled)
        self._storage = Storage(run, attempt, self._committer, self._facts)
        resumed = self._committer.newest()
        self._resumed = resumed.for_ranks(range(world_size)) if resumed else None
        self._parts = Parts(self._start_of(0), _no_fetch)
        self.writer = CheckpointWriter(self._parts, attempt, 0, world_size, functools.partial(self._on_message, 0))

    def _start_of(self, rank: int) -> messages.Start:
        """Returns the work of a rank, with its environment variables."""
        size, home, attempt = self._facts.num_processes, self._home, self._attempt
        world = vars(context.TrainContext(rank, size, rank, size, 0, "inline", attempt, False, "gloo", home))
        config = {"scratch": home, "host": LOOPBACK, "env": self._env, "restart_count": attempt, "max_restarts": 0}
        meeting = {
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return messages.Start(
            run_directory=home,
            run_token="",
            shared=True,
            scratch=home,
            payload=os.path.join(home, "payload.pkl"),
            beat_interval=bounds.HEARTBEAT_INTERVAL,
            context=world,
            env={**self._env, **rank_environment(world, config), **meeting},
            checkpoint=self._resumed,
        )

    def call(self, train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Starts the other ranks, and calls the function as rank 0.

        Raises:
            WorkerFailedError: the failure of another rank caused that of rank 0.
            Exception: the exception that rank 0 raised.
        """
        start = self._start_of(0)
        if start.checkpoint:
            self.writer.committed(start.checkpoint)
        world = context.TrainContext(**start.context)
        session = context.Session(world, self._on_report, self.writer, None, self._home, self._parts)
        before = context.install(session)
        with _environment(start.env):
            try:
                self._start_peers(train, args, kwargs)
                value = train(*args, **kwargs)
                for function in session.at_return:
                    function()
                self.writer.finish()
            except Exception as error:
                self._on_message(0, describe(error))
                self._raise_cause(error)
                raise
            finally:
                context.install(before)
                with self._changed:
                    self._is_over = True
        return session.result if value is None else value

    def _start_peers(self, train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Starts the other ranks, each a process of its own that ends with this one."""
        if self._facts.num_processes == 1:
            return
        payload = build(functools.partial(_call_and_keep, train, self._home), args, kwargs)
        Path(self._start_of(0).payload).write_bytes(b"".join(payload.data))
        for rank in range(1, self._facts.num_processes):
            start = self._start_of(rank)
            # Process groups as rank 0 has them, which has torch's own.
            more = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), PATCH_TORCH: "0"}
            connection, theirs = socket.socketpair()
            with theirs, open(os.devnull, "w") as stacks:
                fds = [theirs.fileno(), stacks.fileno()]
                line = map(str, (*fds, os.getpid(), bounds.INLINE_EXIT_TIMEOUT))
                command, env = [sys.executable, "-c", _MAIN, *line], {**os.environ, **start.env, **more}
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, env=env)
            listener = threading.Thread(target=self._listen, args=(rank, process, connection), daemon=True)
            with self._changed:
                self._peers[rank] = process, connection, listener
            listener.start()
            self._send(rank, start)
            self._send(rank, messages.Go([LOOPBACK], self._store.port, one_host=True))

    def finish(self) -> list[Any]:
        """Waits for the end of the other ranks and of all commits; returns the values of the other ranks."""
        facts, bound = self._facts, bounds.INLINE_PEER_TIMEOUT
        self._on_message(0, messages.Finished(time.time()))
        with self._changed:
            self._changed.wait_for(lambda: facts.failures or len(facts.finished) == facts.num_processes, bound)
        late = self._peers.keys() - facts.finished
        if late and not facts.failures:
            what = f"has not ended {bound:g} s after rank 0"
            self._on_message(min(late), messages.Failed(time.time(), message=what))
        if facts.failures:
            self._raise_cause()
        self._broadcast(messages.End())
        for _, _, listener in self._peers.values():
            listener.join(bound)
        self._committer.close(bound)
        if facts.refusal:
            raise facts.refusal
        return [pickle.loads(_value(self._home, rank).read_bytes()) for rank in self._peers]

    def _raise_cause(self, error: Exception | None = None) -> None:
        """Raises WorkerFailedError if the failure that came first is another rank's; ``error`` is that of rank 0."""
        failures = self._facts.failures
        with self._changed:
            self._changed.wait_for(lambda: is_conclusive(failures, 0.0), bounds.CAUSE_WINDOW)
            cause = first_cause(failures)
        report = cause.report
        if cause.rank == 0:
            return
        what = f"failed: {cause.headline}\n{report.traceback}" if report.exception_type else cause.headline
        facts = {name: getattr(report, name) for name in ("exception_type", "traceback", "exit_code")}
        raise WorkerFailedError(f"rank {cause.rank} {what}", rank=cause.rank, host=LOOPBACK, **facts) from error

    def close(self) -> None:
        """Kills the processes that live."""
        self._kill()
        for _, connection, listener in self._peers.values():
            listener.join()
            connection.close()
        self._committer.close(0.0)

    def _kill(self) -> None:
        with self._changed:
            # Their ends are no failures.
            self._facts.over.update(self._peers)
            for process, _, _ in self._peers.values():
                process.kill()
            # The last reference, so the store is closed.
            self._store = None

    # -- messages ---------------------------------------------------------------------------------

    def _listen(self, rank: int, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        decoder = frames.Decoder()
        decoder.trust(None)
        with contextlib.suppress(OSError):
            while data := connection.recv(frames.CHUNK):
                decoder.feed(data)
                for message in decoder:
                    assert isinstance(message, dict)
                    self._on_message(rank, messages.decode(message))
        code = process.wait()
        if rank not in self._facts.over:
            self._on_message(rank, messages.Failed(time.time(), message=f"ended with code {code}", exit_code=code))

    def _on_report(self, row: str) -> None:
        self._on_message(0, messages.Metrics([json.loads(row)]))

    def _on_message(self, rank: int, message: messages.Message) -> None:
        """Handles a message of a rank as the driver does."""
        with self._changed:
            match message:
                case messages.Metrics():
                    self.metrics += ({"rank": rank, "time": when, **values} for values, when in message.rows)
                case messages.PartKind():
                    self._storage.note_kind(rank, sharded=message.sharded)
                case messages.Part():
                    self._storage.add_part(rank, 0, message)
                case messages.PartFailed():
                    self._committer.drop(message.index)
                case messages.Finished():
                    self._facts.over.add(rank)
                    self._storage.finish(rank, 0, message, {})
                    if rank == 0 and not self.writer.is_sharded:
                        self._committer.note_last()
                case messages.Failed():
                    self._facts.over.add(rank)
                    failure = Failure(rank, LOOPBACK, message, order=len(self._facts.failures))
                    self._facts.note_failure(failure, time.monotonic())
                    if rank and not self._is_over:
                        self._end_waits()
            self._send_settled()
            self._changed.notify_all()

    def _end_waits(self) -> None:
        """Ends rank 0's waits for the others once one has failed: before they have a group, nothing else would."""
        # torch would retry a closed store until the group's timeout, so a rank 0 that connects later gets no address.
        os.environ.pop("MASTER_PORT", None)

        def end() -> None:
            with self._changed:
                if not self._is_over:
                    self._kill()

        threading.Timer(bounds.INLINE_ARRIVAL_TIMEOUT, end).start()

    def _send_settled(self, _: object = None) -> None:
        """Sends the ranks which checkpoints are committed, and which are lost."""
        with self._changed:
            for settled in self._committer.settled():
                if isinstance(settled, int):
                    self._broadcast(messages.NotCommitted(settled))
                else:
                    self._broadcast(messages.Committed(settled.for_ranks(range(self._facts.num_processes))))

    def _broadcast(self, message: messages.Message) -> None:
        self.writer.on_message(message)
        for rank in self._peers:
            self._send(rank, message)

    def _send(self, rank: int, message: messages.Message) -> None:
        # The process may have ended.
        with contextlib.suppress(OSError):
            self._peers[rank][1].sendall(frames.encode(messages.encode(message)))


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


def _call_and_keep(train: Callable[..., Any], folder: str, /, *args: Any, **kwargs: Any) -> Any:
    """Calls the function in a process of its own, and writes its value for `InlineRun.values`."""
    import cloudpickle

    value = None
    try:
        value = train(*args, **kwargs)
    finally:
        # As in a run, a rank that exits with code 0 has succeeded.
        _value(folder, context.get_context().rank).write_bytes(cloudpickle.dumps(value))
    return value


def _value(folder: str, rank: int) -> Path:
    return Path(folder, f"value-{rank}.pkl")


def _no_fetch(name: str) -> str:
    raise FileNotFoundError(f"{name}: an inline run has no driver to fetch from")
