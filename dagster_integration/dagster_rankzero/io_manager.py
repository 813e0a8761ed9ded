"""`RankZeroIOManager`: stores rank 0's value atomically, so that the next step gets a complete value or an error.

    <asset>[/<partition>]/data-<sha16>-<nonce>.<format>
    <asset>[/<partition>]/manifest.json      the version: names its data file; written last, atomically
    <asset>[/<partition>]/held-<sha8>-data-<sha16>-<nonce>.<format>      names a run that reads this data file

Until the new manifest is written, readers see the complete previous version; a crash, or commits at the same time,
leave at most data files that no manifest names and temporary files, which a commit removes after an hour. Each name is
written once, so no commit removes the file that another one is about to commit.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import dagster as dg
from pydantic import Field, PrivateAttr, field_validator

from dagster_rankzero._compat import set_data_version
from dagster_rankzero.fields import KnownFields
from dagster_rankzero.inputs import by_partition, dimensions_of, segment, wants_reference
from dagster_rankzero.metadata import describe_partitions, describe_result
from rankzero import ResultError, ResultRef, RunHandle, RunNotFoundError
from rankzero.pipeline import attempt, formats, map_refs, split, store, verify

MANIFEST = "manifest.json"

logger = logging.getLogger(__name__)

# Names of the data files that `commit` makes, and of the marks of `hold`. A user's files may begin alike.
_DATA = re.compile(r"data-[0-9a-f]{16}-[0-9a-f]{8}\.[a-z.]+")
_HELD = re.compile(rf"held-[0-9a-f]{{8}}-({_DATA.pattern})")
_CHUNK = 8 << 20


class RankZeroIOManager(KnownFields, dg.ConfigurableIOManager):
    """Stores tensors in plain containers by torch.save, JSON values as JSON, anything else as a pickle.

    A version is committed by its manifest, which is written last: a crash never damages the previous
    version. The previous version stays until the next one is committed, since handles of it may still be in use, and
    one that a training reads until that has ended. Loading verifies the checksum. Tensors are mapped into memory, which
    runs no code.
    Loading a pickle runs code, as with Dagster's default IO manager: set ``allow_pickle`` to False unless
    you trust all users who can write to ``base_path``.

    An output that is a `ResultRef` is stored by its file and never loaded: if run directories and
    ``base_path`` share a file system or an object store, no byte passes through the step. An
    input annotated `ResultRef` gets the handle, and so do the functions of `torch_asset` and
    `torch_distributor_op`, whose ranks open it themselves.

    The checksum is the asset's data version, so that dependents are stale only if the
    content has changed. An output of several partitions (a backfill in a single run) is a dict by
    partition key, and each partition is stored separately.

    Example:
        >>> defs = dg.Definitions(resources={"io_manager": RankZeroIOManager(base_path="s3://bucket/assets")})
    """

    base_path: str | None = Field(
        default=None,
        description="Root of the stored values, a path or an fsspec URL such as s3://bucket/assets. "
        "Left out: rankzero/ in the storage directory of the Dagster instance.",
    )
    allow_pickle: bool = Field(
        default=True,
        description="Store and load values that need pickle. Loading them runs code from base_path, so all users "
        "who can write there must be trusted.",
    )

    takes_references: ClassVar[bool] = True
    _root: str = PrivateAttr()

    @field_validator("base_path", mode="before")
    @classmethod
    def _as_text(cls, given: Any) -> Any:
        return str(given) if hasattr(given, "joinpath") else given

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Determines the root directory or URL of the stored values."""
        root = self.base_path
        if root is None:
            if context.instance is None:
                raise dg.DagsterInvariantViolationError("RankZeroIOManager without an instance needs base_path")
            # Dagster's default IO manager stores an asset in a file where this one needs a directory.
            root = store.join(context.instance.storage_directory(), "rankzero")
        self._root = store.normalize(root)

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Commits an output as the new version; one of several partitions is a dict by partition key.

        Raises:
            dagster.Failure: the value, or the file of a `ResultRef`, cannot be stored. Not retried.
        """
        places = self._places_of(context)
        if not (is_single := len(places) == 1):
            obj = by_partition(obj, list(places), context.asset_key.to_user_string())
        try:
            stored = {
                key: commit(obj if is_single else obj[key], place, owner, allow_pickle=self.allow_pickle)
                for key, (place, owner) in places.items()
            }
        except ResultError as error:
            raise dg.Failure(str(error), allow_retries=False) from error
        (place, _), ref = next(iter(places.values())), next(iter(stored.values()))
        versions = "\n".join(f"{key}\t{each.digest}" for key, each in sorted(stored.items()))
        set_data_version(context, split(ref.digest)[1] if is_single else hashlib.sha256(versions.encode()).hexdigest())

        def describe() -> dict[str, Any]:
            if is_single:
                return {"path": dg.MetadataValue.path(place), **describe_result(ref)}
            return describe_partitions(stored)

        context.add_output_metadata(attempt(context.log, "its description", describe, {}))

    def load_input(self, context: dg.InputContext) -> Any:
        """Loads a value, or a dict of those of several partitions; an input that accepts a handle gets that instead.

        Raises:
            FileNotFoundError: no value was stored, and the input does not allow missing partitions.
            dagster.Failure: the file is damaged, or is a pickle although none is allowed. Not retried.
        """
        places = self._places_of(context)
        may_miss = (context.definition_metadata or {}).get("allow_missing_partitions")
        loaded = {}
        for key, (place, owner) in places.items():
            try:
                ref = read_manifest(place, owner).reference(place)
                check_format(ref.format, self.allow_pickle)
                loaded[key] = ref if wants_reference(context.dagster_type) else ref.load()
            except FileNotFoundError:
                if not (may_miss and key):
                    raise
                context.log.warning("partition %s is left out: nothing is stored in %s", key, place)
            except ResultError as error:
                metadata = {"path": dg.MetadataValue.path(place)}
                raise dg.Failure(str(error), metadata=metadata, allow_retries=False) from error
        return loaded if len(places) > 1 else next(iter(loaded.values()), None)

    def _places_of(self, context: dg.InputContext | dg.OutputContext) -> dict[str, tuple[str, list[str] | None]]:
        """Returns the directory of an asset or of each of its partitions, by key, with its owner for the manifest.

        An output of an op has no owner. What has no partitions has an empty key.
        """
        if not context.has_asset_key:
            return {"": (store.join(self._root, *map(segment, context.get_identifier())), None)}
        asset = list(context.asset_key.path)
        base = store.join(self._root, *map(segment, asset))
        if not context.has_asset_partitions:
            return {"": (base, [*asset, ""])}
        places: dict[str, tuple[str, list[str] | None]] = {}
        for key in context.asset_partition_keys:
            names = [segment(name) for name in dimensions_of(key, context.asset_partitions_def)]
            places[str(key)] = store.join(base, *names), [*asset, "/".join(names)]
        return places


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``: the `ResultRef` of the data file beside it, and the previous version's file.

    The owner is the parts of the asset's key, and the partition's path below it; None for the output of an op.
    """

    data: str
    format: str
    digest: str
    size: int
    summary: dict[str, Any]
    superseded: str | None
    owner: list[str] | None = None

    def reference(self, directory: str) -> ResultRef:
        """Returns the handle of the data file."""
        uri = store.join(directory, self.data)
        return ResultRef(uri, self.format, self.digest, self.size, self.summary)


class _DamagedError(ResultError):
    """Raised for a manifest that was cut or changed; the next version replaces it."""


def read_manifest(directory: str, owner: list[str] | None = None) -> Manifest:
    """Reads the manifest of the committed version in a directory.

    Raises:
        FileNotFoundError: no version was committed there.
        ResultError: the manifest is damaged, is of another asset or partition than the owner, or was written by another
            program or a later version of rankzero.
    """
    path = store.join(directory, MANIFEST)
    try:
        facts = json.loads(store.read_bytes(path))
        if not (isinstance(facts, dict) and facts.keys() >= {"data", "format", "digest"}):
            raise ResultError(f"another program wrote {path}: give the IO manager another base_path, or move that file")
        if unknown := ", ".join(sorted(facts.keys() - {known.name for known in fields(Manifest)})):
            raise ResultError(f"a later version of rankzero wrote {path}, with {unknown}: install that one")
        for name in filter(None, (facts["data"], facts.get("superseded"))):
            # It is opened and deleted, so it must not lead out of the directory.
            if not re.fullmatch(r"data-[A-Za-z0-9.-]+", str(name)):
                raise ValueError(f"{name!r} is not the name of a data file")
        manifest = Manifest(**facts)
    except FileNotFoundError:
        raise FileNotFoundError(f"nothing is stored in {directory}: there is no {MANIFEST}") from None
    except (ValueError, TypeError) as error:
        raise _DamagedError(f"{path} is damaged: {error}; materialize it again") from error
    if manifest.owner and owner and manifest.owner != owner:
        raise ResultError(
            f"{directory} holds the value of {_name(manifest.owner)}, not of {_name(owner)}, and their keys make one "
            "path: give one of the two an IO manager with another base_path"
        )
    return manifest


def _previous(directory: str, owner: list[str] | None) -> Manifest | None:
    try:
        return read_manifest(directory, owner)
    except (FileNotFoundError, _DamagedError):
        return None


def _name(owner: list[str]) -> str:
    *asset, partition = owner
    return f"the asset {'/'.join(asset)}" + (f", partition {partition}" if partition else "")


def check_format(file_format: str, allow_pickle: bool) -> None:
    """Raises ResultError for a pickle if none is allowed."""
    if file_format == formats.PICKLE and not allow_pickle:
        raise ResultError(
            "the value needs pickle, and allow_pickle is False: return a dict of tensors or "
            "plain JSON values, or set allow_pickle=True"
        )


def commit(value: object, directory: str, owner: list[str] | None, *, allow_pickle: bool) -> ResultRef:
    """Stores a value, or the file of a `ResultRef`, as the new version, and returns the handle of the stored file.

    Raises:
        ResultError: the value cannot be stored, the handle's file does not exist or is damaged, or the directory has
            the value of another asset or partition, or a manifest of another program or of a later version.
    """
    _previous(directory, owner)
    ref = value if isinstance(value, ResultRef) else None
    file_format = ref.format if ref else formats.choose(value)
    check_format(file_format, allow_pickle)
    store.make_directory(directory)
    store.remove_unfinished(directory, deep=False, folders=True)
    with tempfile.TemporaryDirectory(dir=None if store.is_url(directory) else directory, prefix=".writing-") as scratch:
        path = os.path.join(scratch, "data")
        size, digest = (ref.size, ref.digest) if ref else formats.write(value, file_format, path)
        name = f"data-{split(digest)[1][:16]}-{secrets.token_hex(4)}.{file_format}"
        target = store.join(directory, name)
        if ref:
            _take(ref, path, target)
        else:
            store.upload(path, target)
    before = _previous(directory, owner)
    superseded, obsolete = (before.data, before.superseded) if before else (None, None)
    summary = ref.summary if ref else formats.summarize(value)
    manifest = Manifest(name, file_format, digest, size, summary, superseded, owner)
    store.write_bytes(store.join(directory, MANIFEST), json.dumps(asdict(manifest), indent=2).encode(), durable=True)
    store.sync_directory(os.path.dirname(directory))
    held = _held(directory)
    if obsolete is not None and obsolete not in held:
        store.remove(store.join(directory, obsolete))
    store.remove_strays(directory, _DATA, (name, superseded, *held))
    return manifest.reference(directory)


def _take(ref: ResultRef, path: str, target: str) -> None:
    """Takes the file of a handle over: by a hard link or the store's own copy, else through the local ``path``.

    A file that is linked or copied is not read: its size is compared. Its checksum, which the handle recorded when the
    file was written, is verified when the file is opened.
    """
    try:
        if store.copy_within(ref.uri, target):
            if (size := store.size(target)) != ref.size:
                store.remove(target)
                raise ResultError(
                    f"{ref.uri} has {size} bytes, but {ref.size} were recorded: it was changed or damaged"
                )
            return
        with store.open_read(ref.uri) as source, open(path, "w+b") as copy:
            shutil.copyfileobj(source, copy, _CHUNK)
            copy.seek(0)
            verify(copy, ref.digest, ref.uri)
    except FileNotFoundError:
        raise ResultError(f"the result {ref.uri} does not exist; was its run directory deleted?") from None
    store.upload(path, target, durable=True)


def hold(arguments: Any, run_directory: str, log: Any) -> None:
    """Keeps the versions among the arguments of a run until that has ended, since its next attempt opens them again."""

    def mark(uri: str) -> None:
        directory, _, name = uri.rpartition("/")
        if _DATA.fullmatch(name):
            digest = hashlib.sha256(run_directory.encode()).hexdigest()[:8]
            store.write_bytes(store.join(directory, f"held-{digest}-{name}"), run_directory.encode())

    map_refs(arguments, lambda ref: attempt(log, f"the mark that {ref.uri} is read", lambda: mark(ref.uri), None))


def _held(directory: str) -> set[str]:
    """Returns the names of the data files that living runs read, and removes the marks of runs that have ended."""
    held = set()
    for found in filter(None, map(_HELD.fullmatch, store.list_names(directory))):
        path = store.join(directory, found[0])
        try:
            has_ended = RunHandle.attach(store.read_bytes(path).decode(), follows=False).status().final
        except (FileNotFoundError, RunNotFoundError):
            has_ended = True
        except Exception as error:
            # The version is committed, and must not fail because the store of the runs cannot be read from here.
            logger.warning("%s is kept, because %s names a run that cannot be read: %s", found[1], path, error)
            has_ended = False
        if has_ended:
            store.remove(path)
        else:
            held.add(found[1])
    return held
