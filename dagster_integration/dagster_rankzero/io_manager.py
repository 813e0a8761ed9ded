"""`RankZeroIOManager`: stores rank 0's value atomically, so that the next step gets a complete value or an error.

    <asset>[/@partitions/<partition>]/data-<sha16>-<nonce>.<format>
    <asset>[/@partitions/<partition>]/rankzero.json      the version: its `ResultRef`; written last, atomically
    <asset>[/@partitions/<partition>]/held-<sha8>-data-<sha16>-<nonce>.<format>      names a run that reads this file

Until ``rankzero.json`` is replaced, readers see the complete previous version. A crash, or commits at the same time,
leave at most files that no version names, which a commit removes after an hour. Each name is written once.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import dagster as dg
from pydantic import Field, PrivateAttr, field_validator

from dagster_rankzero._compat import KnownFields, set_data_version
from dagster_rankzero.inputs import dimensions_of, is_frame, segment, wants_reference
from dagster_rankzero.metadata import by_partition, describe_partitions, describe_result
from rankzero import ResultError, ResultRef, RunHandle, RunNotFoundError
from rankzero.pipeline import attempt, map_refs, store

logger = logging.getLogger(__name__)

VERSION_FILE, PARTITIONS = "rankzero.json", "@partitions"
# `segment` gives the name of the directory of an asset's partitions to no part of another asset's key.

# Names of the data files that `commit` makes, and of the marks of `hold`. A user's files may begin alike.
_DATA = re.compile(r"data-[0-9a-f]{16}-[0-9a-f]{8}\.[a-z.]+")
_HELD = re.compile(rf"held-[0-9a-f]{{8}}-({_DATA.pattern})")
_CHUNK = 8 << 20


class RankZeroIOManager(KnownFields, dg.ConfigurableIOManager):
    """Stores tensors in plain containers by torch.save, JSON values as JSON, anything else as a pickle.

    A crash never damages the previous version. It stays until the next one is committed, and one that a training reads
    until that has ended. Loading verifies the checksum, which is the asset's data version. Loading a pickle
    runs code, as with Dagster's default IO manager: set ``allow_pickle`` to False unless you trust all users who can
    write to ``base_path``.

    An output that is a `ResultRef` is stored by its file and never loaded: if run directories and ``base_path`` share a
    file system or an object store, no byte passes through the step. An input annotated `ResultRef` gets the handle, and
    so do the functions of `torch_asset` and `torch_distributor_op`, whose ranks open it themselves. An output of
    several partitions (a backfill in a single run) is a dict by partition key; each partition is stored separately.

    Example:
        >>> defs = dg.Definitions(resources={"io_manager": RankZeroIOManager(base_path="s3://bucket/assets")})
    """

    base_path: str | None = Field(
        None, description="Path or fsspec URL of the stored values; left out: rankzero/ in the instance's storage."
    )
    allow_pickle: bool = Field(True, description="Store and load values that need pickle, which runs their code.")

    takes_references: ClassVar[bool] = True
    _root: str = PrivateAttr()

    @field_validator("base_path", mode="before")
    @classmethod
    def _as_text(cls, given: Any) -> Any:
        return str(given) if hasattr(given, "joinpath") else given

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Determines the root directory or URL of the stored values."""
        instance = context.instance or dg.DagsterInstance.get()
        # Dagster's default IO manager stores an asset in a file where this one needs a directory.
        self._root = store.normalize(self.base_path or store.join(instance.storage_directory(), "rankzero"))

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Commits an output as the new version; one of several partitions is a dict by partition key."""
        places = self._places_of(context)
        values = dict.fromkeys(places, obj)
        if len(places) > 1:
            values = by_partition(obj, list(places), context.asset_key.to_user_string())
        try:
            stored = {key: commit(values[key], place, self.allow_pickle) for key, place in places.items()}
        except ResultError as error:
            # A full disk may be empty at the next try.
            raise dg.Failure(str(error), allow_retries=isinstance(error.__cause__, OSError)) from error
        versions = sorted(f"{key}\t{ref.digest}" for key, ref in stored.items())
        version = hashlib.sha256("\n".join(versions).encode()).hexdigest()
        describe: Callable[[], dict[str, Any]] = partial(describe_partitions, stored)
        if len(places) == 1:
            ((place, ref),) = zip(places.values(), stored.values(), strict=True)
            version, describe = _digits(ref), partial(describe_result, ref, place)
        set_data_version(context, version)
        context.add_output_metadata(attempt(context.log, "its description", describe, {}))

    def load_input(self, context: dg.InputContext) -> Any:
        """Loads a value, or a dict of those of several partitions; an input that accepts a handle gets that instead.

        Raises:
            FileNotFoundError: no value was stored, and the input does not allow missing partitions.
            dagster.Failure: the file is damaged, or is a pickle although none is allowed. Not retried.
        """
        places = self._places_of(context)
        may_miss = (context.definition_metadata or {}).get("allow_missing_partitions")
        loaded: dict[str, Any] = {}
        for key, place in places.items():
            try:
                ref, _ = read_version(place)
                _check_format(ref, self.allow_pickle)
                loaded[key] = ref if wants_reference(context.dagster_type) else ref.load()
            except FileNotFoundError:
                if not (may_miss and key):
                    raise
                context.log.warning("partition %s is left out: nothing is stored in %s", key, place)
            except ResultError as error:
                raise dg.Failure(str(error), metadata={"path": place}, allow_retries=False) from error
        return loaded if len(places) > 1 else next(iter(loaded.values()), None)

    def _places_of(self, context: dg.InputContext | dg.OutputContext) -> dict[str, str]:
        """Returns the directory of an asset or of each of its partitions, by key; without partitions the key is ""."""
        names = context.asset_key.path if context.has_asset_key else context.get_identifier()
        base = store.join(self._root, *map(segment, names))
        if not (context.has_asset_key and context.has_asset_partitions):
            return {"": base}
        return {
            str(key): store.join(base, PARTITIONS, *map(segment, dimensions_of(key, context.asset_partitions_def)))
            for key in context.asset_partition_keys
        }


def read_version(directory: str) -> tuple[ResultRef, str | None]:
    """Reads the committed version in a directory: its handle, and the name of the data file of the version before.

    Raises FileNotFoundError if there is none, ResultError if it is damaged.
    """
    path = store.join(directory, VERSION_FILE)
    try:
        facts = json.loads(store.read_bytes(path))
        name, before = facts["ref"]["uri"], facts["previous"]
        if not all(_DATA.fullmatch(each) for each in (name, before or name)):
            # They are opened and deleted, so they must not lead out of the directory.
            raise ValueError(f"{name!r} or {before!r} is not the name of a data file")
        return ResultRef.deserialize({**facts["ref"], "uri": store.join(directory, name)}, facts["version"]), before
    except FileNotFoundError:
        raise FileNotFoundError(f"nothing is stored in {directory}: there is no {VERSION_FILE}") from None
    except (ValueError, TypeError, LookupError) as error:
        raise ResultError(f"{path} is damaged: {error}; materialize it again", is_damage=True) from error


def commit(value: object, directory: str, allow_pickle: bool) -> ResultRef:
    """Stores a value, or the file of a `ResultRef`, as the new version, and returns the handle of the stored file.

    Raises ResultError if the value cannot be stored, or the file of the handle does not exist or is damaged.
    """
    if is_frame(value):
        told = "RankZeroIOManager stores no DataFrame of Spark: return the path of a table, or give the asset the"
        raise ResultError(f"{told} io_manager_key of an IO manager that passes DataFrames on")
    previous = obsolete = None
    try:
        before, obsolete = read_version(directory)
        previous = before.uri.rpartition("/")[2]
    except FileNotFoundError:
        store.make_directory(directory)
    except ResultError as error:
        if not error.is_damage:
            raise
    store.remove_unfinished(directory, deep=False, folders=True)
    with tempfile.TemporaryDirectory(dir=None if store.is_url(directory) else directory, prefix=".writing-") as scratch:
        ref = value if isinstance(value, ResultRef) else ResultRef.save(value, scratch)
        _check_format(ref, allow_pickle)
        name = f"data-{_digits(ref)[:16]}-{secrets.token_hex(4)}.{ref.format}"
        target = store.join(directory, name)
        if ref is value:
            _take(ref, os.path.join(scratch, "copy"), target)
        else:
            store.upload(ref.uri, target)
    facts = {"version": ResultRef.__version__, "ref": replace(ref, uri=name).to_json(), "previous": previous}
    store.write_bytes(store.join(directory, VERSION_FILE), json.dumps(facts, indent=2).encode(), durable=True)
    store.sync_directory(os.path.dirname(directory))
    held = _held(directory)
    if obsolete and obsolete not in held:
        store.remove(store.join(directory, obsolete))
    store.remove_strays(directory, _DATA, (name, previous, *held))
    return replace(ref, uri=target)


def _take(ref: ResultRef, path: str, target: str) -> None:
    """Takes the file of a handle over: by a hard link or the store's own copy, else through the local ``path``.

    Its checksum is verified when it is opened.
    """
    try:
        if not store.copy_within(ref.uri, target):
            with store.open_read(ref.uri) as source, open(path, "wb") as copy:
                shutil.copyfileobj(source, copy, _CHUNK)
            store.upload(path, target, durable=True)
    except FileNotFoundError:
        raise ResultError(f"the result {ref.uri} does not exist; was its run directory deleted?") from None
    if (size := store.size(target)) != ref.size:
        store.remove(target)
        raise ResultError(f"{ref.uri} has {size} bytes, but {ref.size} were recorded: it was changed or damaged")


def _check_format(ref: ResultRef, allow_pickle: bool) -> None:
    if ref.format == "pickle" and not allow_pickle:
        told = "the value needs pickle, and allow_pickle is False: return a dict of tensors or plain JSON values"
        raise ResultError(f"{told}, or set allow_pickle=True")


def _digits(ref: ResultRef) -> str:
    return ref.digest.rpartition(":")[2]


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
        path, has_ended = store.join(directory, found[0]), False
        try:
            has_ended = RunHandle.attach(store.read_bytes(path).decode(), follows=False).status().final
        except (FileNotFoundError, RunNotFoundError):
            has_ended = True
        except Exception as error:
            # The version is committed, and must not fail because the store of the runs cannot be read from here.
            logger.warning("%s is kept, because %s names a run that cannot be read: %s", found[1], path, error)
        if has_ended:
            store.remove(path)
        else:
            held.add(found[1])
    return held
