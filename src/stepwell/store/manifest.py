"""The small JSON documents of a run: run.json, the attempts, and the manifest whose publication is the commit."""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

from stepwell.errors import DamagedError
from stepwell.store import names
from stepwell.store.checksum import hex_digest

VERSION = 1
_ZEROS = "0" * 32
DOCUMENT_BYTES_MAX = 64 << 20


class RunDocument(msgspec.Struct, frozen=True):
    """`run.json`: what this folder is."""

    run: str
    created: str
    writer: str
    format: str = "stepwell-run"
    version: int = VERSION
    xxh3_128: str = _ZEROS


class AttemptDocument(msgspec.Struct, frozen=True):
    """`attempts/NNNN.json`: one start of the trainers, and the key of the step it resumed from."""

    run: str
    attempt: int
    identity: str
    parent: str | None
    host: str
    pid: int
    created: str
    writer: str
    format: str = "stepwell-attempt"
    version: int = VERSION
    xxh3_128: str = _ZEROS


class PackReference(msgspec.Struct, frozen=True):
    """A pack that a manifest names: it must exist with exactly this size and header hash."""

    name: str
    bytes: int
    header_xxh3_128: str


class Manifest(msgspec.Struct, frozen=True):
    """`manifest.json`: its existence is the commit of a step."""

    run: str
    key: str
    step: int
    attempt: int
    parent: str | None
    identity: str
    layout: str
    packs: tuple[PackReference, ...]
    state_bytes: int
    tensor_count: int
    values_bytes: int
    metrics: dict[str, float | str]
    created: str
    durable_seconds: float
    writer: str
    format: str = "stepwell-manifest"
    version: int = VERSION
    referenced: tuple[str, ...] = ()
    xxh3_128: str = _ZEROS


Document = TypeVar("Document", RunDocument, AttemptDocument, Manifest)


def metrics_to_json(metrics: dict[str, float]) -> dict[str, float | str]:
    """JSON has no NaN and no infinity: those travel as the words that `float()` reads."""
    return {name: value if math.isfinite(value) else repr(value) for name, value in metrics.items()}


def metrics_from_json(metrics: dict[str, float | str]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def encode(document: RunDocument | AttemptDocument | Manifest) -> bytes:
    """The document as indented JSON whose `xxh3_128` field is the checksum of the text with that field zeroed."""
    blank = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(document, xxh3_128=_ZEROS)), indent=1)
    tail = blank.rfind(_ZEROS.encode())
    return blank[:tail] + hex_digest(blank).encode() + blank[tail + 32 :]


def decode(data: bytes, kind: type[Document], where: str) -> Document:
    """Read and check a document. Raises `DamagedError` for a wrong checksum, field, format or version."""
    try:
        document = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError("the document cannot be read", where=where, found=str(error)) from None
    expected = kind.__struct_defaults__[0]
    if document.format != expected or document.version != VERSION:
        raise DamagedError(
            "not a document that this version reads",
            where=where,
            expected=f"{expected} {VERSION}",
            found=f"{document.format} {document.version}",
            todo="upgrade stepwell if the run was written by a newer one",
        )
    tail = data.rfind(document.xxh3_128.encode())
    if len(document.xxh3_128) != 32 or hex_digest(data[:tail] + _ZEROS.encode() + data[tail + 32 :]) != (
        document.xxh3_128
    ):
        raise DamagedError("the document's checksum is wrong", where=where, found=document.xxh3_128)
    if isinstance(document, Manifest):
        _check_manifest(document, where)
    return document


def _check_manifest(manifest: Manifest, where: str) -> None:
    if names.parse_step_key(manifest.key) != (manifest.step, manifest.attempt):
        raise DamagedError("the manifest's key is not its step and attempt", where=where, found=manifest.key)
    if manifest.parent is not None and names.parse_step_key(manifest.parent) is None:
        raise DamagedError("the manifest's parent is not a key", where=where, found=manifest.parent)
    if names.parse_layout_file(names.layout_file(manifest.layout)) is None:
        raise DamagedError("the manifest's layout is not a hash", where=where, found=manifest.layout)
    for pack in manifest.packs:
        if not names.is_pack_file(pack.name) or pack.bytes < 8:
            raise DamagedError("the manifest names an impossible pack", where=where, found=repr(pack))
    try:
        metrics_from_json(manifest.metrics)
    except ValueError as error:
        raise DamagedError("a metric is not a number", where=where, found=str(error)) from None
