"""Atomic reads and writes below a root that is a local path or a URL of an object store.

A reader sees either the old bytes or the new ones. Locally this is done with a temporary file and ``os.replace``; on
an object store, a single PUT is atomic. If two callers `create` the same file, one of them succeeds. `normalize`
rejects a scheme that does not promise both, and `prove` tests whether the scheme's driver and server keep the promise.
Only this package imports fsspec.
"""

from rankzero.store.files import (
    atomic_file,
    copy_within,
    create,
    exists,
    fingerprint,
    list_files,
    list_names,
    make_directory,
    modified,
    open_read,
    presign,
    read_bytes,
    read_from,
    remove,
    size,
    sizes,
    sync_directory,
    temporary_beside,
    tree_size,
    upload,
    write_bytes,
    write_parts,
)
from rankzero.store.leftovers import abort_uploads, is_unfinished, remove_strays, remove_unfinished
from rankzero.store.location import (
    STORE_VARIABLE,
    has_scheme,
    is_absolute,
    is_url,
    join,
    normalize,
    root_of,
    why_untrusted,
)
from rankzero.store.proof import prove
from rankzero.store.waiting import is_missing, patiently

__all__ = [
    "STORE_VARIABLE",
    "abort_uploads",
    "atomic_file",
    "copy_within",
    "create",
    "exists",
    "fingerprint",
    "has_scheme",
    "is_absolute",
    "is_missing",
    "is_unfinished",
    "is_url",
    "join",
    "list_files",
    "list_names",
    "make_directory",
    "modified",
    "normalize",
    "open_read",
    "patiently",
    "presign",
    "prove",
    "read_bytes",
    "read_from",
    "remove",
    "remove_strays",
    "remove_unfinished",
    "root_of",
    "size",
    "sizes",
    "sync_directory",
    "temporary_beside",
    "tree_size",
    "upload",
    "why_untrusted",
    "write_bytes",
    "write_parts",
]
