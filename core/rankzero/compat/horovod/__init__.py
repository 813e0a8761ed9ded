"""Horovod's interface on rankzero's launcher: ``from rankzero.compat.horovod import HorovodRunner``.

`rankzero.compat.horovod.torch` implements ``horovod.torch`` with torch.distributed. Runs start through `Launcher` only.
"""

from typing import TYPE_CHECKING

from rankzero import lazy_names

if TYPE_CHECKING:
    from rankzero.compat.horovod.runner import HorovodRunner, log_to_driver, run

__all__ = ["HorovodRunner", "log_to_driver", "run"]

# Loaded lazily, since a rank imports this package and launches no run.
lazy_names(__name__, "runner.HorovodRunner runner.log_to_driver runner.run")
