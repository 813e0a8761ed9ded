"""The list of a store on an object store, counted in requests."""

from __future__ import annotations

import time

from tests.s3 import S3Server

from rankzero.job import Job
from rankzero.run import RunDirectory, RunStatus, list_runs

RUNS = 6


def submit(bucket: str, number: int, submission: int, state: str) -> None:
    run = RunDirectory(f"{bucket}/runs/run-{number}")
    assert run.claim(submission)
    nonce = f"{submission:016x}"
    job = Job(f"run-{number}", "train", 2, 1, False, None, None, 60.0, {}, submission=submission, nonce=nonce)
    run.write_submission(job)
    here = {"driver_host": "elsewhere", "driver_pid": 1, "driver_namespace": "elsewhere"}
    status = RunStatus(state, submission=submission, nonce=nonce, heartbeat=time.time(), **here)
    run.write_status(status)


def test_a_run_costs_two_requests_and_one_when_its_job_is_known(bucket: str, s3_server: S3Server) -> None:
    states = ["succeeded", "failed", "cancelled", "running", "starting", "succeeded"]
    for number, state in enumerate(states):
        submit(bucket, number, 0, state)

    def listed() -> tuple[list[str], int]:
        before = len(s3_server.log())
        found = [one.status.state for one in list_runs(f"{bucket}/runs")]
        return found, len(s3_server.requests("[A-Z]+", "runs", s3_server.log()[before:])) - 1

    assert listed() == (states, 2 * RUNS)
    assert listed() == (states, RUNS)
    # A run that was submitted again has another job.
    submit(bucket, 0, 1, "running")
    found, requests = listed()
    assert (found[0], requests) == ("running", RUNS + 1)
    assert next(list_runs(f"{bucket}/runs")).job.submission == 1


def test_directories_of_other_programs_are_no_runs(bucket: str) -> None:
    from rankzero import store

    submit(bucket, 0, 0, "succeeded")
    store.write_bytes(f"{bucket}/runs/other/data.csv", b"1")
    store.write_bytes(f"{bucket}/runs/other-2/status.json", b"{}")
    assert [one.job.run_id for one in list_runs(f"{bucket}/runs")] == ["run-0"]
