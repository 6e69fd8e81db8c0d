"""The format on disk: a reader written from docs/format.md alone, and a run that was written once and for all.

Of Stepwell the reader uses nothing. The golden run must stay readable, and the same state must give the same bytes,
so that a change of the format cannot slip in unnoticed.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
import os
import pathlib
import random
import re
import shutil
import struct
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from tests.helpers import flip_byte, pack_of

import stepwell
from stepwell.errors import DamagedError
from stepwell.restore import catalogue as catalogues
from stepwell.restore.verify import verify
from stepwell.store import layout as layouts

GOLDEN = Path(__file__).parent / "golden" / "run"
needs_every_dtype = pytest.mark.skipif(
    not hasattr(torch, "float4_e2m1fn_x2"), reason="the golden run has dtypes that this torch does not know"
)
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

# ---- the reader; from here to the next line of dashes everything comes from docs/format.md

CHUNK = 4 << 20
KEY = re.compile(r"(\d{12})-(\d{4}|[1-9]\d{4,8})")
HEADER_DTYPE = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex64": "C64", "complex128": "F64", "complex32": "F16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "U8", "float4_e2m1fn_x2": "U8",
}  # fmt: skip
ITEM = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


def hash_of(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class Bad(Exception):
    """Something is not as the page says."""


def need(condition: object, what: str) -> None:
    if not condition:
        raise Bad(what)


def read_document(path: Path, kind: str) -> dict[str, Any]:
    data = path.read_bytes()
    document: dict[str, Any] = json.loads(data)
    need(document["format"] == kind and document["version"] == 1, f"{path} is no {kind} of version 1")
    own = document["xxh3_128"].encode()
    at = data.rindex(own)
    need(len(own) == 32 and hash_of(data[:at] + b"0" * 32 + data[at + 32 :]) == own.decode(), f"checksum of {path}")
    return document


class Tensor(NamedTuple):
    """A tensor as its bytes; Stepwell's dtype name, since numpy lacks some."""

    name: str
    dtype: str
    kind: str
    shape: tuple[int, ...]
    data: bytes


class Node(NamedTuple):
    """A container or object of the skeleton with its children filled in."""

    kind: str
    about: Any
    keys: list[Any]
    children: list[Any]


class Reader:
    """Reads one run."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.identity = read_document(run / "run.json", "stepwell-run")["run"]

    def committed(self) -> set[str]:
        folders = (self.run / "steps").iterdir()
        return {folder.name for folder in folders if KEY.fullmatch(folder.name) and (folder / "manifest.json").exists()}

    def newest(self) -> str | None:
        parents = {
            int(path.stem): read_document(path, "stepwell-attempt")["parent"]
            for path in (self.run / "attempts").iterdir()
            if re.fullmatch(r"(\d{4}|[1-9]\d{4,8})\.json", path.name)
        }
        steps = self.committed()
        tips: dict[int, str] = {}
        for key in sorted(steps):
            tips[int(key.split("-")[1])] = key
        for attempt in sorted(tips.keys() | parents.keys(), reverse=True):
            if attempt in tips:
                return tips[attempt]
            if parents[attempt] in steps:
                return str(parents[attempt])
        return None

    def read(self, key: str) -> tuple[Any, list[Tensor], dict[str, Any]]:
        """The tree of a step, its tensors in their order, its manifest."""
        folder = self.run / "steps" / key
        manifest = read_document(folder / "manifest.json", "stepwell-manifest")
        match = KEY.fullmatch(key)
        need(match and manifest["key"] == key and manifest["run"] == self.identity, "the manifest is another one's")
        assert match is not None
        need((manifest["step"], manifest["attempt"]) == (int(match[1]), int(match[2])), "step and attempt")
        layout = read_layout(self.run, manifest["layout"])
        need(len(layout["pack_nodes"]) == len(manifest["packs"]), "number of packs")
        data = []
        for number, reference in enumerate(manifest["packs"]):
            need(re.fullmatch(r"node\d{5}-\d{2,4}\.safetensors", reference["name"]), "name of a pack")
            need(reference["name"] == f"node{layout['pack_nodes'][number]:05d}-{number:02d}.safetensors", "its number")
            values = manifest["values_bytes"] if number == len(manifest["packs"]) - 1 else 0
            data.append(read_pack(folder / reference["name"], reference, manifest, layout, number, values))
        tensors = read_tensors(layout, data)
        values = decode(data[-1][int(layout["pack_data_bytes"][-1]) :])
        need(len(tensors) == manifest["tensor_count"], "number of tensors")
        leaves = (iter(tensors), iter(values))
        tree = build(decode(layout["skeleton"].tobytes())[0], *leaves)
        need(next(leaves[0], None) is None and next(leaves[1], None) is None, "leaves that are nowhere in the tree")
        return tree, tensors, manifest


def split_safetensors(data: bytes) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(data[:8], "little")
    need(size <= 100_000_000 and 8 + size <= len(data), "length of the header")
    return json.loads(data[8 : 8 + size]), 8 + size


def read_layout(run: Path, name: str) -> dict[str, Any]:
    data = (run / "layouts" / f"{name}.safetensors").read_bytes()
    need(hash_of(data) == name, "hash of the layout")
    header, begin = split_safetensors(data)
    about = header.pop("__metadata__")
    need(about["format"] == "stepwell-layout" and about["version"] == "1", "format of the layout")
    columns: dict[str, Any] = {word: about[word].split(",") for word in ("dtypes", "kinds", "devices")}
    for column, entry in header.items():
        low, high = entry["data_offsets"]
        dtype = {"I64": "<i8", "U8": "<u1"}[entry["dtype"]]
        columns[column] = np.frombuffer(data[begin + low : begin + high], dtype=dtype)
    return columns


def read_pack(
    path: Path, reference: dict[str, Any], manifest: dict[str, Any], layout: dict[str, Any], number: int, values: int
) -> bytes:
    """The data section of a pack, every chunk of it checked."""
    data = path.read_bytes()
    need(len(data) == reference["bytes"], "size of the pack")
    header, begin = split_safetensors(data)
    about = header.pop("__metadata__")
    own = about["header_xxh3_128"]
    need(own == reference["header_xxh3_128"], "the header's hash")
    need(hash_of(data[:begin].replace(own.encode(), b"0" * 32, 1)) == own, "the header's checksum")
    need(about["stepwell"] == "1" and about["format"] == "pt" and about["chunk_bytes"] == str(CHUNK), "format")
    need(all(about[word] == manifest[word] for word in ("run", "key", "layout")), "a pack of another step")
    need(begin % 4096 == 0 and begin == layout["pack_header_bytes"][number], "the header's length")
    section = data[begin:]
    need(len(section) == layout["pack_data_bytes"][number] + values, "the data's length")
    chunks = [hash_of(section[at : at + CHUNK]) for at in range(0, len(section), CHUNK)]
    need("".join(chunks) == about["chunks_xxh3_128"], "checksum of a chunk")
    if values:
        low, high = header.pop("__stepwell_values__")["data_offsets"]
        need((low, high) == (layout["pack_data_bytes"][number], len(section)), "place of the values")
    check_members(header, layout, number)
    return section


def check_members(header: dict[str, Any], layout: dict[str, Any], number: int) -> None:
    """The header says of every stored tensor what the layout says."""
    expected = {}
    for i, (name, dtype, shape) in enumerate(described(layout)):
        if layout["alias_of"][i] < 0 and layout["pack_index"][i] == number:
            size, begin = int(layout["sizes"][i]), int(layout["offsets"][i])
            word = HEADER_DTYPE[dtype]
            dims = [size] if dtype in ("float8_e8m0fnu", "float4_e2m1fn_x2") else list(shape)
            dims += [2] if dtype in ("complex128", "complex32") else []
            need(math.prod(dims) * ITEM.get(word, 1) == size, "size of a tensor")
            expected[name] = {"dtype": word, "shape": dims, "data_offsets": [begin, begin + size]}
    need(header == expected, "the header's members")


def described(layout: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    text, dims = layout["names"].tobytes(), layout["dims"].tolist()
    name_begin = dim_begin = 0
    for i, name_end in enumerate(layout["name_ends"]):
        dim_end = dim_begin + int(layout["dim_counts"][i])
        dtype = layout["dtypes"][layout["dtype_codes"][i]]
        yield text[name_begin:name_end].decode(), dtype, tuple(dims[dim_begin:dim_end])
        name_begin, dim_begin = int(name_end), dim_end


def read_tensors(layout: dict[str, Any], sections: list[bytes]) -> list[Tensor]:
    found = []
    for i, (name, dtype, shape) in enumerate(described(layout)):
        begin, size = int(layout["offsets"][i]), int(layout["sizes"][i])
        alias = int(layout["alias_of"][i])
        if alias >= 0:
            need(alias < i and layout["alias_of"][alias] == -1, "an alias of an alias")
            same = ("offsets", "sizes", "pack_index", "dtype_codes")
            need(all(layout[word][i] == layout[word][alias] for word in same), "an alias at another place")
        section = sections[int(layout["pack_index"][i])]
        kind = layout["kinds"][layout["kind_codes"][i]]
        found.append(Tensor(name, dtype, kind, shape, section[begin : begin + size]))
    return found


def build(plain: Any, tensors: Iterator[Tensor], values: Iterator[Any]) -> Any:
    if plain in (0, 1):
        return next(tensors) if plain == 0 else next(values)
    kind, about, keys, children = plain
    keys = [key if isinstance(key, str) else decode(key)[0] for key in keys]
    return Node(kind, about, keys, [build(child, tensors, values) for child in children])


def decode(data: bytes) -> Any:
    return msgspec.msgpack.Decoder(ext_hook=lambda code, body: EXTENSIONS[code](decode(bytes(body)))).decode(data)


def pairs(flat: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2]))


def zone(part: Any) -> dt.tzinfo | None:
    if part is None:
        return None
    offset, name = part  # a zoneinfo key needs the machine's time zone files: not in these tests
    delta = dt.timedelta(microseconds=offset)
    return dt.timezone(delta) if name is None else dt.timezone(delta, name)


def numpy_scalar(part: Any) -> Any:
    return np.frombuffer(part[1], dtype=np.dtype(part[0]))[0]


EXTENSIONS: dict[int, Any] = {
    1: lambda body: int.from_bytes(body, "little", signed=True),
    2: lambda body: body.decode("utf-8", "surrogatepass"),
    3: bytearray,
    4: tuple,
    5: set,
    6: frozenset,
    7: lambda body: dict(pairs(body)),
    8: lambda body: complex(*struct.unpack("<dd", body)),
    9: lambda body: OrderedDict(pairs(body)),
    10: lambda body: defaultdict({"list": list, "int": int, None: None}[body[0]], pairs(body[1])),
    11: lambda body: Counter(dict(pairs(body))),
    12: lambda body: deque(body[1], maxlen=body[0]),
    13: lambda body: namedtuple(body[1], body[2])(*body[3]),
    14: lambda body: dt.datetime(*body[:7], fold=body[7], tzinfo=zone(body[8])),
    15: lambda body: dt.date(*body),
    16: lambda body: dt.time(*body[:4], fold=body[4], tzinfo=zone(body[5])),
    17: lambda body: dt.timedelta(*body),
    18: zone,
    19: numpy_scalar,
    20: lambda body: np.str_(body[1].decode("utf-8", "surrogatepass")) if body[0] == "str" else np.bytes_(body[1]),
    21: lambda body: np.load(BytesIO(body), allow_pickle=False),
    22: np.dtype,
    23: lambda body: ("torch", body[0], body[1]),
    24: lambda body: range(*body),
    25: lambda body: slice(*body),
    26: lambda body: Ellipsis,
    27: decimal.Decimal,
    28: lambda body: uuid.UUID(bytes=body),
    29: lambda body: getattr(pathlib, body[0])(os.fsdecode(body[1])),
}

# ---- what is compared


Point = namedtuple("Point", ["x", "y"])


def all_values() -> dict[str, Any]:
    """One of each kind of plain value; nothing in it depends on versions, time or machine."""
    records = np.zeros(2, dtype=[("id", "<i4"), ("name", "<U3")])
    records["name"] = ["a", "bc"]
    return {
        "plain": [None, True, False, 0, -1, 2**64 - 1, -(2**63), 1.5, -0.0, "text", "ä∞", b"\x00\xff", [], {}],
        "numbers": [2**64, -(2**200), 1 + 2j, decimal.Decimal("1.10"), math.inf],
        "lone surrogate": "a\udc80b",
        "sequences": [(1, (2,)), {3, 1, 2}, {"b", "a"}, frozenset({(1, 2)}), bytearray(b"ab"), deque([1, 2], maxlen=5)],
        "mappings": [
            {1: "int", 1.5: "float", ("a", 2): None},
            OrderedDict(b=1, a=2),
            defaultdict(list, {"k": [1]}),
            Counter("abca"),
        ],
        "named": Point(1, "two"),
        "times": [
            dt.datetime(2024, 2, 29, 12, 30, 15, 250, dt.timezone.utc),
            dt.datetime(2024, 10, 27, 2, 30, fold=1),
            dt.date(1999, 12, 31),
            dt.time(23, 59, tzinfo=dt.timezone(dt.timedelta(hours=-3, minutes=-30), "here")),
            dt.timedelta(days=-1, seconds=5, microseconds=7),
            dt.timezone(dt.timedelta(hours=2)),
        ],
        "numpy": [
            np.float32(1.25), np.int8(-3), np.bool_(True), np.complex128(1 - 1j), np.datetime64("2024-01-02", "D"),
            np.str_("ä"), np.bytes_(b"b"), np.dtype("<f4"), np.array(["a", "bcd"]), records,
            np.arange(3, dtype=">i4"),
        ],
        "torch": [torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3]), torch.channels_last],
        "rest": [range(0, 10, 3), slice(1, None, 2), Ellipsis, uuid.UUID(int=7), pathlib.PurePosixPath("a/b")],
    }  # fmt: skip


def all_tensors() -> dict[str, Any]:
    """A tensor of every dtype, and every kind of shape."""
    bits = torch.arange(24, dtype=torch.uint8)
    tensors: dict[str, Any] = {
        str(dtype).removeprefix("torch."): bits.view(dtype).clone()
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
            torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.complex64, torch.complex32,
            torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
            torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
        )
    }  # fmt: skip
    tensors["bool"] = torch.tensor([True, False, True])
    tensors["complex128"] = torch.arange(6).to(torch.complex128).reshape(2, 3)
    tensors["scalar"], tensors["empty"] = torch.tensor(7.0), torch.zeros(0, 4)
    tensors["strided"] = torch.arange(12, dtype=torch.int32).reshape(3, 4).t()
    tensors["tied"] = tensors["strided"]
    tensors["array"] = np.arange(6, dtype=np.uint16).reshape(2, 3)
    return tensors


class Counting:
    """An object with a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 5, "sums": np.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nobody restores it here")


def golden_state(step: int) -> dict[str, Any]:
    """The state of the golden run; the tensors of later steps differ by one value, the layout does not."""
    module = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(step)
    return {
        "model": module,
        "tensors": all_tensors(),
        "counting": Counting(),
        "nested": [(np.zeros(2), 1), deque([np.ones(1)], maxlen=3), Point(np.ones(2), None), {7: np.ones(1), "k": 2}],
        "ordered": OrderedDict(a=np.ones(1)),
        "default": defaultdict(int, {"a": np.ones(1)}),
        "draws": random.Random(3),
        "values": all_values(),
        "epoch": step,
    }


def seed_everything() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def write_golden(run: Path) -> None:
    """Two attempts: steps 10 and 20, then from 10 on another 20. `python -m tests.test_format` makes the golden run."""
    with stepwell.Checkpointer(run) as ckpt:
        for step in (10, 20):
            seed_everything()
            ckpt.save(step, golden_state(step), metrics={"loss": 1 / step, "odd": math.nan}).wait(timeout=60)
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.restore({"epoch": 0}, step=10, strict=False)
        seed_everything()
        ckpt.save(20, golden_state(21)).wait(timeout=60)


def bytes_of(tensor: Any) -> bytes:
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same(found: Any, live: Any, where: str = "state") -> None:
    """What the reader found is what was saved: types, nesting, values, bits."""
    if isinstance(live, (torch.nn.Module, torch.optim.Optimizer, Counting)):
        assert isinstance(found, Node) and found.kind in ("module", "object"), where
        assert found.about == f"{type(live).__module__}.{type(live).__qualname__}", where
        if isinstance(live, Counting):
            (found,) = found.children
            assert found.kind == "dict" and found.about is None, where
        assert_same(found._replace(kind="dict", about=None), dict(live.state_dict()), where)
    elif isinstance(live, random.Random):
        assert (found.kind, found.about) == ("generator", "random.Random")
        assert found.children == [{"state": live.getstate()}]
    elif isinstance(found, Node):
        assert found.kind == ("namedtuple" if isinstance(live, Point) else type(live).__name__), where
        items = list(live.values()) if isinstance(live, dict) else list(live)
        assert len(items) == len(found.children), where
        if isinstance(live, dict):
            assert [(type(key), key) for key in found.keys] == [(type(key), key) for key in live], where
        about = {
            "deque": lambda: live.maxlen, "defaultdict": lambda: live.default_factory.__name__,
            "namedtuple": lambda: [type(live).__module__, type(live).__qualname__, list(live._fields)],
        }  # fmt: skip
        assert found.about == about.get(found.kind, lambda: None)(), where
        for number, (child, item) in enumerate(zip(found.children, items)):
            assert_same(child, item, f"{where}[{number}]")
    elif isinstance(found, Tensor):
        assert found.kind == ("numpy" if isinstance(live, np.ndarray) else "torch"), where
        assert found.dtype == str(live.dtype).removeprefix("torch.") and found.shape == tuple(live.shape), where
        assert found.data == bytes_of(live), where
    else:
        assert_same_value(found, live, where)


def words(value: Any) -> str:
    """`repr`, but for the order of sets, which is another one in every process."""
    kind = f"{type(value).__name__}, {getattr(value, 'maxlen', None)}, {getattr(value, 'default_factory', None)}"
    if isinstance(value, (set, frozenset)):
        return f"{kind}: {sorted(map(words, value))}"
    if isinstance(value, dict):
        return f"{kind}: {[(words(key), words(item)) for key, item in value.items()]}"
    if isinstance(value, (list, tuple, deque)) and not isinstance(value, torch.Size):
        return f"{kind}: {list(map(words, value))}"
    return repr(value)


def assert_same_value(found: Any, live: Any, where: str) -> None:
    if isinstance(live, (torch.dtype, torch.device, torch.memory_format, torch.Size)):
        kind = "size" if isinstance(live, torch.Size) else type(live).__name__
        text = list(live) if isinstance(live, torch.Size) else str(live).removeprefix("torch.")
        assert found == ("torch", kind, text), where
    elif isinstance(live, np.ndarray):
        assert found.dtype == live.dtype and found.shape == live.shape and (found == live).all(), where
    elif isinstance(live, (list, tuple, deque)):
        assert type(found).__name__ == type(live).__name__ and len(found) == len(live), where
        for number, (one, other) in enumerate(zip(found, live)):
            assert_same_value(one, other, f"{where}[{number}]")
    elif isinstance(live, dict):
        assert type(found) is type(live) and list(found) == list(live), where
        for key in live:
            assert_same_value(found[key], live[key], f"{where}[{key!r}]")
    else:
        assert type(found) is type(live) and found == live and words(found) == words(live), where


# ---- tests


@needs_every_dtype
def test_the_golden_run_is_read_by_the_reader_of_the_page() -> None:
    reader = Reader(GOLDEN)
    assert reader.committed() == {"000000000010-0001", "000000000020-0001", "000000000020-0002"}
    assert reader.newest() == "000000000020-0002"
    for key, step in (("000000000010-0001", 10), ("000000000020-0001", 20), ("000000000020-0002", 21)):
        tree, _, manifest = reader.read(key)
        assert tree.kind == "root" and tree.about is True
        assert_same(tree.children[0], golden_state(step))
        assert set(tree.children[1]) == {"python", "numpy", "torch"}
    assert manifest["parent"] == "000000000010-0001"
    assert reader.read("000000000020-0001")[2]["metrics"] == {"loss": 0.05, "odd": "nan"}


@needs_every_dtype
def test_the_golden_run_is_read_by_stepwell(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN, run)
    catalogue = catalogues.read(run)
    assert verify(catalogue, list(catalogue.steps)) == []
    assert catalogue.newest is not None and catalogue.newest.key == "000000000020-0002"
    loaded, live = stepwell.load(run), golden_state(21)
    for name, tensor in live["tensors"].items():
        assert loaded["tensors"][name].dtype == tensor.dtype and bytes_of(loaded["tensors"][name]) == bytes_of(tensor)
    assert loaded["epoch"] == 21 and words(loaded["values"]) == words(live["values"])


@needs_every_dtype
def test_the_same_state_gives_the_same_bytes(run: Path) -> None:
    """Only what is said here may differ: identities, times, the machine, and the hashes over them."""
    write_golden(run)

    def names(folder: Path) -> list[str]:
        files = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        return sorted(name for name in files if not name.startswith("telemetry"))

    assert names(run) == names(GOLDEN)
    variable = {"run", "identity", "created", "durable_seconds", "host", "pid", "xxh3_128", "header_xxh3_128"}

    def fixed(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: fixed(value) for key, value in part.items() if key not in variable}
        return [fixed(item) for item in part] if isinstance(part, list) else part

    for name in names(GOLDEN):
        new, old = (run / name).read_bytes(), (GOLDEN / name).read_bytes()
        if name.endswith(".json"):
            assert list(json.loads(new)) == list(json.loads(old)), f"fields of {name}"
            assert fixed(json.loads(new)) == fixed(json.loads(old)), name
        elif name.startswith("steps"):
            for word in ("run", "header_xxh3_128"):
                values = [split_safetensors(data)[0]["__metadata__"][word].encode() for data in (new, old)]
                new = new.replace(values[0], values[1], 1)
            assert new == old, name
        elif name.startswith("layouts"):
            assert new == old, name


def test_a_run_with_optimizer_several_packs_and_chunks(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "PACK_TABLE_BYTES_MAX", 1500)
    model = torch.nn.Sequential(torch.nn.Linear(1200, 1000), torch.nn.Linear(1000, 2))
    model[1].weight = torch.nn.Parameter(torch.randn(2, 1000))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 1200)).sum().backward()
    optimizer.step()
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(3, {"model": model, "optim": optimizer}).wait(timeout=60)
    tree, tensors, manifest = Reader(run).read("000000000003-0001")
    assert len(manifest["packs"]) > 1 and sum(pack["bytes"] for pack in manifest["packs"]) > 2 * CHUNK
    by_name = {tensor.name: tensor for tensor in tensors}
    assert by_name["model.0.weight"].data == bytes_of(model[0].weight)
    exp_avg = optimizer.state[model[1].bias]["exp_avg"]
    assert by_name["optim.state.1.bias.exp_avg"].data == bytes_of(exp_avg)
    optim = tree.children[0].children[1]
    assert (optim.kind, optim.keys) == ("optimizer", ["state", "param_groups"])
    names = [[name, list(parameter.shape)] for name, parameter in model.named_parameters()]
    assert optim.about == {"class": "torch.optim.adamw.AdamW", "named": True, "groups": [names]}
    assert optim.children[1] == [{k: v for k, v in optimizer.param_groups[0].items() if k != "params"}]


@pytest.mark.parametrize("name", ["run.json", "attempts/0002.json", "steps/000000000020-0002/manifest.json"])
def test_both_readers_see_a_changed_digit_in_a_document(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN, run)
    text = (run / name).read_text()
    (run / name).write_text(text.replace('"created": "2', '"created": "3', 1))
    with pytest.raises(Bad):
        reader = Reader(run)
        reader.newest()
        reader.read("000000000020-0002")
    try:
        catalogue = catalogues.read(run)
    except DamagedError:
        return
    assert verify(catalogue, list(catalogue.steps)) != []


@pytest.mark.parametrize("place", [30, 4000, -20_000, -1], ids=["metadata", "padding", "tensors", "values"])
def test_both_readers_see_a_flipped_bit_in_a_pack(tmp_path: Path, place: int) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN, run)
    pack = pack_of(run, "000000000020-0002")
    flip_byte(pack, place % pack.stat().st_size)
    with pytest.raises((Bad, ValueError)):
        Reader(run).read("000000000020-0002")
    catalogue = catalogues.read(run)
    findings = verify(catalogue, list(catalogue.steps))
    assert {finding.key for finding in findings} == {"000000000020-0002"}


if __name__ == "__main__":
    from tests import test_format

    test_format.write_golden(GOLDEN)
    shutil.rmtree(GOLDEN / "telemetry")
