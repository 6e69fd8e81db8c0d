"""Plain Python values as bytes, with their exact types: tagged msgpack.

None, bool, float, bytes, lists, and ints, strings and dicts that msgpack can carry are plain msgpack. Everything else
is an extension: a number that says the type (`Tag`) and a payload that is msgpack again. The same value always gives
the same bytes.

Reading is safe on hostile bytes: nothing is imported and no code of the file is run, unless pickles are allowed.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import io
import keyword
import math
import pathlib
import pickle
import re
import struct
import sys
import uuid
import warnings
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from ..errors import DamagedError, UnsupportedStateError, UsageError

DEPTH_MAX = 100
_NESTING_MAX = 2 * DEPTH_MAX
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1

ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_DIRECT = frozenset({type(None), bool, float, bytes})
_INT_ONLY = {int}
_FACTORIES: dict[str, Callable[[], Any]] = {
    factory.__name__: factory
    for factory in (
        dict,
        list,
        set,
        frozenset,
        tuple,
        int,
        float,
        str,
        bytes,
        bool,
        complex,
        OrderedDict,
        Counter,
        deque,
    )
}
_NPY_HEADER_BYTES_MAX = 10_000
_NUMPY_CHARS = "?bBhHiIlLqQefdgFDG"


class Tag(enum.IntEnum):
    """The extension numbers. They are part of the format: never change one, only add."""

    INT = 1
    STR = 2
    BYTEARRAY = 3
    TUPLE = 4
    SET = 5
    FROZENSET = 6
    DICT = 7
    COMPLEX = 8
    ORDERED_DICT = 9
    DEFAULT_DICT = 10
    COUNTER = 11
    DEQUE = 12
    NAMED_TUPLE = 13
    DATETIME = 14
    DATE = 15
    TIME = 16
    TIMEDELTA = 17
    TIMEZONE = 18
    NUMPY_SCALAR = 19
    NUMPY_TEXT = 20
    NUMPY_ARRAY = 21
    NUMPY_DTYPE = 22
    TORCH = 23
    RANGE = 24
    SLICE = 25
    ELLIPSIS = 26
    DECIMAL = 27
    UUID = 28
    PATH = 29
    PICKLE = 100


class Refused(Exception):
    """A value that cannot be stored. Each container on the way out puts its step in front of `path`."""

    def __init__(self, why: str, todo: str | None = None) -> None:
        super().__init__(why)
        self.why, self.todo, self.path = why, todo, ""

    def at(self, step: str) -> Refused:
        self.path = step + self.path
        return self

    def error(self, root: str) -> UnsupportedStateError:
        return UnsupportedStateError(f"{root}{self.path} {self.why}", todo=self.todo)


@dataclass(frozen=True, slots=True)
class TorchValue:
    """A dtype, size, device, layout or memory format of torch, read in a process without torch; stored back exactly."""

    kind: str
    value: str | tuple[int, ...]


def encode_values(values: list[object], *, allow_pickle: bool = False) -> bytes:
    """Plain values as bytes; exact types.

    Raises:
        UnsupportedStateError: a value of a type that cannot be stored; the text says where.
    """
    packed = []
    try:
        for index, value in enumerate(values):
            try:
                packed.append(pack(value, allow_pickle=allow_pickle))
            except Refused as refused:
                raise refused.at(f"[{index}]") from None
    except Refused as refused:
        raise refused.error("values") from None
    return _encode(packed)


def decode_values(data: bytes, *, allow_pickle: bool = False) -> list[object]:
    """The values that `encode_values` made bytes of.

    Raises:
        DamagedError: the bytes are not those of `encode_values`.
        UsageError: there are pickled values and `allow_pickle` is false.
    """
    values = _Reader(allow_pickle).read(data)
    if type(values) is not list:
        raise DamagedError("stored values are damaged", expected="a list", found=type(values).__name__)
    return values


# Writing


_encoder = msgspec.msgpack.Encoder()


def _encode(packed: object) -> bytes:
    return _encoder.encode(packed)


def pack(value: Any, *, allow_pickle: bool = False, depth: int = 0) -> Any:
    """What msgspec can encode in place of `value`; raises `Refused` for a type that cannot be stored."""
    kind = type(value)
    if kind in _DIRECT:
        return value
    if kind is int:
        return value if _INT_MIN <= value <= _INT_MAX else _tagged(Tag.INT, _int_bytes(value))
    if kind is str:
        return value if value.isascii() or _is_utf8(value) else _tagged(Tag.STR, value.encode("utf-8", "surrogatepass"))
    if depth >= _NESTING_MAX:
        raise Refused(f"is nested deeper than {DEPTH_MAX} levels")

    def inner(item: Any) -> Any:
        return pack(item, allow_pickle=allow_pickle, depth=depth + 1)

    def items(sequence: Any) -> list[Any]:
        kinds = set(map(type, sequence))
        if kinds <= _DIRECT or (kinds == _INT_ONLY and min(sequence) >= _INT_MIN and max(sequence) <= _INT_MAX):
            return list(sequence)
        packed = []
        for index, item in enumerate(sequence):
            try:
                packed.append(inner(item))
            except Refused as refused:
                raise refused.at(f"[{index}]") from None
        return packed

    def pairs(mapping: Any) -> list[Any]:
        packed = []
        for key, item in mapping.items():
            try:
                packed.append(inner(key))
                packed.append(inner(item))
            except Refused as refused:
                raise refused.at(f"[{key!r}]") from None
        return packed

    if kind is list:
        return items(value)
    if kind is dict:
        flat = pairs(value)
        if all(type(key) is str for key in flat[::2]):
            return dict(zip(flat[::2], flat[1::2], strict=True))
        return _tagged(Tag.DICT, flat)
    if kind is tuple:
        return _tagged(Tag.TUPLE, items(value))
    if kind is set:
        return _tagged(Tag.SET, _sorted(items(value)))
    if kind is frozenset:
        return _tagged(Tag.FROZENSET, _sorted(items(value)))
    if kind is bytearray:
        return _tagged(Tag.BYTEARRAY, bytes(value))
    if kind is complex:
        return _tagged(Tag.COMPLEX, struct.pack("<dd", value.real, value.imag))
    if kind is OrderedDict:
        return _tagged(Tag.ORDERED_DICT, pairs(value))
    if kind is Counter:
        return _tagged(Tag.COUNTER, pairs(value))
    if kind is defaultdict:
        return _tagged(Tag.DEFAULT_DICT, [factory_name(value), pairs(value)])
    if kind is deque:
        return _tagged(Tag.DEQUE, [value.maxlen, items(value)])
    if is_namedtuple(kind):
        return _tagged(Tag.NAMED_TUPLE, [kind.__module__, kind.__qualname__, list(kind._fields), items(value)])
    if kind is range:
        return _tagged(Tag.RANGE, items((value.start, value.stop, value.step)))
    if kind is slice:
        return _tagged(Tag.SLICE, items((value.start, value.stop, value.step)))
    if value is Ellipsis:
        return _tagged(Tag.ELLIPSIS, None)
    try:
        packed = _pack_library_value(value)
    except Refused:
        if not allow_pickle:
            raise
        packed = None
    if packed is not None:
        return packed
    if allow_pickle:
        try:
            return _tagged(Tag.PICKLE, pickle.dumps(value, protocol=4))
        except Exception as error:
            raise Refused(f"is {_type_name(kind)}, which cannot be pickled: {error}") from error
    raise Refused(*_why_not(value))


def _sorted(packed: list[Any]) -> list[Any]:
    """The items of a set in an order that depends on nothing but the items."""
    kinds = set(map(type, packed))
    return sorted(packed) if kinds in (_INT_ONLY, {str}) else sorted(packed, key=_encode)


def _tagged(tag: Tag, payload: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(int(tag), _encode(payload))


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _type_name(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _why_not(value: Any) -> tuple[str, str]:
    kind = type(value)
    for plain in (bool, int, float, complex, str, bytes, dict, list, tuple, set, frozenset):
        if isinstance(value, plain):
            return (
                f"is {_type_name(kind)}, a kind of {plain.__name__} whose own type could not be kept",
                f"store {plain.__name__}(value), or pass allow_pickle=True",
            )
    return (
        f"is {_type_name(kind)}, which cannot be stored",
        "store plain values, give it state_dict() and load_state_dict(), or pass allow_pickle=True",
    )


def factory_name(mapping: defaultdict[Any, Any]) -> str | None:
    """The name of a defaultdict's factory; raises `Refused` unless it is one of the simple ones."""
    factory = mapping.default_factory
    if factory is None:
        return None
    for name, known in _FACTORIES.items():
        if factory is known:
            return name
    raise Refused(
        f"is a defaultdict with the factory {factory!r}",
        f"use a plain dict, or one of the factories {', '.join(_FACTORIES)}",
    )


def factory_named(name: object) -> Callable[[], Any] | None:
    """The factory that `factory_name` named."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in _FACTORIES:
        raise ValueError(f"unknown factory {name!r}")
    return _FACTORIES[name]


def is_namedtuple(kind: type) -> bool:
    """Whether a type is a direct product of `collections.namedtuple` or `typing.NamedTuple`."""
    fields = getattr(kind, "_fields", None)
    return kind.__bases__ == (tuple,) and type(fields) is tuple and all(type(field) is str for field in fields)


def _pack_library_value(value: Any) -> Any | None:
    kind = type(value)
    if kind is dt.datetime:
        return _tagged(Tag.DATETIME, [*_date_parts(value), *_time_parts(value), _zone(value.tzinfo)])
    if kind is dt.date:
        return _tagged(Tag.DATE, _date_parts(value))
    if kind is dt.time:
        return _tagged(Tag.TIME, [*_time_parts(value), _zone(value.tzinfo)])
    if kind is dt.timedelta:
        return _tagged(Tag.TIMEDELTA, [value.days, value.seconds, value.microseconds])
    if isinstance(value, dt.tzinfo):
        return _tagged(Tag.TIMEZONE, _zone(value))
    if kind is decimal.Decimal:
        return _tagged(Tag.DECIMAL, str(value))
    if kind is uuid.UUID:
        return _tagged(Tag.UUID, value.bytes)
    if kind in (pathlib.PosixPath, pathlib.PurePosixPath):
        return _tagged(Tag.PATH, [kind.__name__, str(value).encode("utf-8", "surrogatepass")])
    if isinstance(value, (np.generic, np.ndarray, np.dtype)):
        return _pack_numpy(value)
    if kind is TorchValue:
        return _tagged(Tag.TORCH, [value.kind, value.value])
    if "torch" in sys.modules:
        from . import torch_state

        described = torch_state.describe_value(value)
        if described is not None:
            return _tagged(Tag.TORCH, list(described))
    return None


def _date_parts(value: dt.date) -> list[int]:
    return [value.year, value.month, value.day]


def _time_parts(value: dt.datetime | dt.time) -> list[int]:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold]


def _zone(zone: dt.tzinfo | None) -> Any:
    """None, the key of a zoneinfo zone, or [offset in microseconds, own name or None]."""
    if zone is None:
        return None
    if type(zone) is dt.timezone:
        offset = zone.utcoffset(None)
        name = zone.tzname(None)
        return [offset // dt.timedelta(microseconds=1), None if name == dt.timezone(offset).tzname(None) else name]
    if type(zone) is zoneinfo.ZoneInfo and zone.key is not None:
        return zone.key
    raise Refused(
        f"has the time zone {zone!r}, which cannot be stored", "use datetime.timezone or zoneinfo.ZoneInfo(key)"
    )


def _pack_numpy(value: Any) -> Any | None:
    kind = type(value)
    if isinstance(value, np.dtype):
        return _tagged(Tag.NUMPY_DTYPE, value.str) if _dtype_is_its_text(value) else None
    if kind is np.ndarray or kind is np.memmap:
        return _tagged(Tag.NUMPY_ARRAY, _npy(value))
    if kind is np.str_:
        return _tagged(Tag.NUMPY_TEXT, ["str", str(value).encode("utf-8", "surrogatepass")])
    if kind is np.bytes_:
        return _tagged(Tag.NUMPY_TEXT, ["bytes", bytes(value)])
    if not isinstance(value, np.generic):
        return None
    if value.dtype.char in _NUMPY_CHARS and kind is np.dtype(value.dtype.char).type:
        return _tagged(Tag.NUMPY_SCALAR, [value.dtype.char, value.tobytes()])
    plain_text = kind in (np.datetime64, np.timedelta64) or (kind is np.void and value.dtype.names is None)
    if plain_text and _dtype_is_its_text(value.dtype):
        return _tagged(Tag.NUMPY_SCALAR, [value.dtype.str, value.tobytes()])
    return None


def _dtype_is_its_text(dtype: np.dtype[Any]) -> bool:
    try:
        return not dtype.hasobject and np.dtype(dtype.str) == dtype and np.dtype(dtype.str).type is dtype.type
    except TypeError:
        return False


def _dtype_is_kept(dtype: np.dtype[Any]) -> bool:
    """Whether numpy's file format gives exactly this dtype back."""
    if dtype.hasobject:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            back = np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype))
    except (TypeError, ValueError, UserWarning):
        return False
    return back == dtype and back.type is dtype.type and back.isalignedstruct == dtype.isalignedstruct


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    """An array in numpy's own file format, which keeps byte order, memory order and record fields."""
    dtype = array.dtype
    if not _dtype_is_kept(dtype):
        raise Refused(
            f"is a numpy array of {dtype!r}, which cannot be stored", "store it as arrays of numbers, or as a list"
        )
    target = io.BytesIO()
    np.lib.format.write_array(target, np.asarray(array), allow_pickle=False)
    data = target.getvalue()
    if len(data) - array.nbytes > _NPY_HEADER_BYTES_MAX:
        raise Refused("is a numpy array of records with too many fields", "store its fields as arrays of their own")
    return data


# Reading


class _Reader:
    """One decoding; counts the nesting, so that hostile bytes end in an error and not in a full stack."""

    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._depth = 0
        self._decoder = msgspec.msgpack.Decoder(ext_hook=self._extension)

    def read(self, data: Any) -> Any:
        try:
            return self._decoder.decode(data)
        except (UsageError, DamagedError):
            raise
        except Exception as error:
            raise DamagedError("stored values are damaged", found=f"{type(error).__name__}: {error}") from error

    def _extension(self, code: int, payload: memoryview) -> Any:
        if self._depth >= _NESTING_MAX:
            raise ValueError(f"values nested deeper than {_NESTING_MAX} levels")
        self._depth += 1
        value = self._build(Tag(code), self._decoder.decode(payload))
        self._depth -= 1
        return value

    def _build(self, tag: Tag, part: Any) -> Any:
        if tag is Tag.PICKLE:
            if not self._allow_pickle:
                raise UsageError(
                    "the stored values hold a pickle, and reading a pickle can run any code",
                    todo="pass allow_pickle=True if you trust whoever wrote this checkpoint",
                )
            return pickle.loads(_checked(part, bytes))
        return _BUILDERS[tag](part)


def _checked(part: Any, kind: type) -> Any:
    if type(part) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {type(part).__name__}")
    return part


def _parts(part: Any, count: int) -> list[Any]:
    if len(_checked(part, list)) != count:
        raise ValueError(f"expected {count} parts, found {len(part)}")
    return list(part)


def _paired(part: Any) -> list[tuple[Any, Any]]:
    if len(_checked(part, list)) % 2:
        raise ValueError("a key without a value")
    return list(zip(part[::2], part[1::2], strict=True))


def _build_int(part: Any) -> int:
    return int.from_bytes(_checked(part, bytes), "little", signed=True)


def _build_str(part: Any) -> str:
    return str(_checked(part, bytes).decode("utf-8", "surrogatepass"))


def _build_complex(part: Any) -> complex:
    return complex(*struct.unpack("<dd", _checked(part, bytes)))


def _build_counter(part: Any) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    dict.update(counter, _paired(part))
    return counter


def _build_default_dict(part: Any) -> defaultdict[Any, Any]:
    name, flat = _parts(part, 2)
    return defaultdict(factory_named(name), _paired(flat))


def _build_deque(part: Any) -> deque[Any]:
    maxlen, items = _parts(part, 2)
    return deque(_checked(items, list), maxlen=maxlen)


def _build_namedtuple(part: Any) -> Any:
    module, qualname, fields, items = _parts(part, 4)
    kind = namedtuple_type(module, qualname, tuple(_checked(fields, list)))
    if len(_checked(items, list)) != len(fields):
        raise ValueError("a named tuple with too many or too few items")
    return tuple.__new__(kind, items)


def namedtuple_type(module: str, qualname: str, fields: tuple[str, ...]) -> type:
    """The named tuple type of that name if its module is loaded, else one just like it. Imports nothing."""
    found: Any = sys.modules.get(_checked(module, str))
    for step in _checked(qualname, str).split("."):
        found = vars(found).get(step) if isinstance(found, type) or type(found) is type(sys) else None
    if isinstance(found, type) and is_namedtuple(found) and found._fields == fields:  # type: ignore[attr-defined]
        return found
    return _made_namedtuple(module, qualname, fields)


@lru_cache(maxsize=256)
def _made_namedtuple(module: str, qualname: str, fields: tuple[str, ...]) -> type:
    """A type like `collections.namedtuple` makes, without its `eval`, since the names may come from a hostile file."""
    for field in fields:
        if type(field) is not str or not field.isidentifier() or keyword.iskeyword(field) or field.startswith("_"):
            raise ValueError(f"{field!r} is not a field name")
    if len(set(fields)) != len(fields):
        raise ValueError("a field name twice")
    members: dict[str, Any] = {field: property(_item_getter(index)) for index, field in enumerate(fields)}
    members.update(_fields=fields, __slots__=(), __module__=module, __qualname__=qualname, __repr__=_namedtuple_repr)
    return type(qualname.rpartition(".")[2], (tuple,), members)


def _item_getter(index: int) -> Callable[[Any], Any]:
    return lambda self: tuple.__getitem__(self, index)


def _namedtuple_repr(self: Any) -> str:
    shown = ", ".join(f"{field}={item!r}" for field, item in zip(self._fields, self, strict=True))
    return f"{type(self).__name__}({shown})"


def _build_datetime(part: Any) -> dt.datetime:
    year, month, day, hour, minute, second, microsecond, fold, zone = _parts(part, 9)
    return dt.datetime(year, month, day, hour, minute, second, microsecond, _build_zone(zone), fold=fold)


def _build_time(part: Any) -> dt.time:
    hour, minute, second, microsecond, fold, zone = _parts(part, 6)
    return dt.time(hour, minute, second, microsecond, _build_zone(zone), fold=fold)


def _build_zone(part: Any) -> dt.tzinfo | None:
    if part is None:
        return None
    if type(part) is str:
        if not re.fullmatch(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*", part):
            raise ValueError(f"{part!r} is not the key of a time zone")
        return zoneinfo.ZoneInfo(part)
    microseconds, name = _parts(part, 2)
    offset = dt.timedelta(microseconds=_checked(microseconds, int))
    return dt.timezone(offset) if name is None else dt.timezone(offset, _checked(name, str))


def _build_numpy_scalar(part: Any) -> Any:
    code, data = _parts(part, 2)
    _checked(code, str)
    if not (len(code) == 1 and code in _NUMPY_CHARS) and not re.fullmatch(r"<[Mm]8(\[\w+\])?|\|V[0-9]{1,9}", code):
        raise ValueError(f"{code!r} is not the type of a numpy scalar")
    dtype = np.dtype(code)
    if len(_checked(data, bytes)) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for {dtype!r}")
    return np.ndarray((), dtype, bytearray(data))[()] if dtype.itemsize else np.zeros((), dtype)[()]


def _build_numpy_text(part: Any) -> Any:
    kind, data = _parts(part, 2)
    if kind == "str":
        return np.str_(_build_str(data))
    if kind == "bytes":
        return np.bytes_(_checked(data, bytes))
    raise ValueError(f"{kind!r} is not a kind of text")


def _build_numpy_array(part: Any) -> np.ndarray[Any, Any]:
    source = io.BytesIO(_checked(part, bytes))
    version = np.lib.format.read_magic(source)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read_header(source, max_header_size=_NPY_HEADER_BYTES_MAX)
    data = bytearray(source.read())
    if dtype.hasobject or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for an array of {dtype!r} and shape {shape}")
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, data, order="F" if fortran else "C")
    return array


def _build_numpy_dtype(part: Any) -> np.dtype[Any]:
    if not re.fullmatch(r"[<>|][a-zA-Z][0-9]{0,9}(\[\w+\])?", _checked(part, str)):
        raise ValueError(f"{part!r} is not a numpy dtype")
    dtype: np.dtype[Any] = np.dtype(part)
    if dtype.hasobject:
        raise ValueError("a dtype of objects")
    return dtype


def _build_torch(part: Any) -> Any:
    kind, described = _parts(part, 2)
    if type(described) is list and all(type(size) is int for size in described):
        described = tuple(described)
    elif type(described) is not str:
        raise ValueError("not a value of torch")
    value = TorchValue(_checked(kind, str), described)
    if "torch" not in sys.modules:
        return value
    from . import torch_state

    return torch_state.value_described(value.kind, value.value)


def _build_path(part: Any) -> pathlib.PurePath:
    name, text = _parts(part, 2)
    kinds: dict[str, type[pathlib.PurePath]] = {
        "PosixPath": pathlib.PosixPath,
        "PurePosixPath": pathlib.PurePosixPath,
    }
    return kinds[name](_build_str(text))


_BUILDERS: dict[Tag, Callable[[Any], Any]] = {
    Tag.INT: _build_int,
    Tag.STR: _build_str,
    Tag.BYTEARRAY: lambda part: bytearray(_checked(part, bytes)),
    Tag.TUPLE: lambda part: tuple(_checked(part, list)),
    Tag.SET: lambda part: set(_checked(part, list)),
    Tag.FROZENSET: lambda part: frozenset(_checked(part, list)),
    Tag.DICT: lambda part: dict(_paired(part)),
    Tag.COMPLEX: _build_complex,
    Tag.ORDERED_DICT: lambda part: OrderedDict(_paired(part)),
    Tag.DEFAULT_DICT: _build_default_dict,
    Tag.COUNTER: _build_counter,
    Tag.DEQUE: _build_deque,
    Tag.NAMED_TUPLE: _build_namedtuple,
    Tag.DATETIME: _build_datetime,
    Tag.DATE: lambda part: dt.date(*_parts(part, 3)),
    Tag.TIME: _build_time,
    Tag.TIMEDELTA: lambda part: dt.timedelta(*_parts(part, 3)),
    Tag.TIMEZONE: _build_zone,
    Tag.NUMPY_SCALAR: _build_numpy_scalar,
    Tag.NUMPY_TEXT: _build_numpy_text,
    Tag.NUMPY_ARRAY: _build_numpy_array,
    Tag.NUMPY_DTYPE: _build_numpy_dtype,
    Tag.TORCH: _build_torch,
    Tag.RANGE: lambda part: range(*_parts(part, 3)),
    Tag.SLICE: lambda part: slice(*_parts(part, 3)),
    Tag.ELLIPSIS: lambda part: Ellipsis,
    Tag.DECIMAL: lambda part: decimal.Decimal(_checked(part, str)),
    Tag.UUID: lambda part: uuid.UUID(bytes=_checked(part, bytes)),
    Tag.PATH: _build_path,
}
