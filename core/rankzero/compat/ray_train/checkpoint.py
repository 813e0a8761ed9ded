"""`Checkpoint`: a directory with a checkpoint, on this machine, in a filesystem, or packed in a run."""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankzero import store
from rankzero.errors import ResultError
from rankzero.run.checkpoints import FOLDER, read_manifests
from rankzero.run.directory import RunDirectory
from rankzero.values import formats

if TYPE_CHECKING:
    import rankzero.train as rt

METADATA, UNPACKED = ".metadata.json", "files"
"""The file with the metadata of a checkpoint, as in Ray; the folder of a run's checkpoint with its unpacked files."""

_temporary: list[tempfile.TemporaryDirectory[str]] = []
"""Directories of checkpoints that cannot be unpacked in their runs; deleted when the process exits."""


@dataclass(frozen=True)
class Stored:
    """A committed checkpoint of a run.

    Attributes:
        run_directory: The run directory.
        id: Name of the checkpoint.
        opened: The checkpoint as this worker has it; None outside of its run.
    """

    run_directory: str
    id: str
    opened: rt.Checkpoint | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Stored, (self.run_directory, self.id)

    @property
    def folder(self) -> str:
        """Returns the path or the URL of the checkpoint's folder in the run directory."""
        return RunDirectory(self.run_directory).path(FOLDER, self.id)

    def unpack(self, target: str) -> None:
        """Copies the files of all workers to a local directory. Raises ResultError."""
        os.makedirs(target, exist_ok=True)
        if self.opened is not None:
            # The last one wins: rank 0's.
            for number in reversed(range(self.opened.world_size)) if self.opened.sharded else [None]:
                self.opened.to_directory(target, number)
            return
        found = read_manifests(RunDirectory(self.run_directory), [self.id])
        if not found:
            raise ResultError(f"checkpoint {self.id} was deleted, since it is not kept")
        parts = found[0].parts.items()
        if not {part["format"] for _, part in parts} <= {formats.DIRECTORY, formats.DISTRIBUTED}:
            raise ResultError(f"checkpoint {self.id} is a state, not a directory: rankzero.train reported it")
        first: dict[str, str] = {}
        for rank, part in parts:
            # Beside the files that it becomes, so that they are moved and not copied.
            with tempfile.TemporaryDirectory(prefix=".writing-", dir=target) as own:
                _unpack_part(store.join(self.folder, part["file"]), part["sha256"], own)
                self._merge(own, target, rank, first)

    def _merge(self, source: str, target: str, rank: str, first: dict[str, str]) -> None:
        for path, name in _tree(source):
            merged = os.path.join(target, name)
            if os.path.isdir(path):
                os.makedirs(merged, exist_ok=True)
            elif (other := first.setdefault(name, rank)) == rank or filecmp.cmp(path, merged, shallow=False):
                os.replace(path, merged)
            else:
                raise ResultError(
                    f"checkpoint {self.id} has a {name} of rank {other} and another one of rank {rank}, "
                    "which one directory cannot hold: give the files of each rank their own names"
                )

    @property
    def unpacked_folder(self) -> str | None:
        """Returns the folder in the run directory for the unpacked files; None if they cannot be there."""
        is_elsewhere = self.opened is not None or store.is_url(self.run_directory)
        return None if is_elsewhere else os.path.join(self.folder, UNPACKED)

    def unpacked(self) -> str:
        """Unpacks the files into a directory that exists as long as the checkpoint does, or this process."""
        if target := self.unpacked_folder:
            with contextlib.suppress(PermissionError, FileNotFoundError):
                if not os.path.isdir(target):
                    with tempfile.TemporaryDirectory(prefix=".writing-", dir=self.folder) as writing:
                        files = os.path.join(writing, UNPACKED)
                        self.unpack(files)
                        # Another process may have been faster.
                        with contextlib.suppress(OSError):
                            os.rename(files, target)
                return target
        _temporary.append(_temporary_directory())
        self.unpack(_temporary[-1].name)
        return _temporary[-1].name


def _unpack_part(file: str, digest: str, target: str) -> None:
    try:
        if not store.is_url(file):
            formats.read_directory(file, digest, target)
            return
        with tempfile.NamedTemporaryFile(prefix="rankzero-checkpoint-") as local:
            with store.open_read(file) as remote:
                shutil.copyfileobj(remote, local)
            local.flush()
            formats.read_directory(local.name, digest, target)
    except FileNotFoundError:
        raise ResultError(f"{file} was deleted, since its checkpoint is not kept") from None


def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rankzero-checkpoint-", dir=os.environ.get("RANKZERO_SCRATCH"))


def _tree(directory: str) -> Iterator[tuple[str, str]]:
    """Yields the paths of all directories and files below a directory, absolute and relative to it, parents first."""
    for folder, folders, files in os.walk(directory):
        for name in folders + files:
            path = os.path.join(folder, name)
            yield path, os.path.relpath(path, directory)


class Checkpoint:
    """A checkpoint that is a directory, with the interface of Ray's class.

    Args:
        path: A local directory, or a URL; with ``filesystem`` a path without the URL's prefix.
        filesystem: A filesystem of pyarrow or of fsspec; None for this machine's, or the one of the URL.
    """

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None) -> None:
        given = os.fspath(path)
        if filesystem is None and store.is_url(given):
            from fsspec.core import url_to_fs

            filesystem, given = url_to_fs(given)
        self._path: str | None = given
        self._filesystem = None if filesystem is None else as_arrow(filesystem)
        self._stored: Stored | None = None

    @classmethod
    def of_run(cls, stored: Stored) -> Checkpoint:
        """Returns a checkpoint of a run, whose files are unpacked when they are needed."""
        checkpoint = cls("")
        checkpoint._path, checkpoint._stored = None, stored
        return checkpoint

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Returns the checkpoint for a local directory.

        Raises:
            ValueError: the directory does not exist.
        """
        if not os.path.isdir(path):
            raise ValueError(f"checkpoint directory {os.fspath(path)!r} does not exist")
        return cls(path)

    @property
    def path(self) -> str:
        """Path of a directory with the files, on `filesystem`.

        The files of a run's checkpoint are packed, and are unpacked when this is read first: in the run directory; in a
        worker, or if the run directory is remote or cannot be written, in a directory that lives as long as the
        process.

        Raises:
            ResultError: as `to_directory`.
        """
        if self._unpacked() is None and self._stored is not None:
            self._path = self._stored.unpacked()
        return str(self._path)

    @property
    def filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem` that `path` belongs to."""
        from pyarrow import fs

        return fs.LocalFileSystem() if self._filesystem is None else self._filesystem

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copies the checkpoint to a local directory, by default a new temporary one, and returns its path.

        Raises:
            ResultError: the checkpoint is damaged, or was deleted since it is not kept; it is a state, or workers have
                given different files one name.
        """
        with contextlib.ExitStack() as undo:
            if path is None:
                path = tempfile.mkdtemp(prefix="rankzero-checkpoint-")
                undo.callback(shutil.rmtree, path, ignore_errors=True)
            target, unpacked = os.fspath(path), self._unpacked()
            if unpacked is None and self._stored is not None:
                self._stored.unpack(target)
            elif self._filesystem is None:
                shutil.copytree(str(unpacked), target, dirs_exist_ok=True)
            else:
                from pyarrow import fs

                os.makedirs(target, exist_ok=True)
                fs.copy_files(unpacked, os.path.abspath(target), self._filesystem, fs.LocalFileSystem())
            undo.pop_all()
        return target

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yields a local directory with the checkpoint, for the block. Raises like `to_directory`."""
        found = self._unpacked()
        if found is not None and self._filesystem is None:
            yield found
            return
        with _temporary_directory() as directory:
            yield self.to_directory(directory)

    def get_metadata(self) -> dict[str, Any]:
        """Returns the metadata that `set_metadata` has stored with the files; an empty dict if there are none."""
        file = f"{self.path}/{METADATA}"
        try:
            with open(file, "rb") if self._filesystem is None else self._filesystem.open_input_stream(file) as stream:
                return dict(json.loads(stream.read()))
        except FileNotFoundError:
            return {}

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replaces the metadata, which become a file of the checkpoint. Set them before `report`."""
        file, data = f"{self.path}/{METADATA}", json.dumps(dict(metadata)).encode()
        with open(file, "wb") if self._filesystem is None else self._filesystem.open_output_stream(file) as stream:
            stream.write(data)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Adds metadata to those that the checkpoint has."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def _unpacked(self) -> str | None:
        """Returns the path of the files; None if they are packed."""
        # The run may have deleted the checkpoint with its files.
        if self._stored is not None and not (self._path and os.path.isdir(self._path)):
            folder = self._stored.unpacked_folder
            self._path = folder if folder and os.path.isdir(folder) else None
        return self._path

    def __getstate__(self) -> dict[str, Any]:
        # A temporary directory is one of this process.
        return {**vars(self), "_path": None if self._stored else self._path}

    def __repr__(self) -> str:
        kind = "local" if self._filesystem is None else self._filesystem.type_name
        return f"Checkpoint(filesystem={kind}, path={self._stored.folder if self._stored else self._path})"


resumed: list[Checkpoint] = []
"""The checkpoint from which the run of this worker starts, if its trainer has one."""


def as_arrow(filesystem: Any) -> Any:
    """Returns a filesystem of pyarrow or fsspec as one of pyarrow; None for this machine's."""
    from pyarrow import fs

    if not isinstance(filesystem, fs.FileSystem):
        filesystem = fs.PyFileSystem(fs.FSSpecHandler(filesystem))
    return None if isinstance(filesystem, fs.LocalFileSystem) else filesystem
