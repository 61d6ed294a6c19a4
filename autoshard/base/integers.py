"""Integers of documents: at most 64 bits, so that nothing that is computed from them overflows."""

from collections.abc import Iterator
from typing import Any

from autoshard.errors import InputError

MAX_INT32 = (1 << 31) - 1
"""Largest signed 32-bit integer."""

MAX_BYTES = 1 << 62
"""Largest number of bytes of a document; exact as a floating-point number too."""
_MAX_UINT64 = (1 << 64) - 1
_MIN_INT64 = -(1 << 63)
_LONG_DIGITS = 20
"""Least digits of an integer of more than 64 bits."""
_TO_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_CHUNK = 1 << 20
_MAX_SHOWN_BITS = 128


def check_integers(text: str | bytes, document: object, error: type[InputError], what: str) -> None:
    """Check that all integers of a parsed JSON document have at most 64 bits.

    Args:
        text: the document.
        document: the same, parsed.
        error: type of the error if one has more.
        what: what the document is, for the message.
    """
    encoded = text.encode() if isinstance(text, str) else text
    if not _may_have_large(encoded):
        return
    for path, number in _large_integers(document, ()):
        place = ".".join(map(str, path)) or what
        raise error(f"{place} is {format_integer(number)}; integers have at most 64 bits")


def _may_have_large(text: bytes) -> bool:
    """True if a text has so many digits in a row; much faster than a regular expression."""
    wanted = b"0" * _LONG_DIGITS
    return any(
        wanted in text[start : start + _CHUNK + _LONG_DIGITS].translate(_TO_ZEROS)
        for start in range(0, len(text), _CHUNK)
    )


def has_64_bits(number: int) -> bool:
    """True if a number is a signed or unsigned 64-bit integer."""
    return _MIN_INT64 <= number <= _MAX_UINT64


def format_integer(number: int) -> str:
    """An integer with separators; its order of magnitude if it is very long.

    >>> format_integer(1_000_000), format_integer(10**4000)
    ('1,000,000', 'about 2^13288')
    """
    bits = number.bit_length()
    if bits <= _MAX_SHOWN_BITS:
        return f"{number:,}"
    return f"about {'-' if number < 0 else ''}2^{bits}"


def _large_integers(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[Any, int]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _large_integers(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _large_integers(item, (*path, index))
    elif isinstance(value, int) and not has_64_bits(value):
        yield path, value
