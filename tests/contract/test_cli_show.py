"""The `rankzero` command finds runs by name, prints JSON that every program reads, and shows damaged runs, too."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.runs import folder_of, job_file

from rankzero import InvalidJobError, Launcher, RunHandle, WorkerFailedError
from rankzero.cli import main
from rankzero.options import TABLE


def rankzero(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def strict(text: str) -> list[dict[str, object]]:
    """The objects of lines of JSON, as a program reads them that knows neither nan nor infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> RunHandle[None]:
    """A run with metrics that are hard to show."""

    def train() -> None:
        import rankzero.train as rt

        for number in range(3):
            print(f"line {number}")
        rt.report({"loss": float("nan"), "combinations": 10**400, "b\tc\nd": 1.0})

    store = tmp_path_factory.mktemp("show") / "store"
    Launcher(2, store=store, run_id="digits-1", start_timeout=240).run(train)
    return RunHandle.attach(store / "digits-1")


@pytest.fixture
def store(first: RunHandle[None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default store, with two runs, of which ``words-2`` is the later one."""
    root = tmp_path / "runs"
    for name, later in (("digits-1", 0), ("words-2", 60)):
        shutil.copytree(first.directory, root / name)
        path = job_file(root / name)
        job = json.loads(path.read_text())
        path.write_text(json.dumps({**job, "run_id": name, "created": job["created"] + later}))
    monkeypatch.setenv("RANKZERO_STORE", str(root))
    return root


@pytest.mark.parametrize("form", [("status", "last"), ("runs",), ("report", "last")])
def test_json_is_json_for_every_program(store: Path, form: tuple[str, ...]) -> None:
    assert strict(rankzero(*form, "--json").stdout)


def test_each_run_is_one_line_of_a_pipe_whatever_its_metrics_are_called(store: Path) -> None:
    done = rankzero("runs")
    assert done.exit_code == 0, done.output
    heads, *lines = (line.split("\t") for line in done.stdout.splitlines())
    assert [len(line) for line in lines] == [len(heads)] * 2
    assert r"b\tc\nd=1" in lines[0][-1]
    assert "combinations=?" in lines[0][-1], "no float holds it"


@pytest.mark.parametrize(
    ("name", "found"), [("last", "words-2"), ("words", "words-2"), ("digits-1", "digits-1"), ("gits", "digits-1")]
)
def test_a_run_is_found_by_its_name(store: Path, name: str, found: str) -> None:
    for given in (name, str(store / name)):
        facts = json.loads(rankzero("status", given, "--json").stdout)
        assert (facts["id"], facts["directory"]) == (found, str(store / found))


def test_a_name_of_several_runs_or_of_none_is_refused(store: Path) -> None:
    done = rankzero("status", "-")
    assert done.exit_code == 1
    assert f"2 runs in {store} contain '-' in their ids: digits-1, words-2" in done.stderr
    assert f"no id in {store} contains 'faces'" in rankzero("logs", "faces").stderr


@pytest.mark.parametrize("command", [("runs",), ("gc", "--older-than", "1d"), ("serve",)])
@pytest.mark.parametrize("root", ["nowhere", "memory://nowhere/runs"])
def test_a_store_that_does_not_exist_is_an_error(tmp_path: Path, command: tuple[str, ...], root: str) -> None:
    done = rankzero(*command, root if "://" in root else str(tmp_path / root))
    assert done.exit_code == 1
    assert "there is no store at" in done.stderr


def test_a_damaged_run_is_named_and_stays(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, file in (("torn", "job.json"), ("lost", "status.json")):
        shutil.copytree(store / "digits-1", store / name)
        path = job_file(store / name) if file == "job.json" else folder_of(store / name) / file
        path.write_text('{"run_id": }')
    listed = strict(rankzero("runs", "--json").stdout)
    assert {"torn", "lost"}.isdisjoint(str(one["id"]) for one in listed)
    assert "torn cannot be read: RunNotFoundError: the job was written" in caplog.text
    kept = rankzero("gc", "--older-than", "1d")
    assert (kept.exit_code, kept.stderr.count("\n")) == (1, 2)
    assert "removed 0, 2 runs stay" in kept.stdout


def test_lines_are_chosen_by_rank_number_and_pattern(store: Path) -> None:
    for more in ((), ("--follow",)):
        assert rankzero("logs", "last", "--tail", "2", "--rank", "1", *more).stdout == "line 1\nline 2\n"
    assert sorted(rankzero("logs", "last", "--grep", "2$").stdout.splitlines()) == ["[0] line 2", "[1] line 2"]
    assert rankzero("logs", "last", "--rank", "0", "--rank", "1", "-n", "1").stdout.endswith("line 2\n")
    assert "is no regular expression" in rankzero("logs", "last", "--grep", "(").stderr


def test_lines_have_times_and_are_chosen_by_them(store: Path) -> None:
    shown = rankzero("logs", "last", "--timestamps", "--rank", "0").stdout.splitlines()
    assert [line[20:] for line in shown] == [f"line {number}" for number in range(3)]
    for line in shown:
        assert abs(time.mktime(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S")) - time.time()) < 3600
    facts = strict(rankzero("logs", "last", "--json").stdout)
    assert [fact["time"] for fact in facts] == sorted(float(str(fact["time"])) for fact in facts)
    assert {fact["run_id"] for fact in facts} == {"words-2"}
    assert rankzero("logs", "last", "--since", "2h").stdout.count("\n") == 6
    log = folder_of(store / "words-2") / "lines"
    log.write_text(re.sub(r"^\[0\] \d{4}(.*line [01])$", r"[0] 2001\1", log.read_text(), flags=re.MULTILINE))
    assert rankzero("logs", "last", "--since", "2h", "--rank", "0").stdout == "line 2\n"
    assert rankzero("logs", "last", "-t", "--rank", "0").stdout.startswith("2001")


def test_an_unexpected_error_is_one_line_and_debug_shows_it(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentialsError(Exception):
        """As botocore's, which is neither an OSError nor rankzero's."""

    def fail(*_: object) -> None:
        raise NoCredentialsError("Unable to locate credentials")

    monkeypatch.setattr("rankzero.store.list_names", fail)
    done = rankzero("runs")
    assert (done.exit_code, done.stderr) == (1, "Error: NoCredentialsError: Unable to locate credentials\n")
    assert isinstance(rankzero("--debug", "runs").exception, NoCredentialsError)


@pytest.mark.parametrize(
    ("text", "seconds"), [("1h30m", 5400.0), ("90s", 90.0), ("3600", 3600), ("1.5h", 5400.0), ("2w1d", 15 * 86400.0)]
)
def test_a_duration_is_seconds_or_numbers_with_units(text: str, seconds: float) -> None:
    assert TABLE["timeout"].kind.read("timeout", text) == seconds


@pytest.mark.parametrize("text", ["h", "1h30", "soon", "1 h"])
def test_another_text_is_no_duration(text: str) -> None:
    with pytest.raises(InvalidJobError, match=r"timeout is .*such as 90s or 1h30m"):
        TABLE["timeout"].kind.read("timeout", text)


def test_a_run_is_explained(tmp_path: Path) -> None:
    def train(lr: float, fails: bool) -> float:
        import rankzero.train as rt

        if rt.get_checkpoint() is None:
            rt.report({"loss": lr}, checkpoint={"lr": lr})
            rt.context.await_checkpoint()
        if fails and rt.get_context().attempt == 0:
            raise ValueError("no luck")
        return lr

    def submit(lr: float, **options: Any) -> None:
        with contextlib.suppress(WorkerFailedError):
            Launcher(store=tmp_path, run_id="one", **options).run(train, lr, True)

    submit(0.5)
    submit(0.5, max_restarts=2)
    submit(0.25)
    submit(0.25)
    done = rankzero("explain", str(tmp_path / "one"))
    assert done.exit_code == 0, done.output
    shown = [line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("submission ")]
    assert shown == [
        "from scratch: it is the first submission under this id",
        "resumed from checkpoint 0000-000000; to start over, change code_version",
        "from scratch: other than before: argument lr",
        "from scratch: its result was delivered",
    ]
    assert "  options: engine='local', max_restarts=2" in done.stdout
    assert "  options that differ from the submission before: max_restarts" in done.stdout
    assert re.search(r"^  shipped: payload\.pkl, \d+ bytes$", done.stdout, re.MULTILINE)
    rows = strict(rankzero("explain", str(tmp_path / "one"), "--json").stdout)
    assert [one["submission"] for one in rows] == list(range(4))
