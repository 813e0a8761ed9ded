"""For tests of your own: training functions under a debugger, and trainings in tests of pipelines.

`run_inline` calls a training function with rank 0 in this very thread. ``pytest_plugins =
["rankzero.testing.fixtures"]`` gives `local_trainings` and `fake_trainings`, with which operators, resources and assets
run as they are, on this machine.
"""

from rankzero.testing.inline import InlineRun, run_inline

__all__ = ["InlineRun", "run_inline"]
