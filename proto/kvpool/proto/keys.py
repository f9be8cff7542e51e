"""The key chain: every chunk's key commits to all tokens before it.

    key[i] = sha256(key[i-1] ‖ tokens of chunk i as u32 LE ‖ extras that start in chunk i)
    key[-1] = namespace digest
    extra  = position inside the chunk (u32 LE) ‖ length (u32 LE) ‖ digest

The number of tokens per chunk is fixed by the namespace, so the concatenation is injective. Key
scheme ``foreign:<name>`` takes page hashes instead (one page = one chunk; the engine has chained
them): ``key = sha256(namespace digest ‖ page hash)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.proto.errors import InvalidError

KEY_BYTES = 32
TOKEN_MAX = (1 << 32) - 1

Tokens = Sequence[int] | npt.NDArray[np.integer]
TokenArray = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, order=True)
class Extra:
    """Content that tokens do not show (an image, prompt embeddings) starting at token `start`.

    `digest` identifies the content. None says that the content has no identity: chunks from the
    one that holds `start` on cannot be shared, and the chain ends before it.
    """

    start: int
    digest: bytes | None


def as_tokens(tokens: Tokens) -> TokenArray:
    """`tokens` as a 1-D uint32 array. Raises `InvalidError` naming the offending value."""
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, np.uint32)
    if array.ndim != 1:
        raise InvalidError(f"tokens must be one-dimensional, not of shape {array.shape}")
    if array.dtype == np.uint32:
        return array
    if array.dtype.kind not in "iu" or _holds_bool(tokens):
        raise InvalidError(f"tokens must be integers, not {array.dtype} (bool and float are refused)")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > TOKEN_MAX:
        raise InvalidError(f"token {low if low < 0 else high} is outside 0..{TOKEN_MAX}")
    return array.astype(np.uint32)


def _holds_bool(tokens: Tokens) -> bool:
    # np.asarray([1, True]) is an integer array, so mixed lists must be looked at one by one.
    return not isinstance(tokens, np.ndarray) and any(isinstance(t, bool | np.bool_) for t in tokens)


def shareable_chunks(tokens: int, chunk_tokens: int, extras: Sequence[Extra] | None = None) -> int:
    """Full chunks of a prompt of `tokens` that have an identity; partial tails have none."""
    chunks = tokens // chunk_tokens
    for extra in extras or ():
        if extra.digest is None:
            chunks = min(chunks, extra.start // chunk_tokens)
    return chunks


def chain_keys(
    previous: bytes,
    tokens: Tokens,
    chunk_tokens: int,
    extras: Sequence[Extra] | None = None,
    *,
    first_token: int = 0,
) -> bytes:
    """Keys (n x 32 bytes) of the full chunks of `tokens`, which start at token `first_token`.

    `previous` is the key before them or the namespace digest. Extras before `first_token` are
    ignored: they are part of `previous`. Raises `InvalidError`.
    """
    array = as_tokens(tokens)
    if len(previous) != KEY_BYTES:
        raise InvalidError(f"the previous key has {len(previous)} bytes, not {KEY_BYTES}")
    if first_token % chunk_tokens:
        raise InvalidError(f"first_token {first_token} is not on a boundary of {chunk_tokens} tokens")
    _check_extras(extras)
    chunks = shareable_chunks(first_token + len(array), chunk_tokens, extras)
    first_chunk = first_token // chunk_tokens
    raw = array.astype("<u4", copy=False).tobytes()
    by_chunk = _encode_extras(extras, chunk_tokens)
    stride = 4 * chunk_tokens
    keys: list[bytes] = []
    for i in range(max(0, chunks - first_chunk)):
        body = raw[i * stride : (i + 1) * stride]
        previous = hashlib.sha256(previous + body + by_chunk.get(first_chunk + i, b"")).digest()
        keys.append(previous)
    return b"".join(keys)


def foreign_keys(digest: bytes, pages: Sequence[bytes]) -> bytes:
    """Keys of pages that an engine has hashed itself. Raises `InvalidError` on an empty hash."""
    for page in pages:
        if not isinstance(page, bytes) or not page:
            raise InvalidError(f"page hash {page!r} must be non-empty bytes")
    return b"".join(hashlib.sha256(digest + page).digest() for page in pages)


def _check_extras(extras: Sequence[Extra] | None) -> None:
    for extra in extras or ():
        if type(extra.start) is not int or extra.start < 0:
            raise InvalidError(f"extra start {extra.start!r} must be a token position (int >= 0)")
        if extra.digest is not None and (not isinstance(extra.digest, bytes) or not extra.digest):
            raise InvalidError(f"extra digest {extra.digest!r} must be non-empty bytes or None")


def _encode_extras(extras: Sequence[Extra] | None, chunk_tokens: int) -> dict[int, bytes]:
    by_chunk: dict[int, bytes] = {}
    named = [(extra.start, extra.digest) for extra in extras or () if extra.digest is not None]
    for start, digest in sorted(named):
        chunk, position = divmod(start, chunk_tokens)
        encoded = position.to_bytes(4, "little") + len(digest).to_bytes(4, "little") + digest
        by_chunk[chunk] = by_chunk.get(chunk, b"") + encoded
    return by_chunk
