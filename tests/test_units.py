import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import UsageError
from stepwell.units import format_bytes, format_rate, format_seconds, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (999.6, "1.00 kB"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (2_416_000_000, "2.42 GB"),
        (24_160_000_000, "24.2 GB"),
        (10**18, "1.00 EB"),
        (25 * 10**21, "25000 EB"),
        (-2_416_000_000, "-2.42 GB"),
        (math.inf, "inf B"),
    ],
)
def test_sizes_have_three_digits_and_a_decimal_prefix(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1023 * 1024, "1023 KiB"),
        (8 << 30, "8.00 GiB"),
        (2_416_000_000, "2.25 GiB"),
    ],
)
def test_binary_sizes_say_so(count: int, text: str) -> None:
    assert format_bytes(count, binary=True) == text


def test_a_rate_is_a_size_per_second() -> None:
    assert format_rate(480_000_000) == "480 MB/s"
    assert format_rate(0) == "0 B/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2e-6, "2 µs"),
        (0.00085, "850 µs"),
        (0.0009996, "1 ms"),
        (0.0012, "1.2 ms"),
        (0.01234, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (184, "3 min 4 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h"),
        (7_500, "2 h 5 min"),
        (86_399, "1 d"),
        (3 * 86_400 + 4 * 3_600, "3 d 4 h"),
        (-0.25, "-250 ms"),
        (math.nan, "nan s"),
    ],
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0 B", 0),
        ("8 GiB", 8 << 30),
        ("2.5GB", 2_500_000_000),
        (" 512 kB ", 512_000),
        ("512KB", 512_000),
        ("1.1 GB", 1_100_000_000),
        ("0.1 TB", 100_000_000_000),
        ("9007199254740993 B", 2**53 + 1),
        ("3 EiB", 3 << 60),
        ("1.1 GiB", 1_181_116_006),
        ("100000000000000000000000000001.5 kB", 100000000000000000000000000001500),
    ],
)
def test_sizes_are_read_exactly(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "8", "8.5", "GiB", "8 Gb", "8 gb", "8 G", "-8 GB", "1e3 B", "8 GiB!", "٣ GB", "8,5 GB"]
)
def test_a_size_without_its_unit_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a size") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)
    assert "GiB" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("5m", 300),
        ("5 min", 300),
        ("3h", 10_800),
        ("2d", 172_800),
        ("0.1s", 0.1),
        ("250ms", 0.25),
        ("7us", 7e-6),
        ("7 µs", 7e-6),
        ("1h30m", 5_400),
        ("3 min 4 s", 184),
        (" 1 h ", 3_600),
        ("0s", 0),
    ],
)
def test_durations_are_read_exactly(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "s", "5x", "5 M", "30m1h", "1h1h", "-5s", "1h 30", "1e3s", "5m,3s"])
def test_a_duration_without_its_unit_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a duration") as caught:
        parse_seconds(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 10**21), st.booleans())
def test_a_written_size_reads_back_within_its_digits(count: int, binary: bool) -> None:
    text = format_bytes(count, binary=binary)
    assert abs(parse_bytes(text) - count) <= 0.00501 * count


@given(st.integers(0, 10**15))
def test_exact_bytes_read_back_exactly(count: int) -> None:
    assert parse_bytes(f"{count} B") == count
    assert parse_bytes(f"{count} MiB") == count << 20


@given(st.floats(1e-6, 1e9))
def test_a_written_duration_reads_back_within_its_digits(seconds: float) -> None:
    again = parse_seconds(format_seconds(seconds))
    # Three digits below a minute, otherwise two units: the worst is half an hour in one day.
    assert abs(again - seconds) <= (0.00501 if seconds < 59 else 0.021) * seconds
    assert parse_seconds(format_seconds(again)) == again


@given(st.integers(1, 59), st.integers(0, 59))
def test_minutes_and_seconds_are_exact(minutes: int, seconds: int) -> None:
    assert parse_seconds(format_seconds(60 * minutes + seconds)) == 60 * minutes + seconds
