"""`install`: makes ``import horovod.torch`` and ``from sparkdl import HorovodRunner`` find ours."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_NAMES = {
    "horovod": "rankzero.compat.horovod",
    "horovod.torch": "rankzero.compat.horovod.torch",
    "horovod.torch.elastic": "rankzero.compat.horovod.torch.elastic",
    "horovod.torch.mpi_ops": "rankzero.compat.horovod.torch",
    "horovod.spark": "rankzero.compat.horovod.runner",
    "sparkdl": "rankzero.compat.horovod",
    "sparkdl.horovod": "rankzero.compat.horovod.runner",
}

_OTHERS = ("horovod.tensorflow", "horovod.keras", "horovod.mxnet")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in _NAMES or name.startswith(_OTHERS):
            return importlib.machinery.ModuleSpec(
                name, self, is_package=name in ("horovod", "horovod.torch", "sparkdl")
            )
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name not in _NAMES:
            raise ImportError(f"{spec.name} is not part of rankzero, which trains torch: use horovod.torch")
        real = importlib.import_module(_NAMES[spec.name])
        alias = ModuleType(spec.name, real.__doc__)
        alias.__getattr__ = lambda name: getattr(real, name)  # type: ignore[method-assign]
        alias.__dict__["__all__"] = getattr(real, "__all__", None) or [n for n in dir(real) if not n.startswith("_")]
        return alias

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Lets ``horovod.torch`` and ``sparkdl`` be imported in this process, whether they are installed or not.

    In ranks the variable ``RANKZERO_HOROVOD=1`` in ``env=`` does it.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
