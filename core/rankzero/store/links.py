"""Links to files of an object store, for a browser without credentials."""

from __future__ import annotations

from rankzero.store.files import exists
from rankzero.store.location import filesystem_of, is_url

_AS_HTML: dict[str, dict[str, str]] = {
    "s3": {"ResponseContentType": "text/html; charset=utf-8"},
    "gs": {"response_type": "text/html; charset=utf-8"},
    "az": {"content_type": "text/html; charset=utf-8"},
}
_SAME = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "az"}


def presign(location: str, seconds: float) -> str:
    """Returns a presigned URL by which a browser without credentials shows an HTML file of an object store.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: this store has no presigned URLs.
    """
    scheme = location.partition("://")[0] if is_url(location) else ""
    kind = _AS_HTML.get(_SAME.get(scheme, scheme))
    if kind is None:
        raise OSError(f"{location} is on no object store that gives links: `rankzero serve` shows it")
    if not exists(location):
        raise FileNotFoundError(f"there is no {location}: the report is written when a run has ended")
    filesystem, path = filesystem_of(location)
    return str(filesystem.sign(path, expiration=round(seconds), **kind))
