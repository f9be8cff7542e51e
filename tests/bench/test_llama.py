"""The engine against a naive implementation, and against itself under every split."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.bench.llama import (
    Array,
    KvCache,
    LayerWeights,
    Llama,
    LlamaConfig,
    LlamaWeights,
    apply_rope,
    attention,
    rms_norm,
    rope_rotations,
    swiglu,
)
from kvpool.bench.model import random_weights
from kvpool.proto.errors import InvalidError

# No two sizes are equal, so that a mixed-up axis cannot go unnoticed.
TINY = LlamaConfig(
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=8,
    hidden=20,
    ffn=28,
    vocab=50,
    rms_eps=1e-5,
    rope_base=1000.0,
)
BLOCK = 4
TOKENS = np.random.default_rng(1).integers(0, TINY.vocab, 23).tolist()


def tiny_weights() -> LlamaWeights:
    """Random weights with norms that are not all ones and an output that is not the embedding."""
    random = np.random.default_rng(2)
    drawn = random_weights(TINY, seed=3)

    def norm() -> Array:
        return random.uniform(0.5, 1.5, TINY.hidden).astype(np.float32)

    layers = tuple(
        LayerWeights(norm(), w.qkv, w.attention_out, norm(), w.gate_up, w.down)
        for w in drawn.layers
    )
    output = random.standard_normal((TINY.vocab, TINY.hidden)).astype(np.float32)
    return LlamaWeights(drawn.embedding, layers, norm(), output)


@pytest.fixture(scope="module")
def llama() -> Llama:
    return Llama(TINY, tiny_weights(), block_tokens=BLOCK)


def prefill_in_pieces(llama: Llama, tokens: Sequence[int], cuts: Sequence[int]) -> KvCache:
    cache = KvCache(llama.config, len(tokens))
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        llama.prefill(tokens[start:end], cache)
    return cache


def kv(cache: KvCache, end: int) -> Array:
    """The KV of the first `end` tokens: (layers, 2, kv_heads, end, head_dim)."""
    return np.stack([plane[:, :, :end] for plane in cache])


# --- A naive Llama: Python floats (float64), one token, head and pair at a time ---------------

Vector = list[float]


def naive_product(vector: Vector, weight: Array) -> Vector:
    rows, columns = weight.shape
    return [sum(vector[i] * float(weight[i, o]) for i in range(rows)) for o in range(columns)]


def naive_norm(vector: Vector, weight: Array) -> Vector:
    root = math.sqrt(sum(v * v for v in vector) / len(vector) + TINY.rms_eps)
    return [v / root * float(w) for v, w in zip(vector, weight, strict=True)]


def naive_rope(vector: Vector, position: int) -> Vector:
    turned = list(vector)
    for even in range(0, len(vector), 2):
        angle = position * TINY.rope_base ** (-even / len(vector))
        x, y = vector[even], vector[even + 1]
        turned[even] = x * math.cos(angle) - y * math.sin(angle)
        turned[even + 1] = x * math.sin(angle) + y * math.cos(angle)
    return turned


def naive_attention(query: Vector, keys: list[Vector], values: list[Vector]) -> Vector:
    scores = [sum(q * k for q, k in zip(query, key, strict=True)) for key in keys]
    weights = [math.exp(score / math.sqrt(len(query))) for score in scores]
    return [
        sum(w * value[d] for w, value in zip(weights, values, strict=True)) / sum(weights)
        for d in range(len(query))
    ]


def heads_of(vector: Vector) -> list[Vector]:
    return [vector[i : i + TINY.head_dim] for i in range(0, len(vector), TINY.head_dim)]


def naive_llama(weights: LlamaWeights, tokens: Sequence[int]) -> tuple[Vector, list[list[Vector]]]:
    """Logits after the last token, and per layer and token the keys and values of all KV heads."""
    group = TINY.heads // TINY.kv_heads
    past: list[list[list[Vector]]] = [[] for _ in weights.layers]  # layer, token, head: K then V
    for position, token in enumerate(tokens):
        hidden = [float(v) for v in weights.embedding[token]]
        for layer, seen in zip(weights.layers, past, strict=True):
            heads = heads_of(naive_product(naive_norm(hidden, layer.attention_norm), layer.qkv))
            turned = TINY.heads + TINY.kv_heads
            heads[:turned] = [naive_rope(head, position) for head in heads[:turned]]
            seen.append(heads[TINY.heads :])
            attended: Vector = []
            for head in range(TINY.heads):
                reads = head // group
                keys = [token_kv[reads] for token_kv in seen]
                values = [token_kv[TINY.kv_heads + reads] for token_kv in seen]
                attended += naive_attention(heads[head], keys, values)
            out = naive_product(attended, layer.attention_out)
            hidden = [h + o for h, o in zip(hidden, out, strict=True)]
            gate_up = naive_product(naive_norm(hidden, layer.ffn_norm), layer.gate_up)
            active = [
                g / (1 + math.exp(-g)) * u
                for g, u in zip(gate_up[: TINY.ffn], gate_up[TINY.ffn :], strict=True)
            ]
            out = naive_product(active, layer.down)
            hidden = [h + o for h, o in zip(hidden, out, strict=True)]
    logits = naive_product(naive_norm(hidden, weights.output_norm), weights.output.T)
    return logits, [[[v for head in heads for v in head] for heads in seen] for seen in past]


# --- Right values ----------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[], [1, 2, 3], [5, 17], [8, 16, 20]])
def test_logits_and_kv_equal_the_naive_llama(llama: Llama, cuts: list[int]) -> None:
    logits, naive_kv = naive_llama(llama.weights, TOKENS)
    cache = prefill_in_pieces(llama, TOKENS[:-1], cuts)
    wide = KvCache(TINY, 40)
    for layer, plane in enumerate(cache):
        wide[layer][:, :, : cache.length] = plane
    wide.length = cache.length
    np.testing.assert_allclose(llama.prefill(TOKENS[-1:], wide), logits, rtol=1e-4, atol=1e-5)
    for plane, expected in zip(wide, naive_kv, strict=True):
        by_token = plane[:, :, : len(TOKENS)].transpose(2, 0, 1, 3).reshape(len(TOKENS), -1)
        np.testing.assert_allclose(by_token, expected, rtol=1e-4, atol=1e-5)


def test_rms_norm_has_unit_mean_square_times_the_weight() -> None:
    rows = np.random.default_rng(4).standard_normal((5, TINY.hidden)).astype(np.float32) * 7
    weight = np.linspace(0.5, 2, TINY.hidden, dtype=np.float32)
    expected = [naive_norm([float(v) for v in row], weight) for row in rows]
    np.testing.assert_allclose(rms_norm(rows, weight, TINY.rms_eps), expected, rtol=1e-5)


def test_rope_turns_neighbouring_pairs_by_position() -> None:
    heads = np.random.default_rng(5).standard_normal((3, 2, 8)).astype(np.float32)
    start = 4000  # where float32 angles would be wrong in the fourth digit
    expected = [
        [naive_rope([float(v) for v in head], start + row) for head in heads[row]]
        for row in range(3)
    ]
    apply_rope(heads, rope_rotations(TINY, start, start + 3))
    np.testing.assert_allclose(heads, expected, rtol=1e-5, atol=1e-6)


def test_query_heads_read_the_kv_head_of_their_group() -> None:
    """With values that name their KV head, each query head's output tells whom it read."""
    queries = np.random.default_rng(6).standard_normal((2, 3, 4, 8)).astype(np.float32)
    keys = np.random.default_rng(7).standard_normal((2, 9, 8)).astype(np.float32)
    values = np.zeros((2, 9, 8), np.float32)
    values[1] = 1
    attended = attention(queries, keys, values)
    np.testing.assert_allclose(attended[0], 0)
    np.testing.assert_allclose(attended[1], 1, rtol=1e-6)


def test_attention_sees_no_future_and_all_of_the_past() -> None:
    """With one-hot values, each query's output is its attention weight per token."""
    rows, tokens = 3, 8
    queries = np.random.default_rng(8).standard_normal((1, 2, rows, 8)).astype(np.float32)
    keys = np.random.default_rng(9).standard_normal((1, tokens, 8)).astype(np.float32)
    weights = attention(queries, keys, np.eye(tokens, dtype=np.float32)[None])[0]
    for row in range(rows):
        visible = tokens - rows + row + 1
        assert (weights[:, row, :visible] > 0).all()
        assert (weights[:, row, visible:] == 0).all()


def test_swiglu_survives_gates_beyond_the_range_of_exp() -> None:
    gate_up = np.array([[-1000, -1, 0, 1, 1000, 2, 2, 2, 2, 2]], np.float32)
    expected = [[0, -2 / (1 + math.e), 0, 2 / (1 + 1 / math.e), 2000]]
    np.testing.assert_allclose(swiglu(gate_up), expected, rtol=1e-6)


# --- Splits ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(cuts=st.lists(st.integers(1, len(TOKENS) - 1), unique=True).map(sorted))
def test_any_split_of_a_prefill_gives_the_same_logits(llama: Llama, cuts: list[int]) -> None:
    whole, split = KvCache(TINY, len(TOKENS)), KvCache(TINY, len(TOKENS))
    expected = llama.prefill(TOKENS, whole)
    for start, end in zip([0, *cuts], [*cuts, len(TOKENS)], strict=True):
        logits = llama.prefill(TOKENS[start:end], split)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(kv(split, split.length), kv(whole, whole.length), atol=1e-5)
    if all(cut % BLOCK == 0 for cut in cuts):
        assert logits.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("cuts", "more_cuts"),
    [([], [4]), ([], [4, 8, 12, 16, 20]), ([6], [6, 8]), ([3, 13], [3, 8, 12, 13, 20])],
)
def test_cuts_between_blocks_change_no_bit(
    llama: Llama, cuts: list[int], more_cuts: list[int]
) -> None:
    few, many = (prefill_in_pieces(llama, TOKENS, c) for c in (cuts, more_cuts))
    assert kv(few, few.length).tobytes() == kv(many, many.length).tobytes()


@pytest.mark.parametrize("cuts", [[3], [7, 9], [1, 2, 22]])
def test_the_same_split_gives_the_same_bits(llama: Llama, cuts: list[int]) -> None:
    first, second = (prefill_in_pieces(llama, TOKENS, cuts) for _ in range(2))
    assert kv(first, first.length).tobytes() == kv(second, second.length).tobytes()


def test_a_pulled_prefix_replaces_its_prefill_bit_for_bit(llama: Llama) -> None:
    whole, pulled = KvCache(TINY, len(TOKENS)), KvCache(TINY, 64)
    expected = llama.prefill(TOKENS, whole)
    for layer, plane in enumerate(whole):
        pulled[layer][:, :, :12] = plane[:, :, :12]
    pulled.length = 12
    assert llama.prefill(TOKENS[12:], pulled).tobytes() == expected.tobytes()
    assert kv(pulled, pulled.length).tobytes() == kv(whole, whole.length).tobytes()


def test_the_kv_of_a_prefix_does_not_depend_on_what_follows(llama: Llama) -> None:
    other = TOKENS[:12] + [(token + 1) % TINY.vocab for token in TOKENS[12:]]
    one, two = prefill_in_pieces(llama, TOKENS, []), prefill_in_pieces(llama, other, [])
    assert kv(one, 12).tobytes() == kv(two, 12).tobytes()
    assert not np.array_equal(kv(one, 23)[..., 12:, :], kv(two, 23)[..., 12:, :])


# --- Generating ------------------------------------------------------------------------------


def test_greedy_generation_is_the_same_after_a_split_prefill(llama: Llama) -> None:
    whole, split = KvCache(TINY, 64), KvCache(TINY, 64)
    expected = llama.generate(TOKENS, whole, 20)
    llama.prefill(TOKENS[:9], split)
    assert llama.generate(TOKENS[9:], split, 20) == expected
    assert len(set(expected)) > 1


def test_generation_goes_on_from_its_last_token(llama: Llama) -> None:
    once, twice = KvCache(TINY, 64), KvCache(TINY, 64)
    expected = llama.generate(TOKENS, once, 12)
    head = llama.generate(TOKENS, twice, 5)
    assert twice.length == len(TOKENS) + 4
    assert head + llama.generate(head[-1:], twice, 7) == expected


def test_generation_ends_after_a_stop_token(llama: Llama) -> None:
    expected = llama.generate(TOKENS, KvCache(TINY, 64), 12)
    stop = expected[4]
    ended = llama.generate(TOKENS, KvCache(TINY, 64), 12, stop={stop})
    assert ended == expected[: expected.index(stop) + 1]
    assert llama.generate(TOKENS, KvCache(TINY, 64), 0) == []


# --- Refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[], [0, -1], [TINY.vocab], [0] * 9])
def test_a_prefill_that_cannot_be_right_is_refused(llama: Llama, tokens: list[int]) -> None:
    cache = KvCache(TINY, 10)
    llama.prefill([1, 2], cache)
    before = kv(cache, 10)
    with pytest.raises(InvalidError):
        llama.prefill(tokens, cache)
    assert cache.length == 2
    assert np.array_equal(kv(cache, 10), before)


def test_a_cache_holds_k_and_v_of_each_layer_in_float32() -> None:
    cache = KvCache(TINY, 10)
    assert len(cache) == TINY.layers
    assert cache.max_tokens == 10
    assert cache[0].shape == (2, TINY.kv_heads, 10, TINY.head_dim)
    assert cache[0].dtype == np.float32


@pytest.mark.parametrize(("field", "value"), [("kv_heads", 4), ("head_dim", 7)])
def test_a_shape_that_cannot_run_is_refused(field: str, value: int) -> None:
    shape = {name: getattr(TINY, name) for name in LlamaConfig.__slots__} | {field: value}
    with pytest.raises(InvalidError, match=field):
        LlamaConfig(**shape)
