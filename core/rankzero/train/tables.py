"""`RankTables`: the tables to which a rank writes rows, and the files that belong to a checkpoint."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rankzero import bounds
from rankzero.errors import ResultError
from rankzero.train.parts import NotTakenError


@dataclass
class RankTables:
    """The state that all calls of `rankzero.train.write_rows` on one rank share.

    Attributes:
        files: By table, the number of data files that this rank has begun.
        lost: Tables that lack rows from before the cursor that this rank has loaded.
        writing: The writers of the calls that are running.
        lock: Held while rows are taken, and while a checkpoint completes the files that are being written.
        schemas: Paths or URLs of the schema files of rows that stay in their tables.
        unremoved: Files of calls that raised, which the store did not remove, each with the function that removes it.
        serials: Numbers for the names of this rank's schema files.
        cursors: Positions of this rank in datasets, of which a state was taken since the last checkpoint.
    """

    files: Counter[str] = field(default_factory=Counter)
    lost: set[str] = field(default_factory=set)
    writing: list[Any] = field(default_factory=list)
    lock: threading.Condition = field(default_factory=threading.Condition)
    schemas: set[str] = field(default_factory=set)
    unremoved: dict[str, Callable[[str], object]] = field(default_factory=dict)
    serials: itertools.count[int] = field(default_factory=itertools.count)
    cursors: dict[str, list[Any]] = field(default_factory=dict)
    _owners: weakref.WeakKeyDictionary[Any, str] = field(default_factory=weakref.WeakKeyDictionary)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def seal(self) -> dict[str, int]:
        """Completes the files of rows that are being written, and returns how many files each table has.

        Raises:
            NotTakenError: a signal handler calls this while rows are being taken, which may have been counted already.
            ResultError: the store refuses them, or refuses to remove rows of a call that raised.
        """
        with self.lock:
            if any(each.taking == threading.get_ident() for each in self.writing):
                raise NotTakenError("it was reported while a batch of rows was being written, by a signal handler")
            while any(each.taking for each in self.writing):
                self.lock.wait(bounds.POLL_INTERVAL_SHORT)
            self.remove_refused()
            for each in self.writing:
                each.complete()
            return dict(self.files)

    def remove(self, paths: Iterable[str], remove: Callable[[str], object]) -> None:
        """Removes files of a call that raised. `remove_refused` retries the ones that the store refuses to remove.

        Args:
            paths: Paths or URLs, in the order in which they are removed. A file need not exist.
            remove: Removes one of them.
        """
        with self.lock:
            for path in paths:
                try:
                    _remove(path, remove)
                except Exception:
                    # Clients of object stores raise their own exceptions.
                    self.unremoved[path] = remove

    def remove_refused(self) -> None:
        """Retries to remove the files of calls that raised, which the store has refused to remove.

        Raises:
            ResultError: the store refuses it again; the table would have rows of a call that raised.
        """
        with self.lock:
            for path, remove in list(self.unremoved.items()):
                try:
                    _remove(path, remove)
                except Exception as error:
                    raise ResultError(
                        f"rows of a call that raised cannot be removed: {path}: {error}. The table would contain them "
                        "together with those of a later call"
                    ) from error
                del self.unremoved[path]

    def cursor(self, owner: object, state: Mapping[str, Any], began_with: int) -> dict[str, Any]:
        """Records a position of this rank in a dataset, for the next checkpoint, which may hold it.

        Args:
            owner: The dataset or loader. Every rank takes the first states of its owners in the same order.
            state: The position: ``epoch`` and ``consumed``.
            began_with: Number of parts in ``consumed`` with which the iteration began, or begins.

        Returns:
            The part of the state that names the position, and the tables with rows from before it.
        """
        if owner not in self._owners:
            self._owners[owner] = str(next(self._numbers))
        name = self._owners[owner]
        self.cursors[name] = [state["epoch"], state["consumed"], began_with]
        return {"cursor": name} | ({"tables": sorted(self.files)} if self.files else {})

    def take_cursors(self) -> dict[str, list[Any]]:
        """Returns the positions that were recorded since the last call."""
        taken, self.cursors = self.cursors, {}
        return taken

    def load_cursor(self, state: Mapping[str, Any], carried: set[str]) -> None:
        """Records which tables of a cursor were lost with their attempt.

        Args:
            state: The state of the cursor.
            carried: Tables that have the rows from before the checkpoint.
        """
        self.lost.update(set(state.get("tables", ())) - set(self.files) - carried)


def _remove(path: str, remove: Callable[[str], object]) -> None:
    try:
        remove(path)
    except FileNotFoundError:
        return
