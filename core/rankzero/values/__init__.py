"""Formats and handles of results, and the file of arguments. Imports only the standard library and torch.

Loading verifies the digest first, except for a safetensors file whose inode, size and times are those that its handle
recorded: docs/decisions/010-bytes-take-the-shortest-way.md. Tensors and arrays of 64 kB and more lie beside the pickle
in the same file, and ranks map them copy-on-write: they may be written to, and not be resized.
"""
