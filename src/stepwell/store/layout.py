"""The layout: which tensors a save holds and where each one's bytes lie in its pack.

A layout is written once per shape of the state and named by its own hash; no data pointer is in it. It is stored as a
safetensors file of numpy columns, so 20 000 tensors cost no 20 000 Python objects on disk or on the wire.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from stepwell.errors import DamagedError
from stepwell.state.spec import ITEM_BYTES, TensorSpec
from stepwell.store import names as file_names
from stepwell.store import safetensors_header as header
from stepwell.store.checksum import chunk_count, hex_digest

Int64 = npt.NDArray[np.int64]

PAGE_BYTES = 4096
PACK_TABLE_BYTES_MAX = 15 << 20
PACK_FIXED_BYTES = 2048  # room for the run, the key, the layout's hash and our own checksum
VALUES = "__stepwell_values__"
FORMAT = "stepwell-layout"
VERSION = "1"
TENSOR_COUNT_MAX = 50_000_000


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class PackPlan:
    """One pack of a layout: `header_bytes` of room, then `data_bytes` of tensors; the last pack also gets the values.

    `image_offset` is where its image begins in the slot (a multiple of 4096).
    """

    name: str
    header_bytes: int
    data_bytes: int
    image_offset: int


@dataclass(frozen=True)
class Layout:
    """Names, dtypes, shapes and places of all tensors of one state on one rank; frozen and shared by many saves.

    `offsets[i]` is relative to the data of pack `pack_index[i]`; an alias (`alias_of[i]` ≥ 0) repeats the place of the
    tensor that it aliases and has no bytes of its own.
    """

    hash: str
    data: bytes = field(repr=False)
    names: list[str] = field(repr=False)
    specs: list[TensorSpec] = field(repr=False)
    alias_of: list[int] = field(repr=False)
    skeleton: bytes = field(repr=False)
    pack_index: Int64 = field(repr=False)
    offsets: Int64 = field(repr=False)
    packs: tuple[PackPlan, ...]

    @cached_property
    def stored(self) -> list[int]:
        """Indices of the tensors that have bytes of their own, by pack, then by offset."""
        own = np.flatnonzero(np.asarray(self.alias_of, dtype=np.int64) < 0)
        order = np.lexsort((self.sizes[own], self.offsets[own], self.pack_index[own]))
        return [int(i) for i in own[order]]

    @cached_property
    def on_host(self) -> list[int]:
        """Those of `stored` whose tensors were in host memory."""
        return self.stored if not self.on_device else [i for i in self.stored if self.specs[i].device == "cpu"]

    @cached_property
    def on_device(self) -> list[int]:
        """Those of `stored` whose tensors were on an accelerator."""
        return [i for i in self.stored if self.specs[i].device != "cpu"]

    @cached_property
    def sizes(self) -> Int64:
        return np.asarray([spec.nbytes for spec in self.specs], dtype=np.int64)

    @property
    def data_bytes(self) -> int:
        """Unique bytes of all tensors."""
        return sum(pack.data_bytes for pack in self.packs)

    def values_room(self, slot_bytes: int) -> int:
        """Bytes that the values may take in a slot of this size."""
        last = self.packs[-1]
        return slot_bytes - last.image_offset - last.header_bytes - last.data_bytes - PAGE_BYTES

    def slot_bytes(self, values_bytes: int) -> int:
        """The slot that this layout needs when its values may grow to `values_bytes`."""
        last = self.packs[-1]
        return round_up(last.image_offset + last.header_bytes + last.data_bytes + values_bytes + PAGE_BYTES, PAGE_BYTES)

    @cached_property
    def slot_offsets(self) -> list[int]:
        """Where each tensor lies in the slot."""
        begins = np.array([pack.image_offset + pack.header_bytes for pack in self.packs], dtype=np.int64)
        offsets: list[int] = (begins[self.pack_index] + self.offsets).tolist()
        return offsets

    @cached_property
    def tables(self) -> tuple[list[bytes], ...]:
        """The members of each pack's header that describe tensors."""
        tables: tuple[list[bytes], ...] = tuple([] for _ in self.packs)
        for i in self.stored:
            spec, begin = self.specs[i], int(self.offsets[i])
            dtype, shape = header.header_entry(spec.dtype, spec.shape, spec.nbytes)
            tables[int(self.pack_index[i])].append(
                header.entry_json(self.names[i], dtype, shape, begin, begin + spec.nbytes)
            )
        return tables


def values_room_for(values_bytes: int) -> int:
    """Room reserved for values of this size: at least twice, a power of two, so that small growth changes nothing."""
    return 1 << max(16, (2 * values_bytes).bit_length())


def shard_name(name: str, box: tuple[tuple[int, int], ...]) -> str:
    """How a pack calls a shard: `name@[a:b,c:d]`, half-open bounds in the global tensor."""
    return f"{name}@[{','.join(f'{begin}:{end}' for begin, end in box)}]"


def build(
    names: list[str],
    specs: list[TensorSpec],
    alias_of: list[int],
    skeleton: bytes,
    *,
    values_bytes_max: int,
    rank: int = 0,
    node: int = 0,
) -> Layout:
    """Give every tensor its place: larger dtypes first, back to back, a new pack before a header passes 16 MiB.

    Deterministic: equal arguments give an equal hash.
    """
    own = [i for i in range(len(names)) if alias_of[i] < 0]
    own.sort(key=lambda i: -ITEM_BYTES[specs[i].dtype])
    pack_of, offset_of = [0] * len(names), [0] * len(names)
    rows: list[tuple[int, int]] = []  # (table bytes, data bytes) of each finished pack
    table_bytes = position = 0
    for i in own:
        row_bytes = 160 + 6 * len(names[i]) + 21 * len(specs[i].shape)  # never less than what entry_json makes
        if table_bytes and table_bytes + row_bytes > PACK_TABLE_BYTES_MAX:
            rows.append((table_bytes, position))
            table_bytes = position = 0
        pack_of[i], offset_of[i] = len(rows), position
        table_bytes += row_bytes
        position += specs[i].nbytes
    rows.append((table_bytes, position))
    for i, target in enumerate(alias_of):
        if target >= 0:
            pack_of[i], offset_of[i] = pack_of[target], offset_of[target]

    packs: list[PackPlan] = []
    image_offset = 0
    for k, (table, data) in enumerate(rows):
        values = values_bytes_max if k == len(rows) - 1 else 0
        room = round_up(8 + PACK_FIXED_BYTES + table + 32 * chunk_count(data + values), PAGE_BYTES)
        packs.append(PackPlan(file_names.pack_file(node, k), room, data, image_offset))
        image_offset = round_up(image_offset + room + data + values, PAGE_BYTES)
    pack_index = np.asarray(pack_of, dtype=np.int64)
    offsets = np.asarray(offset_of, dtype=np.int64)
    encoded = _encode(names, specs, alias_of, skeleton, pack_index, offsets, packs, rank)
    return Layout(hex_digest(encoded), encoded, names, specs, alias_of, skeleton, pack_index, offsets, tuple(packs))


def _encode(
    names: list[str],
    specs: list[TensorSpec],
    alias_of: list[int],
    skeleton: bytes,
    pack_index: Int64,
    offsets: Int64,
    packs: list[PackPlan],
    rank: int,
) -> bytes:
    encoded = [name.encode("utf-8", "surrogatepass") for name in names]
    vocabularies = {
        "dtypes": sorted({spec.dtype for spec in specs}),
        "kinds": sorted({spec.kind for spec in specs}),
        "devices": sorted({spec.device for spec in specs}),
    }
    code = {key: {word: i for i, word in enumerate(words)} for key, words in vocabularies.items()}
    dims = [size for spec in specs for size in spec.shape]
    columns: dict[str, npt.NDArray[np.generic]] = {
        "name_ends": np.cumsum([len(name) for name in encoded], dtype=np.int64),
        "dims": np.asarray(dims, dtype=np.int64),
        "box_shapes": np.asarray(dims, dtype=np.int64),  # one process: every shard is the whole tensor
        "box_offsets": np.zeros(len(dims), dtype=np.int64),
        "ranks": np.full(len(specs), rank, dtype=np.int64),
        "dim_counts": np.asarray([len(spec.shape) for spec in specs], dtype=np.int64),
        "sizes": np.asarray([spec.nbytes for spec in specs], dtype=np.int64),
        "alias_of": np.asarray(alias_of, dtype=np.int64),
        "pack_index": pack_index,
        "offsets": offsets,
        "dtype_codes": np.asarray([code["dtypes"][spec.dtype] for spec in specs], dtype=np.int64),
        "kind_codes": np.asarray([code["kinds"][spec.kind] for spec in specs], dtype=np.int64),
        "device_codes": np.asarray([code["devices"][spec.device] for spec in specs], dtype=np.int64),
        "pack_header_bytes": np.asarray([pack.header_bytes for pack in packs], dtype=np.int64),
        "pack_data_bytes": np.asarray([pack.data_bytes for pack in packs], dtype=np.int64),
        "pack_image_offsets": np.asarray([pack.image_offset for pack in packs], dtype=np.int64),
        "pack_nodes": np.asarray([int(pack.name[4:9]) for pack in packs], dtype=np.int64),
        "names": np.frombuffer(b"".join(encoded), dtype=np.uint8),
        "skeleton": np.frombuffer(skeleton, dtype=np.uint8),
    }
    metadata = {"format": FORMAT, "version": VERSION, **{key: ",".join(words) for key, words in vocabularies.items()}}
    members = [_json_member(header.METADATA, metadata)]
    position = 0
    for name, column in columns.items():
        dtype = "I64" if column.dtype == np.int64 else "U8"
        members.append(header.entry_json(name, dtype, column.shape, position, position + column.nbytes))
        position += column.nbytes
    room = round_up(8 + sum(map(len, members)) + len(members) + 2, 8)
    return header.assemble(members, room) + b"".join(column.tobytes() for column in columns.values())


def _json_member(name: str, value: dict[str, str]) -> bytes:
    return msgspec.json.encode(name) + b":" + msgspec.json.encode(value)


def parse(data: bytes, where: str) -> Layout:
    """Read a layout that may come from a stranger: every length, index and offset is checked before it is used.

    Raises `DamagedError`.
    """

    def wrong(what: str) -> DamagedError:
        return DamagedError(f"the layout is wrong: {what}", where=where)

    head = header.parse(data, len(data), where)
    if head.metadata.get("format") != FORMAT or head.metadata.get("version") != VERSION:
        raise DamagedError(
            "not a layout that this version reads",
            where=where,
            expected=f"{FORMAT} {VERSION}",
            found=f"{head.metadata.get('format')} {head.metadata.get('version')}",
        )

    def raw(name: str) -> memoryview:
        entry = head.entries.get(name)
        if entry is None:
            raise wrong(f"column {name} is missing")
        return memoryview(data)[head.header_bytes + entry.begin : head.header_bytes + entry.end]

    def column(name: str, length: int | None, low: int, high: int) -> Int64:
        if head.entries[name].dtype != "I64" if name in head.entries else True:
            raise wrong(f"column {name} is missing or not I64")
        values = np.frombuffer(raw(name), dtype=np.int64)
        if length is not None and len(values) != length:
            raise wrong(f"column {name} has {len(values)} rows, not {length}")
        if len(values) and (int(values.min()) < low or int(values.max()) > high):
            raise wrong(f"column {name} has a value outside [{low}, {high}]")
        return values

    huge = 1 << 62
    ends = column("name_ends", None, 0, len(raw("names")))
    count = len(ends)
    if count > TENSOR_COUNT_MAX or np.any(np.diff(ends) < 0) or (count and int(ends[-1]) != len(raw("names"))):
        raise wrong("names do not add up")
    dim_counts = column("dim_counts", count, 0, 1024)
    dims = column("dims", int(dim_counts.sum()), 0, huge)
    column("box_shapes", len(dims), 0, huge)
    column("box_offsets", len(dims), 0, huge)
    column("ranks", count, 0, 1 << 30)
    sizes = column("sizes", count, 0, huge)
    alias_of = column("alias_of", count, -1, count - 1)
    headers = column("pack_header_bytes", None, 8, header.HEADER_BYTES_MAX + 8)
    pack_count = len(headers)
    if not pack_count:
        raise wrong("there is no pack")
    data_bytes = column("pack_data_bytes", pack_count, 0, huge)
    images = column("pack_image_offsets", pack_count, 0, huge)
    nodes = column("pack_nodes", pack_count, 0, 99_999)
    pack_index = column("pack_index", count, 0, pack_count - 1)
    offsets = column("offsets", count, 0, huge)
    words = {key: head.metadata.get(key, "").split(",") for key in ("dtypes", "kinds", "devices")}
    dtype_codes = column("dtype_codes", count, 0, len(words["dtypes"]) - 1)
    kind_codes = column("kind_codes", count, 0, len(words["kinds"]) - 1)
    device_codes = column("device_codes", count, 0, len(words["devices"]) - 1)

    if count and not (set(words["kinds"]) <= {"torch", "numpy"} and set(words["dtypes"]) <= set(ITEM_BYTES)):
        raise wrong(f"unknown kinds or dtypes: {words['kinds']}, {words['dtypes']}")
    own = np.flatnonzero(alias_of < 0)
    if np.any(alias_of >= np.arange(count)) or np.any(alias_of[alias_of[alias_of >= 0]] >= 0):
        raise wrong("an alias does not point to an earlier stored tensor")
    order = own[np.lexsort((sizes[own], offsets[own], pack_index[own]))]
    for k in range(pack_count):
        members = order[pack_index[order] == k]
        expected = np.concatenate(([0], np.cumsum(sizes[members])))
        if not np.array_equal(expected[:-1], offsets[members]) or int(expected[-1]) != int(data_bytes[k]):
            raise wrong("tensors have holes, overlaps or reach outside their pack")

    name_bytes = bytes(raw("names"))
    starts = [0, *(int(end) for end in ends)]
    dim_ends = [0, *(int(end) for end in np.cumsum(dim_counts))]
    all_dims = [int(size) for size in dims]
    specs: list[TensorSpec] = []
    for i in range(count):
        shape = tuple(all_dims[dim_ends[i] : dim_ends[i + 1]])
        dtype = words["dtypes"][dtype_codes[i]]
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        if nbytes != sizes[i]:
            raise wrong(f"tensor {i} of shape {shape} and dtype {dtype} has {int(sizes[i])} bytes, not {nbytes}")
        specs.append(TensorSpec(dtype, shape, nbytes, words["kinds"][kind_codes[i]], words["devices"][device_codes[i]]))
    try:
        names = [name_bytes[starts[i] : starts[i + 1]].decode("utf-8", "surrogatepass") for i in range(count)]
    except UnicodeDecodeError:
        raise wrong("a name is not UTF-8") from None
    if len(set(names)) != count:
        raise wrong("a name occurs twice")
    packs = tuple(
        PackPlan(file_names.pack_file(int(nodes[k]), k), int(headers[k]), int(data_bytes[k]), int(images[k]))
        for k in range(pack_count)
    )
    aliases = [int(target) for target in alias_of]
    skeleton = bytes(raw("skeleton"))
    return Layout(hex_digest(data), data, names, specs, aliases, skeleton, pack_index, offsets, packs)
