"""The contents of tensors, arrays and frames however they lie in memory, and of modules whenever they were made."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from typing import Any

from rankzero.values.digest import digest_of


def facts_of_data(value: Any) -> Any:
    """Returns the facts of such a value, which stand for it; None for any other value."""
    for package, name, facts in _KINDS:
        if _is_instance(package, name, value):
            return facts(value)
    return None


def _is_instance(package: str, name: str, value: Any) -> bool:
    """Returns True for an object of this class, or of a subclass, of a package that the user has imported."""
    cls = getattr(sys.modules.get(package), name, None)
    return cls is not None and isinstance(value, cls)


def _array(value: Any) -> Any:
    """Returns type, shape and numbers of an array: its pickle also depends on strides, and on bytes between numbers."""
    import numpy

    if value.dtype.hasobject or type(value) is not numpy.ndarray:
        return None
    if value.dtype.names:
        return "array", value.dtype, value.shape, [_array(value[name]) for name in value.dtype.names]
    is_long = value.dtype.char in "gG"
    here = value.astype(value.dtype.newbyteorder("=")) if is_long else value
    data = numpy.ascontiguousarray(here).reshape(-1).view(numpy.uint8)
    if is_long and numpy.finfo(numpy.longdouble).nmant == 63:
        # An x86 processor uses ten of the sixteen bytes.
        data = numpy.ascontiguousarray(data.reshape(-1, numpy.dtype(numpy.longdouble).itemsize)[:, :10]).reshape(-1)
    return "array", value.dtype, value.shape, digest_of([data.data])


def _scalar(value: Any) -> Any:
    """Returns type and number of a scalar of numpy, whose pickle may contain bytes that no number uses."""
    import numpy

    if value.dtype.hasobject or not (value.dtype.names or value.dtype.char in "gG"):
        return None
    return type(value), _array(numpy.asarray(value))


def _frame(value: Any) -> Any:
    """Returns the columns of a DataFrame: its pickle also depends on what was read from it, which joins its blocks."""
    import pandas

    if type(value) is not pandas.DataFrame:
        return None
    columns = [value.iloc[:, number].array for number in range(value.shape[1])]
    return "frame", value.columns, value.index, columns, value.attrs


def _extension_array(value: Any) -> Any:
    """Returns the parts of an array of pandas: its pickle also depends on the properties that were read from it.

    An index or a Series of pandas consists of such arrays, too. The frequency of dates follows from the dates.
    """

    def counted(part: Any) -> Any:
        if type(part) is tuple:
            return tuple(map(counted, part))
        if type(part) is dict:
            return {name: member for name, member in part.items() if name not in ("_cache", "_freq")}
        return part

    return "extension array", type(value), [counted(part) for part in value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[1:]]


def _tensor(value: Any) -> Any:
    """Returns a tensor's type, shape, numbers and attributes: its pickle also depends on strides and shared memory."""
    import torch

    cls = type(value)
    reduce: Any = cls.__reduce_ex__
    if reduce not in (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__):
        # A subclass with its own pickling.
        return None
    try:
        plain = value.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
        # Not `reshape`, which keeps any stride of a single element.
        data = pickle.PickleBuffer(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy())
    except (RuntimeError, TypeError):
        # Some kinds of tensors lack these operations.
        return None
    facts = (str(value.dtype), tuple(value.shape), value.requires_grad, digest_of([data.raw()]))
    return "tensor", cls, vars(value), *facts


@functools.cache
def _hooks() -> frozenset[str]:
    """Returns the names of a module's attributes that hold its hooks."""
    import torch

    return frozenset(name for name in vars(torch.nn.Module()) if "_hooks" in name)


def without_numbers(value: Any, state: Any) -> Any:
    """Returns the state of a module of torch with its hooks in their order: torch numbers all that a process makes."""
    if not (isinstance(state, dict) and _is_instance("torch.nn", "Module", value)):
        return state
    names = _hooks() & state.keys()
    numbers = sorted({number for name in names for number in state[name] or ()})
    order = {number: place for place, number in enumerate(numbers)}
    return state | {name: {order[number]: hook for number, hook in (state[name] or {}).items()} for name in names}


_KINDS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("torch", "Tensor", _tensor),
    ("torch", "UntypedStorage", lambda storage: ("storage", digest_of([bytes(storage)]))),
    ("torch", "TypedStorage", lambda storage: (str(storage.dtype), storage._untyped_storage)),
    ("torch.utils.hooks", "RemovableHandle", type),
    ("numpy", "ndarray", _array),
    ("numpy", "generic", _scalar),
    ("pandas.api.extensions", "ExtensionArray", _extension_array),
    ("pandas", "DataFrame", _frame),
)
"""Package and name of each class, and the function that returns its facts."""
