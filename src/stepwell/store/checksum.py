"""Checksums: xxh3-128, over chunks of 4 MiB of a pack's data and over whole small files."""

from __future__ import annotations

import xxhash

Digest = xxhash.xxh3_128
"""`digest` of bytes that come in pieces: `update(piece)`, at last `digest()`."""

CHUNK_BYTES = 4 << 20
DIGEST_BYTES = 16


def digest(data: memoryview | bytes) -> bytes:
    """xxh3-128 of some bytes, 16 bytes, big-endian. Releases the GIL while it works."""
    return xxhash.xxh3_128_digest(data)


def hex_digest(data: memoryview | bytes) -> str:
    """`digest` as 32 lower-case hex characters."""
    return xxhash.xxh3_128_hexdigest(data)


def chunk_count(data_bytes: int) -> int:
    """How many chunks cover `data_bytes` bytes; the last one may be short."""
    return -(-data_bytes // CHUNK_BYTES)
