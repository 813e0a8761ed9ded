"""The checksum that tells a training from one with other arguments."""

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rankzero.submit.identity import digest_of


def test_it_is_the_same_in_every_process() -> None:
    program = (
        "from rankzero.submit.identity import digest_of\nprint(digest_of({'a', 'b', 'c'}, [{'lr': frozenset('xyz')}]))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True, env={"PYTHONPATH": path}
        ).stdout
        for path in [":".join(sys.path)]
        for _ in range(4)
    }
    assert digests == {digest_of({"a", "b", "c"}, [{"lr": frozenset("xyz")}]) + "\n"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: (1.0,), lambda: (2.0,)),
        (lambda: ({"a"},), lambda: (frozenset("a"),)),
        (lambda: ((1, 2),), lambda: (1, 2)),
        (lambda: (__import__("numpy").zeros(100_000),), lambda: (__import__("numpy").ones(100_000),)),
    ],
)
def test_it_is_another_one_for_other_arguments(one: Callable[[], Any], other: Callable[[], Any]) -> None:
    assert digest_of(*one()) == digest_of(*one())
    assert digest_of(*one()) != digest_of(*other())


def test_one_object_twice_is_as_two_equal_ones() -> None:
    one, other = [1.5, "x"], [1.5, "x"]
    assert digest_of({"a": one, "b": one}) == digest_of({"a": one, "b": other})
    loop: list[Any] = [1]
    loop.append(loop)
    assert digest_of(loop) == digest_of(loop) != ""


def test_objects_of_a_script_s_own_classes_are_told_by_their_attributes() -> None:
    program = """
import enum
from rankzero.submit.identity import digest_of
class Config:
    def __init__(self, rate): self.rate = rate
class Kind(enum.Enum):
    SMALL = 1
    LARGE = 2
print(digest_of(Config(0.1), Kind.SMALL), digest_of(Config(0.2), Kind.SMALL), digest_of(Config(0.1), Kind.LARGE))
"""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    said = [
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment)
        for _ in range(3)
    ]
    assert len({done.stdout for done in said}) == 1
    assert len(set(said[0].stdout.split())) == 3


def test_what_cannot_be_pickled_has_none() -> None:
    assert digest_of(threading.Lock()) == ""
