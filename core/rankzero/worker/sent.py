"""Imports the modules that were sent with a job under the paths that they came from.

A rank runs the code that was submitted, also if the file was edited since. But code often finds its data beside
``__file__``, and writes there, so a module keeps the path that it came from if this host has it.
"""

from __future__ import annotations

import importlib.abc
import linecache
import os
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source, spec_from_file_location
from typing import Any


class SentModules(importlib.abc.MetaPathFinder):
    """Finds the sources of the user's modules that were sent."""

    def __init__(self, directory: str, origins: Mapping[str, str], sent: Sequence[str]) -> None:
        """Prepares the finder without reading a file.

        Args:
            directory: Directory of the modules that were sent.
            origins: The directory that each top-level module was in where the job was submitted.
            sent: Places of the search path that the user has sent. The modules in them come first, from there.
        """
        self._directory = directory
        self._origins = {
            root: origin for root, origin in origins.items() if not (sent and PathFinder.find_spec(root, [*sent]))
        }

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Returns the spec of a source or a compiled extension that was sent; None for all other modules."""
        origin = self._origins.get(name.partition(".")[0])
        if origin is None:
            return None
        place = name.replace(".", os.sep)
        for file in (os.path.join(place, "__init__.py"), f"{place}.py"):
            sent, original = os.path.join(self._directory, file), os.path.join(origin, file)
            if not os.path.isfile(sent):
                continue
            loader = None
            if os.path.isfile(original):
                loader = _Loader(name, original, sent)
            else:
                original = sent
            inner = [*map(os.path.dirname, (original, sent))] if file.endswith("__init__.py") else None
            return spec_from_file_location(name, original, loader=loader, submodule_search_locations=inner)
        for suffix in EXTENSION_SUFFIXES:
            if os.path.isfile(compiled := os.path.join(self._directory, f"{place}{suffix}")):
                return spec_from_file_location(name, compiled)
        return None


class _Loader(SourceFileLoader):
    """Loads the source that was sent, under another path."""

    def __init__(self, name: str, path: str, sent: str) -> None:
        super().__init__(name, path)
        self._sent = sent

    def get_data(self, path: str) -> bytes:
        if path != self.path:
            return super().get_data(path)
        data = super().get_data(self._sent)
        if super().get_data(path) != data:
            # Tracebacks, inspect and what compiles from its sources (torch.jit) show the source that runs.
            lines = decode_source(data).splitlines(keepends=True)
            linecache.cache[path] = (len(data), None, lines, path)
        return data

    def path_stats(self, path: str) -> Any:
        # Without the time of the source no compiled form is read, which counts as current by seconds and size alone.
        raise OSError(f"{path} may be another version than the one that was sent")
