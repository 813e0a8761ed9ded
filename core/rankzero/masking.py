"""Finds secret values by the names of their settings, and masks them in the output of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

MASK = "***"

# Names that Spark redacts in its UI (spark.redaction.regex), and those of keys of object stores and other services.
_SECRET_NAME = re.compile(
    r"passw|passphrase|[._-]pass$|[._-]pwd$|secret|token(?!iz)|credential|[._-]auth$"
    r"|(access|account|api|private|shared|minio|s3|storage|encryption|signing|hmac|fernet|master|service|license)[._-]?key$"
    r"|(access|account|api|private|shared)[._-]?key|\..*[._-]key$"
    # Of presigned URLs.
    r"|^(.*-)?sig(nature)?$",
    re.IGNORECASE,
)
_NO_SECRET_NAME = re.compile(r"[._-](file|path|dir)$", re.IGNORECASE)
# Values that are too common to mask, and numbers such as MAX_TOKENS=4096: log lines would become unreadable.
_NO_SECRET = re.compile(r"true|false|.{0,3}", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?[\d.,]{1,7}(e[-+]?\d+)?", re.IGNORECASE)

_SHORT = 8  # Characters of a secret below which it is masked only as a whole word


def secrets_of(pairs: Mapping[str, Any]) -> list[str]:
    """Returns the secret values among settings of Spark or environment variables, found by their names.

    Passwords and tokens in URLs are included, whatever the name of the setting.

    Example:
        >>> secrets_of({"spark.hadoop.fs.s3a.secret.key": "geheim", "spark.authenticate.secretBitLength": "1024"})
        ['geheim']
        >>> secrets_of({"DB_URL": "postgres://me:geheim@host/db", "DB_PWD": 84930218})
        ['geheim', '84930218']
    """
    found: list[str] = []
    for name, value in pairs.items():
        # A template that is rendered as a native object turns digits into a number; Python may refuse to convert a
        # huge one to text.
        is_number = isinstance(value, float) or (type(value) is int and value.bit_length() < 1024)
        if isinstance(name, str) and (is_number or isinstance(value, str)):
            text = str(value)
            urls = [secret for _, secret in _PASSWORD.findall(text)]
            urls += [secret for _, key, secret in _SETTING.findall(text) if hides(key, secret)]
            found += [text] if hides(name, text) else [*urls, *map(unquote, urls)]
    return [text for text in dict.fromkeys(found) if not _NO_SECRET.fullmatch(text)]


def is_secret(name: str) -> bool:
    """Returns True for the name of a setting or variable whose value must not be shown."""
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET_NAME.search(name)


def hides(name: str, value: object) -> bool:
    """Returns True if the value of a setting must not be shown. A short number may be, as in ``max_tokens=4096``."""
    return is_secret(name) and not (isinstance(value, (str, int, float)) and _NUMBER.fullmatch(str(value)))


_PASSWORD = re.compile(r"(://[^/@:\s]*:)([^/\s]+)@")
_SETTING = re.compile(r"([?&;]\s*([\w.-]+)=)([^&;\s'\"]+)")


def without_credentials(text: str) -> str:
    """Returns the text with the passwords and tokens of its URLs masked."""
    text = _PASSWORD.sub(rf"\1{MASK}@", text)

    def masked(found: re.Match[str]) -> str:
        return f"{found[1]}{MASK}" if hides(found[2], found[3]) else found[0]

    return _SETTING.sub(masked, text)


class Mask:
    """Replaces secrets by ``***``."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        # A key of several lines is printed line by line.
        lines = {line.strip() for secret in secrets for line in secret.splitlines()}
        # The longest first: one may be part of another.
        ordered = sorted((line for line in lines if not _NO_SECRET.fullmatch(line)), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(_pattern_of, ordered))) if ordered else None

    def text(self, text: str) -> str:
        """Returns the text with all secrets masked."""
        return self._pattern.sub(MASK, text) if self._pattern else text

    def facts(self, value: Any) -> Any:
        """Returns a value with all secrets masked in its texts, also inside lists and dicts."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {name: self.facts(item) for name, item in value.items()}
        return [self.facts(item) for item in value] if isinstance(value, list) else value


def _pattern_of(secret: str) -> str:
    escaped = re.escape(secret)
    return escaped if len(secret) >= _SHORT else rf"(?<!\w){escaped}(?!\w)"
