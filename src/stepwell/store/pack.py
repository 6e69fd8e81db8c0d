"""The header of a pack: a safetensors header that carries the checksums of its own data and of itself."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from stepwell.errors import DamagedError
from stepwell.store import safetensors_header as header
from stepwell.store.checksum import CHUNK_BYTES, DIGEST_BYTES, chunk_count, hex_digest
from stepwell.store.layout import VALUES, Layout

_SELF = "header_xxh3_128"
_ZEROS = "0" * 32


@dataclass(frozen=True, slots=True)
class PackHeader:
    """What a pack says of itself, checked: sizes in bytes, one 16-byte digest per chunk of the data."""

    run: str
    key: str
    layout: str
    hash: str
    header_bytes: int
    data_bytes: int
    values_begin: int
    values_bytes: int
    digests: tuple[bytes, ...]


def encode(
    layout: Layout, pack_index: int, *, run: str, key: str, digests: list[bytes], values_bytes: int
) -> tuple[bytes, str]:
    """The finished header of one pack, exactly `header_bytes` long, and its own hash as hex.

    `digests` has one entry per chunk of tensors and values together; only the last pack has values.
    """
    plan = layout.packs[pack_index]
    metadata = {
        "format": "pt",
        _SELF: _ZEROS,  # first, so that no other run of zeros comes before it
        "stepwell": "1",
        "run": run,
        "key": key,
        "layout": layout.hash,
        "chunk_bytes": str(CHUNK_BYTES),
        "chunks_xxh3_128": b"".join(digests).hex(),
    }
    members = [msgspec.json.encode(header.METADATA) + b":" + msgspec.json.encode(metadata)]
    members += layout.tables[pack_index]
    if values_bytes:
        members.append(
            header.entry_json(VALUES, "U8", (values_bytes,), plan.data_bytes, plan.data_bytes + values_bytes)
        )
    blank = header.assemble(members, plan.header_bytes)
    own_hash = hex_digest(blank)
    return blank.replace(_ZEROS.encode(), own_hash.encode(), 1), own_hash


def parse(data: bytes, file_bytes: int, where: str) -> PackHeader:
    """Read and check a pack's header (its whole bytes, prefix included). Raises `DamagedError`."""
    room = header.header_room(data, file_bytes, where)
    own = _own_hash(data[:room], where)
    blank = data[:room].replace(f'"{_SELF}":"{own}"'.encode(), f'"{_SELF}":"{_ZEROS}"'.encode(), 1)
    if hex_digest(blank) != own:
        raise DamagedError("the header's checksum is wrong", where=where, expected=own, found=hex_digest(blank))
    # Where tensors lie is said by the layout, which is checked already: only our own two members are decoded here.
    try:
        own_members = msgspec.json.decode(data[8:room], type=_OwnMembers)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError("the header is not a safetensors header", where=where, found=str(error)) from None
    meta, data_bytes = own_members.metadata, file_bytes - room
    if meta.get("stepwell") != "1" or meta.get("chunk_bytes") != str(CHUNK_BYTES):
        raise DamagedError("not a pack that this version reads", where=where, found=meta.get("stepwell"))
    try:
        joined = bytes.fromhex(meta["chunks_xxh3_128"])
        run, key, layout = meta["run"], meta["key"], meta["layout"]
    except (KeyError, ValueError) as error:
        raise DamagedError("the pack's metadata is incomplete", where=where, found=str(error)) from None
    digests = tuple(joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES))
    if len(digests) != chunk_count(data_bytes):
        raise DamagedError(
            "the pack has the wrong number of checksums",
            where=where,
            expected=chunk_count(data_bytes),
            found=len(digests),
        )
    begin, end = own_members.values.data_offsets if own_members.values else (data_bytes, data_bytes)
    if not 0 <= begin <= end == data_bytes:
        raise DamagedError(
            "the values do not lie at the pack's end", where=where, expected=data_bytes, found=f"[{begin}, {end})"
        )
    return PackHeader(run, key, layout, own, room, data_bytes, begin, end - begin, digests)


def describes(data: bytes, header: PackHeader, layout: Layout, pack_index: int) -> bool:
    """True when a pack's header bytes are exactly those that its layout and checksums call for, so that what other
    safetensors readers see in it is right too."""
    expected, _ = encode(
        layout,
        pack_index,
        run=header.run,
        key=header.key,
        digests=list(header.digests),
        values_bytes=header.values_bytes,
    )
    return expected == data[: header.header_bytes]


class _ValuesEntry(msgspec.Struct):
    data_offsets: tuple[int, int]


class _OwnMembers(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name=header.METADATA, default_factory=dict)
    values: _ValuesEntry | None = msgspec.field(name=VALUES, default=None)


def _own_hash(data: bytes, where: str) -> str:
    mark = f'"{_SELF}":"'.encode()
    begin = data.find(mark)
    own = data[begin + len(mark) : begin + len(mark) + 32]
    if begin < 0 or len(own) != 32:
        raise DamagedError("not a Stepwell pack: it carries no checksum of its own", where=where)
    try:
        bytes.fromhex(own.decode("ascii"))
    except ValueError:
        raise DamagedError("the header's checksum is not a checksum", where=where) from None
    return own.decode("ascii")
