"""A submitter's steps: the table in the docstring of `next_step` is what the code does."""

from __future__ import annotations

import itertools

from tests.runs import job

from rankzero.run.identity import Comparison, Decision
from rankzero.run.status import RunStatus
from rankzero.submit.existing import Existing
from rankzero.submit.submission import Step, next_step


def rows() -> list[tuple[str, str]]:
    """The rows of the table: run, step."""
    lines = (next_step.__doc__ or "").splitlines()
    rules = [number for number, line in enumerate(lines) if line.strip().startswith("===")]
    return [(line.split()[0], line.split()[1]) for line in lines[rules[1] + 1 : rules[2]]]


def runs() -> list[tuple[str, Existing | None]]:
    """Every run that a submitter may find, with the word of the table."""
    found: list[tuple[str, Existing | None]] = [("none", None)]
    for decision, state, ending in itertools.product(Decision, ("running", "failed"), (False, True)):
        existing = Existing(job(), RunStatus(state=state), decision, ending, Comparison())
        is_started_again = decision in (Decision.RESUME, Decision.FRESH)
        word = "other" if is_started_again and not existing.status.final else decision.value
        found.append(("ending" if ending else word, existing))
    return found


def test_every_run_has_its_step() -> None:
    found = {
        (word, next_step(existing, replaces=replaces).name)
        for (word, existing), replaces in itertools.product(runs(), (False, True))
    }
    assert found == set(rows())
    assert {Step[step] for _, step in rows()} == set(Step)
