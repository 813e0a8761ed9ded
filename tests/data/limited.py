"""A memory control group of a test's own, of either version, and what happened in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import until

MOUNT = Path("/sys/fs/cgroup")


class Limited:
    """A group whose processes may take so much memory together, the cache of the files they read with it.

    Attributes:
        folder: What the kernel shows of it.
        limit: In bytes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._first = (folder / "memory.limit_in_bytes").exists()
        (folder / ("memory.limit_in_bytes" if self._first else "memory.max")).write_text(str(limit))
        # No swap, where it is counted, that would hide what does not fit.
        with contextlib.suppress(OSError):
            (folder / ("memory.memsw.limit_in_bytes" if self._first else "memory.swap.max")).write_text(
                str(limit) if self._first else "0"
            )

    def anonymous(self) -> int:
        """Bytes that its processes have now, without those of files."""
        return self._facts("memory.stat")["rss" if self._first else "anon"]

    def killed(self) -> int:
        """Processes that were killed since there was no room."""
        return self._facts("memory.oom_control" if self._first else "memory.events")["oom_kill"]

    def was_full(self) -> bool:
        """Whether its processes ever had all that they may have, so that something had to give way."""
        if self._first:
            # It may stand just below: the kernel takes pages by the dozen.
            return int((self.folder / "memory.max_usage_in_bytes").read_text()) > 0.98 * self.limit
        return self._facts("memory.events")["max"] > 0

    def _facts(self, name: str) -> dict[str, int]:
        lines = (self.folder / name).read_text().splitlines()
        return {key: int(value) for key, value in (line.split() for line in lines)}


@contextlib.contextmanager
def limited(name: str, limit: int) -> Iterator[Limited]:
    """A group until the end of the block; skips the test where none can be made."""
    folder = _place() / name
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        try:
            group = Limited(folder, limit)
        except OSError as error:
            pytest.skip(f"no memory can be limited in a control group of this process: {error}")
        yield group
    finally:
        # Once all its processes have ended.
        until(lambda: _is_removed(folder), 30.0, f"the end of {folder}")


def _is_removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def _place() -> Path:
    """Where one may stand: below this process's own, of which the second version has only what lies beside it."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path.lstrip("/")))
    if "memory" in own:
        return MOUNT / "memory" / own["memory"]
    beside = MOUNT / own.get("", "")
    return beside.parent if beside != MOUNT else beside
