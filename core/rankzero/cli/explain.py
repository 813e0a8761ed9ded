"""``rankzero explain``: why each submission of a run began where it did, and what it was made of."""

from __future__ import annotations

from collections.abc import Iterator

import click

from rankzero import store
from rankzero.cli import words
from rankzero.errors import RankZeroError
from rankzero.job import Job
from rankzero.options import TABLE
from rankzero.run.directory import RunDirectory, Submission
from rankzero.run.listing import find_run

_LISTINGS = {"modules.zip": "modules.txt", "code.tar.gz": "code.txt"}
"""Files that are shipped with a job, and the lists of what is in them."""

MOST_FILES = 20
"""Most files of one archive that are listed."""


@click.command()
@click.argument("run", shell_complete=words.runs)
@click.option("--json", "as_json", is_flag=True, help="A JSON object for each submission.")
def explain(run: str, as_json: bool) -> None:
    """Explain why each submission of a run resumed or began from scratch, with which options, and what was shipped."""
    for job, sentences in explanations(RunDirectory(find_run(run))):
        if as_json:
            words.print_json({"submission": job.submission, "created": job.created, "explanation": sentences})
        else:
            click.echo(f"submission {job.submission}, {words.moment(job.created)}: {sentences[0]}")
            for sentence in sentences[1:]:
                click.echo(f"  {sentence}")


def explanations(run: RunDirectory) -> Iterator[tuple[Job, list[str]]]:
    """Yields the job of each submission of a run, the first one first, with sentences about it.

    Submissions that attached to a living run, or got an earlier result, are not recorded, since they wrote nothing.

    Raises:
        RunNotFoundError: there is no run.
    """
    before: Job | None = None
    run.job()
    for number in run.numbers():
        if job := run.job_of(number):
            yield job, [job.beginning or "where it began is not recorded", *_changes(before, job), *_shipped(run, job)]
            before = job


def _changes(before: Job | None, job: Job) -> Iterator[str]:
    """Yields the options that were given, and those that the submission before had otherwise."""
    names = [name for name in TABLE if name in vars(job) and name not in ("run_id", "engine", "checkpoints")]
    given = {name: getattr(job, name) for name in names if getattr(job, name) not in (TABLE[name].default, {}, [])}
    master = job.engine.get("master") or job.engine.get("server") or job.engine.get("kind")
    yield f"options: {', '.join(f'{name}={value!r}' for name, value in {'engine': master, **given}.items())}"
    if before and (other := [name for name in ("engine", *names) if getattr(before, name) != getattr(job, name)]):
        yield f"options that differ from the submission before: {', '.join(other)}"
    parts = [name for name in job.identity_parts if name not in TABLE]
    if parts:
        yield f"another training if one of these changes: {', '.join(parts)}"


def _shipped(run: RunDirectory, job: Job) -> Iterator[str]:
    for name, facts in job.files.items():
        yield f"shipped: {name}, {facts.get('size')} bytes"
        if listing := _LISTINGS.get(name):
            try:
                lines = store.read_bytes(Submission(run, job).path(listing)).decode("utf-8", "replace")
            except (OSError, RankZeroError):
                continue
            files = lines.splitlines()
            yield from (f"  {line}" for line in files[:MOST_FILES])
            if more := len(files) - MOST_FILES:
                yield from [f"  and {more} more"] if more > 0 else []
