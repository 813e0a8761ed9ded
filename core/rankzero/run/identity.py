"""`Identity` identifies a training by its parts. Pure functions compare two identities.

`decide` decides what happens to an existing run when its run id is submitted again, for launcher and orchestrators.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from rankzero.run.status import FINAL_STATES

DIGITS = 16
"""Number of digits of a checksum that is shown to people."""

TRAIN, NUM_PROCESSES, CODE_VERSION, SENT_CODE = "train", "num_processes", "code_version", "working_dir and py_files"
ARGUMENT, MODULE, DATASET, VARIABLE = "argument ", "module ", "dataset ", "env "
"""Prefixes of the names of parts."""

_MOST_NAMED = 5
"""Most names of differing parts that a message lists."""


@dataclass(frozen=True)
class Identity:
    """Identifies a training by the checksums of its parts, equal in every process.

    Attributes:
        parts: Name and checksum of each part: the function or script (``train``), each argument, each of the user's
            modules that the code imports, each dataset, and the number of ranks. ``code_version`` replaces the code.
            Environment variables are parts that `compare` only names.

    Example:
        >>> one, other = Identity.of(train="ab", num_processes="2"), Identity.of(train="ab", num_processes="4")
        >>> compare(one, other).differing
        ('num_processes',)
    """

    parts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, parts: Mapping[str, str] | None = None, **more: str) -> Identity:
        """Returns the identity with these parts."""
        return cls(tuple(sorted({**(parts or {}), **more}.items())))

    @property
    def digest(self) -> str:
        """Returns the hexadecimal digits that name the training."""
        parts = tuple(part for part in self.parts if not part[0].startswith(VARIABLE))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:DIGITS]


@dataclass(frozen=True)
class Comparison:
    """The result of comparing the training of a run with a requested training.

    Attributes:
        differing: Names of the parts that differ, which make the two different trainings.
        ignored: Names of parts that differ but are ignored: environment variables, and the code if an orchestrator
            tries again by itself.
        unknown: True if some parts cannot be compared, since the run's identity is not recorded (another version of
            rankzero submitted it) or its code was compiled by another version of Python.
    """

    differing: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    unknown: bool = False

    @property
    def same(self) -> bool:
        """Returns True unless a difference is known. An unknown one must not end a living run."""
        return not self.differing


@dataclass(frozen=True)
class Asked:
    """A request for a training, as far as it decides about an existing run.

    Attributes:
        identity: Identity of the requested training.
        generation: Name of the chain of tries that the orchestrator starts by itself: `Job.generation`.
        by_name: True if a run is continued because of its name alone, whatever it trained: `decide`.
    """

    identity: Identity
    generation: str = ""
    by_name: bool = False

    def repeats(self, generation: str) -> bool:
        """Returns True if the orchestrator repeats a try of this generation by itself."""
        return bool(generation) and self.generation == generation


def compare(before: Identity | None, now: Identity, *, automatic: bool = False, same_python: bool = True) -> Comparison:
    """Compares two trainings by their parts.

    Args:
        before: The training of a run; None if it is unknown.
        now: The requested training.
        automatic: True if an orchestrator tries again by itself. A deployment between two tries must then not end a
            training, so only its arguments, datasets, ranks and ``code_version`` count, and not the code.
        same_python: False if different versions of Python computed the two identities. Each version compiles code
            differently, so the code cannot be compared.

    Example:
        >>> before, now = Identity.of({"module a": "1", "train": "2"}), Identity.of({"module a": "3", "train": "2"})
        >>> compare(before, now).same, compare(before, now, automatic=True).same
        (False, True)
    """
    if before is None:
        return Comparison(unknown=True)
    olds, news = dict(before.parts), dict(now.parts)
    names = [name for name in sorted(olds.keys() | news.keys()) if olds.get(name) != news.get(name)]
    if CODE_VERSION in names:
        # It replaces the parts of the code, so one of the two identities has no such parts.
        names = [name for name in names if name not in (TRAIN, SENT_CODE) and not name.startswith(MODULE)]
    known = [name for name in names if same_python or not (name == TRAIN or name.startswith(MODULE))]
    unknown, names = len(known) < len(names), known
    counts = (ARGUMENT, DATASET, NUM_PROCESSES, CODE_VERSION)
    ignored = [name for name in names if name.startswith(VARIABLE) or (automatic and not name.startswith(counts))]
    return Comparison(tuple(name for name in names if name not in ignored), tuple(ignored), unknown)


def describe(names: tuple[str, ...]) -> str:
    """Returns a list of names of parts as text, the most important ones first.

    Example:
        >>> describe(("argument lr", "module models", "train"))
        'train, argument lr and module models'
    """
    ranked = sorted(names, key=lambda name: (name.startswith(MODULE), name.startswith((ARGUMENT, DATASET)), name))
    shown = ranked[:_MOST_NAMED]
    if more := len(ranked) - len(shown):
        shown.append(f"{more} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)


class Decision(enum.Enum):
    """The action on an existing run."""

    ATTACH = "attach"
    """The run is running: follow it."""

    DELIVER = "deliver"
    """The run has succeeded and its result is not acknowledged: deliver the result."""

    RESUME = "resume"
    """Wait for the end of the run if it is ending, and submit it again from its last checkpoint."""

    FRESH = "fresh"
    """End the run if it is running, and submit it again from scratch."""


def decide(
    state: str,
    *,
    same_training: bool,
    acknowledged: bool,
    ending: bool = False,
    same_generation: bool = False,
    by_name: bool = False,
    unknown: bool = False,
    automatic: bool = False,
) -> Decision:
    """Decides what to do about an existing run.

    Args:
        state: State of the run; ``"failed"`` if its driver died.
        same_training: The run has the identity of the requested training (`rankzero.submit.identity`).
        acknowledged: The result of the run was delivered, and the receiver has acknowledged it.
        ending: The run is running and was asked to stop, its driver has decided to cancel it, or the process that owned
            it has exited.
        same_generation: An orchestrator, and not a user, repeats a step that had succeeded.
        by_name: The name of a run alone decides that it is continued, as in Ray Train: it resumes from the last
            checkpoint even if the training has changed or has succeeded.
        unknown: It cannot be compared whether the training is the same. Its run is not ended, but its result and
            checkpoints are not used: they may be another training's.
        automatic: An orchestrator tries again by itself. It follows what an earlier try of the chain has started,
            whatever differs by now, and only a training that has failed is compared.

    Example:
        >>> decide("failed", same_training=True, acknowledged=False)
        <Decision.RESUME: 'resume'>
    """
    if by_name and state in FINAL_STATES and (acknowledged or unknown or not same_training):
        return Decision.RESUME
    follows = automatic and ((state not in FINAL_STATES and not ending) or (state == "succeeded" and not acknowledged))
    if not (same_training or follows):
        return Decision.FRESH
    if state not in FINAL_STATES:
        return Decision.RESUME if ending else Decision.ATTACH
    if unknown or (acknowledged and not same_generation):
        # This includes a later submission that died when only its status was written.
        return Decision.FRESH
    return Decision.DELIVER if state == "succeeded" else Decision.RESUME
