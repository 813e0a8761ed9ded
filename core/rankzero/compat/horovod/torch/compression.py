"""The type in which a tensor travels."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """What a compression has: base of `NoneCompressor` and `FP16Compressor`, and of users' own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor that travels, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """The tensor in its own type."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """As it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor that travels, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """The tensor in its own type."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors in float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor that travels, and what `decompress` needs."""
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """The tensor in its own type."""
        return tensor.to(context)


class Compression:
    """Which there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
