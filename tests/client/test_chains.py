"""A session hashes only what is new, and what it remembers is always the real chain."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpool.client import Extra
from kvpool.client.chains import REMEMBERED, ChainMemo
from kvpool.proto.keys import chain_keys

STEP = 4
ROOT = bytes(range(32))


def memo() -> ChainMemo:
    return ChainMemo(ROOT, STEP)


def test_a_growing_conversation_hashes_each_chunk_once() -> None:
    chains, tokens = memo(), list(range(10 * STEP))
    for length in range(1, len(tokens) + 1):
        assert chains.keys(tokens[:length]) == chain_keys(ROOT, tokens[:length], STEP)
    assert chains.hashed_chunks == 10
    chains.keys(tokens[: 5 * STEP])
    assert chains.hashed_chunks == 10


def test_conversations_that_share_a_beginning_hash_it_once() -> None:
    chains, system = memo(), list(range(8 * STEP))
    for user in range(20):
        chains.keys([*system, *[1000 + user] * (2 * STEP)])
    assert chains.hashed_chunks == 8 + 20 * 2


def test_an_interleaved_conversation_is_not_forgotten() -> None:
    chains = memo()
    talks = [[100 * talk + i for i in range(6 * STEP)] for talk in range(REMEMBERED)]
    for length in (2, 4, 6):
        for talk in talks:
            chains.keys(talk[: length * STEP])
    assert chains.hashed_chunks == 6 * REMEMBERED


def test_the_least_recently_used_conversation_is_forgotten_first() -> None:
    chains = memo()
    talks = [[100 * talk + i for i in range(STEP)] for talk in range(REMEMBERED + 1)]
    for talk in talks[:REMEMBERED]:
        chains.keys(talk)
    chains.keys(talks[0])
    chains.keys(talks[REMEMBERED])
    before = chains.hashed_chunks
    chains.keys(talks[0])
    assert chains.hashed_chunks == before
    chains.keys(talks[1])
    assert chains.hashed_chunks == before + 1


def test_what_the_caller_does_to_its_tokens_later_changes_nothing() -> None:
    chains, tokens = memo(), np.arange(4 * STEP, dtype=np.uint32)
    chains.keys(tokens)
    tokens[:] = 7
    assert chains.keys(tokens) == chain_keys(ROOT, tokens, STEP)


EXTRAS = st.lists(
    st.builds(Extra, st.integers(0, 24), st.sampled_from([b"cat", b"dog", None])), max_size=3
)
PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=24), EXTRAS), min_size=1, max_size=12
)


@given(PROMPTS)
def test_remembered_keys_are_those_that_hashing_gives(
    prompts: list[tuple[list[int], list[Extra]]],
) -> None:
    chains = memo()
    for tokens, extras in prompts:
        assert chains.keys(tokens, extras) == chain_keys(ROOT, tokens, STEP, extras)
