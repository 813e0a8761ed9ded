"""What a run's environment and engine settings hold reaches the ranks, and lies in no file, however the run ends."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until

from rankzero import Launcher, RunHandle, WorkerFailedError
from rankzero.masking import Mask, secrets_of
from rankzero.submit import durable

# Not in this source, which is shipped with the run.
SECRET = "-".join(["hunter2", "of", "the", "user"])
WAIT = 60.0


PLACES = ["a directory", "an object store"]


@pytest.fixture(params=["a directory", pytest.param("an object store", marks=pytest.mark.soak)])
def secretive(request: pytest.FixtureRequest, launcher: Launcher, tmp_path: Path) -> Launcher:
    store = tmp_path / "store" if request.param == "a directory" else f"{request.getfixturevalue('bucket')}/store"
    env = {**(launcher.env or {}), "TOKEN": SECRET}
    return launcher.options(num_processes=1, run_id="secret", store=store, env=env)


def files_with_the_secret(store: str | Path) -> list[str]:
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(str(store))
    while True:
        filesystem.invalidate_cache()
        paths = filesystem.find(path)
        assert paths
        # A file that is being written has another name by now.
        with contextlib.suppress(FileNotFoundError):
            return [found for found in paths if SECRET.encode() in filesystem.cat_file(found)]


def is_there() -> bool:
    shown = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            shown.append(path.read_bytes())
    return os.environ["TOKEN"].startswith("hunter2") and not any(SECRET.encode() in command for command in shown)


def wait_for_ever() -> None:
    print("waits")
    time.sleep(600)


def fail_once() -> bool:
    import rankzero.train as rt

    if rt.get_context().attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.environ["TOKEN"].startswith("hunter2")


def running(launcher: Launcher) -> RunHandle[None]:
    handle = launcher.submit(wait_for_ever)
    until(lambda: handle.status().state == "running", WAIT, "a rank")
    return handle


@pytest.mark.parametrize("start", [lambda one: one.run(is_there), lambda one: one.submit(is_there).result(WAIT)])
def test_a_run_that_succeeded(secretive: Launcher, tmp_path: Path, start: Callable[[Launcher], bool]) -> None:
    assert start(secretive)
    assert files_with_the_secret(secretive.store) == []


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_that_was_cancelled_or_whose_driver_was_killed(secretive: Launcher, is_killed: bool) -> None:
    handle = running(secretive)
    assert files_with_the_secret(secretive.store) == []
    driver = handle.status().driver_pid
    assert driver
    if is_killed:
        os.kill(driver, signal.SIGKILL)
    else:
        handle.cancel()
    assert handle.wait(WAIT)
    assert files_with_the_secret(secretive.store) == []


def test_a_submitter_that_dies_before_its_driver_starts(
    secretive: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(durable, "DriverProcess", die)
    with pytest.raises(KeyboardInterrupt):
        secretive.submit(is_there)
    assert files_with_the_secret(secretive.store) == []


def test_every_attempt_of_a_run_has_it(secretive: Launcher, tmp_path: Path) -> None:
    assert secretive.options(max_restarts=1).submit(fail_once).result(WAIT)
    assert files_with_the_secret(secretive.store) == []


def test_an_environment_larger_than_a_pipe(launcher: Launcher) -> None:
    env = {**(launcher.env or {}), "LARGE": "x" * 100_000}
    assert launcher.options(num_processes=1, env=env).submit(lambda: len(os.environ["LARGE"])).result(WAIT) == 100_000


def tell_it() -> str:
    value = os.environ["API_TOKEN"]
    print(f"the token is {value}")
    raise ValueError(f"{value} is refused")


@pytest.mark.parametrize("secretive", PLACES, indirect=True)
def test_what_ranks_write_of_a_run_that_failed_is_masked(secretive: Launcher, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match=r"ValueError: \*\*\* is refused") as caught:
        secretive.options(run_id="told", env={**(secretive.env or {}), "API_TOKEN": SECRET}).run(tell_it)
    assert caught.value.log_tail
    assert "the token is ***" in caught.value.log_tail
    assert files_with_the_secret(secretive.store) == []


def test_a_secret_that_is_a_part_of_another_one_leaves_no_rest() -> None:
    assert Mask([SECRET, f"{SECRET}-and-more"]).text(f"by {SECRET}-and-more") == "by ***"


# -- which names of a Spark configuration count as secret -----------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "spark.ssl.keyPassword",
        "spark.hadoop.fs.s3a.secret.key",
        "spark.hadoop.fs.s3a.access.key",
        "spark.hadoop.fs.azure.account.key.store.dfs.core.windows.net",
        "spark.hadoop.fs.s3a.session.token",
        "spark.openlineage.transport.auth.apiKey",
        "spark.authenticate.secret",
        "spark.hadoop.javax.jdo.option.ConnectionPassword",
    ],
)
def test_secret_by_name(name: str) -> None:
    assert secrets_of({name: "geheim"}) == ["geheim"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spark.executor.memory", "8g"),
        ("spark.io.encryption.keySizeBits", "256"),
        ("spark.security.credentials.hive.enabled", "false"),
        ("spark.authenticate.secretBitLength", "256"),
        ("spark.ssl.keyStore", "/etc/keys.jks"),
        ("spark.yarn.keytab", "/etc/rankzero.keytab"),
    ],
)
def test_what_logs_need_stays_readable(name: str, value: str) -> None:
    assert secrets_of({name: value}) == []
