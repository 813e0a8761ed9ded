"""The run directory as pure steps: generators that yield file operations and receive their answers.

They take the steps of `rankzero.submit.start`, `rankzero.submit.existing`, `rankzero.run.directory`,
`rankzero.driver` and `rankzero.run.retention`, in short names:

    N.json              the claim of number N and the job, one file: created once, never changed
    N_NONCE/            everything else of that submission; no other submission has a folder of this name
        payload         written before the claim
        driver          created once: names the one driver
        status          replaced by that driver alone
        end             created once: the outcome, by the driver, or by whoever takes its place
        ack             created once: the receiver that has stored the result
        cancel          a request of a follower; last writer wins
        value.0         rank 0's value
        ck/I/           its checkpoints

An operation is an `Op`; `model` interprets it on a store in memory.
`Config.without` leaves single steps out, for the checks that each of them is needed.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple


class Op(NamedTuple):
    """One operation. Answers: list -> names directly below; get -> content or None; create, link -> True, False (is
    there) or None (no answer: it may have been done, or be done later); put, delete -> True or None; alive -> bool;
    await -> returns when the submission has an end or no process any more; spawn, note -> nothing."""

    kind: str
    name: str = ""
    data: Any = None


class Job(NamedTuple):
    """The content of a claim. A tombstone has no key."""

    number: int
    nonce: str
    key: str = ""
    chain: str = ""
    earlier: tuple[str, ...] = ()
    after: str = ""

    @property
    def folder(self) -> str:
        return f"{self.number}_{self.nonce}"

    @property
    def gone(self) -> bool:
        return not self.key


class End(NamedTuple):
    """The content of ``end``; ``by`` is unique, so a writer whose answer was lost recognizes its own."""

    state: str
    by: str


class Asked(NamedTuple):
    """A requested training: its identity and the orchestrator's chain of tries; empty for a person."""

    key: str
    chain: str = ""


class Config(NamedTuple):
    """The store, the length of a training in steps, and the steps of the protocol that are left out."""

    links: bool = True
    steps: int = 2
    without: frozenset[str] = frozenset()
    tries: int = 2

    def has(self, step: str) -> bool:
        return step not in self.without


Steps = Generator[Op, Any, Any]


class Gone(Exception):
    """On a disk: the folder of a file that is written was removed. Nobody makes it again but its submitter."""


def claim(number: int) -> str:
    return f"{number}.json"


def put(name: str, data: Any) -> Steps:
    """Replaces a file, and repeats what got no answer."""
    while (yield Op("put", name, data)) is None:
        pass


def create(cfg: Config, name: str, data: Any) -> Steps:
    """Creates a file once; True if it has this content now, whoever's request it was that was executed."""
    lost = False
    while (made := (yield Op("create", name, data))) is None:
        lost = True
    return made or (lost and (yield Op("get", name)) == data)


def finish(cfg: Config, job: Job, end: End) -> Steps:
    """Creates the end of a submission, and returns the end that it has: whoever was first. Raises Gone if removed."""
    name = f"{job.folder}/end"
    if not cfg.has("the first end wins"):
        yield from put(name, end)
        return end
    found = end if (yield from create(cfg, name, end)) else (yield Op("get", name))
    yield from check_there(cfg, job)
    if not found:
        raise Gone
    return found


def check_there(cfg: Config, job: Job) -> Steps:
    """Raises Gone if the run was removed: without folders, a late writer can make a file of a removed run again."""
    if not cfg.links and cfg.has("look whether it is there") and (yield Op("get", claim(job.number))) != job:
        raise Gone


def look(cfg: Config) -> Steps:
    """Returns the highest number and its job, or -1 and None."""
    while True:
        names = yield Op("list")
        numbers = [int(name[:-5]) for name in names if name.endswith(".json")]
        newest = max(numbers, default=-1)
        job = (yield Op("get", claim(newest))) if numbers else None
        if job or not numbers:
            return newest, job


def submit(cfg: Config, me: str, asked: Asked) -> Steps:
    """Starts a training, follows one, or delivers a result. Returns the word for it and the job."""
    for turn in range(cfg.tries):
        newest, job = yield from look(cfg)
        resumes = False
        if job and not job.gone:
            same, end = job.key == asked.key, (yield Op("get", f"{job.folder}/end"))
            if end is None:
                if (yield Op("alive", job.folder)):
                    if not (yield Op("get", f"{job.folder}/cancel")):
                        return ("attached" if same else "refused"), job
                    yield Op("await", job.folder)
                    continue
                end = End("dead", f"{me}.{turn}")
                if cfg.has("end before replacing"):
                    try:
                        end = yield from finish(cfg, job, end)
                    except Gone:
                        continue
            if end.state == "succeeded" and same:
                acknowledged = yield Op("get", f"{job.folder}/ack")
                if not acknowledged or acknowledged == asked.chain != "":
                    return "delivered", job
            resumes = same and end.state != "succeeded"
        new = Job(newest + 1, f"{me}{turn}", asked.key, asked.chain, after=job.nonce if job else "")
        if not cfg.has("nonce in names"):
            new = new._replace(nonce="x")
        if resumes and job:
            new = new._replace(earlier=(*job.earlier, job.folder))
        try:
            won = yield from _claim(cfg, new)
            if won:
                yield Op("note", "started", new)
                return "started", new
        except Gone:
            continue
        if not won:
            yield from remove(new.folder)
    return "gave up", None


def _claim(cfg: Config, new: Job) -> Steps:
    """Writes the files of a submission, then claims its number. Raises Gone if the directory was removed meanwhile."""
    if cfg.links:
        yield Op("mkdir", f"{new.folder}/")
    yield from put(f"{new.folder}/payload", new)
    if not cfg.has("exclusive claim"):
        yield from put(claim(new.number), new)
        won = True
    elif cfg.links:
        # The link needs the submission's own folder: it cannot land in a directory that was removed and made again.
        yield from put(f"{new.folder}/job", new)
        won = yield Op("link", claim(new.number), new)
    else:
        won = yield from create(cfg, claim(new.number), new)
    return won


def drive(cfg: Config, me: str, job: Job) -> Steps:
    """Drives a submission. A driver asks for its end before each thing that others can see, and at last creates it."""
    found = yield Op("get", claim(job.number))
    if found != job:
        return "not submitted"
    if not (yield from create(cfg, f"{job.folder}/driver", me)):
        return "has a driver"
    if (yield Op("get", f"{job.folder}/end")):
        return "ended"
    if not (yield Op("get", f"{job.folder}/payload")):
        yield Op("note", "no payload", job)
        end = yield from finish(cfg, job, End("failed", me))
        return end.state
    if (yield Op("get", f"{job.folder}/cancel")):
        end = yield from finish(cfg, job, End("cancelled", me))
        return end.state
    before, checkpoint = yield from newest_checkpoint(job)
    yield Op("note", "trains", (job, checkpoint))
    yield from put(f"{job.folder}/status", ("running", me))
    done = checkpoint[1] if checkpoint else 0
    for index, step in enumerate(range(done + 1, cfg.steps + 1)):
        if step < cfg.steps:
            before = yield from publish(cfg, job, me, index, (job.key, step), before)
            if before is None:
                return "ended"
    yield from put(f"{job.folder}/value.0", (job.key, cfg.steps, me))
    end = yield from finish(cfg, job, End("succeeded", me))
    if not cfg.has("the end that counts"):
        end = End("succeeded", me)
    yield Op("note", "outcome", (job, end))
    yield from put(f"{job.folder}/status", ("over", me))
    return end.state


def newest_checkpoint(job: Job) -> Steps:
    """Returns the published checkpoints of this training, newest first, and the content of the newest one."""
    published, content = [], None
    for folder in reversed((*job.earlier, job.folder)):
        for name in reversed((yield Op("list", f"{folder}/ck/"))):
            place = f"{folder}/ck/{name}"
            if (yield Op("get", f"{place}manifest")):
                published.append(place)
                content = content or (yield Op("get", f"{place}part"))
    if published and not content:
        yield Op("note", "damaged", job)
    return published, content


def publish(cfg: Config, job: Job, me: str, index: int, content: Any, before: list[str]) -> Steps:
    """Publishes a checkpoint, and deletes those before it. Returns what is there; None if the submission has ended."""
    place = f"{job.folder}/ck/{index}/"
    order = ["part", "manifest"] if cfg.has("manifest last") else ["manifest", "part"]
    for file in order:
        if file == "manifest" and (yield Op("get", f"{job.folder}/end")):
            return None
        yield from put(f"{place}{file}", (*content, me))
    for old in before:
        if cfg.has("the end before deleting") and (yield Op("get", f"{job.folder}/end")):
            return None
        yield Op("delete", f"{old}manifest")
        yield Op("delete", f"{old}part")
    return [place]


def follow(cfg: Config, me: str, job: Job, asked: Asked, acknowledges: bool = True) -> Steps:
    """Follows one submission to its end. Of one whose driver seems dead, nothing is written: it may be continued."""
    yield Op("await", job.folder)
    end = yield Op("get", f"{job.folder}/end")
    if not end:
        return "seems dead"
    yield from check_there(cfg, job)
    yield Op("note", "outcome", (job, end))
    if end.state == "succeeded":
        value = yield Op("get", f"{job.folder}/value.0")
        yield Op("note", "value", (job, asked, value))
        if value and acknowledges:
            yield from create(cfg, f"{job.folder}/ack", asked.chain or me)
    return end.state


def run(cfg: Config, me: str, asked: Asked, acknowledges: bool = True) -> Steps:
    """A caller: submits, starts the driver if it has won, follows."""
    word, job = yield from submit(cfg, me, asked)
    if word == "started":
        yield Op("spawn", "drive", (f"{me}d", job))
    if job and word != "refused":
        yield Op("note", word, job)
        word = yield from follow(cfg, me, job, asked, acknowledges)
    return word


def cancel(cfg: Config, me: str) -> Steps:
    """Asks the newest submission to end, and ends it if it has no process."""
    _, job = yield from look(cfg)
    if job and not job.gone and not (yield Op("get", f"{job.folder}/end")):
        yield from put(f"{job.folder}/cancel", "all")
        if not (yield Op("alive", job.folder)):
            yield from finish(cfg, job, End("cancelled", me))


def collect(cfg: Config, me: str) -> Steps:
    """Removes a run whose end is old (here: any that has ended). A tombstone claims the next number, then all goes."""
    newest, job = yield from look(cfg)
    if job is None:
        names = yield Op("list")
        # Somebody died before its claim; its number is taken before its files are deleted.
        newest = max([int(name.split("_")[0]) for name in names if name[:1].isdigit()], default=0) - 1
        if not names:
            return "nothing"
    if job and not job.gone and not (yield Op("get", f"{job.folder}/end")):
        if (yield Op("alive", job.folder)):
            return "lives"
        yield from finish(cfg, job, End("dead", me))
    if not job or not job.gone:
        job = Job(newest + 1, me, after=job.nonce if job else "")
        if cfg.has("tombstone") and not (yield from create(cfg, claim(job.number), job)):
            return "submitted again"
    # Claims first: a folder whose claim is there is whole.
    for name in sorted((yield Op("list")), key=lambda name: name.endswith("/")):
        number = int(name.rstrip("/").removesuffix(".json").split("_")[0])
        if number < job.number or (number == job.number and name.endswith("/")):
            yield from remove(name.rstrip("/"))
    if not cfg.has("the tombstone stays"):
        yield Op("delete", claim(job.number))
    return "removed"


def remove(name: str) -> Steps:
    """Deletes a file, or a folder with all that is in it."""
    yield Op("delete_tree", name)


def sweep(cfg: Config, me: str) -> Steps:
    """Deletes garbage of a run that stays: folders whose number another submission has. No clock is asked."""
    names = yield Op("list")
    for name in names:
        if name.endswith("/"):
            number, nonce = name[:-1].split("_")
            owner = yield Op("get", claim(int(number)))
            if (owner and owner.nonce != nonce) or (not owner and not cfg.has("garbage by number")):
                yield from remove(name[:-1])


def erase(cfg: Config, me: str, backwards: bool = False) -> Steps:
    """A user's ``rm -rf``: one name after the other, in some order of a listing that may be old by then."""
    for name in sorted((yield Op("list")), reverse=backwards):
        yield from remove(name.rstrip("/"))
