"""What each kind of cluster is given for a driver, and what is refused before anything is given."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import find
from tests.runs import submitted

from rankzero import InvalidJobError, Launcher, SparkSubmitEngine
from rankzero.engines.spark import submit
from rankzero.run.directory import Submission

# Not in this source, which is shipped with the run.
SECRET = "-".join(["geheim", "4711"])
CONF = {"spark.driver.memory": "2g", "spark.hadoop.fs.s3a.secret.key": SECRET, "spark.authenticate.secret": SECRET}
RUN = ["/shared/runs/one", "3"]
WORD = submit.pack({"env": {"TOKEN": SECRET}})


def test_a_standalone_cluster_gets_what_is_private_as_a_variable_of_the_driver() -> None:
    given = submit.deployment_of("spark://head:7077", CONF, "/shared/runs/one/submissions/3", RUN, WORD)
    assert given.arguments == [
        *("--class", "org.apache.spark.deploy.PythonRunner", "file:///shared/runs/one/submissions/3/rankzero.jar"),
        *("/shared/runs/one/submissions/3/driver.py", "/shared/runs/one/submissions/3/rankzero.jar"),
        *("/shared/runs/one", "--submission", "3", "--private", "env:SPARK_RANKZERO_PRIVATE"),
    ]
    assert given.conf == {"spark.driver.memory": "2g"}
    assert given.env == {"SPARK_RANKZERO_PRIVATE": WORD, "_SPARK_AUTH_SECRET": SECRET}


def test_yarn_gets_it_as_configuration_that_spark_redacts_in_the_users_staging_directory() -> None:
    given = submit.deployment_of("yarn", CONF, "/tmp/made", RUN, WORD)
    assert given.arguments == [
        *("--py-files", "/tmp/made/rankzero.jar", "/tmp/made/driver.py"),
        *("/shared/runs/one", "--submission", "3", "--private", "conf:spark.rankzero.secret"),
    ]
    assert given.conf == {**CONF, "spark.yarn.submit.waitAppCompletion": "false", "spark.rankzero.secret": WORD}
    assert given.env is None


def test_what_is_private_comes_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    private = {"env": {"A": 'ü"\\\n=${x}'}, "engine": {"conf": {}}}
    monkeypatch.setenv("SPARK_RANKZERO_PRIVATE", submit.pack(private))
    assert submit.read_private("env:SPARK_RANKZERO_PRIVATE") == private
    assert "SPARK_RANKZERO_PRIVATE" not in os.environ


def test_more_than_a_variable_holds_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="takes no more than 131072"):
        submit.deployment_of("spark://head:7077", {}, "/x", RUN, "x" * (128 << 10))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"master": None}, "is no cluster"),
        ({"master": "local-cluster[1,1,1024]"}, "is no cluster"),
        ({"master": "yarn", "session": object()}, "a session"),
        ({"master": "mesos://x"}, "master is 'mesos://x'"),
        ({"master": "k8s://https://api"}, "start a pod of your own that runs"),
    ],
)
def test_what_cannot_be_driven_by_a_cluster_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidJobError, match=words):
        SparkSubmitEngine(**options)


@pytest.mark.parametrize(
    ("master", "root", "words"),
    [
        ("spark://head:7077", "s3://bucket/runs", "a path that every host mounts"),
        ("yarn", "memory://runs", "cannot be started from the store"),
    ],
)
def test_a_store_that_the_cluster_cannot_see_is_refused(master: str, root: str, words: str) -> None:
    with pytest.raises(InvalidJobError, match=words):
        Launcher(2, engine=SparkSubmitEngine(master), store=root).submit(len, "abc")


def test_a_driver_that_sees_another_directory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_RANKZERO_PRIVATE", submit.pack({"env": {}, "engine": {"conf": {}}, "nonce": "its own"}))
    program = "from rankzero.driver.main import main_on_cluster; main_on_cluster()"
    arguments = [str(tmp_path / "run"), "--submission", "0", "--private", "env:SPARK_RANKZERO_PRIVATE"]
    ended = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "is not the directory of the run" in ended.stderr


def test_a_driver_that_a_cluster_queues_is_awaited_for_start_timeout(tmp_path: Path) -> None:
    from rankzero.run.observer import dead_after

    assert dead_after(submitted(str(tmp_path / "run"), queue_time=600.0).status()) == 600.0


@pytest.mark.parametrize(
    ("name", "error", "state", "words"),
    [
        ("run", FileNotFoundError("spark-submit"), "failed", "not be started: FileNotFoundError: spark-submit"),
        ("submit", FileNotFoundError("spark-submit"), "failed", "not be started: FileNotFoundError: spark-submit"),
        ("submit", KeyboardInterrupt(), "cancelled", "interrupted by KeyboardInterrupt before the driver started"),
    ],
)
def test_a_submission_that_fails_is_recorded_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException, state: str, words: str
) -> None:
    def fail(engine: SparkSubmitEngine, own: Submission, private: Mapping[str, Any]) -> None:
        raise error

    monkeypatch.setattr(SparkSubmitEngine, "check", lambda *_: None)
    monkeypatch.setattr(SparkSubmitEngine, "start_driver", fail)
    launcher = Launcher(2, engine=SparkSubmitEngine("spark://head:7077"), store=tmp_path, run_id="one")
    with pytest.raises(type(error)):
        getattr(launcher, name)(len, "abc")
    found = find(launcher)
    assert found is not None
    assert found.status().state == state
    assert words in str(found.status().error)
    # A driver that the cluster has taken all the same does nothing.
    assert Submission(found.own.run, found.job).is_lost()


def test_a_driver_that_has_begun_is_asked_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(engine: SparkSubmitEngine, own: Submission, private: Mapping[str, Any]) -> None:
        own.write_status(replace(own.status(), driver_pid=1))
        raise KeyboardInterrupt

    monkeypatch.setattr(SparkSubmitEngine, "check", lambda *_: None)
    monkeypatch.setattr(SparkSubmitEngine, "start_driver", begin)
    launcher = Launcher(2, engine=SparkSubmitEngine("spark://head:7077"), store=tmp_path, run_id="one")
    with pytest.raises(KeyboardInterrupt):
        launcher.run(len, "abc")
    assert (found := find(launcher))
    assert found.own.cancel_request()
