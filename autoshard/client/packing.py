"""Graphs made small for the way: programs are mostly names, which repeat."""

import zstandard

_WORTH_IT = 0.9
"""Archives are compressed already; what is left in them is not worth a second time."""


def packed(body: bytes) -> tuple[str, bytes]:
    """A `Content-Encoding`, and the body in it; `identity` where that makes it no smaller."""
    small = zstandard.ZstdCompressor().compress(body)
    return ("zstd", small) if len(small) < _WORTH_IT * len(body) else ("identity", body)
