"""Table rows as ranks read and write them: manifests, even shares, the order of an epoch, columns as tensors.

Executors import this package, so it may import only the standard library, torch and pyarrow, which Spark needs there
as well. `rankzero.engines.spark` makes the manifest of a DataFrame, and `rankzero.submit` that of a path. Training code
calls `rankzero.train`.
"""
