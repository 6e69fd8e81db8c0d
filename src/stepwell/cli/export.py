"""`stepwell export`: one step as a file that other tools open."""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, Literal

import click
import msgspec
import numpy as np

from stepwell.cli._output import console, count_of, json_option, print_json, printable, progress
from stepwell.cli._runs import choose, open_run, run_argument, short_key
from stepwell.cli._values import Losses, Lost, leaves, to_json, type_name
from stepwell.errors import StepwellError, UsageError
from stepwell.restore.load import read_tensors
from stepwell.restore.read import OpenStep, open_step
from stepwell.restore.stream import TensorStream
from stepwell.state import RNG_NAME, TorchValue, matches, rebuild
from stepwell.state.skeleton import Node, key_of
from stepwell.store import safetensors_header as header
from stepwell.store.layout import VALUES, round_up
from stepwell.units import format_bytes

VALUES_JSON_BYTES_MAX = 16 << 20  # readers hold the whole header in memory, and refuse one above 100 MB
VALUE_JSON_BYTES_MAX = 1 << 20
RNG_LOST = "states of the global random number generators, left out"


@dataclass(frozen=True)
class Exported:
    """What was written, and what the format could not carry."""

    tensor_count: int
    bytes: int
    lost: list[Lost]


@click.command()
@run_argument
@click.argument("step")
@click.argument("out", type=click.Path())
@click.option(
    "--format", "form", type=click.Choice(["safetensors", "torch"]), default="safetensors", show_default=True,
    help="safetensors: flat names; torch: the nesting of the state, for torch.load(weights_only=True).",
)  # fmt: skip
@click.option("--names", "patterns", multiple=True, metavar="PATTERN", help="Only these, as in 'model.*'; repeatable.")
@click.option("--strip", default="", metavar="PREFIX", help="Take this off names, as in 'model.' (safetensors only).")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option(
    "--allow-pickle", is_flag=True, help="Read pickled values too. A pickle can run any code: trust the file."
)
@json_option
def command(
    run: str,
    step: str,
    out: str,
    form: Literal["safetensors", "torch"],
    patterns: tuple[str, ...],
    strip: str,
    force: bool,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Write one step as a plain safetensors or torch file.

    Every byte is checked while it is read. OUT appears whole or not at all, and is never overwritten without --force.
    What the format cannot carry is listed on stderr and under "lost" with --json.

    safetensors: tensors under their dotted names, in pieces, so in little memory; a tied tensor once, its other names
    in the metadata; plain values as JSON in the metadata under "values". torch: the state's nesting with tensors and
    plain values, optimizer state under parameter numbers as `load_state_dict` wants it; needs torch, and memory for
    all that is exported. States of the global random number generators are not exported.
    """
    if strip and form != "safetensors":
        raise UsageError("--strip is for safetensors; the torch format keeps the nesting", found=strip)
    catalogue = open_run(run)
    chosen = choose(catalogue, step)
    _check_target(out, force)
    opened = open_step(catalogue.root, chosen)
    try:
        with _appearing(out, force) as file:
            if form == "safetensors":
                done = _safetensors(opened, file, patterns, strip, allow_pickle)
            else:
                done = _torch(opened, file, patterns, allow_pickle)
    finally:
        opened.close()
    if as_json:
        print_json(
            "export",
            {
                "run": catalogue.root,
                "key": chosen.key,
                "out": os.path.abspath(out),
                "file_format": form,
                "tensor_count": done.tensor_count,
                "bytes": done.bytes,
                "lost": [asdict(one) for one in done.lost],
            },
        )
        return
    for one in done.lost:
        click.echo(f"not the same in the file: {printable(one)}", err=True)
    content = f"{count_of(done.tensor_count, 'tensor')}, {format_bytes(done.bytes)}"
    console().print(f"{printable(out)}: step {short_key(chosen.key)}, {content}")


def _check_target(out: str, force: bool) -> None:
    """Say before an hour of reading what would fail after it."""
    folder = os.path.dirname(os.path.abspath(out))
    if os.path.isdir(out):
        raise UsageError("OUT is a folder", where=out, expected="the name of a new file")
    if os.path.lexists(out) and not force:
        raise StepwellError("OUT exists", where=out, todo="name another file, or say --force to replace it")
    if not os.path.isdir(folder):
        raise StepwellError("there is no such folder", where=folder, todo="make it first")


@contextmanager
def _appearing(out: str, force: bool) -> Iterator[BinaryIO]:
    """A file to write to that gets the name `out` when the block ends well, and leaves nothing behind otherwise."""
    folder, name = os.path.split(os.path.abspath(out))
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.tmp")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(fd, "wb") as file:
            yield file
            file.flush()
            # The name must never point at bytes that a power loss can still take away.
            os.fsync(fd)
        if force:
            os.rename(temporary, out)
        else:
            _rename_exclusively(temporary, out)
    except BaseException:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        raise
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _rename_exclusively(temporary: str, out: str) -> None:
    try:
        os.link(temporary, out)
        os.unlink(temporary)
    except FileExistsError:
        raise StepwellError("OUT has appeared meanwhile", where=out, todo="name another file, or say --force") from None
    except OSError:  # a file system without hard links
        if os.path.lexists(out):
            raise StepwellError("OUT has appeared meanwhile", where=out, todo="name another file") from None
        os.rename(temporary, out)


# safetensors


def _safetensors(opened: OpenStep, file: BinaryIO, patterns: Sequence[str], strip: str, allow_pickle: bool) -> Exported:
    layout = opened.layout
    names, other_names = _file_names(opened, patterns, strip)
    losses = Losses()
    for i, name in names.items():
        dtype, shape = header.header_entry(layout.specs[i].dtype, layout.specs[i].shape, layout.specs[i].nbytes)
        # safetensors has no name for some dtypes: their bytes are there, under another one.
        if _renamed(layout.specs[i].dtype):
            losses.add(f"{layout.specs[i].dtype} as {dtype} of another shape, the same bytes", name)
    metadata = {
        "format": "pt",
        "stepwell_run": opened.manifest.run,
        "stepwell_step": opened.manifest.key,
        **other_names,
        **_values_note(opened, patterns, allow_pickle, losses),
    }
    members = [msgspec.json.encode(header.METADATA) + b":" + msgspec.json.encode(metadata)]
    position = 0
    for i, name in names.items():
        spec = layout.specs[i]
        dtype, shape = header.header_entry(spec.dtype, spec.shape, spec.nbytes)
        members.append(header.entry_json(name, dtype, shape, position, position + spec.nbytes))
        position += spec.nbytes
    room = round_up(8 + sum(map(len, members)) + len(members) + 1, 8)
    if room > header.HEADER_BYTES_MAX:
        raise StepwellError(
            "the file's header would be too large for safetensors",
            expected=format_bytes(header.HEADER_BYTES_MAX),
            found=format_bytes(room),
            todo="export a part of the step with --names",
        )
    file.write(header.assemble(members, room))
    with TensorStream(opened) as stream, progress("exporting", position) as advance:
        for i in names:
            for begin, end in stream.ranges(i):
                file.write(stream.read(i, begin, end))
                advance(end - begin)
    return Exported(len(names), room + position, losses.all())


def _file_names(opened: OpenStep, patterns: Sequence[str], strip: str) -> tuple[dict[int, str], dict[str, str]]:
    """The name in the file of each stored tensor that is exported, in the order of the file; and, as safetensors'
    own `save_model` has it, the other names of tied tensors with the one that they are stored under."""
    layout = opened.layout
    names: dict[int, str] = {}
    other_names: dict[str, str] = {}
    taken: set[str] = set()
    for i, name in enumerate(layout.names):
        if patterns and not matches(name, patterns):
            continue
        shown = name.removeprefix(strip)
        if not shown or shown in taken or shown in (header.METADATA, VALUES):
            raise UsageError(
                "two tensors would get one name, or one would get none", found=name, todo="another --strip"
            )
        taken.add(shown)
        root = i if layout.alias_of[i] < 0 else layout.alias_of[i]
        if root in names:
            other_names[shown] = names[root]
        else:
            names[root] = shown
    if not names:
        raise UsageError("no tensor has such a name", expected=", ".join(layout.names[:5]), found=", ".join(patterns))
    return {i: names[i] for i in layout.stored if i in names}, other_names


def _renamed(dtype: str) -> bool:
    known = header.HEADER_DTYPE.get(dtype)
    return known is None or known[1] is not None


def _values_note(opened: OpenStep, patterns: Sequence[str], allow_pickle: bool, losses: Losses) -> dict[str, str]:
    """The plain values as JSON, with what cannot be in it noted in `losses`."""
    note: dict[str, Any] = {}
    total_bytes = 0
    for name, value in leaves(opened.saved(allow_pickle=allow_pickle)):
        if patterns and not matches(name, patterns):
            continue
        if name == RNG_NAME:
            losses.add(RNG_LOST)
            continue
        plain = to_json(value, name, losses)
        size = len(json.dumps(plain))
        if size > VALUE_JSON_BYTES_MAX or total_bytes + size > VALUES_JSON_BYTES_MAX:
            losses.add("values too large for the header, left out", name)
            continue
        total_bytes += size
        note[name] = plain
    return {"values": json.dumps(note)} if note else {}


# torch


def _torch(opened: OpenStep, file: BinaryIO, patterns: Sequence[str], allow_pickle: bool) -> Exported:
    try:
        import torch
    except ImportError:
        raise StepwellError(
            "torch is not installed", todo="pip install 'stepwell[torch]', or use --format safetensors"
        ) from None
    chosen = list(patterns) or None
    saved = opened.saved(allow_pickle=allow_pickle)
    sizes = opened.layout.sizes
    total = sum(
        int(sizes[i]) for i in opened.layout.stored if chosen is None or matches(opened.layout.names[i], chosen)
    )
    with progress("reading", total) as advance:
        tensors = read_tensors(opened, chosen, as_numpy=False, progress=advance)
    state = rebuild(saved, tensors.__getitem__, names=chosen)
    losses = Losses()
    if saved.tree().about and (chosen is None or matches(RNG_NAME, chosen)):
        losses.add(RNG_LOST)
    state = _numbered_parameters(saved.tree().children[0], state)
    state = _Plain(torch, losses).of(state, "")
    torch.save(state, file)
    return Exported(len(tensors), file.tell(), losses.all())


def _numbered_parameters(item: Any, built: Any) -> Any:
    """The rebuilt state with the state of optimizers under parameter numbers, the way torch's own files have it."""
    if not isinstance(item, Node) or built is None:
        return built
    if item.kind in ("object", "generator"):
        return _numbered_parameters(item.children[0], built)
    if item.kind == "optimizer":
        return _optimizer(item, built)
    if isinstance(built, dict):
        for entry, child in zip(item.keys, item.children, strict=True):
            key = key_of(entry)
            if key in built:
                built[key] = _numbered_parameters(child, built[key])
        return built
    if item.children and isinstance(built, (list, tuple)):
        new = [_numbered_parameters(child, value) for child, value in zip(item.children, built, strict=True)]
        return new if isinstance(built, list) else tuple.__new__(type(built), new)
    return built


def _optimizer(item: Node, built: dict[str, Any]) -> dict[str, Any]:
    numbers: dict[str, int] = {}
    for group in item.about["groups"]:
        for name, _ in group:
            numbers[name] = len(numbers)
    state = {numbers.get(name, name): value for name, value in built.get("state", {}).items()}
    state.update(built.get("other", {}))
    parts: dict[str, Any] = {"state": state}
    if "param_groups" in built:
        parts["param_groups"] = [
            {**group, "params": [numbers[name] for name in group["params"]]} if isinstance(group, dict) else group
            for group in built["param_groups"]
        ]
    return parts


class _Plain:
    """Makes a state out of what `torch.load(weights_only=True)` accepts; notes what became something else."""

    def __init__(self, torch: Any, losses: Losses) -> None:
        self._torch, self._losses = torch, losses
        plain = (type(None), bool, int, float, str, bytes, bytearray, complex, Counter)
        self._kept = {*plain, torch.Tensor, torch.Size, torch.dtype, torch.device}

    def of(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind in (dict, OrderedDict):
            return kind((key, self.of(item, f"{name}.{key}" if name else str(key))) for key, item in value.items())
        if kind in (list, tuple, set):
            return kind(self.of(item, f"{name}.{index}") for index, item in enumerate(value))
        if kind in self._kept:
            return value
        plain = self._converted(value)
        self._losses.add(f"{type_name(value)} as {type_name(plain)}", name)
        return self.of(plain, name) if isinstance(plain, (dict, list)) else plain

    def _converted(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype.isnative:
            return self._torch.from_numpy(np.array(value))
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return value.item()
        if isinstance(value, dict):
            return dict(value)
        if isinstance(value, (tuple, list)) or hasattr(value, "popleft"):
            return list(value)
        if isinstance(value, TorchValue):
            return str(value.value)
        return str(value)
