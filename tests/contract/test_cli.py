"""The `rankzero` command, as people type it, on a run directory of a real run."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.conftest import of_ranks, until
from tests.runs import folder_of, job_file

from rankzero import Launcher, RunHandle, RunNotFoundError
from rankzero.cli import main
from rankzero.report import card, page, serve

MONTH = 30 * 86400.0


def rankzero(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunHandle[float]:
    """A run of two ranks that has ended well."""

    def train() -> float:
        import rankzero.train as rt

        print(f"hello from {rt.get_context().rank}")
        rt.report({"loss": 0.25})
        return 0.5

    store = tmp_path_factory.mktemp("cli") / "store"
    launcher = Launcher(2, store=store, run_id="first", start_timeout=240)
    assert launcher.run(train) == 0.5
    return RunHandle.attach(store / "first")


@pytest.fixture
def aged(run: RunHandle[float]) -> Iterator[RunHandle[float]]:
    """The same run, as if it had ended 31 days ago."""
    directory = run.own
    status = directory.status()
    then = time.time() - MONTH - 86400
    directory.write_status(replace(status, heartbeat=then, ended=then))
    yield run
    if os.path.exists(run.own.directory):
        directory.write_status(status)


def test_status_shows_what_a_person_wants_to_know(run: RunHandle[float]) -> None:
    shown = rankzero("status", run.directory)
    assert shown.exit_code == 0, shown.output
    lines = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines())
    assert lines["run"] == "first"
    assert lines["trains"] == "train on 2 ranks"
    assert lines["state"] == "succeeded"
    assert lines["metrics"] == "loss=0.25"
    assert lines["result"].startswith(f"{run.own.directory}/result/")
    facts = json.loads(rankzero("status", run.directory, "--json").stdout)
    assert (facts["id"], facts["state"], facts["value"]) == ("first", "succeeded", [0.5])


def test_logs_of_all_ranks_and_of_one(run: RunHandle[float]) -> None:
    every = of_ranks(rankzero("logs", run.directory).stdout.splitlines())
    assert sorted(every) == ["[0] hello from 0", "[1] hello from 1"]
    assert rankzero("logs", run.directory, "--rank", "1", "--follow").stdout == "hello from 1\n"
    wrong = rankzero("logs", run.directory, "--rank", "2")
    assert wrong.exit_code == 2
    assert "2 is no rank of this run, which has 2" in wrong.stderr


def test_expected_errors_are_one_line_on_standard_error(tmp_path: Path) -> None:
    for command in (["status"], ["logs"], ["cancel"]):
        done = rankzero(*command, str(tmp_path))
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr == f"Error: RunNotFoundError: no run lives in {tmp_path}\n"


def test_a_run_whose_driver_has_died_on_this_machine_has_failed_however_long_ago(run: RunHandle[float]) -> None:
    """Two minutes later a reader asked the heartbeat alone, and said for three minutes that the run goes on."""
    directory = run.own
    status = directory.status()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    # The end of the run that the other tests read.
    end = Path(directory.path("end.json"))
    kept = end.rename(end.with_name("kept.json"))
    try:
        for age in (1.0, 60.0, 200.0, 2000.0):
            beat = time.time() - age
            running = replace(status, state="running", ended=None, result=None, heartbeat=beat, driver_pid=gone.pid)
            directory.write_status(running)
            assert "failed" in rankzero("status", run.directory).stdout, age
            # Its last heartbeat is the end that is known.
            assert RunHandle.attach(run.directory).status().ended == beat
    finally:
        kept.rename(end)
        directory.write_status(status)


@pytest.mark.parametrize(("name", "text"), [("job.json", '{"format": 1}'), ("job.json", "[]"), ("status.json", "{}")])
def test_what_somebody_else_has_written_hides_no_other_run(
    run: RunHandle[float], tmp_path: Path, name: str, text: str
) -> None:
    shutil.copytree(run.directory, tmp_path / "first")
    shutil.copytree(run.directory, tmp_path / "strange")
    strange = tmp_path / "strange"
    path = job_file(strange) if name == "job.json" else folder_of(strange) / name
    path.write_text(text)
    for form in ([], ["--json"]):
        assert "first" in rankzero("runs", str(tmp_path), *form).stdout
        done = rankzero("status", str(tmp_path / "strange"), *form)
        assert done.exit_code == 0 or (isinstance(done.exception, SystemExit) and done.stderr.startswith("Error: "))
    assert 'href="runs/first"' in serve.index(str(tmp_path))
    with contextlib.suppress(RunNotFoundError):
        card.draw(RunHandle.attach(tmp_path / "strange"))


def test_what_a_run_has_used_is_in_status_and_runs(run: RunHandle[float]) -> None:
    assert re.search(r"^used +\S+ core-hours$", rankzero("status", run.directory).stdout, re.MULTILINE)
    store = os.path.dirname(run.directory)
    (listed,) = map(json.loads, rankzero("runs", store, "--json").stdout.splitlines())
    assert listed["used"].endswith(" core-hours")
    heads, line = (one.split("\t") for one in rankzero("runs", store).stdout.splitlines())
    assert dict(zip(heads, line, strict=True))["used"] == listed["used"]


def test_cancel_ends_a_run_and_is_harmless_afterwards(launcher: Launcher) -> None:
    def train() -> None:
        import threading

        threading.Event().wait(600)

    handle = launcher.submit(train)
    until(lambda: handle.status().state == "running", 240, "the start")
    asked = rankzero("cancel", handle.directory)
    assert (asked.exit_code, asked.stdout) == (0, f"run {handle.id} was asked to stop\n")
    assert handle.wait(30)
    assert rankzero("status", handle.directory).stdout.splitlines()[2].split() == ["state", "cancelled"]
    again = rankzero("cancel", handle.directory)
    assert (again.exit_code, again.stdout) == (0, f"run {handle.id} has ended already: cancelled\n")


def test_only_who_follows_a_run_keeps_it_alive(tmp_path: Path) -> None:
    """Else a page that is left open would undo what the last follower has said: end soon, if nobody comes."""
    release = tmp_path / "release"

    def train(path: str) -> None:
        import time

        import rankzero.train as rt

        print("hello", flush=True)
        rt.report({"loss": 0.5})
        while not os.path.exists(path):
            time.sleep(0.02)

    store = str(tmp_path / "store")
    handle = Launcher(1, store=store, run_id="one", orphan_timeout=600).submit(train, str(release))
    reader = RunHandle.attach(handle.directory, follows=False)
    until(lambda: reader.metrics() and list(reader.logs()), 60, "the run reports")
    handle.hold(300)
    held = handle.own.lease()
    try:
        for draw in (lambda: serve.index(store), lambda: page.draw(page.run_of(store, "one"))):
            assert "one" in draw()
            assert handle.own.lease() == held
        read = ("status", handle.directory), ("logs", handle.directory), ("logs", handle.directory, "--rank", "0")
        for command in (*read, ("report", handle.directory, "-o", str(tmp_path / "one.html")), ("runs", store)):
            assert rankzero(*command).exit_code == 0
            assert handle.own.lease() == held, command
    finally:
        release.touch()
    assert of_ranks(rankzero("logs", handle.directory, "--follow").stdout.splitlines()) == ["[0] hello"]
    assert handle.wait(60)


@pytest.mark.parametrize("age", ["30", "-3d", "30 days"])
def test_an_age_needs_a_unit(tmp_path: Path, age: str) -> None:
    done = rankzero("gc", str(tmp_path), "--older-than", age)
    assert done.exit_code == 2
    assert "for example 30d" in done.stderr


# Last: it removes the run.
def test_gc_shows_and_then_removes_an_old_run(aged: RunHandle[float]) -> None:
    store = os.path.dirname(aged.directory)
    shown = rankzero("gc", store, "--older-than", "30d", "--dry-run")
    assert shown.exit_code == 0, shown.output
    listed, summary = shown.stdout.splitlines()
    assert "succeeded" in listed
    assert listed.endswith(aged.directory)
    assert summary.startswith("would remove 1, ")
    assert aged.result() == 0.5
    done = rankzero("gc", store, "--older-than", "720h")
    assert done.stdout.splitlines()[1] == summary.replace("would remove", "removed")
    assert rankzero("runs", store, "--json").stdout == ""
    assert os.listdir(aged.directory) == ["submissions"]
