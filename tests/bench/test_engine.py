"""The engine with a store inside the process: it reuses, and it never depends on the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool.bench.engine import Engine, namespace_for, portable_view
from kvpool.bench.llama import Array, KvCache, LlamaConfig
from kvpool.bench.model import Model, random_model
from kvpool.client import Client, LocalStore, Session, connect, portable
from kvpool.proto.errors import InvalidError, UnreachableError

TINY = LlamaConfig(
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    hidden=24,
    ffn=40,
    vocab=262,
    rms_eps=1e-5,
    rope_base=1000.0,
)
CHUNK = 16
MODEL = random_model(7, config=TINY, block_tokens=8)
PROMPT = np.random.default_rng(1).integers(0, TINY.vocab, 6 * CHUNK + 5).tolist()
MIB = 1 << 20


@pytest.fixture
def store() -> Iterator[LocalStore]:
    store = LocalStore(64 * MIB)
    yield store
    store.close()


@pytest.fixture
def client(store: LocalStore) -> Iterator[Client]:
    with connect(store) as client:
        yield client


@pytest.fixture
def session(client: Client) -> Session:
    return client.open(namespace_for(MODEL, CHUNK))


def engine_of(session: Session | None) -> Engine:
    return Engine(MODEL, session, max_tokens=256)


def one_shot(tokens: list[int]) -> Array:
    return MODEL.llama.prefill(tokens, KvCache(TINY, len(tokens)))


def answer_of(engine: Engine, tokens: list[int], limit: int = 20) -> list[int]:
    return list(engine.generate(engine.prefill(tokens), limit))


def chunks_in(session: Session, tokens: list[int]) -> int:
    with session.match(tokens, peek=True) as match:
        return match.chunks


def corrupt(store: LocalStore, session: Session, tokens: list[int], chunk: int) -> None:
    """Flip bits of a stored payload, as a broken DIMM would."""
    with session.match(tokens) as match:
        payload = session.borrow(match).views[chunk]
        for domain in store.service.domains.values():
            for region in domain.pool.regions:
                start = address_of(payload) - address_of(region.array)
                if 0 <= start < region.array.size:
                    region.array[start + 100] ^= 0xFF


def address_of(array: NDArray[np.uint8]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


# --- Reuse -----------------------------------------------------------------------------------


def test_an_engine_without_a_store_computes_what_a_prefill_at_once_computes() -> None:
    assert engine_of(None).prefill(PROMPT).tobytes() == one_shot(PROMPT).tobytes()


def test_a_second_engine_reuses_all_full_chunks_and_gets_the_same_bits(session: Session) -> None:
    first, second = engine_of(session), engine_of(session)
    expected = one_shot(PROMPT).tobytes()
    assert first.prefill(PROMPT).tobytes() == expected
    assert (first.usage.matched, first.usage.published) == (0, 6)
    assert second.prefill(PROMPT).tobytes() == expected
    assert (second.usage.pulled, second.usage.published) == (6 * CHUNK, 0)
    assert second.usage.pulled_bytes == 6 * session.namespace.parts[0].nbytes
    assert second.usage.pull_s > 0


def test_a_prompt_of_whole_chunks_computes_the_last_one_for_its_logits(session: Session) -> None:
    prompt = PROMPT[: 4 * CHUNK]
    engine_of(session).prefill(prompt)
    engine = engine_of(session)
    assert engine.prefill(prompt).tobytes() == one_shot(prompt).tobytes()
    assert (engine.usage.matched, engine.usage.pulled) == (4 * CHUNK, 3 * CHUNK)


def test_a_prompt_shorter_than_a_chunk_is_just_computed(session: Session) -> None:
    engine = engine_of(session)
    assert engine.prefill(PROMPT[:5]).tobytes() == one_shot(PROMPT[:5]).tobytes()
    assert engine.usage.trouble == ""


def test_a_longer_prompt_computes_only_what_is_new(session: Session) -> None:
    engine_of(session).prefill(PROMPT[: 3 * CHUNK + 2])
    engine = engine_of(session)
    assert engine.prefill(PROMPT).tobytes() == one_shot(PROMPT).tobytes()
    assert (engine.usage.pulled, engine.usage.published) == (3 * CHUNK, 3)


def test_an_engine_keeps_nothing_of_its_own_from_one_prompt_to_the_next(session: Session) -> None:
    engine = engine_of(session)
    other = [token ^ 1 for token in PROMPT]
    for prompt in (PROMPT, other, PROMPT[:40], PROMPT):
        assert engine.prefill(prompt).tobytes() == one_shot(prompt).tobytes()
    assert engine.usage.pulled == 6 * CHUNK


def test_answers_are_the_same_with_and_without_the_store(session: Session) -> None:
    cache = KvCache(TINY, 256)
    expected = MODEL.llama.generate(PROMPT, cache, 20)
    assert answer_of(engine_of(None), PROMPT) == expected
    assert answer_of(engine_of(session), PROMPT) == expected
    assert answer_of(engine_of(session), PROMPT) == expected


def test_an_answer_ends_after_a_stop_token(session: Session) -> None:
    answer = answer_of(engine_of(None), PROMPT)
    engine = engine_of(session)
    stopped = list(engine.generate(engine.prefill(PROMPT), 20, stop={answer[4]}))
    assert stopped == answer[: answer.index(answer[4]) + 1]


# --- Publishing ------------------------------------------------------------------------------


def test_publish_stores_all_full_chunks_and_then_costs_nothing(session: Session) -> None:
    engine = engine_of(session)
    engine.publish(PROMPT)
    assert (engine.usage.published, chunks_in(session, PROMPT)) == (6, 6)
    engine.publish(PROMPT)
    assert (engine.usage.matched, engine.usage.pulled, engine.usage.published) == (96, 0, 0)


def test_chunks_are_visible_to_others_while_the_prefill_goes_on(
    store: LocalStore, session: Session
) -> None:
    """A model that waits before every chunk lets us look in between."""
    gate, computed = threading.Semaphore(0), threading.Semaphore(0)

    class Slow:
        block_tokens = MODEL.llama.block_tokens
        config = MODEL.llama.config

        def prefill(self, tokens: list[int], cache: KvCache) -> Array:
            computed.release()
            assert gate.acquire(timeout=10)
            return MODEL.llama.prefill(tokens, cache)

    slow = Model(MODEL.name, MODEL.revision, Slow(), MODEL.tokenizer)  # type: ignore[arg-type]
    thread = threading.Thread(target=Engine(slow, session, max_tokens=256).prefill, args=[PROMPT])
    thread.start()
    with connect(store) as other:
        looking = other.open(session.namespace)
        for chunks in range(6):
            assert computed.acquire(timeout=10)
            assert chunks_in(looking, PROMPT) == chunks
            gate.release()
        gate.release()
        thread.join(10)
        assert chunks_in(looking, PROMPT) == 6


def test_chunks_that_an_answer_completes_are_equal_to_a_prefill_of_them(session: Session) -> None:
    engine = engine_of(session)
    tokens = PROMPT + answer_of(engine, PROMPT, 2 * CHUNK)
    engine.end_turn(will_continue=True)
    assert chunks_in(session, tokens) == len(tokens) // CHUNK == 8
    following = tokens + PROMPT[:9]
    reader = engine_of(session)
    assert reader.prefill(following).tobytes() == one_shot(following).tobytes()
    assert reader.usage.pulled == 8 * CHUNK


def test_the_end_of_a_turn_without_new_chunks_only_hints(session: Session) -> None:
    engine = engine_of(session)
    answer_of(engine, PROMPT, 3)
    engine.end_turn(will_continue=False)
    assert engine.usage.published == 6
    engine_of(None).end_turn(will_continue=False)


# --- Trouble ---------------------------------------------------------------------------------


def test_an_engine_whose_store_is_away_computes_everything(tmp_path: Path) -> None:
    with connect(f"unix:{tmp_path}/nobody") as client:
        engine = engine_of(client.open(namespace_for(MODEL, CHUNK)))
        assert answer_of(engine, PROMPT) == answer_of(engine_of(None), PROMPT)
        assert "nobody" in engine.usage.trouble
        engine.end_turn(will_continue=True)
        engine.publish(PROMPT)
        assert engine.usage.published == 0


def test_an_engine_survives_that_its_store_goes_away(
    store: LocalStore, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(session)
    engine.prefill(PROMPT[: 3 * CHUNK])

    def gone(*_: object) -> None:
        raise UnreachableError("the store has gone")

    monkeypatch.setattr(store, "handle", gone)
    assert engine.prefill(PROMPT).tobytes() == one_shot(PROMPT).tobytes()
    assert engine.usage.trouble == "the store has gone"
    monkeypatch.undo()
    engine.prefill(PROMPT)
    assert (engine.usage.pulled, engine.usage.trouble) == (3 * CHUNK, "")


def test_a_full_store_costs_no_answer(client: Client, session: Session) -> None:
    """All its memory is pinned by others: nothing fits any more, and the engine goes on without."""
    big = portable("big", layers=["l"], kv_heads=8, head_dim=2048, itemsize=4, tokens=CHUNK)
    others = client.open(replace(session.namespace, model="others", parts=(big,)))
    chain = np.arange(100 * CHUNK)
    for chunk in range(100):
        if not others.publish(chain, [others.payload(1)[0]], first=chunk).stored:
            break
        others.pin(chain[: (chunk + 1) * CHUNK])
    engine = engine_of(session)
    assert engine.prefill(PROMPT).tobytes() == one_shot(PROMPT).tobytes()
    assert engine.usage.trouble
    assert engine.usage.published == 0


@pytest.mark.parametrize("chunk", [0, 3, 5])
def test_a_corrupt_chunk_is_computed_and_published_anew(
    store: LocalStore, session: Session, chunk: int
) -> None:
    engine_of(session).prefill(PROMPT)
    corrupt(store, session, PROMPT, chunk)
    engine = engine_of(session)
    assert engine.prefill(PROMPT).tobytes() == one_shot(PROMPT).tobytes()
    assert engine.usage.pulled == chunk * CHUNK
    assert engine.usage.published == 1
    healed = engine_of(session)
    assert healed.prefill(PROMPT).tobytes() == one_shot(PROMPT).tobytes()
    assert healed.usage.pulled == 6 * CHUNK


# --- Identity and layout ---------------------------------------------------------------------


def test_the_portable_view_shows_head_then_kv_then_token() -> None:
    cache = KvCache(TINY, 4 * CHUNK)
    view = portable_view(cache, CHUNK)
    assert view.shape == (4, TINY.layers, TINY.kv_heads, 2, CHUNK, TINY.head_dim)
    view[2, 1, 0, 1, 3] = 5.0  # chunk 2, layer 1, head 0, V, its token 3
    assert (cache[1][1, 0, 2 * CHUNK + 3] == 5.0).all()
    assert cache.planes.sum() == 5.0 * TINY.head_dim


def test_models_with_other_weights_or_chunks_share_nothing(client: Client) -> None:
    other = random_model(8, config=TINY, block_tokens=8)
    names = [namespace_for(MODEL, 16), namespace_for(MODEL, 32), namespace_for(other, 16)]
    assert len({name.digest("tenant") for name in names}) == 3
    engine_of(client.open(names[0])).prefill(PROMPT)
    assert chunks_in(client.open(names[2]), PROMPT) == 0


def test_blocks_that_do_not_divide_a_chunk_are_refused(session: Session) -> None:
    with pytest.raises(InvalidError, match="block_tokens=10 does not divide the 16 tokens"):
        Engine(random_model(7, config=TINY, block_tokens=10), session)


def test_a_prompt_that_does_not_fit_is_refused_and_the_engine_stays_usable(
    session: Session,
) -> None:
    engine_of(session).prefill(PROMPT)
    engine = Engine(MODEL, session, max_tokens=32)
    with pytest.raises(InvalidError, match="101 tokens exceed the cache's 32"):
        engine.prefill(PROMPT)
    assert engine.prefill(PROMPT[:20]).tobytes() == one_shot(PROMPT[:20]).tobytes()
