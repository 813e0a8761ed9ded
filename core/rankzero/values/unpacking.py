"""Unpacking of tar archives, on every Python that is supported.

Runs inside workers too: standard library only.
"""

from __future__ import annotations

import os
import tarfile


def unpack(archive: tarfile.TarFile, target: str | os.PathLike[str]) -> None:
    """Unpacks an archive of rankzero's, whose checksum was compared before.

    Args:
        archive: The open archive.
        target: The directory.
    """
    # Python 3.11.0 to 3.11.3, which Debian 12 has, knows no filters.
    if hasattr(tarfile, "data_filter"):
        archive.extractall(target, filter="data")
    else:
        archive.extractall(target)
