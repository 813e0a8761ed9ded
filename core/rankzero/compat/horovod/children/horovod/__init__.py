"""Stands for ``horovod`` in processes that a rank starts: the parent of this folder is on their search path."""

import importlib
import sys

from rankzero.compat.horovod.install import install

install()
sys.modules[__name__] = importlib.import_module("rankzero.compat.horovod")
