"""Modules under the names of ``ray.train.huggingface``: `transformers`."""

from rankzero.compat.ray_train.names import lookup

__getattr__ = lookup(__name__, "huggingface.transformers")
