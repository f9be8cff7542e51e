"""Namespaces, prompts and self-describing bytes for the client's tests."""

import hashlib
import itertools
from typing import Any

import numpy as np

from kvpool.client import Namespace, Part, native, portable
from kvpool.transfer.copying import Bytes

CHUNK = 16
LAYERS = ("layer.0", "layer.1", "layer.2", "layer.3")
HEADS, DIM = 2, 8
SHAPE = (len(LAYERS), HEADS, 2, CHUNK, DIM)
"""Of one chunk: layer, head, K/V, token, float32."""

_fresh = itertools.count()


def attention(name: str = "all", itemsize: int = 4) -> Part:
    return portable(
        name, layers=LAYERS, kv_heads=HEADS, head_dim=DIM, itemsize=itemsize, tokens=CHUNK
    )


def opaque(name: str = "all", planes: int = 1, nbytes: int = 4096, **rest: Any) -> Part:
    part = native(name, layers=[f"plane.{i}" for i in range(planes)], nbytes=nbytes)
    return Part(part.name, part.planes, **rest)


def namespace(*parts: Part, **fields: Any) -> Namespace:
    """A namespace that no other test uses."""
    values: dict[str, Any] = {
        "model": "made-up",
        "revision": "1",
        "kv_dtype": "float32",
        "kv_scales": "none",
        "layout": "portable",
        "chunk_tokens": CHUNK,
        "parts": parts or (attention(),),
        "key_scheme": "tokens",
        "adapter": "none",
        "rope": "default",
        "salt": f"salt-{next(_fresh)}",
    }
    return Namespace(**values | fields)


def prompt(chunks: int, tail: int = 3, seed: int = 0) -> list[int]:
    """Tokens of `chunks` full chunks and `tail` more."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = rng.integers(0, 1 << 31, chunks * CHUNK + tail).tolist()
    return tokens


def kv(chunks: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(chunks, *SHAPE) of random numbers."""
    return np.random.default_rng(seed).standard_normal((chunks, *SHAPE), np.float32)


LINE = 64


def blob(key: bytes, generation: int, nbytes: int) -> Bytes:
    """Bytes that say of each 64-byte line whose it is, of which write, and at which offset:
    16 bytes of the hash of `key`, offset and generation (8 each), 32 bytes that follow from them.
    """
    lines = np.zeros(-(-nbytes // LINE), "S64").view(np.uint8).reshape(-1, LINE)
    offsets = np.arange(len(lines), dtype="<u8")
    name = hashlib.sha256(key).digest()[:16]
    lines[:, :16] = np.frombuffer(name, np.uint8)
    lines[:, 16:24] = offsets.view(np.uint8).reshape(-1, 8)
    lines[:, 24:32] = np.frombuffer(generation.to_bytes(8, "little"), np.uint8)
    mixed = offsets * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(generation)
    mixed ^= np.frombuffer(name[:8], "<u8")
    for column in range(32, LINE, 8):
        mixed = mixed * np.uint64(0xD6E8FEB86659FD93) ^ (mixed >> np.uint64(29))
        lines[:, column : column + 8] = mixed.view(np.uint8).reshape(-1, 8)
    return lines.reshape(-1)[:nbytes]


def generation_of(data: Bytes, key: bytes) -> int:
    """Which write of `key` these bytes are. Asserts that they are whole, and of that key."""
    found = int.from_bytes(data[24:32].tobytes(), "little")
    assert np.array_equal(data, blob(key, found, data.size)), "bytes of another key or write"
    return found


class Tensor:
    """What the client uses of a torch tensor on the CPU, over a NumPy array."""

    class device:
        type = "cpu"

    def __init__(self, data: Any) -> None:
        self.data = data

    def data_ptr(self) -> int:
        return int(self.data.ctypes.data)

    def numel(self) -> int:
        return int(self.data.size)

    def element_size(self) -> int:
        return int(self.data.itemsize)

    def is_contiguous(self) -> bool:
        return bool(self.data.flags.c_contiguous)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def stride(self) -> tuple[int, ...]:
        return tuple(self.data.strides)
