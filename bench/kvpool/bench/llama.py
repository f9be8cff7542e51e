"""The reference engine: a Llama in plain NumPy, float32 throughout.

It exists to publish and pull real KV without a deep-learning framework, so its one unusual duty is
that its KV must be *reproducible*. The rows of a prefill are worked through in blocks that begin at
multiples of `Llama.block_tokens`, wherever the prefill itself began. A matrix product of one shape
always rounds the same way, hence: whoever prefills a prompt at once, and whoever takes a prefix of
whole blocks from a store and prefills the rest, get the same KV and the same logits to the bit.
A prefill that begins or ends inside a block is right too, but equal only up to rounding.

"Always" holds for one build of BLAS, one kind of CPU and one number of BLAS threads. Processes that
run engines at the same time should start with `OPENBLAS_NUM_THREADS=1` in their environment: BLAS
threads spin while they wait, and two engines on two cores were seen to take 40 times as long.

Names of axes in the shapes below: T tokens of a prefill, B rows of a block (B <= block_tokens),
S tokens in the cache including the block, G query heads that share a KV head (heads / kv_heads).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.proto.errors import InvalidError

Array = npt.NDArray[np.float32]
Rotations = npt.NDArray[np.complex64]


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a model: everything but its weights."""

    layers: int
    heads: int
    kv_heads: int  # divides heads; query head h reads KV head h // (heads // kv_heads)
    head_dim: int  # even: RoPE turns pairs
    hidden: int
    ffn: int
    vocab: int
    rms_eps: float
    rope_base: float

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise InvalidError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise InvalidError(f"head_dim={self.head_dim} is odd; RoPE needs an even one")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's float32 weights, (in, out) and C-contiguous: `rows @ weight` needs no copy.

    Matrices that read the same input stand side by side, so that one product serves them all.
    """

    attention_norm: Array  # (hidden,)
    qkv: Array  # (hidden, (heads + 2 * kv_heads) * head_dim): queries, keys, values
    attention_out: Array  # (heads * head_dim, hidden)
    ffn_norm: Array  # (hidden,)
    gate_up: Array  # (hidden, 2 * ffn): gate, up
    down: Array  # (ffn, hidden)


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All float32 weights. With tied embeddings `output` is `embedding` itself."""

    embedding: Array  # (vocab, hidden)
    layers: tuple[LayerWeights, ...]
    output_norm: Array  # (hidden,)
    output: Array  # (vocab, hidden)


class KvCache:
    """The KV of one sequence, preallocated for `max_tokens` tokens.

    `cache[layer]` is a writable float32 view (2, kv_heads, max_tokens, head_dim): K at index 0, V
    at 1. Keys are stored with RoPE applied, so rows are bound to their positions. The KV of tokens
    [a, b) of a layer is `cache[layer][:, :, a:b]`; whoever writes it there from elsewhere
    then sets `length`, the number of leading tokens whose KV is valid in every layer.
    """

    __slots__ = ("_planes", "length")

    def __init__(self, config: LlamaConfig, max_tokens: int) -> None:
        shape = (config.layers, 2, config.kv_heads, max_tokens, config.head_dim)
        self._planes = np.zeros(shape, np.float32)  # pages come from the system on first write
        self.length = 0

    def __getitem__(self, layer: int) -> Array:
        plane: Array = self._planes[layer]
        return plane

    def __iter__(self) -> Iterator[Array]:
        return iter(self._planes)

    def __len__(self) -> int:
        """The number of layers."""
        return len(self._planes)

    @property
    def planes(self) -> Array:
        """All of it, (layers, 2, kv_heads, max_tokens, head_dim), C-contiguous and writable."""
        return self._planes

    @property
    def max_tokens(self) -> int:
        return self._planes.shape[3]


class Llama:
    """A model that can run. Immutable: any number of caches and threads may share it."""

    __slots__ = ("block_tokens", "config", "weights")

    def __init__(
        self, config: LlamaConfig, weights: LlamaWeights, *, block_tokens: int = 128
    ) -> None:
        """`block_tokens`: rows per block. Make it divide the store's `chunk_tokens`, so that a
        pulled prefix ends on a block. 128 is fastest; 64 costs some 15 % more time."""
        if block_tokens < 1:
            raise InvalidError(f"block_tokens={block_tokens} is not positive")
        self.config = config
        self.weights = weights
        self.block_tokens = block_tokens

    def prefill(self, tokens: Sequence[int], cache: KvCache) -> Array:
        """Append `tokens` to `cache` from `cache.length` on; float32 logits (vocab,) of the last.

        Raises `InvalidError` for no tokens, for a token outside the vocabulary and for more tokens
        than the cache has room for; the cache is then unchanged.
        """
        ids = self._checked(tokens, cache)
        start, end = cache.length, cache.length + len(ids)
        rotations = rope_rotations(self.config, start, end)
        hidden = self.weights.embedding[ids]  # (T, hidden), a copy: updated in place below
        blocks = list(_aligned_blocks(start, end, self.block_tokens))
        # Layer by layer, and in each block by block: a layer's weights stay in the CPU's cache.
        for weights, plane in zip(self.weights.layers, cache, strict=True):
            for a, b in blocks:
                rows = slice(a - start, b - start)
                self._run_layer(hidden[rows], weights, plane, rotations[rows], a)
        cache.length = end
        return self.weights.output @ self._norm(hidden[-1], self.weights.output_norm)

    def generate(
        self, prompt_suffix: Sequence[int], cache: KvCache, n: int, *, stop: Collection[int] = ()
    ) -> list[int]:
        """Prefill `prompt_suffix`, then choose up to `n` tokens greedily; returns them.

        Ends after a token of `stop`, which is returned too. The last token returned is *not* in
        the cache yet: it begins the suffix of the next call.
        """
        generated: list[int] = []
        fed = prompt_suffix
        while len(generated) < n and not (generated and generated[-1] in stop):
            generated.append(int(self.prefill(fed, cache).argmax()))
            fed = generated[-1:]
        return generated

    def _checked(self, tokens: Sequence[int], cache: KvCache) -> npt.NDArray[np.int64]:
        ids = np.asarray(tokens, np.int64)
        if not len(ids):
            raise InvalidError("a prefill needs at least one token")
        if ids.min() < 0 or ids.max() >= self.config.vocab:
            raise InvalidError(f"tokens must be in [0, {self.config.vocab})")
        if cache.length + len(ids) > cache.max_tokens:
            raise InvalidError(
                f"{cache.length} + {len(ids)} tokens exceed the cache's {cache.max_tokens}"
            )
        return ids

    def _run_layer(
        self, hidden: Array, weights: LayerWeights, plane: Array, rotations: Rotations, start: int
    ) -> None:
        """Add one layer's output to `hidden` (B, hidden) and write its KV at `start` of `plane`."""
        attended = self._attend(
            self._norm(hidden, weights.attention_norm) @ weights.qkv, plane, rotations, start
        )
        hidden += attended @ weights.attention_out
        hidden += swiglu(self._norm(hidden, weights.ffn_norm) @ weights.gate_up) @ weights.down

    def _attend(self, qkv: Array, plane: Array, rotations: Rotations, start: int) -> Array:
        """Store the block's keys and values in `plane`, then attend causally.

        `qkv` (B, (heads + 2 * kv_heads) * head_dim) is overwritten. Returns (B, heads * head_dim).
        """
        c = self.config
        rows, end = len(qkv), start + len(qkv)
        by_head = qkv.reshape(rows, -1, c.head_dim)
        apply_rope(by_head[:, : c.heads + c.kv_heads], rotations)
        kv = by_head[:, c.heads :].reshape(rows, 2, c.kv_heads, c.head_dim)
        plane[:, :, start:end] = kv.transpose(1, 2, 0, 3)
        queries = by_head[:, : c.heads].reshape(rows, c.kv_heads, -1, c.head_dim)
        attended = attention(queries.transpose(1, 2, 0, 3), plane[0, :, :end], plane[1, :, :end])
        return attended.transpose(2, 0, 1, 3).reshape(rows, -1)

    def _norm(self, rows: Array, weight: Array) -> Array:
        return rms_norm(rows, weight, self.config.rms_eps)


def _aligned_blocks(start: int, end: int, block: int) -> Iterator[tuple[int, int]]:
    """[start, end) cut at every multiple of `block`."""
    while start < end:
        stop = min(end, start - start % block + block)
        yield start, stop
        start = stop


def rms_norm(rows: Array, weight: Array, eps: float) -> Array:
    """Rows (..., hidden) divided by their root mean square, times `weight` (hidden,)."""
    mean_square = np.square(rows).mean(axis=-1, keepdims=True)
    normed: Array = rows / np.sqrt(mean_square + np.float32(eps))
    normed *= weight
    return normed


def rope_rotations(config: LlamaConfig, start: int, end: int) -> Rotations:
    """e^(i * position * frequency) for the positions [start, end): (T, head_dim / 2).

    The angles are float64, because a float32 angle of some thousand radians is off by 1e-4.
    """
    pairs = np.arange(config.head_dim // 2)
    frequencies = config.rope_base ** (-2.0 * pairs / config.head_dim)
    angles = np.outer(np.arange(start, end), frequencies)
    rotations: Rotations = np.exp(1j * angles).astype(np.complex64)
    return rotations


def apply_rope(by_head: Array, rotations: Rotations) -> None:
    """Turn each pair of elements (2i, 2i + 1) of `by_head` (B, any, head_dim), in place.

    Pairs are neighbours, as GGUF stores Llama's query and key weights; a neighbouring pair of
    float32 *is* a complex64, and turning it is one product. (Checkpoints in Hugging Face's order
    pair i with i + head_dim / 2 instead.)
    """
    by_head.view(np.complex64)[...] *= rotations[:, None]


def attention(queries: Array, keys: Array, values: Array) -> Array:
    """Causal grouped-query attention of the last B of S tokens.

    `queries` (kv_heads, G, B, head_dim) of any strides; `keys` and `values` (kv_heads, S, head_dim)
    from which query b sees the first S - B + b + 1. Returns (kv_heads, G, B, head_dim).
    """
    kv_heads, group, rows, head_dim = queries.shape
    scale = np.float32(head_dim**-0.5)
    # The G heads of a group are stacked as rows: one product per KV head reads its keys once.
    stacked = np.multiply(queries, scale, order="C").reshape(kv_heads, group * rows, head_dim)
    scores = stacked @ keys.transpose(0, 2, 1)  # (kv_heads, G * B, S)
    if rows > 1:
        scores.reshape(kv_heads, group, rows, -1)[..., -rows:] += _hide_future(rows)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    attended: Array = scores @ values
    attended /= scores.sum(axis=-1, keepdims=True)  # after the product: head_dim is less than S
    return attended.reshape(queries.shape)


def _hide_future(rows: int) -> Array:
    """(rows, rows): 0 on and below the diagonal, -inf above it."""
    return np.triu(np.full((rows, rows), -np.inf, np.float32), k=1)


def swiglu(gate_up: Array) -> Array:
    """silu(gate) * up for `gate_up` (B, 2 * ffn): (B, ffn)."""
    gate, up = np.split(gate_up, 2, axis=-1)
    activated = np.negative(gate)
    with np.errstate(over="ignore"):  # exp(88.8) is inf, and x / inf the right 0
        np.exp(activated, out=activated)
    activated += 1
    np.divide(up, activated, out=activated)
    activated *= gate
    return activated
