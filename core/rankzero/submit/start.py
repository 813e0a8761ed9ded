"""Submits a run id: exactly one submitter starts the run, and others attach to it.

Code and arguments are packed first, since files may change meanwhile. Then it is decided what becomes of an existing
run; rows of DataFrames are computed only if the training starts or resumes. A submitter writes the files of its
submission into a folder that no other one has, then creates the job, which is the claim of its number: of two
submitters one wins, and the other looks again. One that dies before that leaves garbage; behind it, the run counts as
one whose driver died as soon as a heartbeat is overdue or its owner has exited.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rankzero import job as jobs
from rankzero import store
from rankzero.data.manifest import FILE, to_bytes
from rankzero.engines.base import Engine
from rankzero.errors import EngineError, InvalidJobError, RankZeroError, RunCancelledError, RunNotFoundError, located
from rankzero.host.processes import describe_process
from rankzero.job import Job
from rankzero.kinds import NumProcesses
from rankzero.run.directory import RunDirectory, Submission
from rankzero.run.identity import DATASET, Decision, compare, digest_of_parts
from rankzero.run.tries import PipelineTry
from rankzero.submit import datasets, existing, pack
from rankzero.submit.code_files import UserCode
from rankzero.submit.existing import Existing
from rankzero.submit.training import params_of
from rankzero.threads import in_thread
from rankzero.values.formats import digest_of
from rankzero.values.pickled import Part
from rankzero.values.ref import ResultRef

logger = logging.getLogger(__name__)

_RECORD_TIMEOUT = 4.0  # Seconds in which a caller that was interrupted before its driver has begun records this


@dataclass(frozen=True)
class Request:
    """The configuration of a launcher, independent of the training function."""

    engine: Engine
    root: str  # Directory or URL of the run directories
    template: Job  # Without what depends on function and arguments; an empty run_id becomes a random one
    # As the launcher was given it: the value of "auto" differs between machines, and the training does not
    num_processes: NumProcesses
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # For the ranks; may hold secrets
    restart_on: object = ()
    sources: Mapping[str, Any] = field(default_factory=dict)  # The result of `datasets.check`
    code: UserCode = field(default_factory=UserCode)  # What travels because the user says so
    trackers: Mapping[str, Any] | None = field(default=None, repr=False)  # Packed; may hold secrets
    caller: PipelineTry | None = None  # The try of a pipeline step that makes the request

    @property
    def directory(self) -> str:
        """Directory or URL of the run with the template's id."""
        return store.join(self.root, self.template.run_id)

    def private(self) -> dict[str, Any]:
        """Returns the values that may hold secrets, which are sent to the driver and written into no file."""
        spec, pid = self.engine.to_spec()[1], self.caller.retrier if self.caller else None
        retrier = None if pid is None else describe_process(pid)
        return {"env": dict(self.env), "engine": spec, "trackers": self.trackers, "retrier": retrier}


class Submitter:
    """Makes the submission of a request, or finds the run to follow. Starts no process."""

    def __init__(
        self, request: Request, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, detached: bool
    ) -> None:
        """Checks the whole request and packs code and arguments; ``detached`` if the driver is in another process."""
        # In a child that multiprocessing is spawning; it rejects new processes itself by this attribute.
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise InvalidJobError(
                "a process that multiprocessing spawned (of a DataLoader, perhaps) runs this script again, and with it "
                "the launcher: put the call below `if __name__ == '__main__':`"
            )
        engine, template = request.engine, request.template
        if detached and not engine.can_detach:
            raise InvalidJobError(
                "a run that outlives this process cannot use this process's SparkSession: "
                "give SparkEngine(master=...) or SparkConnectEngine(url) to submit(), or use run()"
            )
        # The submission that is made, whose driver the caller must start; set before it is claimed.
        self.own: Submission | None = None
        self._request = request
        self._payload = payload = pack.build(train, args, kwargs, request.restart_on)
        self._identity = payload.identity(request.num_processes, template.code_version, request.code)
        # The trainer of a compatibility layer may continue runs by their names. That of a step is named by the step.
        self._by_name = bool(getattr(train, "resumes_by_name", False)) and not template.generation
        self._sources = datasets.Sources(request.sources, engine, template.generation)
        if isinstance(train, (list, tuple)) and template.hang_timeout:
            raise InvalidJobError(
                "hang_timeout needs a function or a script: a command reports no progress; use timeout="
            )
        job = replace(
            template,
            run_id=template.run_id or jobs.new_run_id(payload.name),
            name=payload.name,
            engine=engine.to_spec()[0],
            params=params_of(payload.training, args, kwargs, request.env),
        )
        engine.check(job)
        engine.check_store(request.root)
        self.run = RunDirectory(store.join(request.root, job.run_id))
        is_elsewhere = engine.drives_elsewhere or engine.can_host_driver(self.run, job)
        self._job = replace(job, queue_time=job.start_timeout if is_elsewhere else 0.0)

    def submit(self) -> Existing | None:
        """Makes the submission, or returns the run to follow instead: it looks again until one of both is certain.

        Raises:
            InvalidJobError: another training is live under this id, or the store cannot be used.
            EngineError: an earlier run was asked to stop and does not end, or Spark failed.
        """
        with located(self.run.directory):
            while True:
                with existing.storing(self.run):
                    number, found = self._look()
                    if found and found.is_followed:
                        return found
                    is_free = found is None or existing.ends(found, self._request.caller)
                if is_free and self._start(number + 1, found):
                    return None

    def _look(self) -> tuple[int, Existing | None]:
        """Returns the number of the last submission under the id, and the existing run, compared with the request."""
        while True:
            existing.check_owner(self.run)
            number, job = self.run.newest()
            if job is None:
                return number, None
            before = Submission(self.run, job)
            try:
                return number, self._assess(before)
            except RunNotFoundError:
                # It was removed meanwhile, or cannot be read.
                if before.is_there():
                    raise

    def _asked(self, digests: Mapping[str, str]) -> dict[str, str]:
        """Returns the identity of the training, given the checksums of its datasets."""
        return self._identity | {f"{DATASET}{name}": digest for name, digest in digests.items()}

    def _assess(self, before: Submission) -> Existing:
        """Returns the existing run. Spark computes checksums of DataFrames only if they decide that it is followed."""
        generation, job = self._request.template.generation, before.job
        # The orchestrator repeats by itself the try that submitted it.
        automatic = bool(generation) and generation == job.generation
        known = {name: job.identity_parts.get(DATASET + name, "") for name in self._request.sources}

        def assess(digests: dict[str, str]) -> Existing:
            asked = self._asked(known | digests)
            found = existing.assess(before, asked, self._request.caller, automatic=automatic)
            resumes = self._by_name and found.status.final and found.decision is Decision.FRESH
            return replace(found, decision=Decision.RESUME) if resumes else found

        if automatic:
            # It is followed whatever differs, and perhaps the data cannot be read any more.
            return assess({})
        found = assess(cheap := self._sources.digests(frames=False))
        return assess(self._sources.digests()) if found.is_followed and len(cheap) < len(known) else found

    def _start(self, number: int, found: Existing | None) -> bool:
        """Computes the rows and makes the submission; False if another process was faster."""
        request, run = self._request, self.run
        with existing.storing(run):
            existing.check_writable(run)
        job = replace(self._job, submission=number, nonce=secrets.token_hex(8))
        own = Submission(run, job)
        try:
            manifests, queries, digests = self._sources.collect(own, found.own if found else None)
            identity = self._asked(digests)
            if found and found.decision is Decision.RESUME and not self._by_name:
                # Only now all rows are known.
                comparison = compare(found.own.job.identity_parts, identity, automatic=found.automatic)
                decision = Decision.RESUME if comparison.same else Decision.FRESH
                found = replace(found, decision=decision, comparison=comparison)
            job = replace(job, identity=digest_of_parts(identity), identity_parts=identity, queries=queries)
            files = {"payload.pkl": self._payload.data}
            if zipped := self._payload.modules.zipped:
                files["modules.zip"] = [zipped]
            if sent := request.code.sent:
                files["code.zip"] = [sent[1]]
            if manifests:
                files[FILE] = [to_bytes(manifests)]
            described = _described(own, files, self._payload.refs)
            with existing.storing(run):
                job = replace(existing.behind(found, job), files=described)
            self.own = own = Submission(run, job)
            if not existing.claim(own, files):
                self.own = None
                return False
        except BaseException:
            with contextlib.suppress(Exception):
                # An exception of a signal handler may come behind the claim: the submission gets its end then.
                if not own.is_there():
                    store.remove(own.directory)
            raise
        if found and request.caller is None:
            logger.warning("run %s: %s", run.directory, own.job.beginning)
        return True


@contextlib.contextmanager
def recording_end(submitter: Submitter) -> Iterator[None]:
    """Records the end of the submission if an exception ends the block before a driver has begun.

    Until its driver's first status, a run counts as living for as long as the process that has submitted it.
    """
    owner = os.getpid()
    try:
        yield
    except BaseException as error:
        own = submitter.own
        # A forked child that leaves the block has submitted nothing.
        if own is None or os.getpid() != owner:
            raise
        what, state = f"{type(error).__name__}: {error}".rstrip(": "), "failed"
        end = error if isinstance(error, RankZeroError) else EngineError(f"the driver could not be started: {what}")
        if not isinstance(error, Exception):
            state = "cancelled"
            end = RunCancelledError(f"the caller was interrupted by {what} before the driver started")

        def record() -> None:
            if not own.is_there() or (status := own.status()).final:
                return
            if status.driver_pid is None:
                # A driver process that has started nevertheless finds the end, and exits.
                own.finish(replace(status, state=state, error=end.to_json()))
            elif own.job.owner:
                # The cluster has started it before the caller had a handle.
                own.request_cancel(reason=f"the caller was interrupted by {what}")

        # A store may raise anything, which must not replace the exception, and one that does not answer must not keep a
        # caller that was interrupted.
        with contextlib.suppress(Exception):
            in_thread(record).result(_RECORD_TIMEOUT)
        raise


def _described(own: Submission, files: Mapping[str, list[Part]], refs: list[ResultRef]) -> dict[str, dict[str, Any]]:
    """Describes the files of a submission, and those of arguments. Raises InvalidJobError if one does not exist."""
    described: dict[str, dict[str, Any]] = {}
    for name, parts in files.items():
        facts = {"location": own.path(name), "size": sum(map(len, parts)), "absolute": False}
        described[name] = {**facts, "digest": digest_of(parts)}
    for number, ref in enumerate(refs):
        # Workers read files on an object store directly; if a worker cannot, the driver does.
        if not (store.is_url(ref.uri) or (os.path.isfile(ref.uri) and os.path.getsize(ref.uri) == ref.size)):
            raise InvalidJobError(f"the argument {ref.uri} does not exist or is not the {ref.size} bytes stored")
        facts = {"location": ref.uri, "size": ref.size, "absolute": True}
        described[f"ref-{number}"] = {**facts, "digest": ref.digest, "uri": ref.uri}
    return described
