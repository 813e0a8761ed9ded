"""Atomic reads and writes below a root that is a local path or a URL of an object store.

A reader sees either the old bytes or the new ones. Locally this is done with a temporary file and ``os.replace``; on
an object store, a single PUT is atomic. If two callers `create` the same file, one of them succeeds. `normalize`
rejects a scheme that does not promise both, and `prove` tests whether the scheme's driver and server keep the promise.
Only this package imports fsspec.
"""

from rankzero.store.files import atomic_file as atomic_file
from rankzero.store.files import copy_within as copy_within
from rankzero.store.files import create as create
from rankzero.store.files import exists as exists
from rankzero.store.files import fingerprint as fingerprint
from rankzero.store.files import list_files as list_files
from rankzero.store.files import list_names as list_names
from rankzero.store.files import make_directory as make_directory
from rankzero.store.files import modified as modified
from rankzero.store.files import open_read as open_read
from rankzero.store.files import read_bytes as read_bytes
from rankzero.store.files import read_from as read_from
from rankzero.store.files import remove as remove
from rankzero.store.files import size as size
from rankzero.store.files import sizes as sizes
from rankzero.store.files import sync_directory as sync_directory
from rankzero.store.files import upload as upload
from rankzero.store.files import write_bytes as write_bytes
from rankzero.store.files import write_parts as write_parts
from rankzero.store.location import STORE_VARIABLE as STORE_VARIABLE
from rankzero.store.location import has_scheme as has_scheme
from rankzero.store.location import is_absolute as is_absolute
from rankzero.store.location import is_url as is_url
from rankzero.store.location import join as join
from rankzero.store.location import normalize as normalize
from rankzero.store.location import root_of as root_of
from rankzero.store.location import why_untrusted as why_untrusted
from rankzero.store.upkeep import abort_uploads as abort_uploads
from rankzero.store.upkeep import is_unfinished as is_unfinished
from rankzero.store.upkeep import prove as prove
from rankzero.store.upkeep import remove_strays as remove_strays
from rankzero.store.upkeep import remove_unfinished as remove_unfinished
from rankzero.store.waiting import is_missing as is_missing
from rankzero.store.waiting import patiently as patiently
