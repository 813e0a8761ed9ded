"""A script that is started by hand keeps its checkpoints where it is told to, and goes on from them."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.runs import submitted

SCRIPT = """
    import os, sys
    import torch
    import rankzero.train as rt

    weights, first = torch.zeros(3), 0
    if checkpoint := rt.get_checkpoint():
        state = checkpoint.load()
        weights, first = state["weights"], state["epoch"] + 1
    for epoch in range(first, 6):
        weights += 1
        rt.report({"epoch": epoch}, checkpoint={"weights": weights, "epoch": epoch})
        if epoch == 2 and first == 0:
            # The last one is still on its way.
            sys.exit(3)
    print("from", first, "to", weights.tolist(), rt.get_context().storage_path)
"""


FORKS = """
import gc, json, os, runpy, sys
import torch

# Else each fork examines all of torch at its end, which takes longer than its training.
gc.freeze()
for line in sys.stdin:
    script, output, environment = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for descriptor in (1, 2):
        os.dup2(os.open(f"{output}-{descriptor}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
    break
"""


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a script in a fork of an interpreter that has imported torch, as the first thing that scripts do."""
    output = tmp_path_factory.mktemp("output") / "of"
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as interpreter:
        assert interpreter.stdin
        assert interpreter.stdout
        stdin, stdout = interpreter.stdin, interpreter.stdout

        def run_in_fork(script: Path, **env: str) -> "subprocess.CompletedProcess[str]":
            print(json.dumps([str(script), str(output), {**plain(), **env}]), file=stdin, flush=True)
            status = int(stdout.readline())
            written = [Path(f"{output}-{descriptor}").read_text() for descriptor in (1, 2)]
            return subprocess.CompletedProcess([script], status, *written)

        yield run_in_fork
        stdin.close()


def plain() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "RANKZERO_STORAGE"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_it_goes_on_from_its_last_checkpoint(run: Run, script: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "kept")
    first = run(script, RANKZERO_STORAGE=place)
    assert first.returncode == 3, first.stderr
    assert first.stdout.splitlines() == ["report 1: epoch=0", "report 2: epoch=1", "report 3: epoch=2"]
    second = run(script, RANKZERO_STORAGE=place)
    assert second.stdout.splitlines()[-1] == f"from 3 to [6.0, 6.0, 6.0] {place}", second.stderr
    kept = sorted(path.name for path in Path(place, "checkpoints").iterdir())
    assert kept == ["0000-000002", "0001-000001", "0001-000002"], "the last two, and the one that it began with"


def test_it_keeps_none_without_a_place_nor_with_peers_nor_at_a_url(run: Run, script: Path, tmp_path: Path) -> None:
    assert run(script).returncode == 3
    assert run(script).returncode == 3, "nothing was kept"
    place = str(tmp_path / "kept")
    world = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert run(script, RANKZERO_STORAGE=place, **world).returncode == 3
    assert not os.path.exists(place)
    refused = run(script, RANKZERO_STORAGE="s3://bucket/kept")
    assert "RANKZERO_STORAGE is 's3://bucket/kept'; it must be a local directory" in refused.stderr


def test_it_refuses_the_directory_of_a_run_and_goes_on_from_a_copy_of_its_checkpoints(
    run: Run, script: Path, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    assert run(script, RANKZERO_STORAGE=str(place)).returncode == 3
    submitted(str(place))
    before = sorted(place.rglob("*"))
    refused = run(script, RANKZERO_STORAGE=str(place))
    assert "is the directory of a run: submit the run again under its run_id" in refused.stderr
    assert sorted(place.rglob("*")) == before
    shutil.copytree(place / "checkpoints", tmp_path / "copy" / "checkpoints")
    assert "from 3 to" in run(script, RANKZERO_STORAGE=str(tmp_path / "copy")).stdout


def test_it_goes_on_from_the_checkpoint_before_a_damaged_one(run: Run, script: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "kept")
    run(script, RANKZERO_STORAGE=place)
    [newest] = Path(place, "checkpoints", "0000-000002").glob("rank-0*")
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    refused = run(script, RANKZERO_STORAGE=place)
    assert "checkpoint 0000-000002 is damaged" in refused.stderr
    again = run(script, RANKZERO_STORAGE=place)
    assert again.stdout.splitlines()[-1] == f"from 2 to [6.0, 6.0, 6.0] {place}", again.stderr


def test_a_forked_child_does_not_wait_for_its_parents_checkpoint(run: Run, tmp_path: Path) -> None:
    """It has no thread that writes one."""
    program = """
        import os, sys
        import rankzero.train as rt
        from rankzero.train.writer import CheckpointWriter

        # The fork comes while the checkpoint is being written.
        begin = CheckpointWriter._write_part
        def write(*args):
            written.acquire()
            return begin(*args)
        import threading
        written = threading.Lock()
        written.acquire()
        CheckpointWriter._write_part = write
        rt.report({}, checkpoint={"epoch": 1})
        if not (child := os.fork()):
            sys.exit(0)
        os.waitpid(child, 0)
        written.release()
    """
    script = tmp_path / "fork.py"
    script.write_text(textwrap.dedent(program))
    done = run(script, RANKZERO_STORAGE=str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "store" / "checkpoints" / "0000-000000" / "checkpoint.json").exists()
