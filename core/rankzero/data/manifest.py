"""`Manifest`: what ranks know of a dataset before they open it. Pure data, as JSON in ``datasets.json``."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rankzero.errors import InvalidJobError

FILE = "datasets.json"
"""The manifests of a submission, by name of the dataset, in its folder."""

ARROW, PARQUET = "arrow", "parquet"


@dataclass(frozen=True)
class File:
    """A file of a dataset.

    Attributes:
        location: Absolute path or URL.
        rows: Of each of its row groups (Parquet) or record batches (Arrow).
        partition: Columns that are not in the file, since all its rows have this value: as text, None for a null.
    """

    location: str
    rows: tuple[int, ...]
    partition: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """A dataset.

    Attributes:
        format: ``"arrow"`` or ``"parquet"``, of all its files.
        schema: The Arrow schema as pyarrow serializes it, in base64.
        files: In the order of their rows.
        size: Bytes of its rows in memory, about.
        lengths: Of columns of arrays and vectors that have the same in every row.
        digest: Of the content, wherever it lies.
        folder: Where its files lie, if they are the run's own; else None.
    """

    format: str
    schema: str
    files: tuple[File, ...]
    size: int
    digest: str
    lengths: Mapping[str, int] = field(default_factory=dict)
    folder: str | None = None

    @property
    def rows(self) -> int:
        """Number of all rows."""
        return sum(sum(file.rows) for file in self.files)

    @property
    def row_size(self) -> int:
        """Bytes of a row in memory, about."""
        return max(1, self.size // max(1, self.rows))

    def check_rows(self, name: str, ranks: int) -> None:
        """Raises InvalidJobError unless there is a row for each rank."""
        if self.rows < max(1, ranks):
            raise InvalidJobError(
                f"the dataset {name!r} has {self.rows} rows for {ranks} ranks: give each rank one at least, or lower "
                "num_processes"
            )

    def arrow_schema(self) -> Any:
        """The schema, as a `pyarrow.Schema`."""
        import pyarrow as pa

        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.schema)))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Manifest:
        """The manifest from `to_json`."""
        files = tuple(File(file["location"], tuple(file["rows"]), file["partition"]) for file in data["files"])
        return Manifest(**{**data, "files": files})


def encode_schema(schema: Any) -> str:
    """A `pyarrow.Schema` as `Manifest.schema`."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def to_bytes(manifests: Mapping[str, Manifest]) -> bytes:
    """The content of `FILE`."""
    return json.dumps({name: manifest.to_json() for name, manifest in manifests.items()}).encode()


def from_bytes(data: bytes) -> dict[str, Manifest]:
    """The manifests of `FILE`, by name."""
    return {name: Manifest.from_json(facts) for name, facts in json.loads(data).items()}
