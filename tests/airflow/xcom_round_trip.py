"""Pushes values the whole way that an XCom goes, and compares what comes back.

Serialization, the messages between task and supervisor, the execution API, and the database, all of them Airflow's own.
Of the rendered arguments of the task that pulls, the messages and the request.
"""

import math
from dataclasses import dataclass
from typing import Any

import httpx
from airflow.sdk import serde
from airflow.sdk.execution_time import comms, supervisor
from pydantic import TypeAdapter

from airflow_rankzero.xcom import find_lost_key
from rankzero import ResultRef
from rankzero.values.plain import find_unstorable

REFUSED: list[Any] = [
    2**64,
    -(2**63) - 1,
    {"seed": 2**100},
    "a\0b",
    ["\udcff"],
    {"a\0b": 1},
    {"__classname__": "x.Y"},
    {"__type": "adam", "__var": {"lr": 1e-3}},
    {"__classname__": "builtins.tuple", "__version__": 1, "__data__": [1]},
    {"loss": 1e25},
    [-1e16],
    {"acc": float("nan")},
    float("inf"),
    [-0.0],
]
PUSHED: list[Any] = [2**63 - 1, [-(2**63), 1e15, 5e-324, 0.0, "\x7f\n\U0001f600"], {"": None, "a": [[[[]]], {}]}]
LOST_KEYS = ["", "loss#1", "acc?", "top%41", "a\n", "..", "./a", "a/../b", "a/slice", "a/item/3", "a" * 513]
KEPT_KEYS = ["val/loss", "/", "a//", "...", "100%", "%4x", "a b&c;d=e+f:@", "\\", "slice", "item/3", "a" * 512]


def through_messages(body: dict[str, Any]) -> Any:
    """Returns a message between a task and its supervisor as the other side reads it."""
    frame = comms._RequestFrame(id=0, body=body)
    return comms.msgspec.msgpack.decode(bytes(frame.as_bytes())[4:])[1]


@dataclass
class Way:
    """The task whose XCom carries the values."""

    dag_id: str
    run_id: str
    task_id: str

    def travel(self, value: Any, name: str = "k") -> Any:
        """Returns what a task gets that pulls the XCom of this name."""
        key = {"dag_id": self.dag_id, "run_id": self.run_id, "task_id": self.task_id}
        pushed = comms.SetXCom(key=name, value=serde.serialize(value), map_index=-1, **key)
        received = TypeAdapter(comms.SetXCom).validate_python(through_messages(pushed.model_dump()))
        xcoms = supervisor.InProcessTestSupervisor._api_client().xcoms
        xcoms.set(self.dag_id, self.run_id, self.task_id, name, received.value)
        answer = comms.XComResult.from_xcom_response(xcoms.get(self.dag_id, self.run_id, self.task_id, name))
        pulled = TypeAdapter(comms.XComResult).validate_python(through_messages(answer.model_dump()))
        if type(value) is float and type(pulled.value) in (int, float):
            # A bare number is a number in SQLite, and no JSON text: 1.0 is 1 there, for any task.
            return value if math.isclose(pulled.value, value, rel_tol=1e-15) else pulled.value
        return serde.deserialize(pulled.value)


def same(one: Any, other: Any) -> bool:
    """True for values that are equal, of the same types, with the same signs of zero."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(item, other[key]) for key, item in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    return bool(one == other)


def assert_values_come_back(way: Way) -> None:
    """Pushes values and keys. Raises AssertionError for one that is pulled changed."""
    assert all(find_lost_key([key]) for key in LOST_KEYS)
    assert not find_lost_key(KEPT_KEYS)
    for key in KEPT_KEYS:
        assert way.travel(key, key) == key
    assert all(map(find_unstorable, REFUSED))
    assert not any(map(find_unstorable, PUSHED))
    for value in PUSHED:
        assert same(way.travel(value), value), value
        # It can be an argument of the task that pulls it.
        rendered = comms.SetRenderedFields(rendered_fields={"op_args": [value]})
        httpx.Request("PUT", "http://airflow", json=through_messages(rendered.model_dump())["rendered_fields"])
    for value in [*REFUSED, *PUSHED]:
        # A summary may hold any metric: it is pushed without an error, as what Airflow returns unchanged.
        ref = ResultRef("/x", "json", "", 1, {"metrics": {"m": value}})
        pulled = way.travel(ref)
        assert pulled == ref
        assert way.travel(pulled).summary == pulled.summary
