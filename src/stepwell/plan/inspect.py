"""What an existing checkpoint holds: bytes, files, tensors, by reading names and headers only.

A safetensors header, a Stepwell run's manifest, the directory of a torch.save zip (never its pickle), a DCP folder's
files. Nothing is loaded and nothing is executed.
"""

from __future__ import annotations

import math
import os
import zipfile
from dataclasses import dataclass

from stepwell.errors import NotARunError, StepwellError, UsageError

FILES_MAX = 2_000_000


@dataclass(frozen=True)
class Found:
    """A checkpoint as it lies there.

    Attributes:
        tool: "stepwell", "safetensors", "torch.save", "dcp" or "files" (something else).
        state_bytes: of tensors, where that can be told from headers; else of all files.
        stored_bytes, file_count: of everything in it.
        tensor_count: 0 where headers do not tell.
        parameter_count: elements of all tensors, optimizer state included; 0 where headers do not tell.
    """

    path: str
    tool: str
    state_bytes: int
    stored_bytes: int
    file_count: int
    tensor_count: int = 0
    parameter_count: int = 0


def inspect(path: str) -> Found:
    """Look at a file, a folder or a run. Raises `UsageError` for what is not there or holds nothing."""
    if os.path.isdir(path):
        run = _stepwell_run(path)
        if run is not None:
            return run
        return _folder(path)
    if not os.path.isfile(path):
        raise UsageError("no such checkpoint", where=path)
    size = os.path.getsize(path)
    if path.endswith(".safetensors"):
        return _safetensors([path], path)
    if zipfile.is_zipfile(path):
        data, count = _zip_tensors(path)
        return Found(path, "torch.save", data, size, 1, count)
    return Found(path, "files", size, size, 1)


def _stepwell_run(path: str) -> Found | None:
    from stepwell.restore import catalogue

    try:
        read = catalogue.read(path)
    except NotARunError:
        return None
    step = read.newest
    if step is None or step.manifest is None:
        raise UsageError("the run has no committed step", where=path)
    layout = catalogue.read_layout(path, step.manifest.layout)
    stored = sum(pack.bytes for pack in step.manifest.packs)
    return Found(
        path, "stepwell", layout.data_bytes + step.manifest.values_bytes, stored, len(step.manifest.packs) + 2,
        len(layout.names),
    )  # fmt: skip


def _folder(path: str) -> Found:
    sizes: dict[str, int] = {}
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in names:
            full = os.path.join(folder, name)
            if os.path.isfile(full) and not os.path.islink(full):
                sizes[full] = os.path.getsize(full)
        if len(sizes) > FILES_MAX:
            raise UsageError("too many files for one checkpoint", where=path, expected=f"at most {FILES_MAX:,}")
    if not sizes:
        raise UsageError("an empty folder is no checkpoint", where=path)
    stored = sum(sizes.values())
    there = {os.path.basename(one) for one in sizes}
    if ".metadata" in there and any(name.endswith(".distcp") for name in there):
        data = sum(size for one, size in sizes.items() if one.endswith(".distcp"))
        return Found(path, "dcp", data, stored, len(sizes))
    packed = sorted(one for one in sizes if one.endswith(".safetensors"))
    if packed and len(packed) + 1 >= len(sizes):
        found = _safetensors(packed, path)
        return Found(
            path, "safetensors", found.state_bytes, stored, len(sizes), found.tensor_count, found.parameter_count
        )
    return Found(path, "files", stored, stored, len(sizes))


def _safetensors(paths: list[str], where: str) -> Found:
    from stepwell.store import safetensors_header as headers

    data = tensors = elements = 0
    for path in paths:
        try:
            size = os.path.getsize(path)
            with open(path, "rb") as file:
                first = file.read(8)
                header = headers.parse(first + file.read(headers.header_room(first, size, path) - 8), size, path)
        except (OSError, StepwellError) as error:
            raise UsageError("not a readable safetensors file", where=path, found=str(error).splitlines()[0]) from None
        data += header.data_bytes
        tensors += len(header.entries)
        elements += sum(math.prod(entry.shape) for entry in header.entries.values())
    stored = sum(os.path.getsize(path) for path in paths)
    return Found(where, "safetensors", data, stored, len(paths), tensors, elements)


def _zip_tensors(path: str) -> tuple[int, int]:
    """(bytes, count) of the storages in a torch.save file: its entries `…/data/N`, stored without compression."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageError("not a readable zip", where=path, found=str(error)) from None
    return sum(entry.file_size for entry in entries), len(entries)
