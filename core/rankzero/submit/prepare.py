"""Writes the run directory from a launcher's request, a function and its arguments, after all checks."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import multiprocessing
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rankzero import job as jobs
from rankzero import store
from rankzero.engines.base import Engine
from rankzero.errors import InvalidJobError, located
from rankzero.job import Job
from rankzero.kinds import NumProcesses
from rankzero.masking import is_secret
from rankzero.run import growing
from rankzero.run.directory import RunDirectory
from rankzero.run.identity import DATASET, VARIABLE, Asked, Identity
from rankzero.run.names import LINES, log_name
from rankzero.run.tries import PipelineTry
from rankzero.submit import datasets, pack, submission
from rankzero.submit.datasets import Datasets
from rankzero.submit.pack import Payload
from rankzero.submit.pack_archive import ARCHIVE, UserCode
from rankzero.submit.pack_params import params_of
from rankzero.values.digest import digest_of
from rankzero.values.pickled import Part


@dataclass(frozen=True)
class Request:
    """The configuration of a launcher, independent of the training function.

    Attributes:
        engine: The engine that runs the ranks.
        root: The directory or URL of the run directories.
        template: The job, without the fields that depend on function and arguments; an empty ``run_id`` becomes a
            random one.
        num_processes: World size as the launcher was given it, which is a part of the identity: the value of ``"auto"``
            differs between machines, and the training does not.
        env: Environment variables for the ranks. May hold secrets.
        restart_on: Exceptions after which the user wants another attempt.
        sources: What the user gave for ranks to read, by name.
        code: What travels because the user says so.
        trackers: What `rankzero.submit.trackers.pack` has made of them. May hold secrets.
        caller: The try of a pipeline step that makes the request; None outside of one.
    """

    engine: Engine
    root: str
    template: Job
    num_processes: NumProcesses
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    restart_on: object = ()
    sources: Mapping[str, Any] = field(default_factory=dict)
    code: UserCode = field(default_factory=UserCode)
    trackers: Mapping[str, Any] | None = field(default=None, repr=False)
    caller: PipelineTry | None = None

    @property
    def directory(self) -> str:
        """Directory or URL of the run with the template's id."""
        return store.join(self.root, self.template.run_id)

    def private(self) -> dict[str, Any]:
        """Returns the values that may hold secrets, which are sent to the driver and written into no file."""
        spec, retrier = self.engine.to_spec()[1], self.caller.retrier if self.caller else None
        return {"env": dict(self.env), "engine": spec, "trackers": self.trackers, "retrier": retrier}

    def identity_of(self, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Identity:
        """Returns the identity of a training. Spark computes the checksums of its DataFrames.

        Args:
            train: As for `Launcher.run`.
            args: As for `Launcher.run`.
            kwargs: As for `Launcher.run`.
        """
        own = self.identity_without_datasets(pack.build(train, args, kwargs, is_alone=self.num_processes == 1))
        return self.with_datasets(own, datasets.digests_of(self.sources, self.engine))

    def identity_without_datasets(self, parts: Payload) -> Identity:
        """Returns the identity of a training's code and arguments, as they are now."""
        own = parts.identity(self.num_processes, self.template.code_version, self.code)
        variables = {
            f"{VARIABLE}{name}": digest_of([value.encode(errors="surrogateescape")])
            for name, value in self.env.items()
            if not (name.startswith("RANKZERO_") or is_secret(name))
        }
        return Identity.of(dict(own.parts) | variables)

    def with_datasets(self, identity: Identity, digests: Iterable[tuple[str, str]]) -> Identity:
        """Returns an identity with names and checksums of datasets."""
        if generation := self.template.generation:
            # The driver computes the rows of a query, so only its text is known here. A user's clear reads them again.
            digests = [(name, f"{text} {generation}" if self._is_query(name, text) else text) for name, text in digests]
        return Identity.of({**dict(identity.parts), **{f"{DATASET}{name}": digest for name, digest in digests}})

    def _is_query(self, name: str, digest: str) -> bool:
        return isinstance(self.sources[name], str) and self.sources[name] == digest

    def asked(self, train: Any, identity: Identity) -> Asked:
        """Returns the facts about this request that decide about an existing run with the same id.

        Args:
            train: As for `Launcher.run`. The trainer of a compatibility layer may continue runs by their names.
            identity: The identity of the training.
        """
        # The run of a pipeline step is named by the step.
        by_name = bool(getattr(train, "resumes_by_name", False)) and not self.template.generation
        return Asked(identity, self.template.generation, by_name)


def prepare(
    request: Request,
    train: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    written: submission.Written,
    *,
    detached: bool,
) -> tuple[RunDirectory, Job | None]:
    """Checks the whole request, then writes the run directory. Nothing has started when this raises.

    Args:
        request: The launcher's request.
        train: As for `Launcher.run`.
        args: As for `Launcher.run`.
        kwargs: As for `Launcher.run`.
        written: Set to the submission before it is written, for `submission.recording_end`.
        detached: True if the driver is not in this process.

    Returns:
        The run, and the submitted job, whose driver the caller must start; None if another submitter did.

    Raises:
        InvalidJobError: the request was rejected before anything started.
    """
    _refuse_in_spawned_child()
    engine = request.engine
    if detached and not engine.can_detach:
        raise InvalidJobError(
            "a run that outlives this process cannot use this process's SparkSession: "
            "give SparkEngine(master=...) or SparkConnectEngine(url) to submit(), or use run()"
        )
    parts = pack.build(train, args, kwargs, request.restart_on, is_alone=request.num_processes == 1)
    # Now, and not behind the datasets, for which Spark may take minutes: the code on the disk may change meanwhile.
    own = request.identity_without_datasets(parts)
    if isinstance(train, (list, tuple)) and request.template.hang_timeout:
        raise InvalidJobError("hang_timeout needs a function or a script: a command reports no progress; use timeout=")
    spec, _ = engine.to_spec()
    run_id = request.template.run_id or jobs.new_run_id(parts.name)
    params = params_of(train, args, kwargs, request.env)
    template = replace(request.template, params=params)
    job = replace(template, run_id=run_id, name=parts.name, engine=spec, torch=_torch())
    engine.check(job)
    engine.check_store(request.root)
    run = RunDirectory(store.join(request.root, run_id))
    with located(run.directory), contextlib.ExitStack() as unless_started:
        before = datasets.earlier(run) if request.sources else {}
        found = datasets.collect(request.sources, engine, run, job.num_processes, before)
        unless_started.callback(found.discard, before)
        identity = request.with_datasets(own, found.digests)
        asked = request.asked(train, identity)
        job = replace(job, identity=identity.digest, identity_parts=dict(identity.parts), queries=dict(found.queries))
        job = replace(job, nonce=secrets.token_hex(8))
        written.run, written.nonce = run, job.nonce
        submitted = _submit(run, job, asked, parts, request, found)
        if submitted:
            unless_started.pop_all()
            datasets.remove_replaced(before, found)
    return run, submitted


def _submit(run: RunDirectory, job: Job, asked: Asked, parts: Payload, request: Request, found: Datasets) -> Job | None:
    """Submits the job with its files; see `submission.submit`."""
    files = {"payload.pkl": parts.data, **found.files()}
    listings: dict[str, list[Part]] = {}
    if parts.modules is not None:
        files["modules.zip"] = [parts.modules.data]
        listings["modules.txt"] = [parts.modules.listing.encode("utf-8", "replace")]
    if request.code.archive is not None:
        files[ARCHIVE] = [request.code.archive]
        listings["code.txt"] = [request.code.listing.encode("utf-8", "replace")]
    arguments = _describe_arguments(parts)

    def make_job(number: int, first_attempt: int, fresh_since: int) -> Job:
        described = {
            name: {
                "location": run.submission_path(number, name),
                "size": sum(map(len, data)),
                "absolute": False,
                "digest": digest_of(data),
            }
            for name, data in files.items()
        }
        return replace(
            job,
            files={**described, **arguments},
            submission=number,
            first_attempt=first_attempt,
            fresh_since=fresh_since,
            log_starts=_ends_of_logs(run, job.num_processes) if number else {},
        )

    is_elsewhere = request.engine.drives_elsewhere or request.engine.can_host_driver(run, job)
    start_timeout = job.start_timeout if is_elsewhere else 0.0
    return submission.submit(run, asked, make_job, files | listings, start_timeout, request.caller)


@functools.cache
def _torch() -> str | None:
    """Returns the version of the installed torch, without importing it; None if there is none."""
    # Parsing torch's metadata takes 3 ms.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("torch")
    return None


def _refuse_in_spawned_child() -> None:
    """Raises InvalidJobError in a child that multiprocessing is spawning, which runs the main script again."""
    # multiprocessing itself rejects new processes by this attribute.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InvalidJobError(
            "a process that multiprocessing spawned (of a DataLoader, perhaps) runs this script again, and with it the "
            "launcher: put the call below `if __name__ == '__main__':`"
        )


def _ends_of_logs(run: RunDirectory, world_size: int) -> dict[str, list[int]]:
    """Returns the positions at which the log lines of earlier submissions end, for `Job.log_starts`."""
    if run.is_remote:
        ends = dict.fromkeys(range(world_size), growing.end_of(run.path(LINES)))
    else:
        ends = {rank: growing.end_of(run.path(log_name(rank))) for rank in range(world_size)}
    return {str(rank): [end.piece, end.offset] for rank, end in ends.items()}


def _describe_arguments(parts: Payload) -> dict[str, dict[str, Any]]:
    """Describes the files that arguments refer to. Raises InvalidJobError if one does not exist."""
    described: dict[str, dict[str, Any]] = {}
    for number, ref in enumerate(parts.refs):
        # Workers read files on an object store directly; if a worker cannot, the driver does.
        if not (store.is_url(ref.uri) or (os.path.isfile(ref.uri) and os.path.getsize(ref.uri) == ref.size)):
            raise InvalidJobError(f"the argument {ref.uri} does not exist or is not the {ref.size} bytes stored")
        facts = {"location": ref.uri, "size": ref.size, "digest": ref.digest, "absolute": True}
        described[f"ref-{number}"] = {**facts, "uri": ref.uri}
    return described
