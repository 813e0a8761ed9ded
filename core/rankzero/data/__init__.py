"""Rows of a table as ranks read and write them: manifests, even shares, the order of an epoch, columns as tensors.

Runs on executors, so only the standard library, torch and pyarrow (which Spark needs there, too) may be imported here.
Who makes a manifest of a DataFrame is in `rankzero.engines.spark`, of a path in `rankzero.submit`; what training code
calls is in `rankzero.train`.
"""

from rankzero import lazy_names

lazy_names(
    __name__,
    "columns.joined columns.part columns.Ragged columns.rows_of columns.tensors files.filesystem_of manifest.ARROW "
    "manifest.encode_schema manifest.FILE manifest.File manifest.from_bytes manifest.Manifest manifest.to_bytes "
    "order.Order shares.Batches shares.cut shares.length shares.remaining shares.share shares.split shares.Stretch "
    "table.file_of",
)
