"""An agent's scratch directory goes with the agent, whatever becomes of the process that holds it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.channel.conftest import Received, until
from tests.conftest import ROOT, is_alive

import rankzero
from rankzero import Launcher
from rankzero.channel.connection import new_secret
from rankzero.channel.server import Server
from rankzero.host.network import listen

BOUND = 60.0

HOLD = """
import json, os, sys
from rankzero.task import hold, scratch
make = scratch.make_scratch

def announce(*place):
    made = make(*place)
    print(made, flush=True)
    return made

hold.make_scratch = scratch.make_scratch = announce
hold.hold(json.loads(sys.argv[1]))
"""


@pytest.mark.parametrize(("warm_start", "directories"), [(False, 2), (True, 1)])
def test_of_a_holder_that_stands_still_and_dies_nothing_is_left(
    tmp_path: Path, marker: str, warm_start: bool, directories: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a driver that was stopped: its agent loses it, ends, and finds it alive; then it is killed."""
    monkeypatch.setenv("MARK", marker)
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    if directories == 2:
        # The path of Spark's directory is too long for sockets.
        local = tmp_path / "a-long-name-as-yarn-has-it" / "blockmgr-8c1b"
        local.mkdir(parents=True)
        monkeypatch.setenv("SPARK_LOCAL_DIRS", str(local))
    config = {
        "use_gpu": False,
        "ports": None,
        "grace": 1.0,
        "exit_timeout": 5.0,
        "restart_count": 0,
        "max_restarts": 0,
        "preload_timeout": 20.0 if warm_start else None,
        "env": {},
        "task": 0,
        "host": "127.0.0.1",
        "workers": 1,
        "gpus": [],
        "cores": 1,
        "code_path": os.path.dirname(os.path.dirname(rankzero.__file__)),
    }
    made = tmp_path / "made"

    async def main() -> None:
        received, secret = Received(), new_secret()
        server = Server(secret, received, directory=str(tmp_path))
        port = await server.start(listen("127.0.0.1", None))
        settings = {**config, "driver": [["127.0.0.1"], port], "secret": secret}
        with made.open("w") as output:
            command = [sys.executable, "-c", HOLD, json.dumps(settings)]
            holder = subprocess.Popen(command, cwd=ROOT, stdout=output)
        try:
            await until(lambda: received.messages)
            agent = received.messages[0][2].facts()["pid"]
            paths = made.read_text().splitlines()
            assert [os.path.isdir(path) for path in paths] == [True] * directories
            holder.send_signal(signal.SIGSTOP)
            await server.close()
            await until(lambda: not is_alive(agent))
        finally:
            holder.kill()
            holder.wait(BOUND)
        assert not any(map(os.path.exists, paths))

    asyncio.run(main())


def places() -> dict[str, str]:
    import multiprocessing

    with multiprocessing.Manager() as manager:
        # A socket of its own.
        assert manager.dict() is not None
    return {name: os.environ.get(name, "") for name in ("RANKZERO_SCRATCH", "TMPDIR")}


def test_much_goes_where_spark_has_room_and_sockets_where_they_fit(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    local = tmp_path / "a-long-name-as-yarn-has-it" / "blockmgr-8c1b"
    local.mkdir(parents=True)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path}/not-there,/proc,{local}")
    found = launcher.options(num_processes=1).run(places)
    assert found["RANKZERO_SCRATCH"].startswith(f"{local}/rankzero-agent-")
    assert found["TMPDIR"].startswith(f"{tempfile.gettempdir()}/rankzero-agent-")
    assert not os.path.exists(found["RANKZERO_SCRATCH"])
    assert not os.path.exists(found["TMPDIR"])


def test_what_the_user_set_for_temporary_files_counts_more(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("spark", "user"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path}/spark")
    monkeypatch.setenv("TMPDIR", f"{tmp_path}/user")
    found = launcher.options(num_processes=1).run(places)
    assert found["RANKZERO_SCRATCH"].startswith(f"{tmp_path}/user/rankzero-agent-")


READ_ONLY = """
mount --bind "$1" "$1"
mountpoint -q /dev/shm || mount -t tmpfs none /dev/shm
mount -o remount,bind,ro /
mount -o remount,bind,ro /dev/shm
cd /
shift
exec "$@"
"""

TRAIN_THERE = """
import os, sys
from rankzero import Launcher

def train():
    import torch
    import rankzero.train as rt
    rt.report({"loss": 1.0}, checkpoint={"w": torch.ones(3)})
    print("no place but one")
    return os.environ["RANKZERO_SCRATCH"]

if __name__ == "__main__":
    handle = Launcher(2, store=sys.argv[1], env={"MARK": os.environ["MARK"]}).submit(train)
    print(handle.result(120))
"""


def test_a_root_that_is_read_only(tmp_path: Path, marker: str) -> None:
    """As in a pod with ``readOnlyRootFilesystem``, whose volumes are Spark's local directory and the store."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("mounts need rights")
    (tmp_path / "local").mkdir()
    (tmp_path / "there.py").write_text(TRAIN_THERE)
    env = {name: value for name, value in os.environ.items() if name != "TMPDIR"} | {"MARK": marker}
    python = [sys.executable, str(tmp_path / "there.py"), str(tmp_path / "store")]
    command = ["unshare", "--mount", "sh", "-ec", READ_ONLY, "sh", str(tmp_path), *python]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert "can be written (tried TMPDIR, SPARK_LOCAL_DIRS=" in done.stderr
    assert "name it in spark.local.dir or TMPDIR" in done.stderr
    assert os.listdir(tmp_path / "local") == []


def returns_a_temporary_file(place: str) -> dict[str, str]:
    import tempfile

    made = Path(tempfile.mkdtemp(), "model.pt")
    made.write_text("weights")
    return {"model": str(made), "kept": place, "none": "/nowhere/rankzero-agent-1/model.pt"}


def test_a_returned_path_that_goes_with_the_run_is_named(launcher: Launcher, tmp_path: Path) -> None:
    launcher = launcher.options(num_processes=1, run_id="one")
    value = launcher.run(returns_a_temporary_file, str(tmp_path))
    assert not os.path.exists(value["model"])
    handle = launcher.find()
    assert handle
    named = [line for line in handle.logs(rank=0) if "is deleted with the run" in line]
    assert [value["model"] in line for line in named] == [True]
