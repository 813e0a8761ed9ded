"""Checkpoints of a submission: their layout, their manifests, and the rule by which old ones are removed.

    checkpoints/0000-000003/rank-0.torch           one file for each rank that saved a part
    checkpoints/0000-000003/checkpoint.json        written last, which commits the checkpoint
    checkpoints/0000-000003/damaged                if a rank has found another checksum in a part than the manifest has

A folder's name consists of attempt and number, so no two attempts write the same file. A folder that has only files of
these names, but no ``checkpoint.json``, is not a checkpoint and is removed. Everything else in ``checkpoints/``, also a
copy of a checkpoint under another name, belongs to the user: it is neither read nor removed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rankzero import store
from rankzero.job import CheckpointConfig
from rankzero.run.directory import TABLES
from rankzero.store import location
from rankzero.values.formats import digest_of_file

logger = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"
FOLDER = "checkpoints"
DAMAGED = "damaged"

_NAME = re.compile(r"([0-9]{4}|[1-9][0-9]{4,})-([0-9]{6}|[1-9][0-9]{6,})")  # Of a checkpoint's folder
_BEGUN = re.compile(r"_begun-(.+)-([0-9]+)-([0-9]+)")  # Name of a `begun_file`
_FILE = re.compile(rf"rank-[0-9]+\.[a-z.]+|{DAMAGED}")  # In a folder that is not committed
_loaded: dict[str, str] = {}  # Checksums of the sources that this process has loaded, empty for those that do not count


@dataclass(frozen=True)
class Manifest:
    """Describes a committed checkpoint."""

    id: str  # Name of the folder, made of attempt and number
    attempt: int  # Number of the attempt that wrote the checkpoint
    index: int  # Number of the checkpoint within that attempt
    time: float  # Unix time of rank 0's report
    metrics: dict[str, Any]  # Metrics that rank 0 reported with the checkpoint
    world_size: int  # Number of ranks of the attempt that wrote it
    sharded: bool  # True if every rank saved its own part; False if rank 0's part is the whole checkpoint
    # ``file``, ``format``, ``size`` and ``sha256`` of each part, by rank as text, since keys in JSON are text
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    has_result: bool = False  # True if rank 0 had set the value of the run before: `rankzero.train.set_result`
    loaded: dict[str, str] = field(default_factory=dict)  # `loaded_sources` of rank 0
    place: str = ""  # The folder of the submission that wrote it, which its file does not contain

    @classmethod
    def of_parts(cls, place: str, attempt: int, world_size: int, parts: Mapping[int, Mapping[str, Any]]) -> Manifest:
        """Returns the manifest of the parts that the ranks of an attempt have written and described, by rank."""
        lead, kept = parts[min(parts)], ("file", "format", "size", "sha256")
        return cls(
            **{name: lead[name] for name in ("id", "index", "time", "metrics", "sharded")},
            attempt=attempt,
            world_size=world_size,
            parts={str(rank): {key: part[key] for key in kept} for rank, part in sorted(parts.items())},
            has_result=lead.get("has_result", False),
            loaded=lead.get("loaded", {}),
            place=place,
        )

    @property
    def folder(self) -> str:
        """Path or URL of the checkpoint."""
        return store.join(self.place, FOLDER, self.id)

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest as plain JSON values, without its place."""
        return {name: value for name, value in asdict(self).items() if name != "place"}

    def for_ranks(self, ranks: Iterable[int]) -> dict[str, Any]:
        """Returns the part of the manifest that the ranks of one task need, as plain JSON values.

        With all parts in each message, a world of 1,024 ranks would send half a gigabyte. It has the parts of these
        ranks and of rank 0, and the formats of all. A rank that needs others reads `MANIFEST`.
        """
        wanted = {"0", *map(str, ranks)}
        formats = sorted({part["format"] for part in self.parts.values()})
        parts = {rank: part for rank, part in self.parts.items() if rank in wanted}
        return {**vars(self), "parts": parts, "formats": formats, "loaded": {}}


def list_committed(places: Iterable[str]) -> list[Manifest]:
    """Returns the committed checkpoints in the folders of a training's submissions, oldest first.

    Like the other functions here, it raises OSError, or an error of its fsspec driver, if the store cannot be read.
    """
    return [manifest for place in places for manifest in read_manifests(place, list_folders(place))]


def list_folders(place: str) -> list[str]:
    """Returns the names of the folders of checkpoints, committed or not, oldest first."""
    # By number: the text "0000-1000000" is less than "0000-999999".
    found = [match for name in store.list_names(store.join(place, FOLDER)) if (match := _NAME.fullmatch(name))]
    return [match[0] for match in sorted(found, key=lambda match: (int(match[1]), int(match[2])))]


def read_manifests(place: str, names: list[str]) -> list[Manifest]:
    """Returns the manifests of the named folders that are committed, in this order."""
    found = []
    for name in names:
        # These errors mean that the checkpoint is not committed. Any other error comes from the store.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError, TypeError, AttributeError):
            facts = json.loads(store.read_bytes(store.join(place, FOLDER, name, MANIFEST))) | {"place": place}
            manifest = Manifest(**{key: facts[key] for key in facts.keys() & Manifest.__dataclass_fields__.keys()})
            if manifest.id == name:
                found.append(manifest)
    return found


def remove_uncommitted(place: str, name: str) -> None:
    """Removes a folder of a checkpoint that is not committed, unless it has files that rankzero does not write."""
    with contextlib.suppress(NotADirectoryError):
        folder = store.join(place, FOLDER, name)
        if all(_FILE.fullmatch(file) or store.is_unfinished(file) for file in store.list_names(folder)):
            store.remove(folder)


def up_to_whole(committed: list[Manifest]) -> list[Manifest]:
    """Returns the checkpoints (oldest first) up to the newest one that has all its files. The log names the newer ones.

    A disk may lose what it has reported as written, and a user may remove a file. Only sizes are compared, since ranks
    compare the checksums of what they load; see `mark_damaged`.
    """
    for number in range(len(committed), 0, -1):
        manifest = committed[number - 1]
        damage = damage_of(manifest.folder, manifest.parts.values())
        if damage is None:
            return committed[:number]
        logger.warning("checkpoint %s is not used, since it is damaged: %s", manifest.id, damage)
    return []


def begun_file(table: str, rank: int, index: int) -> str:
    """Returns the name of the file, beside the tables of an attempt, by which a rank has begun to write rows.

    The index is the number of checkpoints that the rank had reported before or, if it reports none, was told of.
    """
    return f"_begun-{table}-{rank:05d}-{index:06d}"


def table_before(manifest: Manifest) -> str | None:
    """Returns the name of a table whose rows precede a checkpoint, and ended with its attempt; None without one.

    Every rank calls `write_rows`. Other ranks than rank 0 may not know yet of the last whole checkpoint before it.
    """
    names = store.list_names(store.join(manifest.place, TABLES, f"{manifest.attempt:04d}"))
    begun = [match.groups() for match in map(_BEGUN.fullmatch, names) if match]
    of_rank_0 = {table for table, rank, _ in begun if int(rank) == 0 and not manifest.sharded}
    for table, rank, index in begun:
        is_behind = int(rank) > 0 and table in of_rank_0
        if int(index) + is_behind <= manifest.index:
            return table
    return None


def mark_damaged(folder: str) -> None:
    """Marks a checkpoint as one from which no attempt may start, since a rank has found a wrong checksum in it."""
    store.write_bytes(store.join(folder, DAMAGED), b"", durable=True)


def damage_of(folder: str, parts: Iterable[Mapping[str, Any]]) -> str | None:
    """Returns which of a checkpoint's parts is missing, has another size or a wrong checksum; None if none is known."""
    sizes = store.sizes(folder)
    if DAMAGED in sizes:
        return f"a rank has found a wrong checksum in {folder}"
    for part in parts:
        if (size := sizes.get(part["file"])) != part["size"]:
            return f"{folder}/{part['file']} has {size} bytes, not {part['size']}"
    return None


def remove(manifest: Manifest) -> None:
    """Removes a committed checkpoint."""
    # The manifest is removed first, so that a checkpoint that is removed in part does not count as one.
    store.remove(store.join(manifest.folder, MANIFEST))
    store.remove(manifest.folder)


def to_remove(
    committed: list[Manifest], config: CheckpointConfig, in_use: Collection[str | None] = ()
) -> list[Manifest]:
    """Returns the checkpoints to remove of the committed ones (oldest first). Those named in ``in_use`` are kept."""
    if config.num_to_keep is None or not committed:
        return []
    key = lambda one: (score(one.metrics, config.metric, config.mode), one.attempt, one.index)  # noqa: E731
    ranked = sorted(committed, key=key, reverse=True)
    kept = {manifest.id for manifest in ranked[: config.num_to_keep]} | {committed[-1].id, *in_use}
    return [manifest for manifest in committed if manifest.id not in kept]


def score(metrics: Mapping[str, Any], metric: str | None, mode: str) -> float:
    """Returns a number that is larger for the better value of a metric; a value that is not a number is the worst."""
    value = None if metric is None else metrics.get(metric)
    if not isinstance(value, (int, float)) or math.isnan(value):
        return -math.inf
    return value if mode == "max" else -value


def loaded_sources() -> dict[str, str]:
    """Returns the checksums of the user's sources that this rank has loaded and no job has brought, by path."""
    scratch = os.path.realpath(os.environ.get("RANKZERO_SCRATCH", os.devnull)) + os.sep
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and file not in _loaded and name.partition(".")[0] not in location.BESIDE:
            is_own = file.endswith(".py") and location.is_user_file(file)
            is_sent = is_own and os.path.realpath(file).startswith(scratch)
            _loaded[file] = digest_of_loaded(file) if is_own and not is_sent else ""
    return {path: digest for path, digest in _loaded.items() if digest}


def digest_of_loaded(path: str) -> str:
    """Returns the checksum of a source as ranks report it; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return digest_of_file(path)
    return ""
