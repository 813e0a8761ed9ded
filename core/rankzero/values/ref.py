"""`ResultRef`: the handle of a value that a run's rank 0 returned, or that a pipeline step stored.

A handle is small, plain data: it can be sent by XCom, JSON and pickle. Given as an argument to
another run it is opened inside the workers, so the bytes do not pass through the orchestrator.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from rankzero import store
from rankzero.errors import ResultError
from rankzero.values import formats, pickled
from rankzero.values.plain import storable


@dataclass(frozen=True)
class ResultRef:
    """The handle of a stored result: location, format and checksum.

    Attributes:
        uri: Absolute local path or fsspec URL of the file.
        format: ``"json"``, ``"torch"`` or ``"pickle"``.
        digest: Checksum of the file, with the name of its algorithm: see docs/values.md#digests.
        size: Bytes of the file.
        summary: Facts for display: type, last metrics.
        fingerprint: `store.fingerprint` of a local file of tensors when its checksum was computed. While the file has
            it, `load` does not read the file for its checksum, which takes as long as reading the tensors.

    Example:
        >>> ref = ResultRef.save([0.5, 0.25], "results")  # as `RunHandle.result_ref` gives one
        >>> ref.load()
        [0.5, 0.25]
    """

    __version__: ClassVar[int] = 1

    uri: str
    format: str
    digest: str
    size: int
    summary: dict[str, Any] = field(default_factory=dict, compare=False)
    fingerprint: str | None = field(default=None, compare=False)

    @staticmethod
    def save(value: Any, directory: str | os.PathLike[str]) -> ResultRef:
        """Stores a value of a plain pipeline step, so that it is passed by reference like a run's result.

        Args:
            value: A value that can be pickled; tensors in dicts and lists become a file for `torch.load`.
            directory: Local path or fsspec URL; created if it does not exist.

        Returns:
            The handle. The file is named by its checksum: saving the same bytes twice is harmless.

        Raises:
            ResultError: the value cannot be pickled, or the directory cannot be written.

        Example:
            >>> ref = ResultRef.save({"a": 1}, "results")
            >>> ref.load()
            {'a': 1}
        """
        base = store.normalize(directory)
        file_format = formats.choose(value)
        try:
            store.make_directory(base)
            with tempfile.TemporaryDirectory(dir=None if store.is_url(base) else base) as scratch:
                path = os.path.join(scratch, "value")
                size, digest = formats.write(value, file_format, path)
                uri = store.join(base, f"{digest.rpartition(':')[2][:32]}.{file_format}")
                store.upload(path, uri)
        except (OSError, ImportError, ValueError) as error:
            raise ResultError(f"a value cannot be stored in {directory}: {error}") from error
        return ResultRef(uri, file_format, digest, size, {"type": pickled.type_name(value)}).fingerprinted()

    def fingerprinted(self) -> ResultRef:
        """Returns this handle with the fingerprint of its file, which has just been placed; unchanged for others."""
        is_known = self.format == formats.TORCH and not store.is_url(self.uri)
        return replace(self, fingerprint=store.fingerprint(self.uri)) if is_known else self

    def load(self) -> Any:
        """Loads the value after the checksum of its file was compared, unless that is known to be unchanged.

        Tensors are on the CPU, mapped from the file. ``json`` and ``torch`` files run no code. ``pickle`` files run
        code of their author: load only files that your own runs wrote.

        Raises:
            ResultError: the file does not exist, was changed or has an unknown format, or an object in it cannot be
                created here; the message says what to do.
        """
        if not store.is_url(self.uri):
            return self.load_from(self.uri)
        # In a rank, the agent's scratch directory has room. The file has no name, so that no killed process leaves one.
        with self._explained(self.uri), tempfile.TemporaryFile(dir=os.environ.get("RANKZERO_SCRATCH")) as local:
            with store.open_read(self.uri) as remote:
                shutil.copyfileobj(remote, local, 8 << 20)
            local.seek(0)
            return formats.read(f"/dev/fd/{local.fileno()}", self.format, self.digest, self.uri)

    def load_from(self, path: str) -> Any:
        """Loads the value from a local copy of the file, like `load`."""
        with self._explained(path), open(path, "rb") as file:
            # By its descriptor, since its name may be replaced.
            is_known = self.fingerprint is not None and store.fingerprint(file.fileno()) == self.fingerprint
            return formats.read(f"/dev/fd/{file.fileno()}", self.format, None if is_known else self.digest, path)

    @contextlib.contextmanager
    def _explained(self, location: str) -> Iterator[None]:
        try:
            yield
        except ResultError:
            raise
        except FileNotFoundError:
            raise ResultError(f"the result {location} does not exist; was its run directory deleted?") from None
        except Exception as error:
            # Drivers of object stores raise their own exceptions.
            raise ResultError(f"the result {location} cannot be read: {type(error).__name__}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Returns the handle as plain JSON values, for `from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> ResultRef:
        """Rebuilds a handle from the values that `to_json` returned."""
        return ResultRef(**data)

    # Airflow's serialization calls these two names.
    def serialize(self) -> dict[str, Any]:
        """Returns the handle for Airflow's XCom, with a summary that every database stores."""
        return {**self.to_json(), "summary": storable(self.summary)}

    @staticmethod
    def deserialize(data: dict[str, Any], version: int) -> ResultRef:
        """Rebuilds a handle from the values that `serialize` returned."""
        return ResultRef.from_json(data)


def map_refs(value: Any, function: Callable[[ResultRef], Any]) -> Any:
    """Returns a copy of ``value`` with every `ResultRef` in it replaced, also inside lists, tuples and dicts.

    Each container is copied once, so that shared and cyclic ones remain so. Other objects are not copied.

    Args:
        value: Any value.
        function: Returns the replacement of a `ResultRef`. It is called once for each object.

    Example:
        >>> map_refs({"a": [1], "b": (ResultRef("/x", "json", "", 0),)}, lambda ref: ref.uri)
        {'a': [1], 'b': ('/x',)}
    """
    with contextlib.suppress(RecursionError):
        return _copied(value, function, {})
    # A value of so many levels cannot be pickled either.
    return value


def _copied(item: Any, function: Callable[[ResultRef], Any], made: dict[int, Any]) -> Any:
    """Returns the copy for `map_refs`; ``made`` has the copies of containers and references by id."""
    if id(item) in made:
        return made[id(item)]
    if isinstance(item, ResultRef):
        made[id(item)] = function(item)
    elif type(item) is tuple:
        made[id(item)] = tuple(_copied(each, function, made) for each in item)
    elif type(item) is list:
        # Registered before it is filled, since it may contain itself.
        made[id(item)] = filled = list[Any]()
        filled += (_copied(each, function, made) for each in item)
    elif type(item) is dict:
        made[id(item)] = table = dict[Any, Any]()
        table.update((key, _copied(each, function, made)) for key, each in item.items())
    return made.get(id(item), item)
