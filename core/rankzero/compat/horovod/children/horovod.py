"""Stands for ``horovod`` in Python programs that a rank starts, whose search path has this folder."""

import sys

from rankzero.compat import horovod

horovod.install()
sys.modules[__name__] = horovod
