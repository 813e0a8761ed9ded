"""A Kubernetes Job that submits a run under a fixed run id: its pods are process namespaces of this machine."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from tests.conftest import ROOT, until

from rankzero.cli import main
from rankzero.run.directory import RunDirectory

on_namespaces = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="pods are made of Linux namespaces, which need root"
)

WAIT = 180.0

SCRIPT = """
import os, sys, time
import rankzero.train as rt

before = rt.get_checkpoint()
if before is None:
    rt.report({"step": 1}, checkpoint={"step": 1})
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
print("resumed from", before and before.load()["step"], flush=True)
"""


class Pod:
    """One container, whose first process is the submitting program."""

    def __init__(self, directory: Path, number: int) -> None:
        self._output = directory / f"pod-{number}.log"
        unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-m", "rankzero.cli"]
        arguments = ["run", "--store", str(directory / "store"), "--run-id", "nightly"]
        env = {**os.environ, "RANKZERO_TIME_SCALE": "0.3"}
        command = [*unshare, *arguments, str(directory / "train.py"), str(directory / "go")]
        with open(self._output, "wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=env)

    @property
    def lines(self) -> str:
        return self._output.read_text()

    def kill(self) -> None:
        """Ends the container as a kubelet does whose node is lost: no process of it gets a signal to handle."""
        self._process.kill()
        self._process.wait(WAIT)

    def wait(self) -> int:
        return self._process.wait(WAIT)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Pod]]:
    pods: list[Pod] = []

    def start() -> Pod:
        pods.append(Pod(tmp_path, len(pods)))
        return pods[-1]

    (tmp_path / "train.py").write_text(SCRIPT)
    yield start
    for pod in pods:
        pod.kill()


def await_checkpoint(directory: Path) -> None:
    run = RunDirectory(str(directory / "store" / "nightly"))
    until(lambda: run.newest()[1] and run.current().status().checkpoint, WAIT, "one")


@on_namespaces
def test_the_next_pod_resumes_the_run_of_a_pod_that_was_lost(start: Callable[[], Pod], tmp_path: Path) -> None:
    lost = start()
    await_checkpoint(tmp_path)
    lost.kill()
    (tmp_path / "go").touch()
    following = start()
    assert following.wait() == 0, following.lines
    assert "resumed from 1" in following.lines


def test_the_manifest_of_the_documentation_is_a_command_that_exists() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    [text] = re.findall("```yaml\n(apiVersion: batch/v1\n.*?)```", page, re.DOTALL)
    pod = yaml.safe_load(text)["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["restartPolicy"] == "OnFailure"
    program, command, *arguments = [*container["command"], *container["args"]]
    assert (program, command) == ("rankzero", "run")
    context = main.commands["run"].make_context("run", arguments)
    assert context.params["script"] == "/app/train.py"
    assert (context.params["run_id"], context.params["store"]) == ("train-nightly", "s3://bucket/runs")
    assert context.params["conf"]["spark.driver.host"] == "$(POD_IP)"
