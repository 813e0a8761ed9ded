"""The names of ``horovod.common.util``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from rankzero.compat.horovod.torch.world import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
)

__all__ = ["ccl_built", "cuda_built", "ddl_built", "env", "gloo_built", "mpi_built", "nccl_built", "rocm_built"]


@contextlib.contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets environment variables within the block; None removes one."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
