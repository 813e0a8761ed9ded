"""`distributed`, a decorator: the function trains on all ranks when it is called."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast

from rankzero.errors import InvalidJobError
from rankzero.launcher import Launcher
from rankzero.train.context import RANK_PROCESS

P = ParamSpec("P")
R = TypeVar("R")


class DistributedFunction(Generic[P, R]):
    """A function that trains on all ranks when it is called, and returns rank 0's value.

    In a rank, and in the processes that a rank starts, a call is the plain call: the ranks are there already.

    Attributes:
        launcher: The `Launcher` with the options of the decorator.
    """

    def __init__(self, function: Callable[P, R], launcher: Launcher) -> None:
        """Makes a decorated function from the plain one and the launcher that runs it."""
        if not callable(function):
            raise InvalidJobError(f"@distributed(...) decorates a function, not {function!r}")
        functools.update_wrapper(cast("Callable[..., Any]", self), function)
        self.launcher = launcher

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Self:
        """Returns the decorated method of an object, which travels to the ranks with it; unbound, this object."""
        return self if instance is None else type(self)(MethodType(self.launch_function, instance), self.launcher)

    @property
    def launch_function(self) -> Callable[P, R]:
        """The plain function. `rankzero.submit` gives it to the ranks."""
        return self.__wrapped__  # type: ignore[attr-defined, no-any-return]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Trains, and returns rank 0's value. Raises like `Launcher.run`."""
        if RANK_PROCESS in os.environ:
            return self.launch_function(*args, **kwargs)
        return self.launcher.run(self, *args, **kwargs)

    def local(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the plain function in this process."""
        return self.launch_function(*args, **kwargs)

    def options(self, **changes: Any) -> Self:
        """Returns a copy with changed options of the launcher. Raises InvalidJobError for a wrong value."""
        return type(self)(self.launch_function, self.launcher.options(**changes))

    def in_ranks(self) -> tuple[Any, ...]:
        """Returns how `rankzero.submit` pickles the function for ranks: without the launcher, which stays here."""
        return type(self), (self.launch_function, Launcher(1))

    def __reduce__(self) -> str | tuple[Any, ...]:
        # By its name, so that a module which is imported again has the same object.
        name: str = self.__qualname__  # type: ignore[attr-defined]
        is_importable = self.__module__ != "__main__" and "<locals>" not in name
        return name if is_importable else (type(self), (self.launch_function, self.launcher))


@dataclass(frozen=True)
class distributed(Launcher):
    """Decorates a training function, which then trains on all ranks when it is called. Takes the options of `Launcher`.

    Example:
        >>> from rankzero import distributed
        >>> @distributed(num_processes=2)
        ... def train(lr: float) -> float:
        ...     import rankzero.train as rt
        ...     return lr * rt.get_context().world_size
        >>> train(lr=0.5)
        1.0
        >>> train.options(num_processes=1)(lr=0.5)
        0.5
        >>> train.local(lr=0.5)  # a plain call, in a world of one
        0.5
    """

    def __call__(self, function: Callable[P, R]) -> DistributedFunction[P, R]:
        """Returns the decorated function. Raises InvalidJobError for anything else than a callable."""
        return DistributedFunction(function, self)
