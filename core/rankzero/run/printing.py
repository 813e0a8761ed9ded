"""Prints the lines of ranks, through the logger ``rankzero.ranks``."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger(__name__)

_ranks = logging.getLogger("rankzero.ranks")
"""The logger that gets the lines of ranks. Its level, filters and handlers decide what is printed."""


class _Printer(logging.Handler):
    """Writes the lines of ranks to standard output."""

    _failed: object = None
    """The stream that could not be written, so that this is logged once."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the line of a record."""
        self.write(self.format(record))

    def write(self, line: str) -> None:
        """Writes a line to standard output as it is."""
        stream = sys.stdout
        if stream is None:
            return
        encoding = getattr(stream, "encoding", None) or "utf-8"
        try:
            stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
            stream.flush()
        except (OSError, ValueError) as error:
            if self._failed is not stream:
                self._failed = stream
                what = "the lines of the ranks cannot be written to standard output (%s); the run continues"
                logger.warning(what, error)


_printer = _Printer()


def _print_ranks() -> None:
    _ranks.addHandler(_printer)
    _ranks.propagate = False
    if not _ranks.level:
        _ranks.setLevel(logging.INFO)


if not _ranks.handlers:
    _print_ranks()


def print_line(line: str, run_id: str = "") -> None:
    """Passes a line of a rank to the logger ``rankzero.ranks``, which writes it to standard output unless changed.

    A process without standard output prints none, and a stream that fails (a full disk, a closed pipe) does not end the
    run, whose directory has the lines, too.

    Args:
        line: The line, with its ``[rank]`` prefix; its level is INFO.
        run_id: Name of the run; the log record has it as its attribute ``run_id``.
    """
    if not (_ranks.level or _ranks.handlers):
        # `logging.config` resets the loggers below each one that it names.
        _print_ranks()
    is_changed = _ranks.propagate or _ranks.filters or _printer.filters or _printer.level or _printer.formatter
    if _ranks.handlers == [_printer] and _ranks.level == logging.INFO and not is_changed:
        # A record costs more than the line.
        _printer.write(line)
        return
    # `logging.config` disables the loggers that it does not know.
    _ranks.disabled = False
    _ranks.info(line, extra={"run_id": run_id})


def in_notebook() -> bool:
    """Returns True in the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    found = shell.get_ipython() if shell is not None and hasattr(shell, "get_ipython") else None
    return getattr(found, "kernel", None) is not None
