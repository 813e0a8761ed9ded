"""Formats and handles of results, and the file of arguments. Imports only the standard library and torch.

Loading verifies the digest first, except for a safetensors file whose inode, size and times are those that its handle
recorded: docs/architecture.md#bytes-do-not-pass-through-the-driver. Tensors and arrays of 64 kB and more lie beside the
pickle in the same file, and ranks map them copy-on-write: they may be written to, and not be resized.
"""
