"""``@torch_distributor``, also ``@task.torch_distributor``: a function that trains, as a TaskFlow task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar, overload

from airflow.sdk.bases.decorator import DecoratedOperator, task_decorator_factory

from airflow_rankzero.operators import TorchDistributorOperator

if TYPE_CHECKING:
    from airflow.sdk.bases.decorator import Task

P = ParamSpec("P")
R = TypeVar("R")


class _TorchDistributorDecoratedOperator(DecoratedOperator, TorchDistributorOperator):
    """The operator behind the decorator: ``train`` is the decorated function."""

    template_fields: Sequence[str] = TorchDistributorOperator.template_fields
    template_fields_renderers: ClassVar[dict[str, str]] = TorchDistributorOperator.template_fields_renderers
    shallow_copy_attrs: Sequence[str] = ("train", "python_callable")
    custom_operator_name = "@task.torch_distributor"

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            python_callable=python_callable,
            op_args=op_args,
            op_kwargs=op_kwargs,
            kwargs_to_upstream={"train": python_callable, "op_args": op_args or (), "op_kwargs": op_kwargs},
            **kwargs,
        )


@overload
def torch_distributor(python_callable: Callable[P, R]) -> Task[P, R]: ...
@overload
def torch_distributor(*, multiple_outputs: bool = ..., **kwargs: Any) -> Callable[[Callable[P, R]], Task[P, R]]: ...
def torch_distributor(
    python_callable: Callable[..., Any] | None = None, *, multiple_outputs: bool = False, **kwargs: Any
) -> Any:
    """Makes a task of a function that every rank calls.

    The call's arguments are the function's, templated; the task's value is what rank 0 returns, as
    `TorchDistributorOperator` describes. The ranks run outside of Airflow: a parameter that is named like a variable
    of the context must be passed, ``ds="{{ ds }}"``, else the DAG file is refused.

    Args:
        python_callable: The function, when used without parentheses.
        multiple_outputs: Push every key of a returned small dict as an XCom of its own, too.
        kwargs: Arguments of `TorchDistributorOperator`.

    Returns:
        The task, or a decorator that makes one.

    Example:
        >>> from airflow.sdk import DAG
        >>> @torch_distributor(num_processes=2)
        ... def train(lr: float) -> float:
        ...     return lr
        >>> with DAG("digits"):
        ...     loss = train(lr=1e-3)
    """
    # Explicit: Airflow would conclude True from `-> dict[...]`, and then refuse a ResultRef.
    return task_decorator_factory(
        python_callable,
        multiple_outputs=multiple_outputs,
        decorated_operator_class=_TorchDistributorDecoratedOperator,
        **kwargs,
    )
