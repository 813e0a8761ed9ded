"""Names of directories for assets and partitions: different keys have different names, whatever their characters."""

import hashlib
import re

LIMIT = 255
"""Most bytes of the name of a directory in common file systems."""

_KEPT = 180
# Bytes of a longer name that are kept before its checksum.


def segment(text: str) -> str:
    """Returns the name of one directory for a part of an asset's key or a dimension of a partition's key.

    Most keys are their own names. A slash, a percent sign and a NUL are escaped, so that no two keys share a name.

    Example:
        >>> segment("2026-01-01"), segment("a/b"), segment("a%2Fb"), segment(".."), segment("")
        ('2026-01-01', 'a%2Fb', 'a%252Fb', '%2E%2E', '%')
    """
    name = re.sub(r"[%/\0]", lambda found: f"%{ord(found[0]):02X}", text)
    if name in (".", ".."):
        return name.replace(".", "%2E")
    encoded = name.encode("utf-8", "surrogatepass")
    if len(encoded) > LIMIT:
        return f"{encoded[:_KEPT].decode('utf-8', 'ignore')}%~{hashlib.sha256(encoded).hexdigest()[:32]}"
    return name or "%"
