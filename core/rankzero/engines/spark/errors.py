"""Translates Spark's exceptions into rankzero's typed errors."""

from __future__ import annotations

import re

from rankzero.advice import advised, known
from rankzero.engines.local import CUT_OFF
from rankzero.engines.spark.conf import dynamic_allocation_error
from rankzero.errors import LOST, PREEMPTED, EngineError, InsufficientSlotsError, RankZeroError

ERROR_LIMIT = 2000
"""Most characters of Spark's own text that an error quotes."""


def explain(text: str) -> RankZeroError:
    """Returns the typed error for the text of an exception of Spark."""
    if "SPARK-24819" in text:
        return InsufficientSlotsError(f"the cluster lost slots before the barrier stage began: {first_lines(text)}")
    if "SPARK-24942" in text:
        return dynamic_allocation_error()
    if found := re.search(r"rankzero agent of task \d+ ended by (signal)?.*", text):
        is_lost = found[1] or any(words in found[0] for words in CUT_OFF)
        return EngineError(advised(first_lines(text[found.start() :])), cause=LOST if is_lost else None, code="RZ-2003")
    if found := re.search(r"rankzero: .+", text):
        return EngineError(found[0].removeprefix("rankzero: "))
    if re.search(_PREEMPTED, text, re.IGNORECASE):
        return EngineError(f"the cluster took an executor back: {first_lines(text)}", cause=PREEMPTED)
    if found := re.search(_EXECUTOR_LOST, text):
        # Only this line names the executor and the reason, and not the Java text before it.
        line = text[text.rfind("\n", 0, found.start()) + 1 :]
        return EngineError(f"Spark lost an executor: {first_lines(line)}", cause=LOST)
    if re.search(_SESSION_LOST, text):
        return EngineError(f"the SparkContext or its JVM ended: {reason(text)}", cause=LOST)
    if "cancelled" in text and not known(text):
        return EngineError(f"the Spark job was cancelled from outside of rankzero: {first_lines(text)}")
    return EngineError(f"the Spark job failed: {reason(text)}")


_PREEMPTED = r"preempt|decommission"
_EXECUTOR_LOST = (
    r"ExecutorLostFailure|Executor.{0,40} lost|Lost executor|ExecutorDeadException|worker lost|executor \S+ exited"
)
_SESSION_LOST = (
    r"SparkContext was shut down|stopped SparkContext|Py4JNetworkError|Answer from Java side is empty|"
    r"Connection refused|Error while receiving|Connection reset by peer"
)


def reason(text: str) -> str:
    """Returns the advice about an exception of Spark with the line that it is about, else the readable part."""
    found = known(text)
    return f"{found.advice} ({found.line})" if found else first_lines(text)


def first_lines(text: str) -> str:
    """Returns the readable part of a Java exception: what failed, without the stacks."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    return "\n".join(lines)[:ERROR_LIMIT]
