"""Compressions: the types in which tensors are sent to other ranks."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """The interface of a compression, and the compression that sends tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor to send, and the context that `decompress` needs: the original type, or None."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Returns the received tensor in its original type."""
        return tensor if context is None else tensor.to(context)


NoneCompressor = Compressor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor to send, and its type."""
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype


class Compression:
    """The compressions that the operations accept: ``none`` and ``fp16``."""

    none = Compressor
    fp16 = FP16Compressor
