"""Modules under the names of ``ray.train.huggingface``: `transformers`."""
