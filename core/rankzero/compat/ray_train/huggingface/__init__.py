"""Modules under the names of ``ray.train.huggingface``: `transformers`."""

from rankzero.compat.ray_train.huggingface import transformers

__all__ = ["transformers"]
