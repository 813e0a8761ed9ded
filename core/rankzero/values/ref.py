"""`ResultRef`: the handle of a value that a run's rank 0 returned, or that a pipeline step stored.

A handle is small, plain data: it passes through XCom, JSON and pickle. Given as an argument to
another run it is opened inside the workers, so the bytes pass through no orchestrator.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from rankzero import store
from rankzero.errors import ResultError
from rankzero.values import formats


@dataclass(frozen=True)
class ResultRef:
    """Where a result lies and how to open it.

    Attributes:
        uri: Absolute local path or fsspec URL of the file.
        format: ``"json"``, ``"safetensors"`` or ``"cloudpickle"``.
        sha256: Checksum of the file, hex. No code of a file runs without it.
        size: Bytes of the file.
        summary: What a person wants to see: type, number of tensors and parameters, last metrics.
        fingerprint: `store.fingerprint` of a local safetensors file when it was written. As long as it is the same, the
            file is opened without reading it for its checksum first. None for every other file.

    Example:
        >>> ref = ResultRef.save([0.5, 0.25], "results")  # as `RunHandle.result_ref` gives one
        >>> ref.load()
        [0.5, 0.25]
    """

    __version__: ClassVar[int] = 1

    uri: str
    format: str
    sha256: str
    size: int
    summary: dict[str, Any] = field(default_factory=dict, compare=False)
    fingerprint: str | None = field(default=None, compare=False)

    @staticmethod
    def save(value: Any, directory: str | os.PathLike[str]) -> ResultRef:
        """Stores a value of a plain pipeline step, so that it travels by reference like a run's.

        Args:
            value: Anything that can be pickled; a dict of tensors becomes a safetensors file.
            directory: Local path or fsspec URL; made if it is not there.

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
                size, sha256 = formats.write(value, file_format, path)
                uri = store.join(base, f"{sha256[:32]}.{file_format}")
                store.upload(path, uri)
        except (OSError, ImportError, ValueError) as error:
            raise ResultError(f"a value cannot be stored in {directory}: {error}") from error
        return ResultRef(uri, file_format, sha256, size, formats.summarize(value), fingerprint_of(uri, file_format))

    def load(self, *, verify: bool = False) -> Any:
        """Opens the value, if it is what was written.

        The checksum says so. Tensors are on the CPU: ``safetensors`` files are mapped into memory and run no code, and
        are not read for their checksum while the file system says that nothing was done to the file since it was
        written; ``cloudpickle`` files run code of whoever wrote them: load only what your own runs wrote.

        Args:
            verify: True reads every file for its checksum, which finds what a broken disk did to it, too.

        Raises:
            ResultError: the file does not exist, was changed or is of an unknown format.
        """
        if not store.is_url(self.uri):
            return self.load_from(self.uri, verify=verify)
        with tempfile.TemporaryDirectory(prefix="rankzero-") as directory:
            path = os.path.join(directory, "value")
            try:
                with store.open_read(self.uri) as remote, open(path, "wb") as local:
                    while chunk := remote.read(_COPY_CHUNK):
                        local.write(chunk)
            except FileNotFoundError:
                raise ResultError(f"the result {self.uri} does not exist") from None
            return self.load_from(path)

    def load_from(self, path: str, *, verify: bool = False) -> Any:
        """Opens the value from a local copy of the file; as `load`."""
        try:
            return formats.read(path, self.format, self.sha256, None if verify else self.fingerprint)
        except FileNotFoundError:
            raise ResultError(f"the result {path} does not exist; was its run directory deleted?") from None

    def to_json(self) -> dict[str, Any]:
        """The handle as plain JSON values."""
        found = asdict(self)
        if self.fingerprint is None:
            del found["fingerprint"]
        return found

    @staticmethod
    def from_json(data: dict[str, Any]) -> ResultRef:
        """The handle from `to_json`."""
        return ResultRef(**data)

    # The names under which Airflow's serialization asks for the same two things.
    def serialize(self) -> dict[str, Any]:
        """The handle for Airflow's XCom, whose JSON knows no nan: a metric may be one."""
        return {**self.to_json(), "summary": _without_nan(self.summary)}

    @staticmethod
    def deserialize(data: dict[str, Any], version: int) -> ResultRef:
        """The handle from Airflow's XCom."""
        if version > ResultRef.__version__:
            raise TypeError(f"this rankzero reads ResultRef version {ResultRef.__version__}, not {version}")
        return ResultRef.from_json(data)


def fingerprint_of(uri: str, file_format: str) -> str | None:
    """The ``fingerprint`` of a file that was written just now; None for what is always read for its checksum."""
    if file_format == formats.SAFETENSORS and not store.is_url(uri):
        # Without one its readers compute the checksum.
        with contextlib.suppress(OSError):
            return store.fingerprint(uri)
    return None


_COPY_CHUNK = 8 << 20


def _without_nan(value: Any) -> Any:
    """``value`` with ``nan`` and ``inf`` as text, also inside lists and dicts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return value


def map_refs(value: Any, function: Callable[[ResultRef], Any]) -> Any:
    """``value`` with every `ResultRef` in it, also inside lists, tuples and dicts, replaced."""
    if isinstance(value, ResultRef):
        return function(value)
    if type(value) is list:
        return [map_refs(item, function) for item in value]
    if type(value) is tuple:
        return tuple(map_refs(item, function) for item in value)
    if type(value) is dict:
        return {key: map_refs(item, function) for key, item in value.items()}
    return value
