"""Tools for users' tests: a training function under a debugger, and trainings in tests of pipelines.

`run_inline` calls a training function as rank 0 in the calling thread. ``pytest_plugins =
["rankzero.testing.fixtures"]`` adds the fixtures `local_trainings` and `fake_trainings`, which run unchanged operators,
resources and assets on this machine.
"""

from rankzero.testing.inline import InlineRun, run_inline

__all__ = ["InlineRun", "run_inline"]
