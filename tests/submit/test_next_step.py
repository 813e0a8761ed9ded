"""A submitter's steps: the table in the docstring of `next_step` is what the code does."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from rankzero.job import Job
from rankzero.run.directory import RunDirectory
from rankzero.run.identity import Asked, Comparison, Decision, Identity
from rankzero.run.status import RunStatus
from rankzero.submit.existing import Existing
from rankzero.submit.submission import Claim, Step, next_step, submit


def job(number: int, first_attempt: int = 0, fresh_since: int = 0) -> Job:
    facts = {"submission": number, "first_attempt": first_attempt, "fresh_since": fresh_since}
    return Job("one", "train", 1, 1, False, None, None, 60.0, {}, **facts)


def rows() -> list[tuple[str, str, str]]:
    """The rows of the table: claim, run, step."""
    lines = (next_step.__doc__ or "").splitlines()
    rules = [number for number, line in enumerate(lines) if line.strip().startswith("===")]
    spans = [found.span() for found in re.finditer("=+", lines[rules[0]])]
    cells = [[line[begin:end].strip() for begin, end in spans[:3]] for line in lines[rules[1] + 1 : rules[2]]]
    return [(claim, run, step) for claim, run, step in cells if claim]


def runs() -> list[tuple[str, Existing | None]]:
    """Every run that a submitter may find, with the word of the table."""
    found: list[tuple[str, Existing | None]] = [("none", None)]
    for decision, state, ending in itertools.product(Decision, ("running", "failed"), (False, True)):
        existing = Existing(job(0), RunStatus(state=state), decision, ending, Comparison())
        is_started_again = decision in (Decision.RESUME, Decision.FRESH)
        word = "other" if is_started_again and not existing.status.final else decision.value
        found.append(("ending" if ending else word, existing))
    return found


def test_every_state_has_one_row_and_its_step() -> None:
    table, used = rows(), set()
    for claim, (word, existing) in itertools.product(Claim, runs()):
        (row,) = [row for row in table if row[0] == claim.name and row[1] in (word, "any")]
        assert next_step(existing, claim) is Step[row[2]], row
        used.add(row)
    assert used == set(table)
    assert {Step[step] for _, _, step in table} == set(Step)


@pytest.mark.parametrize("look", [1, 2])
def test_a_later_claim_that_is_withdrawn_ends_no_submission(
    look: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another submitter claims the next number before one of this one's looks at the claims, and gives up after it."""
    run = RunDirectory(str(tmp_path / "one"))
    newest, looks = RunDirectory.newest_claim, itertools.count(1)

    def overtaken(self: RunDirectory) -> int:
        if next(looks) != look:
            return newest(self)
        self.claim(1)
        found = newest(self)
        self.release(1)
        return found

    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.01")
    monkeypatch.setattr(RunDirectory, "newest_claim", overtaken)
    submitted = submit(run, Asked(Identity.of(train="ab")), job, {})
    assert submitted is not None
    assert run.find_job() == submitted
