"""A store in memory, scopes, and a checker of `steps`: every interleaving of the file operations of a few processes.

A state is the store, what each actor has been answered so far, and the budgets of faults. A process that is stopped and
comes back is an interleaving; a clock that is wrong is `alive` answering False about a process that lives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.protocol import steps as protocol
from tests.protocol.steps import Asked, Config, Gone, Job, Op, claim

LOST, LATE, GONE = "lost", "late", "gone"


class Violation(AssertionError):
    """A property does not hold."""


class State(NamedTuple):
    """The store as sorted items, actors as (spec, answers, is active), budgets, requests on their way, facts."""

    files: tuple[tuple[str, Any], ...]
    actors: tuple[tuple[Any, tuple[Any, ...], bool], ...]
    crashes: int
    doubts: int
    losses: int
    late: tuple[tuple[int, Op], ...] = ()
    facts: frozenset[Any] = frozenset()


class Scope(NamedTuple):
    """What may happen: a prefix that is played in order, then actors at once, with budgets of faults."""

    name: str
    actors: tuple[Any, ...]
    before: tuple[Any, ...] = ()
    crashes: int = 0
    doubts: int = 0
    losses: int = 0
    links: tuple[bool, ...] = (True, False)
    steps: int = 2
    erased: bool = False
    tries: int = 2


_next: dict[Any, Op | None] = {}


def next_op(cfg: Config, spec: Any, answers: tuple[Any, ...]) -> Op | None:
    """Returns the operation that an actor wants after these answers; None if it has ended."""
    key = (cfg, spec, answers)
    if key not in _next:
        steps = getattr(protocol, spec[0])(cfg, *spec[1])
        try:
            op = next(steps)
            for answer in answers:
                op = steps.throw(Gone) if answer == GONE else steps.send(answer)
            _next[key] = op
        except (StopIteration, Gone):
            _next[key] = None
    return _next[key]


class World:
    """Executes operations of one scope and checks the properties."""

    def __init__(self, scope: Scope, cfg: Config) -> None:
        self.scope, self.cfg = scope, cfg

    def start(self) -> State:
        state = State((), (), 0, 0, 0)
        for spec in self.scope.before:
            spec, stops_at = (spec[:2], spec[2]) if len(spec) == 3 else (spec, None)
            state = state._replace(actors=(*state.actors, (spec, (), True)))
            state = self.play(state, stops_at)
        actors = tuple((spec, (), True) for spec in self.scope.actors)
        scope = self.scope
        return state._replace(
            actors=(*state.actors, *actors), crashes=scope.crashes, doubts=scope.doubts, losses=scope.losses
        )

    def play(self, state: State, stops_at: str | None = None) -> State:
        """Plays all actors in order, without faults; leaves the driver before an operation with ``stops_at``."""
        while True:
            for index in reversed(range(len(state.actors))):
                spec, answers, active = state.actors[index]
                op = next_op(self.cfg, spec, answers) if active else None
                if op and stops_at and spec[0] == "drive" and (stops_at in f"{op.kind} {op.name}"):
                    return state
                if op and (found := self.step(state, index, op)):
                    state = found[0]
                    break
            else:
                return state

    def alive(self, state: State, folder: str) -> bool:
        driven = False
        for spec, _, active in state.actors:
            if spec[0] == "drive" and spec[1][1].folder == folder:
                driven = True
                if active:
                    return True
        submitter = folder.split("_")[1][:-1]
        return not driven and any(active and spec[1][0] == submitter for spec, _, active in state.actors)

    def successors(self, state: State) -> Iterator[State]:
        busy = False
        for index, (spec, answers, active) in enumerate(state.actors):
            op = next_op(self.cfg, spec, answers) if active else None
            if op is None:
                continue
            busy = True
            yield from self.step(state, index, op)
            if state.crashes:
                crashed = self._set(state, index, spec, answers, False)
                yield crashed._replace(crashes=state.crashes - 1)
        for number, (index, op) in enumerate(state.late):
            rest = state._replace(late=state.late[:number] + state.late[number + 1 :])
            yield self._do(rest, index, op)[0]
        if not busy and not state.late:
            self.rest(state)

    def _set(self, state: State, index: int, spec: Any, answers: tuple[Any, ...], active: bool) -> State:
        actors = list(state.actors)
        actors[index] = (spec, answers, active)
        return state._replace(actors=tuple(actors))

    def _answered(self, state: State, index: int, answer: Any) -> State:
        spec, answers, _ = state.actors[index]
        answers = (*answers, answer)
        # Notes are no operations: they are taken with the operation before them.
        while (op := next_op(self.cfg, spec, answers)) and op.kind in ("note", "spawn"):
            if op.kind == "spawn":
                state = state._replace(actors=(*state.actors, ((op.name, op.data), (), True)))
            else:
                state = self.note(state, op)
            answers = (*answers, None)
        return self._set(state, index, spec, answers if op else (), op is not None)

    def step(self, state: State, index: int, op: Op) -> list[State]:
        """Returns the states after an operation: one, or more if it can fail or if a process may be doubted."""
        files = dict(state.files)
        if op.kind == "await":
            ended = f"{op.name}/end" in files or not self.alive(state, op.name)
            return [self._answered(state, index, True)] if ended else []
        if op.kind == "alive":
            lives = self.alive(state, op.name)
            found = [self._answered(state, index, lives)]
            if lives and state.doubts:
                found.append(self._answered(state._replace(doubts=state.doubts - 1), index, False))
            return found
        if op.kind == "get":
            return [self._answered(state, index, files.get(op.name))]
        if op.kind == "list":
            below = {name[len(op.name) :] for name in files if name.startswith(op.name) and name != op.name}
            names = {name.split("/")[0] + ("/" if "/" in name else "") for name in below}
            return [self._answered(state, index, tuple(sorted(names)))]
        done, answer = self._do(state, index, op)
        found = [self._answered(done, index, answer)]
        if state.losses and op.kind in ("put", "create"):
            found.append(self._answered(done._replace(losses=state.losses - 1), index, None))
            later = state._replace(losses=state.losses - 1, late=(*state.late, (index, op)))
            found.append(self._answered(later, index, None))
        return found

    def _do(self, state: State, index: int, op: Op) -> tuple[State, Any]:
        """Executes an operation that changes the store, and checks it."""
        files, name = dict(state.files), op.name
        folder = name.split("/")[0] + "/"
        is_claim = name.endswith(".json")
        if self.cfg.links and op.kind in ("put", "create") and "_" in folder and not is_claim and folder not in files:
            return state, GONE
        answer: Any = True
        if op.kind == "link" and f"{op.data.folder}/job" not in files:
            return state, GONE
        if op.kind in ("create", "link") and name in files:
            return state, False
        if op.kind == "delete_tree":
            for each in [each for each in files if each == name or each.startswith(name + "/")]:
                self.deleting(state, files, index, each)
                del files[each]
        elif op.kind == "delete":
            if name in files:
                self.deleting(state, files, index, name)
                del files[name]
        else:
            self.writing(state, files, name, op)
            files[name] = op.data
        state = state._replace(files=tuple(sorted(files.items(), key=lambda item: item[0])))
        if is_claim or name.endswith(("/driver", "/end")):
            self.check_live(state, files)
        return state, answer

    # Properties

    def current(self, files: dict[str, Any]) -> Job | None:
        numbers = [int(name[:-5]) for name in files if name.endswith(".json")]
        return files[claim(max(numbers))] if numbers else None

    def check_live(self, state: State, files: dict[str, Any]) -> None:
        """At most one submission is open: claimed, not ended (where a user removes: of those that have a driver)."""
        jobs = [job for name, job in files.items() if name.endswith(".json") and not job.gone]
        gone = max((job.number for name, job in files.items() if name.endswith(".json") and job.gone), default=-1)
        live = [job for job in jobs if f"{job.folder}/end" not in files and job.number > gone]
        if self.scope.erased:
            live = [job for job in live if f"{job.folder}/driver" in files]
        if len(live) > 1:
            raise Violation(f"two open submissions: {[job.folder for job in live]}")

    def writing(self, state: State, files: dict[str, Any], name: str, op: Op) -> None:
        old = files.get(name)
        if old is not None and not name.endswith(("/cancel", "/lease")):
            writer = [content[-1] if type(content) is tuple else content for content in (old, op.data)]
            if writer[0] != writer[1]:
                raise Violation(f"{name} of {writer[0]} is overwritten by {writer[1]}")
        if name.endswith(".json") and not self.scope.erased:
            before = files.get(claim(int(name[:-5]) - 1))
            if before and not before.gone:
                end = files.get(f"{before.folder}/end")
                is_success = end and end.state == "succeeded" and op.data.key == before.key
                if is_success and f"{before.folder}/ack" not in files:
                    raise Violation(f"{name} begins although the success of {before.folder} was not delivered")

    def deleting(self, state: State, files: dict[str, Any], index: int, name: str) -> None:
        spec = state.actors[index][0]
        if spec[0] == "erase":
            return
        current = self.current(files)
        if name.endswith(".json"):
            if (current and name == claim(current.number)) and not files[name].gone:
                raise Violation(f"{spec} deletes the newest claim")
            return
        number, nonce = name.split("/")[0].split("_") if "_" in name else ("0", "")
        owner = files.get(claim(int(number)))
        removed = current is not None and any(
            job.gone and job.number >= int(number) for each, job in files.items() if each.endswith(".json")
        )
        if "ck/" in name and spec[0] == "drive":
            if current and not current.gone and (current.folder == spec[1][1].folder or nonce in str(current.earlier)):
                places = [f"{folder}/ck/" for folder in (*current.earlier, current.folder)]
                found = [each for place in places for each in files if each.startswith(place)]
                published = [each for each in found if each.endswith("manifest")]
                # In the order of the submissions, then of the indexes.
                if published and name in (published[-1], published[-1].replace("manifest", "part")):
                    raise Violation(f"{spec[1][0]} deletes the newest checkpoint {name}")
            return
        if removed or (owner and owner.nonce != nonce):
            return
        own = spec[0] in ("run", "submit") and nonce[:-1] == spec[1][0]
        if not own:
            raise Violation(f"{spec[0]} deletes {name}, which a job names or may name")

    def note(self, state: State, op: Op) -> State:
        files = dict(state.files)
        if op.name == "no payload" and not self.scope.erased and files.get(claim(op.data.number)) == op.data:
            raise Violation(f"{op.data.folder} has no files")
        if op.name == "damaged" and not self.scope.erased and files.get(claim(op.data.number)) == op.data:
            raise Violation(f"{op.data.folder} finds a published checkpoint without its part")
        if op.name == "trains":
            job, checkpoint = op.data
            if checkpoint and checkpoint[0] != job.key:
                raise Violation(f"{job.folder} ({job.key}) resumes from a checkpoint of {checkpoint[0]}")
        if op.name == "outcome":
            job, end = op.data
            fact = ("outcome", job.folder, end.state)
            if any(each[:2] == fact[:2] and each[2] != fact[2] for each in state.facts):
                raise Violation(f"two outcomes of {job.folder} are reported")
            written = files.get(f"{job.folder}/end")
            if written and written.state != end.state:
                raise Violation(f"{job.folder} is reported as {end.state}, and its end is {written.state}")
            state = state._replace(facts=state.facts | {fact})
        if op.name == "value" and (op.data[0].folder + "/end") in files:
            job, asked, value = op.data
            removed = (found := self.current(files)) is None or found.gone or self.scope.erased
            if not removed and (value is None or value[:2] != (asked.key, self.cfg.steps)):
                raise Violation(f"{asked} gets {value} of {job.folder}")
        return state

    _rested: set[Any] = set()

    def rest(self, state: State) -> None:
        """When nobody is left: a last caller gets its value, and gc leaves nothing."""
        files = dict(state.files)
        waiting = [spec[1][0] for spec, _, active in state.actors if active]
        key = (self.cfg, self.scope.erased, state.files, tuple(waiting))
        if key in self._rested:
            return
        self._rested.add(key)
        current = self.current(files)
        asked = Asked("A", "chain")
        cfg = self.cfg._replace(tries=9)
        world = World(self.scope, cfg)
        last = ("run", ("Z", asked))
        after = world.play(State(state.files, ((last, (), True),), 0, 0, 0))
        done = dict(after.files)
        now = world.current(done)
        if now is None or now.gone or done.get(f"{now.folder}/end", (None,))[0] != "succeeded":
            raise Violation(f"a last submission does not succeed: {now}")
        if current and not current.gone and current.key == "A" and not self.scope.erased:
            end = files.get(f"{current.folder}/end")
            if end and end.state == "succeeded" and f"{current.folder}/ack" not in files and now != current:
                raise Violation(f"the success of {current.folder} is lost")
            first = (*current.earlier, current.folder)[0]
            if not (end and end.state == "succeeded") and now != current and first not in now.earlier:
                raise Violation(f"{current.folder} is not continued")
        after = world.play(after._replace(actors=((("collect", ("Y",)), (), True),)))
        if left := [name for name, content in after.files if not (name.endswith(".json") and content.gone)]:
            raise Violation(f"gc leaves {left}")


def explore(scope: Scope, cfg: Config, most: int = 2_500_000) -> tuple[int, list[str] | None]:
    """Visits every state of a scope, depth first. Returns the number of states and the violation, if any."""
    world = World(scope, cfg)
    _next.clear()
    World._rested = set()
    try:
        first = world.start()
    except Violation as violation:
        return 0, [str(violation)]
    seen = {hash(first)}
    stack = [(first, world.successors(first))]
    while stack:
        try:
            state = next(stack[-1][1])
        except StopIteration:
            stack.pop()
            continue
        except Violation as violation:
            return len(seen), [str(violation), *trace(cfg, [state for state, _ in stack])]
        if hash(state) in seen:
            continue
        seen.add(hash(state))
        if len(seen) > most:
            return len(seen), ["too many states"]
        stack.append((state, world.successors(state)))
    return len(seen), None


def trace(cfg: Config, states: list[State]) -> list[str]:
    """The operations that led to a state, one a line."""
    lines = []
    for old, new in itertools.pairwise(states):
        for index, (spec, answers, active) in enumerate(new.actors):
            before = old.actors[index] if index < len(old.actors) else (spec, (), True)
            if before[1:] != (answers, active):
                op = next_op(cfg, before[0], before[1])
                end = "" if active or answers == () else " CRASH"
                lines.append(f"{spec[1][0]:>4} {op.kind if op else ''} {op.name if op else ''}{end}")
                break
        else:
            lines.append("     a late request is executed")
    return lines


A, B, PERSON = Asked("A", "chain"), Asked("B", ""), Asked("A", "")
JOB = Job(0, "a0", "A", "chain")

SCOPES = [
    Scope("two submitters", (("run", ("a", A)), ("run", ("b", A))), crashes=1, steps=1),
    Scope("two submitters, lost answers", (("run", ("a", A)), ("submit", ("b", A))), losses=1, steps=1, links=(False,)),
    Scope(
        "doubt: a driver is replaced and comes back",
        (("run", ("b", A)),),
        (("run", ("a", A), "ck/0/manifest"),),
        doubts=1,
        steps=3,
    ),
    Scope(
        "the same, and one crash",
        (("run", ("b", A)),),
        (("run", ("a", A), "get 0_a0/end"),),
        crashes=1,
        doubts=1,
        steps=2,
    ),
    Scope(
        "the same, lost answers",
        (("run", ("b", A)),),
        (("run", ("a", A), "value"),),
        losses=1,
        doubts=1,
        steps=1,
        links=(False,),
    ),
    Scope(
        "success, then same and other",
        (("run", ("b", PERSON)), ("run", ("c", B))),
        (("run", ("a", A, False)),),
        steps=1,
        crashes=1,
    ),
    Scope(
        "other code replaces",
        (("submit", ("b", B)), ("run", ("c", A))),
        (("run", ("a", A), "ck/0/manifest"),),
        doubts=1,
    ),
    Scope(
        "two drivers of one submission",
        (("drive", ("d2", JOB)), ("submit", ("b", A))),
        (("run", ("a", A), "0_a0/driver"),),
        crashes=1,
        steps=2,
    ),
    Scope("cancel", (("cancel", ("x",)), ("run", ("b", A))), (("run", ("a", A), "value"),), crashes=1, steps=1),
    Scope("gc and a submitter", (("collect", ("g",)), ("run", ("b", A))), (("run", ("a", A)),), crashes=1, steps=1),
    Scope(
        "two gc and a submitter",
        (("collect", ("g",)), ("collect", ("h",)), ("submit", ("b", A))),
        (("run", ("a", A)),),
        steps=1,
    ),
    Scope(
        "gc, two submitters",
        (("collect", ("g",)), ("submit", ("b", A)), ("submit", ("c", A))),
        (("run", ("a", A)),),
        steps=1,
        tries=3,
    ),
    Scope("sweep and submitters", (("sweep", ("s",)), ("submit", ("b", A)), ("submit", ("c", A))), steps=1, crashes=1),
    Scope(
        "rm -rf of a live run",
        (("erase", ("u",)), ("run", ("b", A))),
        (("run", ("a", A), "value"),),
        erased=True,
        steps=1,
        tries=3,
    ),
    Scope(
        "the same, from behind",
        (("erase", ("u", True)), ("run", ("b", A))),
        (("run", ("a", A), "value"),),
        erased=True,
        links=(True,),
        steps=1,
        tries=3,
    ),
    Scope(
        "rm -rf, two submitters",
        (("erase", ("u",)), ("submit", ("b", A)), ("run", ("c", A))),
        (("run", ("a", A)),),
        erased=True,
        steps=1,
        tries=3,
    ),
]
