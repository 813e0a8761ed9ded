"""Compares trainings, and decides what happens to an existing run when its run id is submitted again.

The identity of a training is a dictionary with the checksum of each of its parts, equal in every process: the function
or script, each argument, each of the user's modules that is sent, each dataset, and the number of ranks.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from rankzero.run.status import FINAL_STATES

DIGITS = 16  # Number of digits of a checksum that is shown to people
RESISTS = "?"  # Beginning of the checksum of an argument that cannot be compared, which has another one each time
_MOST_NAMED = 5  # Most names of differing parts that a message lists

TRAIN, NUM_PROCESSES, CODE_VERSION, SENT_CODE = "train", "num_processes", "code_version", "working_dir and py_files"
ARGUMENT, MODULE, DATASET = "argument ", "module ", "dataset "
"""Prefixes of the names of parts."""


def digest_of_parts(parts: Mapping[str, str]) -> str:
    """Returns the hexadecimal digits that name a training, given the checksums of its parts by name."""
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:DIGITS]


@dataclass(frozen=True)
class Comparison:
    """Compares the training of a run with a requested training."""

    differing: tuple[str, ...] = ()  # Names of the parts that differ, which make the two different trainings
    ignored: tuple[str, ...] = ()  # Names of parts of the code that differ and are ignored for a retry

    @property
    def same(self) -> bool:
        """Returns True if the two are the same training."""
        return not self.differing


def compare(before: Mapping[str, str], now: Mapping[str, str], *, automatic: bool = False) -> Comparison:
    """Compares the identity of a run's training with that of the requested one.

    If an orchestrator tries again by itself (``automatic``), only arguments, datasets and ranks count, since a
    deployment between two tries must not end a training. An argument that cannot be compared counts as unchanged then.
    """
    names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    if CODE_VERSION in names:
        # It replaces the parts of the code, so one of the two identities has no such parts.
        names = [name for name in names if name not in (TRAIN, SENT_CODE) and not name.startswith(MODULE)]
    if automatic:
        names = [name for name in names if not now.get(name, "").startswith(RESISTS)]
    counts = (ARGUMENT, DATASET, NUM_PROCESSES)
    ignored = [name for name in names if automatic and not name.startswith(counts)]
    return Comparison(tuple(name for name in names if name not in ignored), tuple(ignored))


def describe(names: tuple[str, ...]) -> str:
    """Returns names of parts as text, the most important ones first: "train, argument lr, module models"."""
    ranked = sorted(names, key=lambda name: (name.startswith(MODULE), name.startswith((ARGUMENT, DATASET)), name))
    more = len(ranked) - _MOST_NAMED
    return ", ".join(ranked[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


class Decision(enum.Enum):
    """The action on an existing run."""

    ATTACH = "attach"  # Follow the living run
    DELIVER = "deliver"  # Deliver the result
    RESUME = "resume"  # Submit the run again from its last checkpoint
    FRESH = "fresh"  # End the run if it is living, and submit it again from scratch


def decide(
    state: str,
    *,
    same_training: bool,
    acknowledged: bool,
    same_generation: bool = False,
    automatic: bool = False,
) -> Decision:
    """Decides what to do about an existing run. The first row that fits counts.

    ========================  =====================================  ========
    Run                       Requested training                     Decision
    ========================  =====================================  ========
    living                    the same; any, if automatic            ATTACH
    living                    any other                              FRESH
    succeeded, not delivered  the same; any, if automatic            DELIVER
    succeeded, delivered      the same, in the chain that got it     DELIVER
    failed                    the same                               RESUME
    ended                     any other                              FRESH
    ========================  =====================================  ========

    A run whose driver died has failed. The end of one that was asked to stop is awaited before.
    """
    follows = same_training or automatic
    if state not in FINAL_STATES:
        return Decision.ATTACH if follows else Decision.FRESH
    if state == "succeeded" and not acknowledged:
        return Decision.DELIVER if follows else Decision.FRESH
    if not same_training or (acknowledged and not same_generation):
        # This includes a later submission that died when only its status was written.
        return Decision.FRESH
    return Decision.DELIVER if state == "succeeded" else Decision.RESUME
