"""A test that changes what a signal does is named, and what it ignores reaches no server of a later test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests import servers
from tests.conftest import ROOT, until

SUITE = """
import signal
from tests.handlers import same_signal_handlers

def test_guilty():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

def test_innocent():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""

STUBBORN = """
import signal, subprocess, sys, time
print("ignored" if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN else "default", flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; print('child', flush=True); time.sleep(600)"])
child.wait()
"""


def test_the_guilty_test_is_named_and_the_next_one_finds_what_was_before(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rE", "-c", os.devnull, "test_suite.py"]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60
    )
    assert "ERROR test_suite.py::test_guilty - AssertionError: handlers of signals" in done.stdout
    assert "2 passed, 1 error" in done.stdout


def test_a_server_ignores_nothing_and_ends_with_all_that_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        server = servers.start(sys.executable, "-c", STUBBORN, log=log)
    finally:
        signal.signal(signal.SIGTERM, before)
    until(lambda: "child" in log.read_text(), 30, "a server with a child")
    servers.stop([server], timeout=0.1)
    assert log.read_text().split() == ["default", "child"]
    assert list(servers.session(server.pid)) == []


@pytest.mark.skipif(not shutil.which("setpriv"), reason="util-linux is not here")
def test_a_server_ends_with_tests_that_are_killed(tmp_path: Path) -> None:
    program = f"""
import pathlib, time
import pytest
from tests import servers
server = servers.start("sleep", "600", log=pathlib.Path({str(tmp_path / "log")!r}))
print(server.pid, flush=True)
time.sleep(600)
"""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", program]
    tests = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True)
    assert tests.stdout is not None
    server = int(tests.stdout.readline())
    until(lambda: Path(f"/proc/{server}/comm").read_text() == "sleep\n", 30, "a server")
    tests.kill()
    tests.communicate()
    until(lambda: not servers.is_alive(server), 30, "its end")
