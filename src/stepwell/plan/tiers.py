"""Places that a state is kept in: defaults of each class, a cluster's own from a TOML file, measured ones from a bench.

Every default names its source and is there to be replaced: a class says little about one system.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stepwell.errors import UsageError
from stepwell.plan.spelling import misspelt
from stepwell.units import parse_bytes, parse_seconds

NODES_PER_UNIT = 32  # of the storage guidance for DGX H100 SuperPOD: one scalable unit


@dataclass(frozen=True)
class Tier:
    """One place.

    Attributes:
        kind: "nvme" (in each node), "nfs", "parallel" or "object".
        write_bytes_per_second, read_bytes_per_second: of each node for "nvme", of the whole system for the others,
            with large requests, sustained.
        node_bytes_per_second: what one node can move to or from it; 0 for "nvme".
        ops_per_second: metadata operations (requests, for "object") that it serves; `latency_seconds` of one.
        capacity_bytes: of each node for "nvme", else of the system; 0 when unknown.
        prices: per TB and month, per GB/s and month, per million write requests; in `currency`, as of `price_date`;
            0 when not given.
        origin: "assumed", "published" or "measured"; `source` says where from.
    """

    name: str
    kind: str
    write_bytes_per_second: float
    read_bytes_per_second: float
    node_bytes_per_second: float
    ops_per_second: float
    latency_seconds: float
    capacity_bytes: int = 0
    price_per_tb: float = 0.0
    price_per_gbs: float = 0.0
    price_per_million_puts: float = 0.0
    currency: str = "USD"
    price_date: str = ""
    origin: str = "assumed"
    source: str = ""

    @property
    def local(self) -> bool:
        """True where the loss of a node loses what it holds."""
        return self.kind == "nvme"

    def write_rate(self, nodes: int, writer_nodes: int | None = None) -> float:
        """Bytes per second that `writer_nodes` of the job's nodes can write together, alone on the system."""
        return self._rate(self.write_bytes_per_second, nodes if writer_nodes is None else writer_nodes)

    def read_rate(self, nodes: int) -> float:
        """Bytes per second that the job's nodes can read together."""
        return self._rate(self.read_bytes_per_second, nodes)

    def _rate(self, of_system: float, nodes: int) -> float:
        if self.local:
            return of_system * nodes
        return min(of_system, self.node_bytes_per_second * nodes)


def default_tier(kind: str, nodes: int) -> Tier:
    """A class's default for a job of this size. Raises `UsageError` with the nearest right spelling."""
    kind = ALSO_CALLED.get(kind.lower(), kind)
    units = max(1.0, nodes / NODES_PER_UNIT)
    if kind == "nvme":
        return Tier(
            "nvme", "nvme", 6e9, 12e9, 0.0, 100_000, 50e-6, capacity_bytes=7_680_000_000_000,
            source="assumed: two data-centre NVMe drives of a node as one volume",
        )  # fmt: skip
    if kind == "nfs":
        return Tier(
            "nfs", "nfs", 1e9, 1.5e9, 1e9, 5_000, 1e-3,
            source="assumed: one NFS server behind 10 Gbit/s",
        )  # fmt: skip
    if kind == "parallel":
        return Tier(
            "parallel", "parallel", 20e9 * units, 40e9 * units, 4e9, 50_000, 500e-6, origin="published",
            source="DGX H100 SuperPOD storage guidance, 'better': 20 GB/s write, 40 read for 32 nodes, 4 per node; "
            "metadata rate assumed",
        )  # fmt: skip
    if kind == "object":
        return Tier(
            "object", "object", 10e9 * units, 20e9 * units, 1e9, 3_500, 50e-3,
            source="assumed: 10 GB/s write for 32 nodes, 1 for each; 3 500 PUT/s for each prefix is S3's",
        )  # fmt: skip
    raise misspelt(
        "storage", kind, [*KINDS, *ALSO_CALLED], "; several as in nvme+parallel; or a TOML file with your own"
    )


KINDS = ("nvme", "nfs", "parallel", "object")
ALSO_CALLED = {
    "ssd": "nvme", "local": "nvme", "nas": "nfs", "lustre": "parallel", "gpfs": "parallel", "weka": "parallel",
    "beegfs": "parallel", "cephfs": "parallel", "s3": "object", "gcs": "object",
}  # fmt: skip
_ORDER = {kind: index for index, kind in enumerate(KINDS)}


def tiers_named(text: str, nodes: int) -> list[Tier]:
    """`nvme+parallel`, or the path of a TOML file; in the order in which a save goes through them."""
    if text.endswith(".toml"):
        return _from_toml(text, nodes)
    chain = [default_tier(part.strip(), nodes) for part in text.split("+")]
    return _ordered(chain, text)


def _ordered(chain: list[Tier], where: str) -> list[Tier]:
    if len({tier.name for tier in chain}) != len(chain):
        raise UsageError("a tier is named twice", where=where)
    return sorted(chain, key=lambda tier: _ORDER[tier.kind])


_RATES = {"write": "write_bytes_per_second", "read": "read_bytes_per_second", "per_node": "node_bytes_per_second"}
_NUMBERS = ("ops_per_second", "price_per_tb", "price_per_gbs", "price_per_million_puts")
_TEXTS = ("name", "currency", "price_date", "source")


def _from_toml(path: str, nodes: int) -> list[Tier]:
    """`[[tier]]` tables: kind, and what differs from the default: name, write, read, per_node (`"40 GB/s"`),
    ops_per_second, latency (`"1ms"`), capacity (`"2 PB"`), prices, currency, price_date, source."""
    import msgspec

    try:
        with open(path, "rb") as file:
            document = msgspec.toml.decode(file.read())
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError("the storage file cannot be read", where=path, found=str(error)) from None
    tables = document.get("tier")
    if not isinstance(tables, list) or not tables:
        raise UsageError("the storage file names no tier", where=path, expected="[[tier]] tables")
    return _ordered([_tier_of(table, nodes, f"{path}, tier {index + 1}") for index, table in enumerate(tables)], path)


def _tier_of(table: Mapping[str, Any], nodes: int, where: str) -> Tier:
    if "kind" not in table:
        raise UsageError("a tier without a kind", where=where, expected="kind = " + " or ".join(map(repr, KINDS)))
    tier = default_tier(str(table["kind"]), nodes)
    given: dict[str, Any] = {"source": where, "origin": "published"}
    for key, value in table.items():
        if key == "kind":
            continue
        if key in _RATES:
            given[_RATES[key]] = float(parse_rate(str(value)))
        elif key in _TEXTS:
            given[key] = str(value)
        elif key == "latency":
            given["latency_seconds"] = parse_seconds(str(value))
        elif key == "capacity":
            given["capacity_bytes"] = parse_bytes(str(value))
        elif key in _NUMBERS and isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
            given[key] = float(value)
        else:
            known = [*_RATES, *_TEXTS, "latency", "capacity", *_NUMBERS]
            near = difflib.get_close_matches(key, known, 1)
            raise UsageError(
                "a tier has something that cannot be read",
                where=where,
                found=f"{key} = {value!r}",
                expected=f"{near[0]}?" if near and near[0] != key else "one of " + ", ".join(known),
            )
    for name in ("write_bytes_per_second", "read_bytes_per_second", "ops_per_second"):
        if given.get(name, 1) <= 0:
            raise UsageError("a rate is above zero", where=where, found=f"{name} = {given[name]}")
    return replace(tier, **given)


def parse_rate(text: str) -> int:
    """`40 GB/s` in bytes per second."""
    if not text.rstrip().endswith("/s"):
        raise UsageError("not a rate", expected="a size per second, as in 40 GB/s", found=repr(text))
    return parse_bytes(text.rstrip()[:-2])


def measured(chain: list[Tier], path: str) -> list[Tier]:
    """The tiers with what `stepwell bench --json` found: its figures `bytes_per_second{write,sustained}` and so on
    replace the assumptions of the tier that `inputs.tier` names, or of the only one.

    Sustained figures go before burst ones. Raises `UsageError` for a file that is not such a document.
    """
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        if document["format"] != "stepwell.bench" or document["version"] != 1:
            raise UsageError(
                "not a benchmark of this version",
                where=path,
                expected="stepwell.bench, version 1",
                found=f"{document['format']}, version {document['version']}",
            )
        values = {figure["id"]: figure["value"] for figure in document["figures"]}
        name = document["inputs"].get("tier")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError("the benchmark's result cannot be read", where=path, found=str(error)) from None
    index = next((i for i, tier in enumerate(chain) if name in (tier.name, tier.kind)), 0 if len(chain) == 1 else None)
    if index is None:
        raise UsageError(
            "which tier was measured is not said",
            where=path,
            expected=" or ".join(tier.name for tier in chain),
            found=name,
        )
    given: dict[str, Any] = {}
    for field, ids in _MEASURED.items():
        for one in ids:
            if isinstance(values.get(one), (int, float)) and values[one] > 0:
                given[field] = float(values[one])
                break
    if not given:
        raise UsageError("the benchmark measured nothing that a plan can use", where=path)
    if not chain[index].local and "write_bytes_per_second" in given:
        given["node_bytes_per_second"] = max(chain[index].node_bytes_per_second, given["write_bytes_per_second"])
    tier = replace(chain[index], **given, origin="measured", source=path)
    return [*chain[:index], tier, *chain[index + 1 :]]


_MEASURED = {
    "write_bytes_per_second": ("bytes_per_second{write,sustained}", "bytes_per_second{write,burst}"),
    "read_bytes_per_second": ("bytes_per_second{read,sustained}", "bytes_per_second{read,burst}"),
    "ops_per_second": ("metadata_ops_per_second",),
}
