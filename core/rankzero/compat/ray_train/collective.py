"""Collectives under the names of ``ray.train.collective``."""

from rankzero.train import barrier
from rankzero.train import broadcast_object as broadcast_from_rank_zero

__all__ = ["barrier", "broadcast_from_rank_zero"]
