"""Views alias their memory, copies are whole, and what has no plain bytes is refused."""

import array
import mmap
import threading
from typing import Any

import numpy as np
import pytest

from kvpool.proto.errors import InvalidError
from kvpool.transfer.copying import ALIGNMENT, PIECE, as_bytes, copy, empty


class Tensor:
    """What `as_bytes` uses of a torch tensor, over a NumPy array."""

    def __init__(self, data: Any, device: str = "cpu") -> None:
        self._data = data
        self.device = type("Device", (), {"type": device, "__str__": lambda _: device})()

    def data_ptr(self) -> int:
        return int(self._data.ctypes.data)

    def numel(self) -> int:
        return int(self._data.size)

    def element_size(self) -> int:
        return int(self._data.itemsize)

    def is_contiguous(self) -> bool:
        return bool(self._data.flags.c_contiguous)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._data.shape)

    def stride(self) -> tuple[int, ...]:
        return tuple(self._data.strides)


class Interface:
    """Memory that only has `__array_interface__`."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.__array_interface__ = data.__array_interface__


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(12),
        memoryview(bytearray(24))[4:16],
        array.array("f", [0, 0, 0]),
        np.zeros((3, 2), np.float16),
        np.zeros(3, np.dtype([("a", np.uint16), ("b", np.uint16)])),
        memoryview(np.zeros((3, 1), np.float32)),
        Interface(np.zeros(6, np.int16)),
        Tensor(np.zeros((2, 3), np.float16)),
    ],
)
def test_views_alias_the_memory(buffer: Any) -> None:
    view = as_bytes(buffer, writable=True)
    view[:] = np.arange(12)
    assert view.shape == (12,)
    assert as_bytes(buffer).tobytes() == bytes(range(12))
    assert not as_bytes(buffer).flags.writeable
    if isinstance(buffer, bytearray):
        assert buffer == bytes(range(12))


def test_a_view_keeps_its_memory_alive() -> None:
    view = as_bytes(Tensor(np.full(1000, 7, np.uint8)))
    assert view.tobytes() == b"\x07" * 1000


@pytest.mark.parametrize("buffer", [b"", bytearray(), np.zeros((0, 3)), np.zeros(0, np.uint8)])
def test_nothing_is_a_buffer_too(buffer: Any) -> None:
    assert as_bytes(buffer).size == 0
    copy(bytearray(), buffer)


def test_a_scalar_array_has_bytes() -> None:
    assert as_bytes(np.array(1, np.uint32)).tobytes() == b"\1\0\0\0"


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (np.zeros((4, 4))[:, 1], "contiguous"),
        (np.asfortranarray(np.zeros((4, 4))), "contiguous"),
        (memoryview(bytearray(8))[::2], "contiguous"),
        (Tensor(np.zeros((4, 4))[:, 1]), "contiguous"),
        (Tensor(np.zeros(4), "cuda"), "cuda"),
        (np.array([object()]), "objects"),
        (memoryview(np.array([object()])), "objects"),
        ("text", "str"),
        (None, "None"),
        (7, "int"),
    ],
)
def test_other_buffers_are_refused_by_name(buffer: Any, words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        as_bytes(buffer)


@pytest.mark.parametrize("buffer", [b"abc", memoryview(b"abc"), as_bytes(bytearray(3))])
def test_read_only_memory_is_refused_for_writing(buffer: Any) -> None:
    assert as_bytes(buffer).size == 3
    with pytest.raises(InvalidError, match="read-only"):
        as_bytes(buffer, writable=True)


@pytest.mark.parametrize("nbytes", [0, 1, mmap.PAGESIZE, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE])
def test_copies_are_whole(nbytes: int) -> None:
    source = np.arange(nbytes // 4 + 1, dtype=np.uint32).view(np.uint8)[:nbytes]
    target = np.zeros(nbytes + 2, np.uint8)
    copy(target[1:-1], source)
    assert np.array_equal(target[1:-1], source)
    assert target[0] == target[-1] == 0


def test_a_copy_of_other_length_is_refused() -> None:
    with pytest.raises(InvalidError, match="3 bytes into a buffer of 2"):
        copy(bytearray(2), b"abc")


def test_a_large_copy_lets_other_threads_run() -> None:
    """If the copy held the GIL, the other thread would count a handful at best."""
    source = np.ones(64 << 20, np.uint8)
    target = np.zeros_like(source)
    counted, copying = [0], threading.Event()
    ended = threading.Event()

    def count() -> None:
        copying.set()
        while not ended.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    copying.wait()
    before = counted[0]
    copy(target, source)
    during = counted[0] - before
    ended.set()
    thread.join()
    assert during > 1000


@pytest.mark.parametrize("nbytes", [1, 4096, 10_000_000])
def test_fresh_memory_starts_where_copies_are_fast(nbytes: int) -> None:
    fresh = empty(nbytes)
    assert fresh.size == nbytes and fresh.ctypes.data % ALIGNMENT == 0
    assert as_bytes(fresh, writable=True).size == nbytes
