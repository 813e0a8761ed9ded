"""`SyncBatchNorm`: statistics over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from rankzero.compat.horovod.torch.allreduce import allreduce
from rankzero.compat.horovod.torch.world import size


class SyncBatchNorm(_BatchNorm):
    """Batch normalization with the mean and variance over all ranks; on a CPU, too."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes ``input`` of shape ``(batch, channels, ...)``."""
        self._check_input_dim(input)
        if not (self.training or not self.track_running_stats) or size() == 1:
            plain: torch.Tensor = super().forward(input)
            return plain
        dims = [dim for dim in range(input.dim()) if dim != 1]
        channels, shape = input.size(1), [1, input.size(1)] + [1] * (input.dim() - 2)
        # Half a precision holds neither the sums nor, beyond 65504, the count; torch's own takes them so, too.
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        count = x.new_tensor([x.numel() / channels])
        total: Any = allreduce(torch.cat([x.sum(dims), count]), name="sync_batch_norm.sum", op="Sum")
        rows = total[-1].detach()
        mean = total[:channels] / rows
        # Around the mean of all ranks: the mean of squares less the square of the mean would lose every digit.
        squares: Any = allreduce((x - mean.view(shape)).pow(2).sum(dims), name="sync_batch_norm.squares", op="Sum")
        variance = squares / rows
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked.add_(1)
                share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked or 1)
                unbiased = squares.detach() / (rows - 1).clamp(min=1)
                self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), share)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        output = (x - mean.view(shape)) * torch.rsqrt(variance.view(shape) + self.eps)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        result: torch.Tensor = output.to(input.dtype)
        return result
