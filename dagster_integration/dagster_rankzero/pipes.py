"""Dagster Pipes inside a training: rank 0's messages are sent with its printed lines, through rankzero's channel.

The executors therefore need neither a shared file nor a service, only the package ``dagster-pipes``.
"""

import contextlib
import functools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import dagster as dg

from dagster_rankzero._compat import assets_of
from rankzero.pipeline import attempt

_RANK_0 = "[0] "
_MESSAGE = '{"__dagster_pipes_version"'


class _Lines(dg.PipesMessageReader):
    """Finds the Pipes messages in the lines of a run."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._handler: Any = None
        self.results = self.messages = 0
        """Numbers of reports from before the last restart of rank 0, which are ignored."""

    @contextlib.contextmanager
    def read_messages(self, handler: Any) -> Iterator[dict[str, Any]]:
        """Yields the parameters for the writer in rank 0, which make it write to standard output."""
        self._handler = handler
        yield {"stdio": "stdout"}

    def no_messages_debug_text(self) -> str:
        """Returns the text of Dagster's warning about missing messages."""
        return "Rank 0 has to call dagster_pipes.open_dagster_pipes(), and to print nothing through another stdout."

    def take(self, line: str) -> str | None:
        """Handles the message in a line, and returns the rest of the line; None if there is nothing else in it."""
        start = line.find(_MESSAGE)
        if start < 0 or not line.startswith(_RANK_0):
            return line
        try:
            # A progress bar, or a print without a line end, may precede it.
            message, end = json.JSONDecoder().raw_decode(line, start)
        except ValueError:
            return line
        if message.get("method") == "opened":
            self.results = len(self._handler.get_reported_results())
            self.messages = len(self._handler.get_custom_messages())
        try:
            self._handler.handle_message(message)
        except Exception as error:
            # A wrong message must not end the training.
            self._log.warning("a Pipes message of rank 0 cannot be used: %s", error)
        rest = line[:start] + line[end:]
        return rest if rest.strip() != _RANK_0.strip() else None


class PipesCall:
    """A training whose rank 0 may use Pipes."""

    def __init__(self, session: dg.PipesSession, lines: _Lines) -> None:
        self._session = session
        self._lines = lines

    @property
    def env(self) -> Mapping[str, str]:
        """Returns the environment variables from which ``dagster_pipes`` reads its context and its output channel."""
        return self._session.get_bootstrap_env_vars()

    def passing(self, on_line: Callable[[str], None]) -> Callable[[str], None]:
        """Returns a function that handles the messages in lines, and passes everything else to ``on_line``."""

        def take(line: str) -> None:
            if (rest := self._lines.take(line)) is not None:
                on_line(rest)

        return take

    def add_to(self, context: Any, result: Any) -> Any:
        """Returns the result of a step with rank 0's reports about its asset; reports about other assets are logged.

        The run's metadata override reported entries of the same name; a reported data version overrides the checksum.
        Call it after the session is closed.
        """
        for reported in self._session.get_reported_results()[self._lines.results :]:
            if isinstance(result, dg.MaterializeResult) and assets_of(context) == [reported.asset_key]:
                result = _with_report(result, reported)
            elif isinstance(reported, dg.MaterializeResult):
                attempt(context.log, "what rank 0 reported", functools.partial(_log, context, reported), None)
            else:
                name, key = reported.check_name, reported.asset_key
                context.log.warning("rank 0 reported the check %s of %s, which is not this step's", name, key)
        if messages := self._session.get_custom_messages()[self._lines.messages :]:
            shown = {"pipes_messages": dg.MetadataValue.json(list(messages))}
            if isinstance(result, dg.MaterializeResult):
                return result._replace(metadata={**(result.metadata or {}), **shown})
            return result.with_metadata({**result.metadata, **shown})
        return result


def _with_report(
    result: dg.MaterializeResult[Any], reported: dg.MaterializeResult[Any] | dg.AssetCheckResult
) -> dg.MaterializeResult[Any]:
    if isinstance(reported, dg.AssetCheckResult):
        return result._replace(check_results=[*(result.check_results or ()), reported])
    metadata = {**(reported.metadata or {}), **(result.metadata or {})}
    return result._replace(metadata=metadata, data_version=reported.data_version or result.data_version)


def _log(context: Any, reported: dg.MaterializeResult[Any]) -> None:
    assert reported.asset_key is not None
    context.log_event(dg.AssetMaterialization(reported.asset_key, metadata=reported.metadata))


@contextlib.contextmanager
def open_call(context: Any) -> Iterator[PipesCall]:
    """Opens a Pipes session for one training of a step."""
    lines = _Lines(context.log)
    with contextlib.ExitStack() as stack:
        with warnings.catch_warnings():
            # Dagster warns about a parameter of its own function.
            warnings.simplefilter("ignore", dg.PreviewWarning)
            session = stack.enter_context(dg.open_pipes_session(context, dg.PipesEnvContextInjector(), lines))
        yield PipesCall(session, lines)
