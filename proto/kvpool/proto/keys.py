"""The key chain: every chunk's key commits to all tokens before it.

    key[i] = sha256(key[i-1] ‖ tokens of chunk i as u32 LE ‖ extras that start in chunk i)
    key[-1] = namespace digest
    extra  = position inside the chunk (u32 LE) ‖ length (u32 LE) ‖ digest

The number of tokens per chunk is fixed by the namespace, so the concatenation is injective. Key
scheme ``foreign:<name>`` takes page hashes instead (one page = one chunk; the engine has chained
them): ``key = sha256(namespace digest ‖ page hash)``.
"""

from __future__ import annotations

import array
import hashlib
import operator
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.proto.errors import InvalidError

KEY_BYTES = 32
TOKEN_MAX = (1 << 32) - 1
_COUNT_MAX = (1 << 32) - 1

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
    """`tokens` as a 1-D uint32 array, which is `tokens` itself where it is one already.

    Raises `InvalidError` naming the offending value: bool and float are no tokens.
    """
    if isinstance(tokens, str | bytes | bytearray):
        raise InvalidError(f"tokens must be integers, not {type(tokens).__name__}")
    if isinstance(tokens, Sequence) and not isinstance(tokens, memoryview):
        return _from_items(tokens)
    values = np.asarray(tokens)
    if values.ndim != 1:
        raise InvalidError(f"tokens must be one-dimensional, not of shape {values.shape}")
    if values.dtype == np.uint32:
        return values
    if values.size == 0:
        return np.empty(0, np.uint32)
    if values.dtype.kind not in "iu":
        raise InvalidError(f"tokens must be integers, not {values.dtype}")
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > TOKEN_MAX:
        raise InvalidError(f"token {low if low < 0 else high} is outside 0..{TOKEN_MAX}")
    return values.astype(np.uint32)


def _from_items(items: Sequence[int]) -> TokenArray:
    # NumPy takes [1, True] for integers and [1, 2.0] for floats, so the types are looked at first.
    if set(map(type, items)) == {int}:
        try:
            return np.asarray(array.array("I", items)).astype(np.uint32, copy=False)
        except OverflowError:
            pass  # the loop names the token
    for item in items:
        if not isinstance(item, int | np.integer) or isinstance(item, bool):
            raise InvalidError(
                f"token {reprlib.repr(item)} is {type(item).__name__}, not an integer"
            )
        if not 0 <= item <= TOKEN_MAX:
            raise InvalidError(f"token {item} is outside 0..{TOKEN_MAX}")
    return np.fromiter(items, np.uint32, len(items))


def shareable_chunks(tokens: int, chunk_tokens: int, extras: Sequence[Extra] | None = None) -> int:
    """Full chunks of a prompt of `tokens` that have an identity; partial tails have none.

    Raises `InvalidError`.
    """
    _check_extras(extras)
    chunk_tokens = _whole("chunk_tokens", chunk_tokens, 1)
    chunks = _whole("tokens", tokens, 0) // chunk_tokens
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

    `previous` is the key before them or the namespace digest. Positions of extras count from the
    start of the prompt. Extras with a digest before `first_token` are ignored: they are part of
    `previous`; one without ends the chain before it, so there are no keys. Raises `InvalidError`.
    """
    values = as_tokens(tokens)
    _check_root("previous key", previous)
    chunk_tokens = _whole("chunk_tokens", chunk_tokens, 1)
    first_token = _whole("first_token", first_token, 0)
    if first_token % chunk_tokens:
        raise InvalidError(
            f"first_token {first_token} is not on a boundary of {chunk_tokens} tokens"
        )
    chunks = shareable_chunks(first_token + len(values), chunk_tokens, extras)
    first_chunk = first_token // chunk_tokens
    raw = values.astype("<u4", copy=False).tobytes()
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
    _check_root("namespace digest", digest)
    for page in pages:
        if not isinstance(page, bytes) or not page:
            raise InvalidError(f"page hash {page!r} must be non-empty bytes")
    return b"".join(hashlib.sha256(digest + page).digest() for page in pages)


def _check_root(what: str, value: bytes) -> None:
    if not isinstance(value, bytes) or len(value) != KEY_BYTES:
        raise InvalidError(f"the {what} must be {KEY_BYTES} bytes, not {reprlib.repr(value)}")


def _whole(what: str, value: int, minimum: int) -> int:
    """`value`, which may be any integer type but bool, as an int."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not minimum <= number <= _COUNT_MAX:
        raise InvalidError(f"{what} {reprlib.repr(value)} is no int from {minimum} to {_COUNT_MAX}")
    return number


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
