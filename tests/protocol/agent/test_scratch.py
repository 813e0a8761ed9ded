"""An agent's scratch directory goes with the agent, whatever becomes of the process that holds it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.conftest import ROOT, processes_with
from tests.conftest import until as wait_until
from tests.protocol.channel.conftest import Received, until

import rankzero
from rankzero import Launcher
from rankzero.channel.connection import new_secret
from rankzero.channel.server import Server
from rankzero.host.network import listen
from rankzero.task import hold

BOUND = 60.0

HOLD = """
import json, os, sys
from rankzero.task import hold
make = hold.tempfile.mkdtemp

def announce(**place):
    made = make(**place)
    print(made, flush=True)
    return made

hold.tempfile.mkdtemp = announce
hold.hold(json.loads(sys.argv[1]))
"""


CONFIG = {
    "use_gpu": False,
    "grace": 1.0,
    "exit_timeout": 5.0,
    "connect_timeout": BOUND,
    "restart_count": 0,
    "max_restarts": 0,
    "env": {},
    "task": 0,
    "host": "127.0.0.1",
    "workers": 1,
    "gpus": [],
    "cores": 1,
    "code_path": os.path.dirname(os.path.dirname(rankzero.__file__)),
}


def test_an_agent_that_is_stopped_before_it_finds_its_driver_fails_with_the_reason(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = {**CONFIG, "driver": [["127.0.0.1"], silent.getsockname()[1]], "secret": new_secret()}
        config |= {"scratch": str(scratch), "watched": []}
        program = (
            "import asyncio, json; from rankzero.agent.supervise import run; run(json.loads(input()), asyncio.Runner())"
        )
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as agent:
            assert agent.stdin
            assert agent.stderr
            agent.stdin.write(json.dumps(config) + "\n")
            agent.stdin.flush()
            connection, _ = silent.accept()
            with connection:
                agent.send_signal(signal.SIGTERM)
                assert agent.wait(BOUND) == 1
            assert agent.stderr.read() == "it got SIGTERM: the cluster takes the place back\n"
    assert not scratch.exists()


@pytest.mark.parametrize("warm_start", [False, True])
def test_of_a_holder_that_stands_still_and_dies_nothing_is_left(
    tmp_path: Path, marker: str, warm_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a driver that was stopped: its agent loses it, ends, and finds it alive; then it is killed."""
    monkeypatch.setenv("MARK", marker)
    config = {**CONFIG, "preload_timeout": 20.0 if warm_start else None}
    made = tmp_path / "made"

    async def main() -> None:
        received, secret = Received(), new_secret()
        server = Server(secret, received.on_message, received.on_end, {}, {}, str(tmp_path))
        port = await server.start(listen("127.0.0.1", None))
        settings = {**config, "driver": [["127.0.0.1"], port], "secret": secret}
        with made.open("w") as output:
            command = [sys.executable, "-c", HOLD, json.dumps(settings)]
            holder = subprocess.Popen(command, cwd=ROOT, stdout=output)
        try:
            await until(lambda: received.messages)
            path, *_ = made.read_text().split()
            assert os.path.isdir(path)
            holder.send_signal(signal.SIGSTOP)
            await server.close()
            await until(lambda: not set(processes_with(marker)) - {holder.pid})
        finally:
            holder.kill()
            holder.wait(BOUND)
        assert not os.path.exists(path)

    asyncio.run(main())


@pytest.mark.parametrize("is_set", [False, True])
def test_much_goes_where_the_user_or_spark_has_room(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_set: bool
) -> None:
    local = tmp_path / "a-long-name-as-yarn-has-it" / "blockmgr-8c1b"
    local.mkdir(parents=True)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path}/not-there,/proc,{local}")
    monkeypatch.delenv("TMPDIR", raising=False)
    with tempfile.TemporaryDirectory() as short:
        if is_set:
            monkeypatch.setenv("TMPDIR", short)
            monkeypatch.setattr(tempfile, "tempdir", short)
        scratch = launcher.options(num_processes=1).run(os.getenv, "RANKZERO_SCRATCH")
    assert scratch.startswith(f"{short if is_set else local}/rankzero-agent-")
    assert not os.path.exists(scratch)


GRACE = """
import os, signal, sys, time
from rankzero import Launcher

def train(place):
    def save(*_):
        os.rename(f"{place}/up", f"{place}/asked")
        while not os.path.exists(f"{place}/go"):
            time.sleep(0.05)
        os._exit(0)

    signal.signal(signal.SIGTERM, save)
    with open(f"{place}/.up", "w") as file:
        file.write(os.environ["RANKZERO_SCRATCH"])
    os.rename(file.name, f"{place}/up")
    time.sleep(60)

Launcher(1, store=f"{sys.argv[1]}/store", warm_start=False, stop_grace=60).run(train, sys.argv[1])
"""


def test_a_launch_removes_what_killed_processes_have_left_and_nothing_that_is_in_use(
    tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of the agent in use is dead, and its rank still saves."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, young = hold.Directory("agent"), hold.Directory("agent")
    for directory in (left, young):
        directory.log.close()
    with subprocess.Popen([sys.executable, "-c", GRACE, str(tmp_path)], env={**os.environ, "MARK": marker}) as owner:
        wait_until((tmp_path / "up").exists, BOUND, "a rank")
        used = (tmp_path / "up").read_text()
        owner.kill()
    wait_until((tmp_path / "asked").exists, BOUND, "SIGTERM")
    for path in (left.path, used):
        os.utime(path, (0, 0))
    own = hold.Directory("agent")
    own.sweep()
    own.close()
    assert [os.path.exists(path) for path in (left.path, young.path, used)] == [False, True, True]
    (tmp_path / "go").touch()
    wait_until(lambda: not os.path.exists(used), BOUND, "the end of the agent")


READ_ONLY = """
mount --bind "$1" "$1"
mountpoint -q /dev/shm || mount -t tmpfs none /dev/shm
mount -o remount,bind,ro /
mount -o remount,bind,ro /dev/shm
cd /
shift
exec "$@"
"""


LAUNCH_THERE = "import sys; from rankzero import Launcher; Launcher(2, store=sys.argv[1]).submit(int).result(120)"


def test_a_root_that_is_read_only(tmp_path: Path, marker: str) -> None:
    """As in a pod with ``readOnlyRootFilesystem``, whose volumes are Spark's local directory and the store."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("mounts need rights")
    (tmp_path / "local").mkdir()
    env = {name: value for name, value in os.environ.items() if name != "TMPDIR"} | {"MARK": marker}
    python = [sys.executable, "-c", LAUNCH_THERE, str(tmp_path / "store")]
    command = ["unshare", "--mount", "sh", "-ec", READ_ONLY, "sh", str(tmp_path), *python]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert "No usable temporary directory found in" in done.stderr
    assert os.listdir(tmp_path / "local") == []
