"""What the store does when it fails for a moment, and when it goes on failing."""

from collections.abc import Callable

import pytest

from rankzero import store


class Refusing:
    """An action that fails so many times."""

    def __init__(self, times: int, error: Exception) -> None:
        self.left, self.error, self.calls = times, error, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise self.error
        return "done"


def test_a_failure_of_a_moment_is_tried_again() -> None:
    action = Refusing(3, ConnectionResetError("outage"))
    assert store.patiently(action, 20.0, 0.001) == "done"
    assert action.calls == 4


@pytest.mark.parametrize(
    ("seconds", "give_up"),
    [(0.0, lambda error: False), (20.0, lambda error: isinstance(error, ConnectionError))],
    ids=["the time is up", "another try is of no use"],
)
def test_the_last_error_is_raised(seconds: float, give_up: Callable[[Exception], bool]) -> None:
    action = Refusing(1000, ConnectionResetError("outage"))
    with pytest.raises(ConnectionResetError, match="outage"):
        store.patiently(action, seconds, 0.01, give_up)
    assert action.calls <= 2


def test_an_interrupt_is_not_tried_again() -> None:
    def action() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.patiently(action, 20.0, 0.01)
