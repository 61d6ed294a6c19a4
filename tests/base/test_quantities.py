"""ByteCount, bandwidths and times: what people write, and what they read."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from autoshard.base.integers import MAX_BYTES
from autoshard.base.quantities import (
    Bandwidth,
    ByteCount,
    format_bytes,
    format_flops,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_rate,
    unit_hint,
)
from autoshard.errors import InputError
from autoshard.plan import PlanOptions

TOO_MANY = "more than any memory has"

BYTES: TypeAdapter[int] = TypeAdapter(ByteCount)
BANDWIDTH: TypeAdapter[float] = TypeAdapter(Bandwidth)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GB", 80 * 10**9),
        ("80G", 80 * 10**9),
        ("80gb", 80 * 10**9),
        ("80g", 80 * 10**9),
        ("80 GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("80 Gi", 80 * 2**30),
        ("80gib", 80 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        (" 512 MiB ", 2**29),
        ("1.5TB", 15 * 10**11),
        ("1PiB", 2**50),
        ("3kB", 3000),
        ("3KB", 3000),
        ("1KiB", 1024),
        ("7B", 7),
        ("1024", 1024),
        ("8e10", 80 * 10**9),
        ("0.5GB", 5 * 10**8),
        ("0.001kB", 1),
        ("1.0015kB", 1001),
        ("123456789.123456789GB", 123456789123456789),
    ],
)
def test_numbers_of_bytes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes
    assert BYTES.validate_json(f'"{text}"', strict=True) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "GB", "-1GB", "80Gb", "80 gigs", "80GBs", "1e-9", "nan", "1.GB", "8 0GB", "٣GB", "0"),
        *("0GB", "0.5B", "0.5", "0.0001kB", "80XB", "80GB/s"),
    ],
)
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"is not a number of bytes above 0; .* such as 80GB"):
        parse_bytes(text)
    with pytest.raises(ValidationError, match="is not a number of bytes"):
        BYTES.validate_python(text)


def test_whole_numbers_stay_as_they_are() -> None:
    assert parse_bytes(80) == 80
    assert parse_bytes(8e10) == 80 * 10**9
    for wrong in (0, -1, 1.5):
        with pytest.raises(InputError, match=f"{wrong} is not a whole number of bytes above 0"):
            parse_bytes(wrong)


@given(st.integers(1, 2**62), st.sampled_from([("GB", 10**9), ("GiB", 2**30), ("", 1)]))
def test_whole_amounts_are_exact(number: int, unit: tuple[str, int]) -> None:
    whole = min(number, MAX_BYTES // unit[1])
    assert parse_bytes(f"{whole}{unit[0]}") == whole * unit[1]


def test_more_bytes_than_any_memory_has_are_refused() -> None:
    assert parse_bytes(MAX_BYTES) == MAX_BYTES
    for wrong in (MAX_BYTES + 1, "1e10GB"):
        with pytest.raises(InputError, match=TOO_MANY):
            parse_bytes(wrong)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("450GB/s", 450e9),
        ("450 GB/s", 450e9),
        ("450GB", 450e9),
        ("450GBps", 450e9),
        ("1.5TB/s", 1.5e12),
        ("400Gb/s", 50e9),
        ("400Gbps", 50e9),
        ("400Gbit/s", 50e9),
        ("100kb/s", 12500.0),
        ("1GiB/s", 2.0**30),
        ("0.5GB/s", 5e8),
        ("450e9", 450e9),
        ("1000", 1000.0),
    ],
)
def test_bandwidths(text: str, rate: float) -> None:
    assert parse_rate(text) == rate
    assert BANDWIDTH.validate_json(f'"{text}"', strict=True) == rate


@pytest.mark.parametrize(
    ("text", "number"), [("400G", "400G"), ("400gb/s", "400G"), ("25 g/s", "25G"), ("1gib", "1Gi")]
)
def test_bits_are_not_taken_for_bytes(text: str, number: str) -> None:
    with pytest.raises(InputError, match=f"bytes or bits per second; write {number}B/s or .*b/s"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["", "0", "0GB/s", "-3GB/s", "fast", "450GB/h", "inf"])
def test_what_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"is not a bandwidth above 0; .* such as 450GB/s"):
        parse_rate(text)


SCHEMAS: dict[str, Any] = {"bytes": BYTES.json_schema(), "rate": BANDWIDTH.json_schema()}


@given(
    st.from_regex(SCHEMAS["bytes"]["anyOf"][1]["pattern"]),
    st.from_regex(SCHEMAS["rate"]["anyOf"][1]["pattern"]),
)
def test_every_text_of_the_schema_is_read(amount: str, rate: str) -> None:
    try:
        assert parse_bytes(amount) >= 1
    except InputError as error:
        assert TOO_MANY in str(error)  # noqa: PT017  most texts are read
    assert 0 < parse_rate(rate) < 1e200


@given(st.text(alphabet="0123456789.eE+kKmMgGtTiIbBps/ ", max_size=9))
def test_what_is_read_is_in_the_schema(text: str) -> None:
    for kind, parse in (("bytes", parse_bytes), ("rate", parse_rate)):
        pattern = SCHEMAS[kind]["anyOf"][1]["pattern"]
        try:
            parse(text)
        except InputError as error:
            assert TOO_MANY in str(error) or not re.search(pattern, text)  # noqa: PT017  some are read
        else:
            assert re.search(pattern, text.strip())


def test_an_answer_has_numbers_only() -> None:
    limits = {"exclusiveMinimum": 0, "maximum": MAX_BYTES}
    assert BYTES.json_schema(mode="serialization") == {"type": "integer", **limits}
    assert BANDWIDTH.json_schema(mode="serialization") == {"type": "number"}


def test_options_take_strings() -> None:
    options = PlanOptions(memory_budget="1.5GB")
    assert options == PlanOptions(memory_budget=1_500_000_000)
    assert options.model_dump(mode="json")["memory"]["budget"] == 1_500_000_000


def test_memory_without_a_unit_may_be_a_mistake() -> None:
    assert unit_hint(80) == "did you mean 80GB?"
    assert unit_hint(81920) == "did you mean 81920MB?"
    assert unit_hint(500_000) is None


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (0.4, "0.4 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (12_345, "12.3 kB"),
        (999_700_000, "1 GB"),
        (80e9, "80 GB"),
        (1.5e12, "1.5 TB"),
        (100e9, "100 GB"),
    ],
)
def test_bytes_are_readable(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text
    assert format_rate(nbytes) == f"{text}/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3.2e-6, "3.2 us"),
        (0.4777, "478 ms"),
        (0.9996, "1 s"),
        (1.25, "1.25 s"),
        (75, "1 min 15 s"),
        (3700, "1 h 1 min"),
    ],
)
def test_seconds_are_readable(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_operations_are_readable() -> None:
    assert format_flops(989.4e12) == "989 TFLOP/s"
