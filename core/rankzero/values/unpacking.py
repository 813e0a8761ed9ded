"""Unpacks tar archives on every supported Python.

Runs inside workers too: standard library only.
"""

from __future__ import annotations

import os
import tarfile


def unpack(archive: tarfile.TarFile, target: str | os.PathLike[str]) -> None:
    """Unpacks an archive that rankzero made and whose checksum was verified.

    Args:
        archive: The open archive.
        target: The directory.
    """
    # Python 3.11.0 to 3.11.3, which Debian 12 has, has no filters.
    if hasattr(tarfile, "data_filter"):
        archive.extractall(target, filter="data")
    else:
        archive.extractall(target)
