"""Bytes, bytes per second and seconds: reading them as people write them, and formatting them.

Numbers of bytes and bandwidths may be given as numbers or as strings such as "80GB" and "450GB/s"
wherever they are taken: in Python, in requests, in files of topologies and on the command line.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from math import isfinite
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, WithJsonSchema

from autoshard.base.integers import MAX_BYTES, format_integer, has_64_bits
from autoshard.errors import InputError

MIN_PLAUSIBLE_BYTES = 10**6
"""A smaller amount of memory of a device was probably meant in another unit."""

MIN_PLAUSIBLE_RATE = 10**6
"""A slower link, in bytes per second, was probably meant in another unit."""

_MAX_GB, _MAX_MB = 4096, 300_000
"""Largest numbers of gigabytes and of megabytes that a device may have."""

# The grammar as a regular expression that JSON Schema can have too: no group names, no flags.
# A fraction below one has three digits at most, and so is a byte or more with any prefix.
_NUMBER = r"[1-9][0-9]{0,17}(?:\.[0-9]{1,18})?(?:[eE]\+?[0-9]{1,2})?"
_FRACTION = r"0\.(?:[1-9][0-9]{0,2}|0[1-9][0-9]?|00[1-9])"
_PREFIX = "[kKmMgGtTpP][iI]?"
# "Gb" with a capital prefix is a unit of bits.
_BYTE_UNIT = "(?:[kKmMgGtTpP][iI]?B?|[kmgtp]i?b)"
_PER_SECOND = "(?:/s|ps)?"
_BYTES_PATTERN = rf"^(?:(?:{_NUMBER}) ?(?:{_BYTE_UNIT}|B|b)?|(?:{_FRACTION}) ?{_BYTE_UNIT})$"
_RATE_PATTERN = (
    rf"^(?:{_NUMBER}|(?:{_NUMBER}|{_FRACTION}) ?"
    rf"(?:(?:{_PREFIX})?B|(?:[kKMGTP]i?)?(?:b|bit)){_PER_SECOND})$"
)
_PARTS = re.compile(r"([0-9.]+(?:[eE]\+?[0-9]+)?) ?([kmgtp]?)(i?)(.*)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_bytes(value: str | float) -> int:
    """Read a number of bytes: "80GB" and "80G" are 80 * 10^9 bytes, "80GiB" is 80 * 2^30.

    Args:
        value: a number and a unit, in upper or lower case; bytes without a unit. A number is
            returned as it is, if it is whole. Fractions of a byte are dropped.

    Raises:
        InputError: it is not a number of bytes above zero.
    """
    if not isinstance(value, str):
        return _checked(_whole(value))
    text = value.strip()
    if not re.fullmatch(_BYTES_PATTERN, text):
        raise InputError(
            f"{value!r} is not a number of bytes above 0; write a number and a unit, such as "
            "80GB, 74.5GiB or 500MB"
        )
    return _checked(int(_amount(text)[0]))


def parse_rate(value: str | float) -> float:
    """Read a bandwidth in bytes per second: "450GB/s" is 450 * 10^9, "400Gb/s" an eighth of 400.

    Args:
        value: a number and a unit: B for bytes and b or bit for bits, with or without "/s"; bytes
            per second without a unit. A number is returned as it is.

    Raises:
        InputError: it is not a bandwidth above zero.
    """
    if not isinstance(value, str):
        if isinstance(value, int) and not has_64_bits(value):
            raise InputError(f"{format_integer(value)} is not a bandwidth of any link")
        if not isfinite(value):
            raise InputError(f"{value} is not a bandwidth of any link")
        return float(value)
    text = value.strip()
    if re.fullmatch(_RATE_PATTERN, text):
        amount, unit = _amount(text)
        return float(amount / 8 if unit.startswith("b") else amount)
    unclear = re.fullmatch(rf"({_NUMBER}|{_FRACTION}) ?({_PREFIX})b?{_PER_SECOND}", text)
    if unclear is not None:
        number = unclear[1] + unclear[2].upper()[0] + unclear[2][1:]
        raise InputError(
            f"{value!r} could be bytes or bits per second; write {number}B/s or {number}b/s"
        )
    raise InputError(
        f"{value!r} is not a bandwidth above 0; write a number and a unit, such as 450GB/s (bytes) "
        "or 400Gb/s (bits)"
    )


def unit_hint(nbytes: int) -> str | None:
    """Return a question if an amount of memory was probably meant in another unit, or None."""
    if nbytes > _MAX_MB:
        return None
    return f"did you mean {nbytes}{'GB' if nbytes <= _MAX_GB else 'MB'}?"


def format_bytes(nbytes: float) -> str:
    """Format bytes with a decimal unit and three significant digits."""
    return _scaled(nbytes, _DECIMAL, "B")


def format_rate(bytes_per_second: float) -> str:
    """Format a bandwidth with a decimal unit and three significant digits."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_flops(operations_per_second: float) -> str:
    """Format operations per second with a decimal unit and three significant digits."""
    return _scaled(operations_per_second, _DECIMAL, "FLOP/s")


def format_seconds(seconds: float) -> str:
    """Format a time with a readable unit and three significant digits, such as "477 ms"."""
    if seconds < _MINUTE:
        return _scaled(seconds, _SMALL, "s")
    total = round(seconds)
    hours, minutes = total // _HOUR, total % _HOUR // _MINUTE
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {total % _MINUTE} s"


_MINUTE = 60
_HOUR = 3600
_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))


def _scaled(value: float, scales: Sequence[tuple[float, str]], unit: str) -> str:
    """Three significant digits of a value, in the largest unit of which it is one or more."""
    rounded = float(f"{value:.3g}")
    scale, prefix = next(
        (known for known in scales if rounded >= known[0]), scales[-1] if value else (1.0, "")
    )
    figure = f"{rounded / scale:#.3g}" if rounded / scale >= 1 else f"{rounded / scale:.3g}"
    digits = figure.rstrip("0").rstrip(".") if "." in figure else figure
    return f"{digits} {prefix}{unit}"


def _whole(value: float) -> int:
    if not isfinite(value) or value != int(value) or value < 1:
        raise InputError(f"{value} is not a whole number of bytes above 0")
    return int(value)


def _checked(nbytes: int) -> int:
    if nbytes > MAX_BYTES:
        raise InputError(f"{format_integer(nbytes)} bytes are more than any memory has")
    return nbytes


def _amount(text: str) -> tuple[Fraction, str]:
    """The exact number, with its prefix counted, and the unit."""
    parts = _PARTS.fullmatch(text)
    assert parts is not None
    number, prefix, binary, unit = parts.groups()
    base = 1024 if binary else 1000
    return Fraction(number) * base ** _POWERS[prefix.lower()], unit


T = TypeVar("T")


def _from_text(parse: Callable[[str], T], value: Any) -> Any:
    if isinstance(value, bool):
        raise InputError(f"Input should be a number or a text, not {value}")
    return parse(value) if isinstance(value, str) else value


def _schema(number: dict[str, Any], pattern: str) -> dict[str, Any]:
    """JSON Schema of a number, or a string."""
    return {"anyOf": [number, {"type": "string", "pattern": pattern}]}


ByteCount = Annotated[
    int,
    Field(gt=0, le=MAX_BYTES),
    BeforeValidator(partial(_from_text, parse_bytes)),
    WithJsonSchema(
        _schema({"type": "integer", "exclusiveMinimum": 0, "maximum": MAX_BYTES}, _BYTES_PATTERN),
        mode="validation",
    ),
]
"""A number of bytes in a document: an integer, or a string such as "80GB"."""

Bandwidth = Annotated[
    float,
    BeforeValidator(partial(_from_text, parse_rate)),
    WithJsonSchema(_schema({"type": "number"}, _RATE_PATTERN), mode="validation"),
]
"""Bytes per second in a document: a number, or a string such as "450GB/s"."""
