"""The list of a store on an object store, counted in requests."""

from __future__ import annotations

import time

from tests.runs import submitted
from tests.s3 import S3Server

from rankzero import store
from rankzero.run.listing import list_runs
from rankzero.run.status import RunStatus

RUNS = 6


def submit(bucket: str, number: int, submission: int, state: str) -> None:
    here = {"driver_host": "elsewhere", "driver_pid": 1, "driver_namespace": "elsewhere"}
    status = RunStatus(state, heartbeat=time.time(), **here)
    submitted(f"{bucket}/runs/run-{number}", status, submission=submission)


def test_a_run_costs_three_requests_and_two_when_its_job_is_known(bucket: str, s3_server: S3Server) -> None:
    states = ["succeeded", "failed", "cancelled", "running", "starting", "succeeded"]
    for number, state in enumerate(states):
        submit(bucket, number, 0, state)

    def listed() -> tuple[list[str], int]:
        before = len(s3_server.log())
        found = [one.status.state for one in list_runs(f"{bucket}/runs")]
        return found, len(s3_server.requests("[A-Z]+", "runs", s3_server.log()[before:])) - 1

    assert listed() == (states, 3 * RUNS)
    assert listed() == (states, 2 * RUNS)
    # A run that was submitted again has another job.
    submit(bucket, 0, 1, "running")
    found, requests = listed()
    assert (found[0], requests) == ("running", 2 * RUNS + 1)
    assert next(list_runs(f"{bucket}/runs")).job.submission == 1
    # So does one that was removed and submitted again.
    store.remove(f"{bucket}/runs/run-0")
    submit(bucket, 0, 1, "starting")
    assert next(list_runs(f"{bucket}/runs")).status.state == "starting"
