"""Formats and handles of results, and the file of arguments. Imports only the standard library and torch.

Loading verifies the digest first. Ranks map large tensors and arrays copy-on-write: they may be written to, and not be
resized.
"""
