"""Plain values keep their exact types, and hostile bytes end in an error."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import enum
import math
import pathlib
import pickle
import random
import struct
import uuid
import zoneinfo
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import DamagedError, UnsupportedStateError, UsageError
from stepwell.state import decode_values, encode_values


class Point(NamedTuple):
    x: int
    y: float = 0.0


class Color(enum.IntEnum):
    RED = 1


def identical(a: Any, b: Any) -> bool:
    """Equality that also compares types, signs of zero, NaN payloads and the order of dicts, at every depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and not isinstance(a, np.floating):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex) and not isinstance(a, np.complexfloating):
        return identical(a.real, b.real) and identical(a.imag, b.imag)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, np.ndarray):
        same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        return same and a.flags.f_contiguous == b.flags.f_contiguous
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=False)
        same = len(a) == len(b) and all(identical(x, y) for x, y in pairs)
        return same and getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
    if isinstance(a, (set, frozenset)):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    if isinstance(a, (list, tuple, collections.deque)):
        same = len(a) == len(b) and all(map(identical, a, b))
        return same and getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
    if isinstance(a, (slice, range)):
        return identical((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, (dt.datetime, dt.time)):
        return a.replace(tzinfo=None) == b.replace(tzinfo=None) and repr(a) == repr(b) and a.fold == b.fold
    if isinstance(a, decimal.Decimal):
        return a.as_tuple() == b.as_tuple()
    return bool(a == b)


def turned(value: Any) -> Any:
    (back,) = decode_values(encode_values([value]))
    return back


VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    -(2**63) - 1,
    2**64 - 1,
    2**64,
    -(10**40),
    10**40,
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000123))[0],
    5e-324,
    "",
    "naïve\0文",
    "lone \ud800 surrogate",
    b"\0\xff",
    bytearray(b"abc"),
    (),
    (1, (2, [3, (4,)])),
    [],
    [1, 2.0, "3", None, True],
    [2**70, 1],
    {},
    {"a": 1, "b": {"c": (1,)}},
    {1: "int", "1": "text", 2.5: "float", None: 0, (1, "x"): 1, b"b": 2},
    {True: "bool"},
    {"\udfff": 1},
    {1, 2, 3},
    set(),
    frozenset({"a", (1, 2)}),
    complex(-0.0, math.nan),
    collections.OrderedDict([("z", 1), ("a", 2)]),
    collections.defaultdict(list, {"k": [1]}),
    collections.defaultdict(None, {"k": 1}),
    collections.Counter("hello"),
    collections.deque([1, 2], maxlen=5),
    collections.deque(),
    Point(1, -0.0),
    [Point(1), Point(2, 3.0)],
    range(0, 2**70, 3),
    slice(None, -1, 2),
    ...,
    dt.datetime(2024, 2, 29, 23, 59, 59, 999999),
    dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-5, microseconds=7), "odd")),
    dt.date(1, 1, 1),
    dt.time(1, 2, 3, 4, tzinfo=dt.timezone(dt.timedelta(hours=2))),
    dt.timedelta(days=-3, microseconds=1),
    dt.timezone.utc,
    decimal.Decimal("-0.100"),
    decimal.Decimal("sNaN12"),
    uuid.UUID(int=7),
    pathlib.Path("/a/b"),
    pathlib.PurePosixPath("x/\udcff"),
    np.dtype("float32"),
    np.dtype(">i4"),
    torch.float8_e4m3fn,
    torch.Size([2, 0, 3]),
    torch.Size([]),
    torch.device("cuda:3"),
    torch.channels_last,
    torch.strided,
]


# No repr in these names: the order of a set's elements differs from process to process, and xdist compares names.
@pytest.mark.parametrize("value", VALUES, ids=[f"{i}-{type(value).__name__}" for i, value in enumerate(VALUES)])
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    assert identical(turned(value), value)
    assert identical(turned([(value,)]), [(value,)])
    assert encode_values([value]) == encode_values([turned(value)])


NUMPY_SCALARS: list[Any] = [
    *(np.dtype(char).type(1) for char in "?bBhHiIlLqQefdgFDG"),
    np.float64("nan"),
    np.float32(-0.0),
    np.longdouble("0.1"),
    np.datetime64("2024-01-01T00:00:00.123456789", "ns"),
    np.datetime64("NaT"),
    np.timedelta64(5, "D"),
    np.timedelta64(5, "25s"),
    np.str_("text"),
    np.str_(""),
    np.str_("\ud800"),
    np.bytes_(b"ab\0"),
    np.void(b"\0\1\2"),
]


@pytest.mark.parametrize("value", NUMPY_SCALARS, ids=lambda value: f"{type(value).__name__}-{value!r:.30}")
def test_a_numpy_scalar_comes_back_with_its_type(value: Any) -> None:
    assert identical(turned(value), value)


NUMPY_ARRAYS: list[Any] = [
    np.array(["a", "bcd"]),
    np.array([b"a", b"bcd"]),
    np.array(["2024-01-01", "NaT"], "M8[s]"),
    np.arange(3, dtype=">f4"),
    np.array([(1, 2.0)], dtype=[("a", "<i2"), ("b", ">f8")]),
    np.array([1.0], np.longdouble),
    np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
    np.zeros((0, 3), "U4"),
    np.array("x"),
]


@pytest.mark.parametrize("value", NUMPY_ARRAYS, ids=lambda value: str(value.dtype))
def test_an_array_that_is_no_tensor_comes_back_exactly(value: Any) -> None:
    assert identical(turned(value), value)


def test_equal_sets_give_equal_bytes() -> None:
    words = [f"word{number}" for number in range(50)] + [(number, None) for number in range(50)]
    grown: set[Any] = set()
    for word in reversed(words):
        grown.add(word)
        grown.add(-1)
        grown.discard(-1)
    assert encode_values([set(words)]) == encode_values([grown])
    assert encode_values([set(range(9))]) == encode_values([set(range(8, -1, -1))])


class Text(str):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Color.RED,
        Text("x"),
        object(),
        lambda: 0,
        int,
        collections.UserDict(),
        collections.defaultdict(lambda: 0),
        memoryview(b""),
        iter([]),
        np.array([object()]),
        np.ma.array([1], mask=[True]),
        np.zeros(1, dtype=np.dtype([("a", "i1"), ("b", "i8")], align=True)),
        dt.datetime(2024, 1, 1, tzinfo=type("Zone", (dt.tzinfo,), {})()),
        {"key": {Color.RED: 1}},
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_would_lose_its_type_is_refused(value: Any) -> None:
    with pytest.raises(UnsupportedStateError, match=r"values\[0\]"):
        encode_values([value])


def test_a_refused_value_is_named_by_its_path() -> None:
    with pytest.raises(UnsupportedStateError, match=r"values\[1\]\['a'\]\[2\] is an object"):
        encode_values([0, {"a": [0, 1, object()]}])


def test_deep_values_are_refused_and_not_a_recursion_error() -> None:
    value: Any = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(UnsupportedStateError, match="nested deeper"):
        encode_values([value])


class Marker:
    """Sets a flag when a pickle of it is read."""

    touched = False

    def __reduce__(self) -> Any:
        return (setattr, (Marker, "touched", True))


def test_case_18_reading_runs_no_pickle_unless_asked() -> None:
    data = encode_values([{"x": Marker()}], allow_pickle=True)
    with pytest.raises(UsageError, match="allow_pickle=True"):
        decode_values(data)
    assert not Marker.touched
    decode_values(data, allow_pickle=True)
    assert Marker.touched
    Marker.touched = False


def test_pickled_values_come_back_when_both_sides_allow_it() -> None:
    data = encode_values([Color.RED, Text("x")], allow_pickle=True)
    assert identical(decode_values(data, allow_pickle=True), [Color.RED, Text("x")])


def test_a_type_that_cannot_be_pickled_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedStateError, match="cannot be pickled"):
        encode_values([lambda: 0], allow_pickle=True)


def test_a_named_tuple_of_an_unknown_module_becomes_one_just_like_it() -> None:
    data = encode_values([Point(1, 2.0)]).replace(b"test_values", b"test_vanish")
    (back,) = decode_values(data)
    assert type(back) is not Point and type(back).__name__ == "Point"
    assert (back.x, back.y, back._fields) == (1, 2.0, ("x", "y"))
    assert encode_values([back]) == data


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(categories=None))
    | st.binary()
    | st.binary().map(bytearray)
    | st.datetimes(timezones=st.none() | st.just(dt.timezone.utc) | st.timezones())
    | st.dates()
    | st.timedeltas()
    | st.decimals()
    | st.floats(width=32).map(np.float32),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(collections.deque)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text()), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(plain)
def test_any_nesting_of_values_comes_back(value: Any) -> None:
    assert identical(turned(value), value)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_give_values_or_a_clear_error(data: bytes) -> None:
    try:
        assert isinstance(decode_values(data), list)
    except (DamagedError, UsageError):
        pass


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_changed_byte_gives_values_or_a_clear_error(data: st.DataObject) -> None:
    good = bytearray(encode_values(VALUES[::3] + NUMPY_SCALARS + NUMPY_ARRAYS))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_values(bytes(good))
    except (DamagedError, UsageError):
        pass


def _extension(tag: int, payload: Any) -> bytes:
    return msgspec.msgpack.encode([msgspec.msgpack.Ext(tag, msgspec.msgpack.encode(payload))])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x91",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x01",
        _extension(99, 1),
        _extension(1, "text"),
        _extension(5, [[1]]),
        _extension(13, ["x", "Y", ["a; import os"], [1]]),
        _extension(18, "../../etc/passwd"),
        _extension(18, "No/Such"),
        _extension(19, ["O", b"\0" * 8]),
        _extension(19, ["|V999999999", b""]),
        _extension(
            21, b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999,), }".ljust(128)
        ),
        _extension(21, b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (0,), }".ljust(128)),
        _extension(22, "|O8"),
        _extension(23, ["dtype", "load"]),
        _extension(23, ["device", "nowhere"]),
        _extension(29, ["WindowsPath", "x"]),
        _extension(14, [0] * 9),
    ],
    ids=range(20),
)
def test_hostile_bytes_are_damage(data: bytes) -> None:
    with pytest.raises(DamagedError):
        decode_values(data)


def test_a_stored_named_tuple_cannot_name_another_thing() -> None:
    (value,) = decode_values(_extension(13, ["os", "system", ["a"], [1]]))
    assert isinstance(value, tuple) and value.a == 1  # type: ignore[attr-defined]


def test_extensions_nested_without_end_are_damage() -> None:
    data = msgspec.msgpack.encode(1)
    for _ in range(3000):
        data = msgspec.msgpack.encode(msgspec.msgpack.Ext(4, data))
    with pytest.raises(DamagedError):
        decode_values(msgspec.msgpack.encode([msgspec.msgpack.Ext(4, data)]))


def test_case_18_a_pickle_hidden_in_a_numpy_array_is_not_read() -> None:
    payload = pickle.dumps(Marker())
    array = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(118) + payload
    with pytest.raises(DamagedError):
        decode_values(_extension(21, array))
    assert not Marker.touched


def test_a_long_history_is_encoded_without_a_step_per_number() -> None:
    history = [random.random() for _ in range(100_000)]
    assert len(encode_values([history])) < 9 * len(history) + 100
    assert turned(history) == history
