"""Formats and handles of results, and the envelope of arguments. Imports only the standard library and torch."""

from rankzero import lazy_names

lazy_names(
    __name__,
    "digest.Digest digest.digest_of digest.digest_of_file digest.verify envelope.beside envelope.LARGE "
    "envelope.open_packed envelope.pack plain.find_unstorable plain.is_json ref.map_refs resharding.ShardedState "
    "unpacking.unpack",
)
