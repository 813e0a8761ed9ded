"""The archive of Spark's classes: made once, of a run that has ended, and no JVM minds one that does not fit."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import spark_classes
from tests.conftest import until

from rankzero import Launcher, SparkEngine, bounds
from rankzero.engines.spark import archive, dump
from rankzero.engines.spark.jvm import find_java


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The archives' folder in a user's cache that is empty yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Without the suite's own archive: a JVM that is given one makes none.
    monkeypatch.setenv("JDK_JAVA_OPTIONS", spark_classes.QUICK_START)
    place = tmp_path / "cache" / "rankzero" / "jvm"
    place.mkdir(parents=True, mode=0o700)
    return place


def java() -> str:
    found = find_java()
    assert found
    return found


def make(*arguments: str) -> None:
    """As a set-up does."""
    subprocess.run([sys.executable, "-m", "rankzero.engines.spark.dump", *arguments], check=True, capture_output=True)


def is_mapped_by_a_jvm(path: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if path in maps.read_text() and maps.with_name("comm").read_text() == "java\n":
                return True
        except OSError:
            continue
    return False


@pytest.mark.soak
def test_a_run_has_the_archive_made_that_the_next_one_starts_with(launcher: Launcher, cache: Path) -> None:
    path = archive.path_for(java())
    old = [cache / f"{number}.jsa" for number in range(5)]
    for number, file in enumerate([*old, cache / "killed.jsa.1.tmp"]):
        file.write_bytes(b"old")
        os.utime(file, (number, number))
    embedded = launcher.options(num_processes=1, engine=SparkEngine("local[1]"))
    assert embedded.run(is_mapped_by_a_jvm, path) is False
    until(lambda: os.path.exists(path), bounds.ARCHIVE_TIMEOUT, "the archive")
    # The oldest had to go, and what a killed maker left.
    kept = {file.name for file in cache.iterdir()} - {"lock"}
    assert kept == {os.path.basename(path), *(file.name for file in old[-(dump.KEPT - 1) :])}
    assert os.path.getsize(path) > 10 << 20
    assert embedded.run(is_mapped_by_a_jvm, path) is True


def test_a_jvm_says_nothing_of_an_archive_that_does_not_fit(cache: Path) -> None:
    Path(archive.path_for(java())).write_bytes(b"no archive" * 1000)
    options = archive.options(java()).split()
    assert f"-XX:SharedArchiveFile={archive.path_for(java())}" in options
    command = [os.path.join(java(), "bin", "java"), *options, "-version"]
    env = {name: value for name, value in os.environ.items() if "JAVA_OPTIONS" not in name}
    plain = subprocess.run([command[0], "-version"], check=True, capture_output=True, text=True, env=env)
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    assert done.stdout == ""
    assert done.stderr.replace(", sharing", "") == plain.stderr.replace(", sharing", "")


def test_an_archive_that_others_may_write_is_left_alone(cache: Path) -> None:
    Path(archive.path_for(java())).write_bytes(b"code of a stranger")
    cache.chmod(0o777)
    assert archive.options(java()) == ""


def test_one_maker_at_a_time(cache: Path) -> None:
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make()
    assert [file.name for file in cache.iterdir()] == ["lock"]


def test_a_java_that_makes_no_archive_is_not_asked_again(cache: Path) -> None:
    path = Path(archive.path_for(java()))
    path.touch()
    make()
    assert path.stat().st_size == 0
    assert archive.options(java()) == ""


def test_without_a_cache_to_write_to_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    archive.make_in_background(java())
    assert archive.options(java()) == ""
