"""Imports a module by a computed name, as `importlib.import_module`.

A source that calls that one by its own name may import any module of its package: each run of a function of such a
source would ship, and count in its identity, all modules of the suite.
"""

from importlib import import_module

load_module = import_module
