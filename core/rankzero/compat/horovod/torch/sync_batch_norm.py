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
        count = torch.tensor([input.numel() / input.size(1)], dtype=input.dtype, device=input.device)
        sums = torch.cat([input.sum(dims), input.pow(2).sum(dims), count])
        total: Any = allreduce(sums, op="Sum")
        channels = input.size(1)
        rows = total[-1]
        mean = total[:channels] / rows
        variance = total[channels : 2 * channels] / rows - mean.pow(2)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked.add_(1)
                share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked or 1)
                self.running_mean.lerp_(mean.detach(), share)
                self.running_var.lerp_(variance.detach() * rows.detach() / (rows.detach() - 1), share)
        shape = [1, channels] + [1] * (input.dim() - 2)
        output = (input - mean.view(shape)) * torch.rsqrt(variance.view(shape) + self.eps)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        result: torch.Tensor = output
        return result
