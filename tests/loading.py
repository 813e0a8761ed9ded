"""Imports a module by a computed name, as `importlib.import_module`.

Code that calls that one, under any name, may import any module of its package: each run of such a function would ship,
and count in its identity, all modules of the suite. What looks for it does not look into a partial.
"""

from functools import partial
from importlib import import_module

load_module = partial(import_module)
