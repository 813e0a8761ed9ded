"""The safetensors format for a dict of tensors: loading maps the file and runs no code.

Executors need not have the safetensors library, so rankzero has its own codec; the tests compare it with the library in
both directions. Properties that the format lacks (an ``OrderedDict`` with its ``_metadata``, parameters,
``requires_grad``) are in the header's metadata, which the library returns on request.
Format: https://github.com/huggingface/safetensors#format

Runs inside workers too: standard library and torch only.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import struct
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from rankzero.errors import ResultError
from rankzero.values.plain import is_json

if TYPE_CHECKING:
    import torch

_HEADER_LENGTH = struct.Struct("<Q")
_HEADER_ALIGNMENT = 8
_MAX_HEADER = 100 << 20
_LARGE = 1 << 20
_EXTRA = "rankzero"
"""Key, in the header's metadata, of the properties that the format lacks."""

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}

Tensors = dict[str, "torch.Tensor"]


def can_hold(value: object) -> bool:
    """Returns True if the format preserves a value: a dict of tensors that share no memory and have no attributes."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) not in (dict, OrderedDict) or not value:
        return False
    assert isinstance(value, dict)
    known = {getattr(torch, name, None) for name in _DTYPES.values()}
    stretches = []
    for key, item in value.items():
        if type(key) is not str or key == "__metadata__" or type(item) not in (torch.Tensor, torch.nn.Parameter):
            return False
        if item.layout != torch.strided or item.dtype not in known or item.device.type == "meta" or item.is_nested:
            return False
        if item.is_quantized or vars(item):
            return False
        size = item.numel() * item.element_size()
        if size:
            reach = 1 + sum((n - 1) * step for n, step in zip(item.shape, item.stride(), strict=True))
            if reach < item.numel():
                # An expanded tensor, whose elements share memory.
                return False
            begin = item.untyped_storage().data_ptr() + item.storage_offset() * item.element_size()
            stretches.append((str(item.device), begin, begin + reach * item.element_size()))
    stretches.sort()
    if any(one[0] == other[0] and other[1] < one[2] for one, other in itertools.pairwise(stretches)):
        return False
    return _has_known_attributes(value) and _header_bound(value) < _MAX_HEADER


def _has_known_attributes(value: Tensors) -> bool:
    """Returns True if a dict has no attributes except the ``_metadata`` of a ``state_dict()``, as plain data."""
    attributes = getattr(value, "__dict__", {})
    kept = attributes.get("_metadata")
    if kept is None:
        return not attributes
    return len(attributes) == 1 and type(kept) is OrderedDict and is_json(dict(kept))


def _header_bound(value: Tensors) -> int:
    """Returns an upper bound of the header's bytes: keys are escaped, and may occur twice more."""
    return sum(18 * len(key) + 22 * item.dim() + 160 for key, item in value.items())


def write(tensors: Tensors, sink: Any) -> None:
    """Writes tensors to a `rankzero.values.formats.Sink`."""
    # Widest types first, so that every tensor is aligned in the file and can be mapped; small tensors of each type
    # first, so that hashing is not behind at the end.
    ordered = sorted(tensors.items(), key=_place_in_file)
    names = {dtype: name for name, dtype in _DTYPES.items()}
    places = {}
    offset = 0
    for key, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        places[key] = {
            "dtype": names[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = {"format": "pt"}
    if extra := _extra_of(tensors):
        text[_EXTRA] = json.dumps(extra, separators=(",", ":"))
    # The header keeps the caller's order, whatever the order of the bytes.
    header = json.dumps({"__metadata__": text, **{key: places[key] for key in tensors}}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _HEADER_ALIGNMENT)
    sink.write(_HEADER_LENGTH.pack(len(header)) + header)
    for _, tensor in ordered:
        here = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
        length = here.numel() * here.element_size()
        if length:
            sink.write_lasting((ctypes.c_char * length).from_address(here.data_ptr()), here)


def _place_in_file(item: tuple[str, torch.Tensor]) -> tuple[int, bool, str]:
    name, tensor = item
    return -tensor.element_size(), tensor.numel() * tensor.element_size() >= _LARGE, name


def _extra_of(tensors: Tensors) -> dict[str, Any]:
    import torch

    parameters = [key for key, tensor in tensors.items() if type(tensor) is torch.nn.Parameter]
    requires_grad = [key for key, tensor in tensors.items() if tensor.requires_grad]
    extra: dict[str, Any] = {}
    if type(tensors) is OrderedDict:
        extra["ordered"] = getattr(tensors, "_metadata", None)
    if parameters:
        extra["parameters"] = parameters
    if requires_grad:
        extra["requires_grad"] = requires_grad
    return extra


def read(file: IO[bytes], location: str) -> Tensors:
    """Maps a file copy-on-write: pages are read when they are used, and the file is never changed.

    Every tensor has its own storage within the mapping. Views of one storage would each be
    pickled with all of it, and could not be written as safetensors again.

    Args:
        file: The file, open at its begin.
        location: The name of the file in errors.
    """
    total = os.fstat(file.fileno()).st_size
    prefix = file.read(_HEADER_LENGTH.size)
    length = _HEADER_LENGTH.unpack(prefix)[0] if len(prefix) == _HEADER_LENGTH.size else -1
    if not 0 < length <= min(_MAX_HEADER, total):
        raise ResultError(f"{location} is not a safetensors file")
    header: dict[str, Any] = json.loads(file.read(length))
    text = header.pop("__metadata__", None) or {}
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    found = dict(_tensors_in(mapped, header, _HEADER_LENGTH.size + length, location))
    return _with_extra(found, json.loads(text.get(_EXTRA, "{}")))


def _tensors_in(mapped: mmap.mmap, header: dict[str, Any], start: int, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    for key, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise ResultError(f"{name}: tensor {key!r} is of a type {entry['dtype']!r} that is not known here")
        dtype: torch.dtype = getattr(torch, _DTYPES[entry["dtype"]])
        begin, end = (start + position for position in entry["data_offsets"])
        if not start <= begin <= end <= len(mapped):
            raise ResultError(f"{name}: tensor {key!r} lies outside the file")
        if begin == end:
            yield key, torch.empty(entry["shape"], dtype=dtype, device="cpu")
        elif begin % dtype.itemsize:
            raw = torch.frombuffer(mapped, dtype=torch.uint8, count=end - begin, offset=begin)
            yield key, raw.clone().view(dtype).reshape(entry["shape"])
        else:
            count = (end - begin) // dtype.itemsize
            yield key, torch.frombuffer(mapped, dtype=dtype, count=count, offset=begin).reshape(entry["shape"])


def _with_extra(tensors: Tensors, extra: dict[str, Any]) -> Tensors:
    import torch

    requires_grad = set(extra.get("requires_grad", ()))
    for key in extra.get("parameters", ()):
        tensors[key] = torch.nn.Parameter(tensors[key], requires_grad=key in requires_grad)
    for key in requires_grad:
        tensors[key].requires_grad_()
    if "ordered" not in extra:
        return tensors
    ordered = OrderedDict(tensors)
    if extra["ordered"] is not None:
        ordered._metadata = OrderedDict(extra["ordered"])  # type: ignore[attr-defined]
    return ordered
