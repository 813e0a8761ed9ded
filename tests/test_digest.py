"""The checksum that tells a training from one with other arguments."""

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rankzero.digest import digest_of


def test_it_is_the_same_in_every_process() -> None:
    program = "from rankzero.digest import digest_of; print(digest_of({'a', 'b', 'c'}, [{'lr': frozenset('xyz')}]))"
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


def test_what_cannot_be_pickled_has_none() -> None:
    assert digest_of(threading.Lock()) == ""
