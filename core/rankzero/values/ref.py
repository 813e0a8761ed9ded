"""`ResultRef`: the handle of a value that a run's rank 0 returned, or that a pipeline step stored.

A handle is small, plain data: it can be sent by XCom, JSON and pickle. Given as an argument to
another run it is opened inside the workers, so the bytes do not pass through the orchestrator.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any, ClassVar

from rankzero import store
from rankzero.errors import ResultError
from rankzero.values import digest as digests
from rankzero.values import formats
from rankzero.values.plain import storable


@dataclass(frozen=True)
class ResultRef:
    """The handle of a stored result: location, format and checksum.

    Attributes:
        uri: Absolute local path or fsspec URL of the file.
        format: ``"json"``, ``"torch"`` or ``"pickle"``.
        digest: Checksum of the file, with the name of its algorithm: ``"sha256:..."``, or ``"sha256-8m:..."`` for more
            than 8 MiB, which all cores hash together.
        size: Bytes of the file.
        summary: Facts for display: type, number of tensors and parameters, last metrics.
        fingerprint: `store.fingerprint` of a local file when its checksum was computed.

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
                uri = store.join(base, f"{digests.split(digest)[1][:_NAME_DIGITS]}.{file_format}")
                store.upload(path, uri)
        except (OSError, ImportError, ValueError) as error:
            raise ResultError(f"a value cannot be stored in {directory}: {error}") from error
        return ResultRef(uri, file_format, digest, size, formats.summarize(value)).fingerprinted()

    def fingerprinted(self) -> ResultRef:
        """Returns this handle with the fingerprint of its file, which has just been placed; unchanged for a URL."""
        return self if store.is_url(self.uri) else replace(self, fingerprint=store.fingerprint(self.uri))

    def load(self, *, verify: bool = False) -> Any:
        """Loads the value after the checksum of its file was compared.

        Tensors are on the CPU, mapped from the file. ``json`` and ``torch`` files run no code. ``pickle`` files run
        code of their author: load only files that your own runs wrote.

        Args:
            verify: Whether a local ``torch`` file is read for its checksum, although the kernel shows that it is
                unchanged since the checksum was computed.

        Raises:
            ResultError: the file does not exist, was changed or has an unknown format, or an object in it cannot be
                created here; the message says what to do.
        """
        if not store.is_url(self.uri):
            return self.load_from(self.uri, verify=verify)
        # In a rank, the agent's scratch directory has room. The file has no name, so that no killed process leaves one.
        with tempfile.TemporaryFile(dir=os.environ.get("RANKZERO_SCRATCH")) as local:
            with self._open() as remote:
                shutil.copyfileobj(remote, local, _COPY_CHUNK)
            local.seek(0)
            return formats.read_open(local, self.uri, self.format, self.digest)

    def load_from(self, path: str, *, verify: bool = False) -> Any:
        """Loads the value from a local copy of the file, like `load`."""
        try:
            with open(path, "rb") as file:
                # Only a file that runs no code; by its descriptor, since its name may be replaced.
                trusted = self.format == formats.TORCH and store.fingerprint(file.fileno()) == self.fingerprint
                return formats.read_open(file, path, self.format, None if trusted and not verify else self.digest)
        except FileNotFoundError:
            raise ResultError(f"the result {path} does not exist; was its run directory deleted?") from None
        except OSError as error:
            raise ResultError(f"the result {path} cannot be read: {error}") from error

    @property
    def sha256(self) -> str:
        """The sha256 of the file, hex, as ``sha256sum`` prints it. A file of more than 8 MiB is read for it."""
        algorithm, digits = digests.split(self.digest)
        if algorithm == digests.PLAIN:
            return digits
        with self._open() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        try:
            with store.open_read(self.uri) as file:
                yield file
        except FileNotFoundError:
            raise ResultError(f"the result {self.uri} does not exist; was its run directory deleted?") from None
        except Exception as error:
            # Drivers of object stores raise their own exceptions.
            raise ResultError(f"the result {self.uri} cannot be read: {type(error).__name__}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Returns the handle as plain JSON values, for `from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> ResultRef:
        """Rebuilds a handle from the values that `to_json` returned."""
        return ResultRef(**data)

    def __bool__(self) -> bool:
        """Returns True, whatever the stored value is."""
        return True

    def __len__(self) -> int:
        """Raises TypeError: the value is a file, and its handle has no items."""
        raise self._is_no_container("len()")

    def __getitem__(self, key: object) -> Any:
        """Raises TypeError: the value is a file, and its handle has no items."""
        raise self._is_no_container(f"[{key!r}]")

    def __iter__(self) -> Iterator[Any]:
        """Raises TypeError: the value is a file, and its handle has no items."""
        raise self._is_no_container("iteration")

    def _is_no_container(self, use: str) -> TypeError:
        return TypeError(
            f"this is a ResultRef, the handle of a stored {self.summary.get('type', 'value')}, and has no {use}: call "
            f".load() to get the value ({self.uri})"
        )

    # Airflow's serialization calls these two names.
    def serialize(self) -> dict[str, Any]:
        """Returns the handle for Airflow's XCom, with a summary that every database stores."""
        return {**self.to_json(), "summary": storable(self.summary)}

    @staticmethod
    def deserialize(data: dict[str, Any], version: int) -> ResultRef:
        """Rebuilds a handle from the values that `serialize` returned."""
        if version > ResultRef.__version__:
            raise TypeError(f"this rankzero reads ResultRef version {ResultRef.__version__}, not {version}")
        return ResultRef.from_json(data)


_COPY_CHUNK = 8 << 20
_NAME_DIGITS = 32
_CONTAINERS = (list, tuple, dict)


def map_refs(value: Any, function: Callable[[ResultRef], Any]) -> Any:
    """Returns ``value`` with every `ResultRef` in it, also inside lists, tuples and dicts, replaced.

    Only containers that hold a `ResultRef` are copied, each once, so that shared and cyclic containers remain so.

    Args:
        value: Any value.
        function: Returns the replacement of a `ResultRef`.

    Example:
        >>> kept, ref = [1], ResultRef("/x", "json", "", 0)
        >>> mapped = map_refs({"a": kept, "b": [ref]}, lambda ref: ref.uri)
        >>> mapped["b"], mapped["a"] is kept
        (['/x'], True)
    """
    if isinstance(value, ResultRef):
        return function(value)
    holding = _holding(value)
    made: dict[int, Any] = {}

    def mapped(item: Any) -> Any:
        if id(item) in made:
            return made[id(item)]
        if isinstance(item, ResultRef):
            made[id(item)] = function(item)
        elif id(item) not in holding:
            return item
        elif type(item) is tuple:
            made[id(item)] = tuple(map(mapped, item))
        else:
            # Registered before it is filled, since it may contain itself.
            made[id(item)] = filled = type(item)()
            later.append((item, filled))
        return made[id(item)]

    later: deque[tuple[Any, Any]] = deque()
    result = mapped(value)
    while later:
        old, new = later.popleft()
        if type(old) is list:
            new += map(mapped, old)
        else:
            new.update((key, mapped(item)) for key, item in old.items())
    return result


def _holding(value: Any) -> set[int]:
    """Returns the ids of the containers within ``value`` that hold a `ResultRef` at any depth."""
    above: dict[int, list[int]] = {}
    found: list[int] = []
    waiting = [value] if type(value) in _CONTAINERS else []
    seen: set[int] = set()
    while waiting:
        container = waiting.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        for item in container.values() if type(container) is dict else container:
            if isinstance(item, ResultRef):
                found.append(id(container))
            elif type(item) in _CONTAINERS:
                above.setdefault(id(item), []).append(id(container))
                waiting.append(item)
    holding: set[int] = set()
    while found:
        container_id = found.pop()
        if container_id not in holding:
            holding.add(container_id)
            found += above.get(container_id, ())
    return holding
