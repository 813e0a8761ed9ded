"""What goes wrong in a collective."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed: a rank has died, or ranks do not agree.

    Its messages, their causes and what to do: docs/errors.md#horovodinternalerror
    """


class MismatchError(HorovodInternalError, ValueError):
    """Ranks issued the same name for different things; names them.

    Its messages, their causes and what to do: docs/errors.md#mismatcherror
    """


class StallError(HorovodInternalError, TimeoutError):
    """Ranks wait for something that another one does not issue; names it, and the ranks.

    Its messages, their causes and what to do: docs/errors.md#stallerror
    """
