"""`rankzero doctor`: what the ranks see, what that means, and what a person or a program is told."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.conftest import free_port
from tests.s3 import S3Server

from rankzero import LocalEngine, SparkEngine
from rankzero.cli import main
from rankzero.doctor.examine import examine
from rankzero.doctor.findings import OK, PROBLEM, WARNING, judge


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def facts(**changes: Any) -> dict[str, Any]:
    facts = {"host": "one", "entered": 1000.0, "together": 1000.0, "python": "3.12.1", "torch": "2.13.0"}
    return {**facts, "device": "cpu", "store": (OK, ""), **changes}


@pytest.mark.parametrize(
    ("second", "started", "expected"),
    [
        ({}, 999.9, []),
        ({"torch": "2.4.0"}, 999.9, [(PROBLEM, "torch")]),
        ({"host": "two", "together": 1400.0}, 999.9, [(PROBLEM, "clocks")]),
        ({}, 1500.0, [(PROBLEM, "clocks")]),
        ({"store": (PROBLEM, "OSError: read-only")}, 999.9, [(PROBLEM, "store")]),
        ({"store": (WARNING, "no driver of S3")}, 999.9, [(WARNING, "store")]),
    ],
)
def test_what_differs_is_found(second: dict[str, Any], started: float, expected: list[tuple[str, str]]) -> None:
    found = [each for each in judge([facts(), facts(**second)], started, store="/runs") if each.level != OK]
    assert [(finding.level, finding.about) for finding in found] == expected
    assert all(finding.mend for finding in found), "each comes with what to do"


def test_this_machine_is_examined(tmp_path: Path) -> None:
    # Two ranks are asked for, and tasks of three.
    told = doctor("--store", str(tmp_path), "--processes-per-task", "3", "--json")
    assert told.exit_code == 0, told.output
    examination = json.loads(told.stdout)
    levels = {finding["about"]: finding["level"] for finding in examination["findings"]}
    assert levels == dict.fromkeys(["from here", "slots", "Python", "torch", "clocks", "store"], OK)
    assert examination["healthy"]
    assert [rank["rank"] for rank in examination["ranks"]] == [0, 1, 2]
    assert os.listdir(tmp_path) == [], "an examination leaves nothing"


def test_an_object_store_is_used_from_the_ranks(bucket: str, s3_server: S3Server) -> None:
    told = doctor("--store", f"{bucket}/runs", "--json")
    assert told.exit_code == 0, told.output
    (finding,) = [each for each in json.loads(told.stdout)["findings"] if each["about"] == "store"]
    assert "driver and ranks write it" in finding["what"]
    # Stores limit the writes of one object.
    written = s3_server.requests("PUT", "/.doctor-")
    assert {line.split()[6].partition("?")[0][-2:] for line in written} == {"/0", "/1"}


def test_the_log_lines_of_an_orchestrator_are_no_part_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        """An orchestrator package, whose import configures a log of standard output, as Airflow's does."""

        def load(self) -> Callable[..., dict[str, Any]]:
            handler = logging.StreamHandler(sys.stdout)

            def connection(name: str, conf: dict[str, str]) -> dict[str, Any]:
                handler.handle(logging.makeLogRecord({"msg": f"a warning about connection {name}"}))
                return {"engine": SparkEngine(f"spark://127.0.0.1:{free_port()}", conf=conf)}

            return connection

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Entry()])
    told = doctor("--conn-id", "cluster", "--json")
    # What is seen from here comes first, and then nothing is started.
    assert [finding["about"] for finding in json.loads(told.stdout)["findings"]] == ["from here"]
    assert told.stderr == "a warning about connection cluster\n"


def test_ranks_that_cannot_start_are_a_problem_with_what_to_do(tmp_path: Path) -> None:
    told = doctor("--engine", "local[2]", "-n", "3", "--store", str(tmp_path))
    assert told.exit_code == 1
    assert "InsufficientSlotsError" in told.output


def never(*_: object) -> None:
    while True:
        time.sleep(1)


def test_ranks_that_hang_while_they_look_around_are_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a host sees its peers at the rendezvous, and not at the first all-reduce."""
    monkeypatch.setattr("rankzero.doctor.examine.collect_facts", never)
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.02")
    found = examine(LocalEngine(), store=str(tmp_path))
    assert not found.healthy
    assert "no rank made progress" in found.findings[-1].what
