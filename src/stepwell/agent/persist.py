"""From a slot to a committed step: persist and commit.

The order of effects is the product; docs/durability.md lists what a crash between each two of them leaves behind.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import datetime, timezone

from stepwell.errors import PersistError
from stepwell.store import names, pack
from stepwell.store.checksum import CHUNK_BYTES, digest
from stepwell.store.layout import PAGE_BYTES, Layout, round_up
from stepwell.store.manifest import Manifest, PackReference, decode, encode
from stepwell.tiers.posix import PackWriter, PosixTier

PIECE_BYTES = 2 * CHUNK_BYTES
WRITER = "stepwell 0.1.0"


@dataclass(frozen=True, slots=True)
class Order:
    """One accepted save, as the persister needs it. `identity` tells a repeated order from another save."""

    identity: str
    run: str
    step: int
    attempt: int
    key: str
    parent: str | None
    values_bytes: int
    metrics: dict[str, float | str]
    entered_seconds: float


@dataclass
class Stages:
    """Seconds of each stage of one persist, and its bytes."""

    seconds: dict[str, float] = field(default_factory=dict)
    written_bytes: int = 0
    file_count: int = 0
    _last: float = field(default_factory=time.perf_counter)

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def persist(
    tier: PosixTier, order: Order, layout: Layout, slot: memoryview, workers: ThreadPoolExecutor, stages: Stages
) -> Manifest:
    """Write the packs of a slot, make them durable, and commit the step by publishing its manifest.

    Idempotent: repeating an order that is committed already returns its manifest. On an error nothing is committed
    and no temporary file is left. Raises the system's `OSError`, or `PersistError`.
    """
    folder = tier.path(names.STEPS, order.key)
    done = committed(folder, order.identity)
    if done is not None:
        # The agent that published it may have been killed before the folder was synced.
        tier.ops.fsync_directory(folder)
        return done
    if os.path.islink(folder):
        linked = PersistError("a link is in the place of the step's folder", where=folder, todo="remove it")
        linked.errno = errno.ELOOP  # what it leads to is not ours to write into, now or later
        raise linked
    tier.make_folders(folder)
    _publish_layout(tier, layout)
    stages.mark("folders_seconds")
    writers: list[PackWriter] = []
    references: list[PackReference] = []
    try:
        for index in range(len(layout.packs)):
            writer = PackWriter(tier, os.path.join(folder, layout.packs[index].name))
            writers.append(writer)
            references.append(_write_pack(writer, order, layout, index, slot, workers, stages))
        for writer in writers:
            writer.finish()
    except BaseException:
        for writer in writers:
            writer.abandon()
        raise
    # All packs have their names for good before a manifest may speak of them.
    tier.ops.fsync_directory(folder)
    stages.mark("rename_seconds")
    manifest = _manifest(order, layout, references)
    tier.publish(os.path.join(folder, names.MANIFEST), encode(manifest))
    stages.mark("commit_seconds")
    return manifest


def committed(folder: str, identity: str) -> Manifest | None:
    """The manifest of this very save when it is committed already.

    Raises `PersistError` when the step is committed by another save.
    """
    path = os.path.join(folder, names.MANIFEST)
    try:
        with open(path, "rb") as file:
            manifest = decode(file.read(), Manifest, path)
    except FileNotFoundError:
        return None
    if manifest.identity != identity:
        raise PersistError(
            "this step is committed already by another save", where=path, expected=identity, found=manifest.identity
        )
    return manifest


def _publish_layout(tier: PosixTier, layout: Layout) -> None:
    path = tier.path(names.LAYOUTS, names.layout_file(layout.hash))
    if _holds(path, layout.data):  # whoever published it may have been killed before the folder was synced
        tier.ops.fsync_directory(os.path.dirname(path))
        return
    if os.path.lexists(path):  # damaged: every new step would need it, and its true bytes are at hand
        tier.remove([path])
    tier.make_folders(os.path.dirname(path))
    tier.publish(path, layout.data)


def _holds(path: str, data: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(data) + 1) == data
    except OSError:
        return False


def _write_pack(
    writer: PackWriter,
    order: Order,
    layout: Layout,
    index: int,
    slot: memoryview,
    workers: ThreadPoolExecutor,
    stages: Stages,
) -> PackReference:
    plan = layout.packs[index]
    values_bytes = order.values_bytes if index == len(layout.packs) - 1 else 0
    data_bytes = plan.data_bytes + values_bytes
    image = slot[plan.image_offset : plan.image_offset + plan.header_bytes + round_up(data_bytes, PAGE_BYTES)]

    def write_piece(begin: int) -> list[bytes]:
        end = min(begin + PIECE_BYTES, data_bytes)
        data = image[plan.header_bytes : plan.header_bytes + data_bytes]
        found = [digest(data[at : min(at + CHUNK_BYTES, end)]) for at in range(begin, end, CHUNK_BYTES)]
        first, last = plan.header_bytes + begin, plan.header_bytes + round_up(end, PAGE_BYTES)
        writer.write(image[first:last], first)
        return found

    digests: list[bytes] = []
    for found in _in_order(workers, write_piece, range(0, data_bytes, PIECE_BYTES)):
        digests += found
    stages.mark("write_seconds")
    header, own_hash = pack.encode(
        layout, index, run=order.run, key=order.key, digests=digests, values_bytes=values_bytes
    )
    image[: plan.header_bytes] = header
    writer.write(image[: plan.header_bytes], 0)
    file_bytes = plan.header_bytes + data_bytes
    writer.sync(file_bytes)
    stages.mark("fsync_seconds")
    stages.written_bytes += file_bytes
    stages.file_count += 1
    return PackReference(plan.name, file_bytes, own_hash)


def _in_order(workers: ThreadPoolExecutor, work: object, begins: range) -> Iterator[list[bytes]]:
    """Results in order; the first error stops what has not begun and is raised once all running work has ended."""
    futures: list[Future[list[bytes]]] = [workers.submit(work, begin) for begin in begins]  # type: ignore[arg-type]
    done, running = wait(futures, return_when=FIRST_EXCEPTION)
    if any(future.exception() for future in done if not future.cancelled()):
        for future in running:
            future.cancel()
        wait(futures)
    for future in futures:
        if not future.cancelled():
            yield future.result()


def _manifest(order: Order, layout: Layout, references: list[PackReference]) -> Manifest:
    return Manifest(
        run=order.run,
        key=order.key,
        step=order.step,
        attempt=order.attempt,
        parent=order.parent,
        identity=order.identity,
        layout=layout.hash,
        packs=tuple(references),
        state_bytes=layout.data_bytes,
        tensor_count=len(layout.names),
        values_bytes=order.values_bytes,
        metrics=order.metrics,
        created=utc_now(),
        durable_seconds=round(time.monotonic() - order.entered_seconds, 6),
        writer=WRITER,
    )


def utc_now() -> str:
    """RFC 3339, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
