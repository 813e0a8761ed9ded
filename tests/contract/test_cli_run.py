"""`rankzero run`, as people type it, and torchrun's lines under it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import of_ranks, until

from rankzero import RunHandle

SCRIPT = """
import os, sys, time
import rankzero.train as rt
print("arguments", sys.argv[1:], os.environ["WORLD_SIZE"])
for step in range(int(os.environ.get("STEPS", "3"))):
    rt.report({"step": step, "total_steps": int(os.environ.get("STEPS", "3")), "loss": 1 / (step + 1)})
    time.sleep(float(os.environ.get("PAUSE", "0")))
if "--fail" in sys.argv:
    raise ValueError("no such lr")
"""

COMMAND = [sys.executable, "-m", "rankzero.cli"]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


def rankzero(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=240)


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    """The first line of a rank: a start on a busy machine may say that it waits."""
    assert process.stdout is not None
    return next(line for line in process.stdout if b"rankzero: " not in line)


def test_a_line_of_torchrun_moves_over_by_its_first_word(script: Path, store: Path) -> None:
    line = f"--nnodes=1 --nproc_per_node=2 --standalone --rdzv-backend c10d -t 3 {script} --lr 1e-3".split()
    done = rankzero("run", "--store", store, *line)
    assert done.returncode == 0, done.stderr
    assert sorted(of_ranks(done.stdout.splitlines())) == [f"[{rank}] arguments ['--lr', '1e-3'] 2" for rank in (0, 1)]
    for name in ("--standalone", "--rdzv-backend", "--tee"):
        assert f"rankzero: {name} has no meaning here and is ignored" in done.stderr


@pytest.mark.parametrize(
    "line", ["--nnodes=2", "--nnodes=1:4 --nproc-per-node=2", "--node_rank=1", "--nnodes 2 --node-rank 0"]
)
def test_a_line_for_each_of_several_nodes_is_refused(line: str, script: Path, store: Path) -> None:
    done = rankzero("run", "--store", store / "none", *line.split(), script)
    assert done.returncode == 2
    assert "this line is for several nodes" in done.stderr
    assert not (store / "none").exists()


def test_the_end_can_be_read_by_a_script(script: Path, store: Path) -> None:
    done = rankzero("run", "--store", store, "-n", 1, "--run-id", "first", "--json", "--label", "team=a", script)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, facts["state"], facts["id"]) == (0, "succeeded", "first")
    assert facts["metrics"]["loss"] == pytest.approx(1 / 3)
    found = rankzero("runs", store, "--label", "team=a", "--json")
    assert [json.loads(line)["id"] for line in found.stdout.splitlines()] == ["first"]
    # Acknowledged: the same line trains again.
    assert "arguments" in rankzero("run", "--store", store, "-n", 1, "--run-id", "first", script).stdout


def test_a_success_whose_acknowledgement_cannot_be_written_is_one(store: Path, tmp_path: Path) -> None:
    program, folders = tmp_path / "program.py", str(store / "kept" / "submissions" / "0-*")
    program.write_text(f"import glob, os; os.makedirs(glob.glob({folders!r})[0] + '/delivery/in the way')")
    done = rankzero("run", "--store", store, "--run-id", "kept", program)
    assert (done.returncode, "succeeded: " in done.stderr) == (0, True), done.stderr
    assert "could not be acknowledged" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-n", "1", "{script}", "--fail"], 1, "ValueError: no such lr"),
        (["-n", "0", "{script}"], 2, "num_processes is 0; it must be a positive integer"),
        (["-n", "2", "--nproc-per-node", "2", "{script}"], 2, "not both"),
        (["--nproc-per-node", "gpu", "{script}"], 2, "say --use-gpu, too"),
        (["-n", "1", "no-such-script.py"], 2, "there is no such script"),
        (["-n", "1", "--engine", "sparky", "{script}"], 2, "master is 'sparky'"),
        (["-n", "1", "--conf", "spark.x=1", "{script}"], 2, "--conf is Spark's"),
        (["-n", "64", "--engine", "local[2]", "{script}"], 3, "64"),
        (["--timeout", "soon", "{script}"], 2, "timeout is 'soon'; it must be a number of seconds, or"),
    ],
)
def test_an_exit_code_and_a_sentence_for_each_end(
    script: Path, store: Path, arguments: list[str], code: int, message: str
) -> None:
    done = rankzero("run", "--store", store, *(one.format(script=script) for one in arguments))
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr.replace("Traceback (most recent call last):\n  File", "", 1)


def test_a_detached_run_is_followed_and_cancelled_by_its_directory(script: Path, store: Path) -> None:
    line = ["--detach", "-n", "1", "--env", "STEPS=6000", "--env", "PAUSE=0.1", script]
    directory = rankzero("run", "--store", store, *line).stdout.strip()
    handle = RunHandle.attach(directory)
    try:
        until(lambda: bool(handle.status().metrics), 60, "a metric")
        assert json.loads(rankzero("cancel", directory, "--json").stdout)["asked"] is True
        assert handle.wait(60)
    finally:
        handle.cancel()
    assert rankzero("status", directory).stdout.splitlines()[2].split() == ["state", "cancelled"]


def test_a_detached_run_trains_again_after_its_success(script: Path, store: Path) -> None:
    """As a line of cron with a fixed name, whose results nobody takes."""
    line = ["run", "--store", store, "--detach", "-n", "1", "--run-id", "nightly", script]
    for submission in range(2):
        handle = RunHandle.attach(rankzero(*line).stdout.strip())
        assert handle.wait(60)
        assert handle.job.submission == submission


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_run_that_is_stopped_from_outside_is_cancelled(script: Path, store: Path, number: signal.Signals) -> None:
    line = f"--store {store} -n 1 --run-id stopped-{number} --env STEPS=6000 --env PAUSE=0.1 {script}".split()
    process = subprocess.Popen([*COMMAND, "run", *line], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert first_line(process).startswith(b"[0] arguments")
        process.send_signal(number)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    assert RunHandle.attach(store / f"stopped-{number}").status().state == "cancelled"


def test_a_run_under_nohup_outlives_its_terminal(script: Path, store: Path) -> None:
    line = ["--store", str(store), "-n", "1", "--run-id", "nohup", "--env", "STEPS=20", "--env", "PAUSE=0.1"]
    command = ["nohup", *COMMAND, "run", *line, str(script)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        assert first_line(process).startswith(b"[0] arguments")
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert RunHandle.attach(store / "nohup").status().state == "succeeded"


@pytest.mark.parametrize("train", ["near-by:main", "near-by.py:main"])
def test_a_function_of_a_file_in_the_working_directory(
    train: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "near-by.py").write_text("def main():\n    print('in main')\n")
    command = [sys.executable, "-P", "-m", "rankzero.cli", "run", "--store", str(store), train]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, of_ranks(done.stdout.splitlines())) == (0, ["[0] in main"]), done.stderr
