"""How many cores a process may use: what its affinity and the quotas of its control groups leave."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankzero.host import usage

QUOTA = 50_000
"""Of 100,000 microseconds: half a core."""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of eight cores whose control groups lie in a folder."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(usage, "GROUPS", str(tmp_path / "self"))
    monkeypatch.setattr(usage, "MOUNT", str(tmp_path))
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_a_container_of_the_second_version(machine: Path) -> None:
    write(machine, self="0::/\n", cpu__max="250000 100000\n")
    assert usage.available_cores() == 3


def test_the_least_of_the_groups_above_counts(machine: Path) -> None:
    write(machine, self="0::/pods/one/rank\n")
    write(machine / "pods", cpu__max="400000 100000\n")
    write(machine / "pods/one", cpu__max="200000 100000\n")
    write(machine / "pods/one/rank", cpu__max="max 100000\n")
    assert usage.available_cores() == 2


def test_a_container_of_the_first_version_that_is_told_the_hosts_path(machine: Path) -> None:
    write(machine, self="5:cpuset:/x\n4:cpu,cpuacct:/docker/3f1c\n0::/docker/3f1c\n")
    write(machine / "cpu", cpu__cfs_quota_us="150000\n", cpu__cfs_period_us="100000\n")
    assert usage.available_cores() == 2


@pytest.mark.parametrize("text", ["", "0::/\n"])
def test_without_a_quota_the_affinity_counts(machine: Path, text: str) -> None:
    write(machine, self=text, cpu__max="max 100000\n")
    write(machine / "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert usage.available_cores() == 8


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """A control group of the kernel's with a quota."""
    mount = Path(usage.MOUNT)
    group = (mount if (mount / "cgroup.controllers").exists() else mount / "cpu") / f"rankzero-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        try:
            group.mkdir()
            stack.callback(group.rmdir)
            if group.parent == mount:
                (group / "cpu.max").write_text(f"{QUOTA} 100000")
            else:
                (group / "cpu.cfs_quota_us").write_text(str(QUOTA))
        except OSError as error:
            pytest.skip(f"this machine gives no control groups: {error}")
        yield group


def test_python_counts_as_the_jvm_does(half_a_core: Path) -> None:
    code = f"open({str(half_a_core / 'cgroup.procs')!r}, 'w').write('0')\n"
    code += "from rankzero.host.usage import available_cores\nprint('here', available_cores(), flush=True)\n"
    code += "import os; os.execvp('java', ['java', '-XshowSettings:system', '-version'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (count,) = re.findall(r"Effective CPU Count: (\d+)", done.stdout + done.stderr)
    assert f"here {count}\n" in done.stdout
    assert count == "1"
