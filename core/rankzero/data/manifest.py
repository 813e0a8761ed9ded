"""`Manifest`: the description of a dataset that ranks get before they open it, as JSON in ``datasets.json``."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rankzero.errors import InvalidJobError
from rankzero.run.directory import DATASETS_FILE

FILE = DATASETS_FILE
"""Name of the file in a submission's folder that holds the manifests by name of the dataset."""


@dataclass(frozen=True)
class File:
    """A file of a dataset.

    Attributes:
        location: Absolute path or URL.
        rows: Number of rows of each row group.
        partition: Partition columns, which are not in the file: the value of all rows as text, None for a null.
        stamp: Size and time of the last change when the run was submitted; empty for files that never change.
        content: Its ETag or checksum at that time, which decides if the stamp is another one.
    """

    location: str
    rows: tuple[int, ...]
    partition: Mapping[str, str | None] = field(default_factory=dict)
    stamp: str = ""
    content: str = ""


@dataclass(frozen=True)
class Manifest:
    """Describes a dataset: its Parquet files with their numbers of rows, and the schema.

    Attributes:
        schema: The Arrow schema as pyarrow serializes it, in base64.
        files: The files in the order of their rows.
        size: Approximate number of bytes of all rows in memory.
        lengths: By name, the length of the arrays or vectors of a column that have the same length in every row.
        digest: Digest of the content, which does not depend on its location.
        folder: Folder of the files if they belong to the run; else None.
    """

    schema: str
    files: tuple[File, ...]
    size: int
    digest: str
    lengths: Mapping[str, int] = field(default_factory=dict)
    folder: str | None = None

    @property
    def rows(self) -> int:
        """Returns the number of rows of all files."""
        return sum(sum(file.rows) for file in self.files)

    @property
    def row_size(self) -> int:
        """Returns the approximate number of bytes of a row in memory, at least 1."""
        return max(1, self.size // max(1, self.rows))

    def check_rows(self, name: str, ranks: int) -> None:
        """Raises InvalidJobError unless there is a row for each rank."""
        if self.rows < max(1, ranks):
            raise InvalidJobError(
                f"the dataset {name!r} has {self.rows} rows for {ranks} ranks: give each rank one at least, or lower "
                "num_processes"
            )

    def arrow_schema(self) -> Any:
        """Returns the schema as a `pyarrow.Schema`."""
        import pyarrow as pa

        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.schema)))

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest as plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Manifest:
        """Returns the manifest from the values of `to_json`."""
        files = tuple(File(**{**file, "rows": tuple(file["rows"])}) for file in data["files"])
        return Manifest(**{**data, "files": files})


def encode_schema(schema: Any) -> str:
    """Returns a `pyarrow.Schema` as text for `Manifest.schema`."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def to_bytes(manifests: Mapping[str, Manifest]) -> bytes:
    """Returns manifests by name as the content of `FILE`."""
    return json.dumps({name: manifest.to_json() for name, manifest in manifests.items()}).encode()


def from_bytes(data: bytes) -> dict[str, Manifest]:
    """Returns the manifests in the content of `FILE`, by name."""
    return {name: Manifest.from_json(facts) for name, facts in json.loads(data).items()}
