"""Kinds of values, one of each, to see whether they cross over; and what it is to come back the same."""

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import re
import threading
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch


@dataclasses.dataclass
class Score:
    value: float
    parts: list[int] = dataclasses.field(default_factory=list)


class Point(NamedTuple):
    x: int
    y: int


class Kind(enum.Enum):
    SMALL = 1
    LARGE = "two"


class Tagged(torch.Tensor):
    pass


class Net(torch.nn.Module):
    """Has tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(3, 3, bias=False)
        self.decoder = torch.nn.Linear(3, 3, bias=False)
        self.decoder.weight = self.encoder.weight
        self.norm = torch.nn.BatchNorm1d(3)


DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
    },
    key=str,
)


def of_type(dtype: torch.dtype) -> torch.Tensor:
    """Six elements, of whatever the bytes mean in that type; 0 and 1 where others are none."""
    data = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    return (data % 2 if dtype is torch.bool else data).view(dtype)


def tagged(tensor: torch.Tensor, **attributes: Any) -> torch.Tensor:
    vars(tensor).update(attributes)
    return tensor


def adam() -> dict[str, Any]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model.norm(model.decoder(model.encoder(torch.ones(2, 3)))).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def ordered() -> Any:
    state = collections.OrderedDict(b=torch.ones(2), a=torch.zeros(3))
    state._metadata = collections.OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    return state


KINDS: dict[str, Callable[[], Any]] = {
    **{f"tensor of {dtype}": functools.partial(of_type, dtype) for dtype in DTYPES},
    **{f"dict of {dtype}": lambda dtype=dtype: {"x": of_type(dtype)} for dtype in DTYPES},  # type: ignore[misc]
    **{f"nested {dtype}": lambda dtype=dtype: {"x": [of_type(dtype), 1]} for dtype in DTYPES},  # type: ignore[misc]
    "none": lambda: None,
    "numbers": lambda: [0, -1, 2.5, float("inf"), 1 + 2j, True, 2**70],
    "a long integer": lambda: {"n": 10**5000},
    "text": lambda: ["", "a\nb", "\N{SNOWMAN}", "\ud800"],
    "two surrogates": lambda: {"\ud83d\ude00": ["\ud83d\ude00"]},
    "bytes": lambda: [b"", b"\0\xff", bytearray(b"x"), bytearray(b"y") * 100_000],
    "tuple": lambda: (1, (2, [3])),
    "keys": lambda: {1: "a", (2, 3): "b", None: "c"},
    "sets": lambda: [{1, 2}, frozenset("ab")],
    "named tuple": lambda: Point(1, 2),
    "enum": lambda: [Kind.SMALL, Kind.LARGE],
    "dataclass": lambda: Score(0.5, [1]),
    "times": lambda: [
        datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        datetime.timedelta(1),
        datetime.date(2026, 1, 2),
    ],
    "exact numbers": lambda: [decimal.Decimal("1.10"), fractions.Fraction(1, 3)],
    "names": lambda: [pathlib.PurePosixPath("/a"), uuid.UUID(int=7), range(3), slice(1, 2), Ellipsis],
    "collections": lambda: [
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, a=[1]),
        collections.Counter("aab"),
        collections.deque([1, 2], maxlen=3),
    ],
    "types": lambda: [int, Score, torch.nn.Linear, torch.float32, torch.device("cpu"), torch.Size([1, 2])],
    "functions": lambda: [len, numpy.sum, torch.relu],
    "exceptions": lambda: [KeyError("a"), OSError(2, "x")],
    "arrays": lambda: [
        numpy.arange(6).reshape(2, 3),
        numpy.asfortranarray(numpy.ones((3, 2))),
        numpy.array(["a", None]),
    ],
    "large arrays": lambda: [
        numpy.arange(100_000.0),
        numpy.arange(100_013, dtype=numpy.uint8),
        numpy.asfortranarray(numpy.arange(210_000.0).reshape(700, 300)),
        numpy.arange(100_000.0)[::3],
        numpy.broadcast_to(numpy.arange(3.0), (100_000, 3)),
        numpy.empty((0, 3)),
    ],
    "structured array": lambda: numpy.zeros(3, dtype=[("a", "i4"), ("b", "f8")]),
    "numpy scalars": lambda: [numpy.float32(1.5), numpy.int8(3), numpy.datetime64("2026-01-02")],
    "large tensors": lambda: [
        torch.arange(200_000.0, requires_grad=True),
        torch.arange(200_000).bfloat16(),
        torch.nn.Parameter(torch.arange(200_000.0), requires_grad=False),
        torch.arange(200_000.0)[50_000:100_000],
        torch.arange(20_480.0).reshape(64, -1).t(),
        torch.arange(20_000).to(torch.complex64).conj(),
    ],
    "empty tensors": lambda: {"a": torch.empty(0), "b": torch.empty(0, 3), "c": torch.tensor(7)},
    "trainable": lambda: [torch.ones(2, requires_grad=True), (torch.ones(2, requires_grad=True) * 2).detach()],
    "parameters": lambda: dict(Net().named_parameters()),
    "frozen parameter": lambda: {"x": torch.nn.Parameter(torch.ones(2), requires_grad=False)},
    "integer parameter": lambda: torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False),
    "float8 with requires_grad": lambda: torch.ones(3).to(torch.float8_e4m3fn).requires_grad_(),
    "float8 parameter": lambda: torch.nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn)),
    "tensor with attributes": lambda: {"x": tagged(torch.ones(2), unit="m"), "y": torch.zeros(1)},
    "parameter with attributes": lambda: {"x": tagged(torch.nn.Parameter(torch.ones(2)), no_decay=True)},
    "subclass": lambda: torch.ones(3).as_subclass(Tagged),
    "state_dict": lambda: Net().state_dict(),
    "ordered state": ordered,
    "ordered dict of tensors": lambda: collections.OrderedDict(z=torch.ones(1), a=torch.ones(2)),
    "training state": adam,
    "module": Net,
    "lazy module": lambda: torch.nn.LazyLinear(3),
    "transposed": lambda: {"x": torch.arange(6.0).reshape(2, 3).t()},
    "expanded": lambda: {"x": torch.ones(1).expand(1 << 40)},
    "conjugated": lambda: [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag],
    "sparse": lambda: [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()],
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "meta": lambda: torch.empty(3, device="meta"),
    "storage": lambda: torch.arange(3).untyped_storage(),
    "generator's state": lambda: torch.Generator().manual_seed(3).get_state(),
    "packed sequence": lambda: torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
}
"""Name to a function that makes one. Each comes back the same: `same`."""


def arguments() -> dict[str, Callable[[], Any]]:
    """Returns further kinds that users give as arguments; some of them cannot be pickled."""
    import pandas
    import pyarrow
    import scipy.sparse

    days = lambda: pandas.date_range("2026-01-01", periods=3, tz="UTC")  # noqa: E731
    fields = [("a", pyarrow.int32()), ("b", pyarrow.list_(pyarrow.string()))]
    return {
        "data frame": lambda: pandas.DataFrame({"x": [1, 2], "y": ["a", None], "z": [0.5, float("nan")]}),
        "data frame with an index": lambda: pandas.DataFrame({"x": [1, 2, 3]}, index=days()),
        "series": lambda: pandas.Series([1.5, 2.5], name="loss"),
        "index": lambda: pandas.MultiIndex.from_tuples([("a", 1), ("b", 2)]),
        "timestamp": lambda: pandas.Timestamp("2026-01-02 03:04", tz="Europe/Berlin"),
        "categorical": lambda: pandas.Categorical(["a", "b", "a"]),
        "days": days,
        "arrow table": lambda: pyarrow.table({"a": [1, 2], "b": ["x", None]}),
        "arrow schema": lambda: pyarrow.schema(fields, {"made": "by hand"}),
        "numpy generator": lambda: numpy.random.default_rng(3),
        "masked array": lambda: numpy.ma.masked_equal([1, 2, 3], 2),
        "sparse matrix": lambda: scipy.sparse.csr_matrix([[0, 1], [2, 0]]),
        "pattern": lambda: re.compile("a+"),
        "bound method": lambda: [1].append,
        "partial": lambda: functools.partial(max, 3),
        "optimizer": lambda: torch.optim.SGD(Net().to("meta").parameters(), lr=0.1),
        "nested sets": lambda: {frozenset("abc"), frozenset("xyz")},
        "lock": threading.Lock,
    }


def same(one: Any, other: Any) -> bool:
    """True if two values cannot be told apart by their types and what they hold."""
    if type(one) is not type(other) or getattr(one, "__dict__", {}).keys() != getattr(other, "__dict__", {}).keys():
        return False
    if isinstance(one, torch.Tensor):
        return _same_tensor(one, other)
    if isinstance(one, torch.nn.Module):
        return same(list(one.named_parameters()), list(other.named_parameters())) and same(
            [id(p) == id(q) for p in one.parameters() for q in one.parameters()],
            [id(p) == id(q) for p in other.parameters() for q in other.parameters()],
        )
    if isinstance(one, torch.UntypedStorage):
        return bytes(one) == bytes(other)
    if isinstance(one, numpy.ndarray):
        return (
            (one.dtype, one.shape, repr(one)) == (other.dtype, other.shape, repr(other))
            and one.flags.f_contiguous >= other.flags.f_contiguous
            and bool(one.dtype.hasobject or numpy.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
        )
    if isinstance(one, dict):
        metadata = (getattr(one, "_metadata", None), getattr(other, "_metadata", None))
        return metadata[0] == metadata[1] and same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, BaseException):
        return same(one.args, other.args)
    return bool(one == other)


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    facts = [(x.dtype, x.layout, x.device, x.requires_grad) for x in (one, other)]
    if facts[0] != facts[1] or isinstance(one, torch.nn.parameter.UninitializedParameter):
        return facts[0] == facts[1]
    if one.is_nested:
        return all(map(_same_tensor, one.unbind(), other.unbind()))
    if one.shape != other.shape or str(vars(one)) != str(vars(other)):
        return False
    if one.device.type == "meta":
        return True
    if one.layout is not torch.strided or one.is_quantized:
        return repr(one) == repr(other)
    if one.numel() > 1 << 30:
        return one.stride() == other.stride() and bool(one[0] == other[0])
    return _bytes_of(one) == _bytes_of(other)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
