"""The header of a safetensors file: how it is written, and how one from a stranger is read.

A safetensors file is an 8-byte little-endian length N, N bytes of JSON, then the tensors' bytes back to back. The
format forbids holes, overlaps and trailing bytes; this reader enforces all of that before anybody uses an offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from stepwell.errors import DamagedError

HEADER_BYTES_MAX = 100_000_000
METADATA = "__metadata__"
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip

# Our canonical dtype → (the header's dtype, its trailing dimension). What safetensors has no name for travels as
# something that every safetensors reader opens; the layout keeps the true dtype.
HEADER_DTYPE: dict[str, tuple[str, int | None]] = {
    "float64": ("F64", None), "float32": ("F32", None), "float16": ("F16", None), "bfloat16": ("BF16", None),
    "int64": ("I64", None), "int32": ("I32", None), "int16": ("I16", None), "int8": ("I8", None),
    "uint64": ("U64", None), "uint32": ("U32", None), "uint16": ("U16", None), "uint8": ("U8", None),
    "bool": ("BOOL", None), "complex64": ("C64", None), "complex128": ("F64", 2), "complex32": ("F16", 2),
    "float8_e4m3fn": ("F8_E4M3", None), "float8_e5m2": ("F8_E5M2", None),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", None), "float8_e5m2fnuz": ("F8_E5M2FNUZ", None),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a safetensors file; offsets are half-open and relative to the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: entries cover `data_bytes` without hole or overlap."""

    metadata: dict[str, str]
    entries: dict[str, HeaderEntry]
    header_bytes: int
    data_bytes: int


class _RawEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def entry_json(name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> bytes:
    """One `"name":{…}` member of the header's JSON, without a comma."""
    dims = ",".join(map(str, shape))
    key = msgspec.json.encode(name)
    return key + f':{{"dtype":"{dtype}","shape":[{dims}],"data_offsets":[{begin},{end}]}}'.encode()


def header_entry(dtype: str, shape: tuple[int, ...], nbytes: int) -> tuple[str, tuple[int, ...]]:
    """What the header says for a tensor of our canonical dtype: (header dtype, header shape)."""
    known = HEADER_DTYPE.get(dtype)
    if known is None:  # float4, e8m0 and whatever comes: raw bytes, which every reader opens
        return "U8", (nbytes,)
    name, trailing = known
    return name, (shape if trailing is None else (*shape, trailing))


def assemble(members: list[bytes], room_bytes: int) -> bytes:
    """The length and the JSON, padded with spaces to exactly `room_bytes`.

    Raises `ValueError` when the members do not fit.
    """
    text = b"{" + b",".join(members) + b"}"
    if len(text) + 8 > room_bytes:
        raise ValueError(f"a header of {len(text) + 8} bytes does not fit into {room_bytes}")
    size = room_bytes - 8
    return size.to_bytes(8, "little") + text.ljust(size, b" ")


def header_room(first_bytes: bytes, file_bytes: int, where: str) -> int:
    """The header's length including its 8-byte prefix, from a file's first 8 bytes; checked against the file's size."""
    if len(first_bytes) < 8:
        raise DamagedError("not a safetensors file: too short", where=where, expected=">= 8 bytes", found=file_bytes)
    size = int.from_bytes(first_bytes[:8], "little")
    if size > HEADER_BYTES_MAX or size + 8 > file_bytes:
        raise DamagedError(
            "the header's length is impossible",
            where=where,
            expected=f"at most {min(HEADER_BYTES_MAX, max(0, file_bytes - 8))} bytes",
            found=f"{size} bytes",
        )
    return size + 8


def parse(header: bytes, file_bytes: int, where: str) -> Header:
    """Parse and check a whole header (prefix included). Raises `DamagedError`; executes and allocates nothing else."""
    room = header_room(header, file_bytes, where)
    try:
        raw = msgspec.json.decode(header[8:room], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(METADATA), type=dict[str, str]) if METADATA in raw else {}
        rows = {name: msgspec.json.decode(value, type=_RawEntry) for name, value in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError("the header is not a safetensors header", where=where, found=str(error)) from None
    data_bytes = file_bytes - room
    entries: dict[str, HeaderEntry] = {}
    position = 0
    for name, row in sorted(rows.items(), key=lambda item: item[1].data_offsets):
        begin, end = row.data_offsets
        item_bytes = ITEM_BYTES.get(row.dtype)
        if item_bytes is None:
            raise DamagedError("a tensor has an unknown dtype", where=f"{where}: {name!r}", found=row.dtype)
        count = 1
        for size in row.shape:
            if size < 0:
                raise DamagedError("a tensor has a negative size", where=f"{where}: {name!r}", found=row.shape)
            count *= size
        if begin != position or end - begin != count * item_bytes or end > data_bytes:
            raise DamagedError(
                "a tensor's offsets are wrong (hole, overlap, size or end of file)",
                where=f"{where}: {name!r}",
                expected=f"[{position}, {position + count * item_bytes}) within {data_bytes} bytes",
                found=f"[{begin}, {end})",
            )
        position = end
        entries[name] = HeaderEntry(row.dtype, tuple(row.shape), begin, end)
    if position != data_bytes:
        raise DamagedError(
            "the file has bytes that belong to no tensor", where=where, expected=position, found=data_bytes
        )
    return Header(metadata, entries, room, data_bytes)
