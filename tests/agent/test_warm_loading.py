"""A warm server's memory lies in huge pages, so that its forks are cheap."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.conftest import until

from rankzero import Launcher
from rankzero.warm import loading

GATHERED = 120.0


def kernel_can() -> bool:
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    setting = Path(loading._SETTING)
    return release >= (6, 1) and setting.exists() and "[never]" not in setting.read_text()


needs_kernel = pytest.mark.skipif(not kernel_can(), reason="this kernel does not collapse pages, or is told not to")


def test_who_wants_no_huge_pages_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel would make them all the same.
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(loading, "_SETTING", str(setting))
    asked: list[bool] = []
    loading.gather(lambda: bool(asked.append(True)))
    assert asked == []
    setting.write_text("always [madvise] never\n")
    loading.gather(lambda: bool(asked.append(True)))
    # It stops when it is told to.
    assert asked == [True]


PROGRAM = """
import mmap

from rankzero.warm import loading

dense = [bytearray(str(number).encode() * 100) for number in range(200_000)]
sparse = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
sparse[0] = sparse[32 << 20] = 1


def kilobytes(name):
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))


before = kilobytes("Rss:")
loading.gather()
assert all(text == str(number).encode() * 100 for number, text in enumerate(dense))
print(kilobytes("AnonHugePages:"), kilobytes("Rss:") - before)
"""


@needs_kernel
def test_dense_memory_is_gathered_and_sparse_memory_is_not_filled() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=60)
    gathered, grown = map(int, done.stdout.split())
    assert gathered > 50 << 10
    assert grown < 16 << 10


def rank_parent() -> int:
    """The warm server's id: the parent of the agent."""
    return psutil.Process(os.getppid()).ppid()


@pytest.mark.soak
@needs_kernel
def test_an_idle_server_gathers_its_memory(launcher: Launcher) -> None:
    # A server of its own: of one that has served many runs, half of the pages have been split again.
    launcher = launcher.options(env={"TORCH_OF_THIS_TEST": "1"})
    server = launcher.run(rank_parent)

    def share() -> bool:
        lines = Path(f"/proc/{server}/smaps_rollup").read_text().splitlines()[1:]
        kilobytes = {line.split()[0]: int(line.split()[1]) for line in lines}
        return kilobytes["AnonHugePages:"] > kilobytes["Anonymous:"] / 2

    assert until(share, GATHERED, "the server's memory in huge pages")
    assert launcher.run(rank_parent) == server
