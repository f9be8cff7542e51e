"""Views and copies of bytes that neither copy in secret nor hold the GIL.

`np.copyto` on uint8 views releases the GIL; `memoryview[:] =` and `bytes()` hold it for the whole
copy, which stops every other thread of an engine.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvpool.proto.errors import InvalidError
from kvpool.transfer.base import Buffer

Bytes: TypeAlias = NDArray[np.uint8]
"""A 1-D, contiguous view of uint8."""

_UINT8 = np.dtype(np.uint8)

PIECE = 4 << 20
"""Bytes that one `np.copyto` moves, so that signals are handled every millisecond or so."""


ALIGNMENT = 64


def empty(nbytes: int) -> Bytes:
    """Uninitialised memory that starts at a multiple of 64 bytes.

    NumPy's own large arrays start 16 bytes into a page. Payloads start at pages, and with AMD's
    Zen 3 and glibc 2.36, copies of up to 400 KB whose target lies 16 bytes beyond their source,
    modulo pages, take two to three times as long as all others.
    """
    whole = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + nbytes]


def copy(dst: Buffer, src: Buffer) -> None:
    """Copy all bytes of `src` to `dst`, which must not overlap and be of the same length.

    Raises `InvalidError` for unequal lengths and for what `as_bytes` refuses.
    """
    target, source = as_bytes(dst, writable=True), as_bytes(src)
    if target.size != source.size:
        raise InvalidError(f"cannot copy {source.size} bytes into a buffer of {target.size}")
    move(target, source)


def move(target: Bytes, source: Bytes) -> None:
    """The copy itself. REQUIRES: views of `as_bytes`, of the same length (nothing is checked)."""
    if source.size <= PIECE:
        np.copyto(target, source)
        return
    for at in range(0, source.size, PIECE):
        np.copyto(target[at : at + PIECE], source[at : at + PIECE])


def as_bytes(buffer: Buffer, writable: bool = False) -> Bytes:
    """The bytes of `buffer` as a 1-D uint8 array over the same memory.

    Takes NumPy arrays of any dtype, everything with the buffer protocol or `__array_interface__`,
    and CPU tensors of torch (recognised by their methods, torch is not imported). The view is
    writable only if asked for. Raises `InvalidError` for memory that is not C-contiguous, holds
    Python objects, is on a device, or is read-only although `writable` was asked for.
    """
    array = buffer if isinstance(buffer, np.ndarray) else _array_over(buffer)
    flags = array.flags
    if array.ndim == 1 and array.dtype == _UINT8 and flags.carray:  # the most frequent case
        if writable:
            return array
        view = array[:]
        view.flags.writeable = False
        return view
    if array.dtype.hasobject:
        raise InvalidError("a buffer of Python objects has no bytes to move")
    if not flags.c_contiguous:
        raise InvalidError(
            f"the buffer of shape {array.shape} and strides {array.strides} is not C-contiguous"
        )
    if writable and not flags.writeable:
        raise InvalidError("the buffer is read-only, but bytes are to be written to it")
    view = array.reshape(-1).view(np.uint8)
    if not writable:
        view.flags.writeable = False
    return view


def _array_over(buffer: Buffer) -> NDArray[Any]:
    if hasattr(buffer, "__array_interface__"):
        return np.asarray(buffer)
    if hasattr(buffer, "data_ptr"):
        return np.asarray(_TensorMemory(buffer))
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidError(f"a {type(buffer).__name__} has no bytes to move") from error
    if "O" in view.format:
        raise InvalidError("a buffer of Python objects has no bytes to move")
    if not view.c_contiguous:
        raise InvalidError(
            f"the buffer of shape {view.shape} and strides {view.strides} is not C-contiguous"
        )
    return np.frombuffer(view, np.uint8)


class _TensorMemory:
    """The memory of a CPU tensor as an array interface, which keeps the tensor alive.

    NumPy knows neither bfloat16 nor float8, so that `tensor.numpy()` and DLPack refuse the usual
    KV dtypes; the address and length always work.
    """

    def __init__(self, tensor: Any) -> None:
        if tensor.device.type != "cpu":
            raise InvalidError(f"the tensor is on {tensor.device}, not in host memory")
        if not tensor.is_contiguous():
            raise InvalidError(
                f"the tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} "
                "is not C-contiguous"
            )
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (tensor.numel() * tensor.element_size(),),
            "data": (tensor.data_ptr(), False),
        }
