"""What a run on an object store costs in requests, counted at a server, and what it blocks while that is slow."""

import threading
import time

import pytest
from tests.conftest import until
from tests.runs import submitted
from tests.s3 import S3Server

from rankzero import RunHandle
from rankzero.driver import recorder as recorders
from rankzero.driver.recorder import Recorder
from rankzero.driver.watch import Watch
from rankzero.masking import Mask
from rankzero.pipeline import Follower, LineWritten
from rankzero.run.directory import RENEWAL_INTERVAL_REMOTE, Submission
from rankzero.run.status import LONGEST_PACE, pace

RANKS = 64
DAY = 86400.0
SCALE = 10  # A second of the test is so many of the day: what is due every 10 s comes every second

LOOKS = 5

WAIT = 60.0


def looks_of_a_day() -> int:
    """How often something is due that follows `pace` from the start of a run on."""
    age, looks = 0.0, 0
    while age < DAY:
        age += pace(age)
        looks += 1
    return looks


@pytest.fixture
def run(bucket: str) -> Submission:
    own = submitted(f"{bucket}/runs/long", num_processes=RANKS, orphan_timeout=900.0 / SCALE, nonce="ab")
    assert own.claim_driver()
    return own


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old run, whose time goes by faster: every interval is shorter by `SCALE`, the lease of 900 s one of 90 s."""
    monkeypatch.setenv("RANKZERO_TIME_SCALE", str(1 / SCALE))
    monkeypatch.setattr(recorders, "pace", lambda _: LONGEST_PACE / SCALE)


class Counts:
    """Requests for parts of the run directory, by method and part, from when it was made to its end."""

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self._began, self._since = len(server.log()), time.monotonic()

    def end(self) -> None:
        """What comes from here on does not count: the run goes on while we do."""
        self._lines = self._server.log()[self._began :]
        self.intervals = (time.monotonic() - self._since) / (LONGEST_PACE / SCALE)
        """How many looks were due meanwhile."""

    def of(self, method: str, part: str) -> int:
        return len(self._server.requests(method, f"/runs/long/submissions/0-ab/{part}", self._lines))


DRIVERS = [("PUT", "status.json"), ("PUT", "lines/"), ("PUT", "events.jsonl/")]
DRIVERS += [("GET", "cancel"), ("GET", "end.json"), ("HEAD", "driver"), ("GET", "lease")]
FOLLOWERS = [("GET", "status.json"), ("GET", "lines/"), ("PUT", "lease")]


def has_lines(follower: Follower) -> bool:
    return LineWritten in [type(event) for event in follower.poll()]


def test_a_day_of_64_ranks_costs_less_than_50_000_requests_to_write_and_20_000_to_follow(
    run: Submission, fast: None, s3_server: S3Server
) -> None:
    recorder = Recorder(run, Mask())
    watch = Watch(run, recorder, leased=True)
    recorder.update(state="running")
    handle = RunHandle.attach(run.run.directory)
    follower = Follower(handle)
    stop = threading.Event()

    def train() -> None:
        """Every rank writes lines and reports metrics all the time."""
        step = 0
        while not stop.wait(0.1):
            for rank in range(RANKS):
                recorder.log(rank, [f"step {step}"])
                recorder.metrics(rank, [({"step": step}, time.time())])
            watch.check()
            step += 1

    training = threading.Thread(target=train)
    training.start()
    try:
        until(lambda: has_lines(follower), WAIT, "the first lines")
        counts = Counts(s3_server)
        looks = successes = 0
        while successes < LOOKS:
            looks += 1
            successes += has_lines(follower)
            handle.pause()
        counts.end()
        beats, due = counts.of("PUT", "status.json"), counts.intervals
        found = {key: counts.of(*key) for key in (*DRIVERS, *FOLLOWERS)}
        everything = counts.of("[A-Z]+", "")
    finally:
        stop.set()
        training.join()
        recorder.finish(state="succeeded")
    # Nothing else is asked.
    assert everything == sum(found.values())
    # What comes with each heartbeat by the heartbeat, the rest by the time: this machine may have been slow.
    to_write = sum(found[key] / (beats if key[0] == "PUT" else due) for key in DRIVERS)
    # The lease comes each minute, also of a slow look, and once at the beginning.
    to_follow = found["GET", "lines/"] / successes + found["GET", "status.json"] / looks
    to_follow += found["PUT", "lease"] / (due + RENEWAL_INTERVAL_REMOTE * SCALE / LONGEST_PACE)
    day = looks_of_a_day()
    print(f"{day} looks a day, each {to_write:.2f} requests to write, {to_follow:.2f} to follow:")
    print(f"{day * to_write:.0f} requests to write and {day * to_follow:.0f} to follow a day of {RANKS} ranks", found)
    assert day * to_write < 50_000
    assert day * to_follow < 20_000
