"""Rows of a table as ranks read and write them: manifests, even shares, the order of an epoch, columns as tensors.

Runs on executors, so only the standard library, torch and pyarrow (which Spark needs there, too) may be imported here.
Who makes a manifest of a DataFrame is in `rankzero.engines.spark`, of a path in `rankzero.submit`; what training code
calls is in `rankzero.train`.
"""
