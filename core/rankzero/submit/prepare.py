"""Makes a submission from a launcher's request, a function and its arguments, or finds the run to follow."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import multiprocessing
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rankzero import job as jobs
from rankzero import store
from rankzero.data.manifest import Manifest
from rankzero.engines.base import Engine
from rankzero.errors import InvalidJobError, RunNotFoundError, located
from rankzero.host.processes import describe_process, this_process
from rankzero.job import Job
from rankzero.kinds import NumProcesses
from rankzero.masking import is_secret
from rankzero.run.directory import RunDirectory, Submission, compare_job
from rankzero.run.identity import DATASET, VARIABLE, Asked, Decision, Identity
from rankzero.run.tries import PipelineTry
from rankzero.submit import datasets, existing, pack, submission
from rankzero.submit.datasets import Datasets
from rankzero.submit.existing import Existing
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

    def repeated(self, before: Submission) -> Request:
        """Returns the request with the datasets of an earlier try of the same chain.

        A dataset that has changed since does not make an automatic try another training.
        """
        kept = datasets.of_earlier_try(before, self.sources, self.template.generation)
        return replace(self, sources={**self.sources, **kept}) if kept else self

    def private(self) -> dict[str, Any]:
        """Returns the values that may hold secrets, which are sent to the driver and written into no file."""
        spec, pid = self.engine.to_spec()[1], self.caller.retrier if self.caller else None
        retrier = None if pid is None else describe_process(pid)
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


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`.

    Attributes:
        own: The submission that was made, whose driver the caller must start.
        existing: The run to follow instead of that.
    """

    own: Submission | None = None
    existing: Existing | None = None


def prepare(
    request: Request,
    train: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    written: submission.Written,
    *,
    detached: bool,
) -> Prepared:
    """Checks the whole request, then makes a submission, or finds the run to follow. Nothing starts.

    Code and arguments are packed first, since the files may change meanwhile. Then it is decided what becomes of an
    existing run; rows of DataFrames are computed only if the training starts or resumes.

    Args:
        request: The launcher's request.
        train: As for `Launcher.run`.
        args: As for `Launcher.run`.
        kwargs: As for `Launcher.run`.
        written: Set to the submission once it is claimed, for `submission.recording_end`.
        detached: True if the driver is not in this process.

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
    own = request.identity_without_datasets(parts)
    if isinstance(train, (list, tuple)) and request.template.hang_timeout:
        raise InvalidJobError("hang_timeout needs a function or a script: a command reports no progress; use timeout=")
    spec, _ = engine.to_spec()
    run_id = request.template.run_id or jobs.new_run_id(parts.name)
    params = params_of(train, args, kwargs, request.env)
    template = replace(request.template, params=params, submitter=this_process())
    job = replace(template, run_id=run_id, name=parts.name, engine=spec, torch=_torch())
    engine.check(job)
    engine.check_store(request.root)
    run = RunDirectory(store.join(request.root, run_id))
    is_elsewhere = engine.drives_elsewhere or engine.can_host_driver(run, job)
    job = replace(job, queue_time=job.start_timeout if is_elsewhere else 0.0)
    with located(run.directory):
        return _Submitter(request, run, job, parts, functools.partial(request.asked, train), own).submit(written)


class _Submitter:
    """Looks at the run under an id and decides, until it has made a submission or found a run to follow."""

    def __init__(
        self,
        request: Request,
        run: RunDirectory,
        job: Job,
        parts: Payload,
        asked: Callable[[Identity], Asked],
        identity: Identity,
    ) -> None:
        self._request = request
        self._run = run
        self._job = job
        self._parts = parts
        self._asked = asked
        self._identity = identity
        self._paths: dict[str, Manifest] = {}

    def submit(self, written: submission.Written) -> Prepared:
        """Looks until it is decided. ``written`` is set as for `prepare`."""
        run, caller = self._run, self._request.caller
        while True:
            with submission.storing(run):
                number, before = existing.find_newest(run)
                found = None
                if before:
                    try:
                        found = self._assess(before)
                    except RunNotFoundError as error:
                        existing.check_removed(run, before, error)
                        continue
                step = submission.settles(run, found, replaces=caller is not None)
            if step is submission.Step.FOLLOW:
                return Prepared(existing=found)
            if step is submission.Step.START and (own := self._start(number + 1, found, written)):
                return Prepared(own)

    def _sources(self, job: Job) -> Mapping[str, Any]:
        return self._request.repeated(Submission(self._run, job)).sources

    def _assess(self, job: Job) -> Existing:
        """Returns the existing run. Spark computes checksums of DataFrames only if the run would be followed."""
        request = self._request
        sources = datasets.read_paths(self._sources(job), request.engine, self._paths)

        def assess(assumed: Mapping[str, str] | None) -> Existing:
            known = datasets.digests_of(sources, request.engine, assumed)
            asked = self._asked(request.with_datasets(self._identity, known))
            return existing.assess(self._run, job, asked, request.caller)

        parts = job.identity_parts.items()
        found = assess({name.removeprefix(DATASET): digest for name, digest in parts if name.startswith(DATASET)})
        is_followed = found.decision in (Decision.ATTACH, Decision.DELIVER) and not found.ending
        return assess(None) if is_followed and any(map(datasets.is_frame, sources.values())) else found

    def _start(self, number: int, found: Existing | None, written: submission.Written) -> Submission | None:
        """Computes the rows and makes the submission; None if another process was faster."""
        request, run = self._request, self._run
        sources, before = request.sources, dict[str, Manifest]()
        submission.make(run)
        if found and sources:
            before = datasets.earlier(Submission(run, found.job))
            kept = self._sources(found.job)
            changed = {name: source for name, source in kept.items() if source is not sources[name]}
            if found.decision is Decision.RESUME and datasets.are_readable(changed, sources, request.engine):
                sources = kept
        plain = replace(self._job, submission=number, nonce=secrets.token_hex(8))
        own, data = Submission(run, plain), Datasets()
        try:
            sources = datasets.read_paths(sources, request.engine, self._paths)
            data = datasets.collect(sources, request.engine, own, before)
            identity = request.with_datasets(self._identity, data.digests)
            asked = self._asked(identity)
            if found and found.decision is Decision.RESUME and not asked.by_name:
                # Only now all rows are known.
                comparison = compare_job(found.job, asked)
                decision = Decision.RESUME if comparison.same else Decision.FRESH
                found = replace(found, decision=decision, comparison=comparison)
            job = replace(plain, identity=identity.digest, identity_parts=dict(identity.parts))
            job = submission.behind(run, found, replace(job, queries=dict(data.queries)))
            files, listings = self._files(data)
            described = {name: _described(own.path(name), content) for name, content in files.items()}
            own = written.own = Submission(run, replace(job, files={**described, **_describe_arguments(self._parts)}))
            is_made = submission.claim(own, files | listings)
        except BaseException:
            data.discard(before)
            raise
        if not is_made:
            data.discard(before)
            return None
        if found:
            submission.report_beginning(found, own, is_quiet=request.caller is not None)
            datasets.remove_replaced(before, data)
        return own

    def _files(self, data: Datasets) -> tuple[dict[str, list[Part]], dict[str, list[Part]]]:
        """Returns the parts of each file by name: those for ranks, and those for people."""
        parts, code = self._parts, self._request.code
        files = {"payload.pkl": parts.data, **data.files()}
        listings: dict[str, list[Part]] = {}
        if parts.modules is not None:
            files["modules.zip"] = [parts.modules.data]
            listings["modules.txt"] = [parts.modules.listing.encode("utf-8", "replace")]
        if code.archive is not None:
            files[ARCHIVE] = [code.archive]
            listings["code.txt"] = [code.listing.encode("utf-8", "replace")]
        return files, listings


def _described(location: str, parts: list[Part]) -> dict[str, Any]:
    return {"location": location, "size": sum(map(len, parts)), "absolute": False, "digest": digest_of(parts)}


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
