"""Table rows as ranks read and write them: manifests, even shares, the order of an epoch, columns as tensors.

Executors import this package, so it may import only the standard library, torch and pyarrow, which Spark needs there
as well. `rankzero.engines.spark` makes the manifest of a DataFrame, and `rankzero.submit` that of a path. Training code
calls `rankzero.train`.
"""

from rankzero import lazy_names

lazy_names(
    __name__,
    "columns.joined columns.part columns.Ragged columns.rows_of columns.tensors files.filesystem_of manifest.ARROW "
    "manifest.encode_schema manifest.FILE manifest.File manifest.from_bytes manifest.Manifest manifest.to_bytes "
    "shares.Batches shares.cut shares.length shares.Order shares.remaining shares.share shares.split shares.Stretch "
    "shares.united table.file_of",
)
