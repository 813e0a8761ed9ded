"""`RankTables`: the tables to which a rank writes rows, and which of those rows belong to a checkpoint."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rankzero.errors import ResultError


@dataclass
class RankTables:
    """The state that the calls of `rankzero.train.write_rows` of one rank share.

    Attributes:
        files: By table, the number of data files that this rank has begun.
        lost: Tables that lack rows of before the cursor that this rank has loaded.
        writing: The writers of the calls that are running.
        lock: Held while rows are taken, and while a checkpoint completes the files that are being written.
        schemas: Schema files, by path or URL, of rows that are in their tables.
        unremoved: Files of calls that raised which the store did not remove, each with the function that removes it.
        serials: Numbers for the names of this rank's schema files.
    """

    files: Counter[str] = field(default_factory=Counter)
    lost: set[str] = field(default_factory=set)
    writing: list[Any] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    schemas: set[str] = field(default_factory=set)
    unremoved: dict[str, Callable[[str], object]] = field(default_factory=dict)
    serials: itertools.count[int] = field(default_factory=itertools.count)

    def seal(self) -> dict[str, int]:
        """Completes the files of rows that are being written, and returns how many files each table has.

        Raises:
            ResultError: the store does not take them, or does not remove rows of a call that raised.
        """
        with self.lock:
            self.remove_refused()
            for each in self.writing:
                each.complete()
            return dict(self.files)

    def remove(self, paths: Iterable[str], remove: Callable[[str], object]) -> None:
        """Removes files of a call that raised. `remove_refused` repeats what the store refuses.

        Args:
            paths: Paths or URLs, in the order in which they are removed. A file need not exist.
            remove: Removes one of them.
        """
        with self.lock:
            for path in paths:
                try:
                    _remove(path, remove)
                except Exception:
                    # Drivers of object stores have exceptions of their own.
                    self.unremoved[path] = remove

    def remove_refused(self) -> None:
        """Removes the files of calls that raised which the store did not remove before.

        Raises:
            ResultError: the store refuses it again; the table would have rows of a call that raised.
        """
        with self.lock:
            for path, remove in list(self.unremoved.items()):
                try:
                    _remove(path, remove)
                except Exception as error:
                    raise ResultError(
                        f"rows of a call that raised cannot be removed: {path}: {error}. Their table would have them "
                        "beside those of a later call"
                    ) from error
                del self.unremoved[path]

    def cursor(self) -> dict[str, list[str]]:
        """Returns the part of a cursor's state that names the tables with rows of before it."""
        return {"tables": sorted(self.files)} if self.files else {}

    def load_cursor(self, state: Mapping[str, Any], carried: set[str]) -> None:
        """Notes which tables of a cursor were lost with their attempt.

        Args:
            state: The state of the cursor.
            carried: Tables that have the rows of all ranks of before the checkpoint.
        """
        self.lost.update(set(state.get("tables", ())) - set(self.files) - carried)


def _remove(path: str, remove: Callable[[str], object]) -> None:
    try:
        remove(path)
    except FileNotFoundError:
        return
