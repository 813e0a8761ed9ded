"""One version of a stored value: a data file of its own name, and a manifest that commits it.

    <asset>[/<partition>]/data-<sha16>-<nonce>.<format>
    <asset>[/<partition>]/manifest.json      written last, atomically
    <asset>[/<partition>]/held-<sha8>-data-<sha16>-<nonce>.<format>      names a run that reads this data file

Until the new manifest is written, readers see the complete previous version; a crash, or commits at the same time,
leave at most data files that no manifest names and temporary files, which a commit removes after an hour. A committed
version survives a power failure. The previous version stays until the next one is committed, since handles of it may
still be in use, and one that a training reads until that has ended, since each of its attempts opens the file. Each
name is written once, so no commit removes the file that another one is about to commit.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import tempfile
from dataclasses import asdict, dataclass, fields
from typing import Any

from rankzero import ResultError, ResultRef, RunHandle, RunNotFoundError
from rankzero.pipeline import formats, split, store, verify

MANIFEST = "manifest.json"

logger = logging.getLogger(__name__)

_PREFIX = "data-"
_NAME_DIGITS = 16
_DATA = re.compile(rf"{_PREFIX}[0-9a-f]{{{_NAME_DIGITS}}}-[0-9a-f]{{8}}\.[a-z.]+")
"""Names of the data files that `commit` makes. A folder of the user's may have other files that begin alike."""
_HELD = re.compile(rf"held-[0-9a-f]{{8}}-({_DATA.pattern})")
"""Names of the files that `hold` makes."""
_CHUNK = 8 << 20


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``, which commits a version.

    Attributes:
        data: Name of the data file in the same directory.
        format: ``"json"``, ``"torch"`` or ``"pickle"``.
        digest: Checksum of the data file, with the name of its algorithm.
        size: Bytes of the data file.
        summary: Type, number of tensors and parameters.
        run_id: Dagster run that stored it.
        superseded: Data file of the previous version, or None.
        owner: The parts of the asset's key, and the partition's path below it; None for the output of an op, and in
            versions that were stored before this was recorded.
    """

    data: str
    format: str
    digest: str
    size: int
    summary: dict[str, Any]
    run_id: str | None
    superseded: str | None
    owner: list[str] | None = None

    def reference(self, directory: str) -> ResultRef:
        """Returns the handle of the data file."""
        uri = store.join(directory, self.data)
        return ResultRef(uri, self.format, self.digest, self.size, self.summary)


class _DamagedError(ResultError):
    """Raised for a manifest that was cut or changed; the next version replaces it."""


def read_manifest(directory: str) -> Manifest:
    """Reads the manifest of the committed version in a directory.

    Raises:
        FileNotFoundError: no version was committed there.
        ResultError: the manifest is damaged, or was written by another program or a later version of rankzero.
    """
    path = store.join(directory, MANIFEST)
    try:
        facts = json.loads(store.read_bytes(path))
    except FileNotFoundError:
        raise FileNotFoundError(f"nothing is stored in {directory}: there is no {MANIFEST}") from None
    except ValueError as error:
        raise _damaged(path, error) from error
    if not (isinstance(facts, dict) and facts.keys() >= {"data", "format", "digest"}):
        raise ResultError(f"another program wrote {path}: give the IO manager another base_path, or move that file")
    if unknown := facts.keys() - {known.name for known in fields(Manifest)}:
        raise ResultError(
            f"a later version of rankzero wrote {path}, with {', '.join(sorted(unknown))}: install that one"
        )
    for name in (facts["data"], facts.get("superseded")):
        # It is opened and deleted, so it must not lead out of the directory.
        if name is not None and not re.fullmatch(rf"{_PREFIX}[A-Za-z0-9.-]+", str(name)):
            raise _damaged(path, ValueError(f"{name!r} is not the name of a data file"))
    try:
        return Manifest(**facts)
    except TypeError as error:
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> ResultError:
    return _DamagedError(f"{path} is damaged: {error}; materialize it again")


def check_owner(directory: str, manifest: Manifest, owner: list[str] | None) -> None:
    """Raises ResultError if the version in a directory belongs to another asset or partition."""
    if manifest.owner is not None and owner is not None and manifest.owner != owner:
        raise ResultError(
            f"{directory} holds the value of {_name(manifest.owner)}, not of {_name(owner)}, and their keys make one "
            "path: give one of the two an IO manager with another base_path"
        )


def _name(owner: list[str]) -> str:
    *asset, partition = owner
    return f"the asset {'/'.join(asset)}" + (f", partition {partition}" if partition else "")


def commit(
    value: object, directory: str, run_id: str | None, *, allow_pickle: bool, owner: list[str] | None = None
) -> ResultRef:
    """Stores a value, or the file of a `ResultRef`, as the new version.

    Args:
        value: A value that rankzero's formats can hold, or a handle.
        directory: Directory of the asset or partition.
        run_id: Id of the Dagster run, for the manifest.
        allow_pickle: False refuses values that need pickle.
        owner: The parts of the asset's key, and the partition's path, for the manifest.

    Returns:
        The handle of the stored file.

    Raises:
        ResultError: the value cannot be stored, the handle's file does not exist or is damaged, or the directory has
            the value of another asset or partition, or a manifest of another program or of a later version.

    The store copies the file of a handle if it can (a hard link, a copy within S3). The file is then not read here:
    its size is compared, and its checksum, which the handle recorded when the file was written, is verified when the
    file is opened. A file that is copied from one store to another is verified
    during the copy.
    """
    if found := _previous(directory):
        check_owner(directory, found, owner)
    store.make_directory(directory)
    store.remove_unfinished(directory, deep=False, folders=True)
    ref = value if isinstance(value, ResultRef) else None
    file_format = ref.format if ref else formats.choose(value)
    check_format(file_format, allow_pickle)
    with tempfile.TemporaryDirectory(dir=None if store.is_url(directory) else directory, prefix=".writing-") as scratch:
        path = os.path.join(scratch, "data")
        if ref:
            size, digest, summary = ref.size, ref.digest, ref.summary
        else:
            size, digest = formats.write(value, file_format, path)
            summary = formats.summarize(value)
        name = f"{_PREFIX}{split(digest)[1][:_NAME_DIGITS]}-{secrets.token_hex(4)}.{file_format}"
        target = store.join(directory, name)
        if ref:
            _take(ref, path, target)
        else:
            store.upload(path, target)
    before = _previous(directory)
    superseded, obsolete = (before.data, before.superseded) if before else (None, None)
    manifest = Manifest(name, file_format, digest, size, summary, run_id, superseded, owner)
    store.write_bytes(store.join(directory, MANIFEST), json.dumps(asdict(manifest), indent=2).encode(), durable=True)
    store.sync_directory(os.path.dirname(directory))
    held = _held(directory)
    if obsolete is not None and obsolete not in held:
        store.remove(store.join(directory, obsolete))
    store.remove_strays(directory, _DATA, (name, superseded, *held))
    return manifest.reference(directory)


def hold(uri: str, run_directory: str) -> None:
    """Keeps the data file of a version until a run has ended. Other files are not affected. Raises OSError.

    Args:
        uri: The file that a `ResultRef` names.
        run_directory: Directory of a run that has the handle among its arguments.
    """
    directory, _, name = uri.rpartition("/")
    if _DATA.fullmatch(name):
        mark = f"held-{hashlib.sha256(run_directory.encode()).hexdigest()[:8]}-{name}"
        store.write_bytes(store.join(directory, mark), run_directory.encode())


def _held(directory: str) -> set[str]:
    """Returns the names of the data files that living runs read, and removes the marks of runs that have ended."""
    held = set()
    for mark in store.list_names(directory):
        if found := _HELD.fullmatch(mark):
            path = store.join(directory, mark)
            try:
                if _is_living(store.read_bytes(path).decode()):
                    held.add(found[1])
                else:
                    store.remove(path)
            except FileNotFoundError:
                # Another process has removed it.
                pass
            except Exception as error:
                # The version is committed, and must not fail because the store of the runs cannot be read from here.
                logger.warning("%s is kept, because %s names a run that cannot be read: %s", found[1], path, error)
                held.add(found[1])
    return held


def _is_living(run_directory: str) -> bool:
    try:
        return not RunHandle.attach(run_directory, follows=False).status().final
    except RunNotFoundError:
        return False


def check_format(file_format: str, allow_pickle: bool) -> None:
    """Raises ResultError for a pickle if none is allowed."""
    if file_format == formats.PICKLE and not allow_pickle:
        raise ResultError(
            "the value needs pickle, and allow_pickle is False: return a dict of tensors or "
            "plain JSON values, or set allow_pickle=True"
        )


def _previous(directory: str) -> Manifest | None:
    try:
        return read_manifest(directory)
    except (FileNotFoundError, _DamagedError):
        return None


def _take(ref: ResultRef, path: str, target: str) -> None:
    """Copies a handle's file to ``target``, through the local ``path`` if its store cannot copy it there."""
    try:
        if store.is_url(target):
            if store.copy_within(ref.uri, target):
                _check_size(ref, store.size(target))
                return
        elif store.copy_within(ref.uri, path):
            _check_size(ref, os.path.getsize(path))
            store.upload(path, target)
            return
        _fetch(ref, path)
    except FileNotFoundError:
        raise ResultError(f"the result {ref.uri} does not exist; was its run directory deleted?") from None
    store.upload(path, target, durable=True)


def _check_size(ref: ResultRef, size: int) -> None:
    if size != ref.size:
        raise ResultError(f"{ref.uri} has {size} bytes, but {ref.size} were recorded: it was changed or damaged")


def _fetch(ref: ResultRef, path: str) -> None:
    """Streams a handle's file to ``path`` and verifies it."""
    with store.open_read(ref.uri) as source, open(path, "wb") as target:
        while chunk := source.read(_CHUNK):
            target.write(chunk)
    with open(path, "rb") as copy:
        try:
            verify(copy, ref.digest)
        except ResultError as error:
            raise ResultError(f"{ref.uri}: {error}") from None
