"""transformers on the store: the same bits and tokens as without, whatever happens to the store."""

import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig
from transformers.models.mistral.modeling_mistral import MistralForCausalLM

from kvpool.client import LocalStore, connect
from kvpool.client.engines import hf
from kvpool.client.engines.hf import Engine, namespace_for
from kvpool.proto.errors import ConfigError, InvalidError
from tests.client.stores import extent
from tests.store.daemons import RunningDaemon

CHUNK = 16
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,  # far from zero, so that the greedy choice is clear
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny(dtype: torch.dtype = torch.float32, **fields: Any) -> LlamaForCausalLM:
    """A random Llama with grouped KV heads; equal calls give equal weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | fields)).to(dtype).eval()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny()


@pytest.fixture
def store() -> Iterator[LocalStore]:
    with closing(LocalStore(32 << 20, chunks=4096)) as made:
        yield made


@pytest.fixture
def new_engine(model: LlamaForCausalLM) -> Iterator[Callable[..., Engine]]:
    """Engines with clients of their own, as if each were a process started anew."""
    clients = []

    def make(
        store: LocalStore | str | None, of: LlamaForCausalLM = model, **options: Any
    ) -> Engine:
        if store is None:
            return Engine(of, None, name="tiny", revision="1", chunk_tokens=CHUNK)
        client = connect(store)
        clients.append(client)
        identity: dict[str, Any] = {"name": "tiny", "revision": "1", "chunk_tokens": CHUNK}
        return Engine(of, client, **identity | options)

    yield make
    for client in clients:
        client.close()


def prompt(tokens: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (1, tokens), generator=generator)


def split_prefill(model: LlamaForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, DynamicCache]:
    """The yardstick, without the adapter: a prefill that is split at the chunks' boundaries."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for piece in ids.split(CHUNK, dim=1):
            output = model(piece, past_key_values=cache, logits_to_keep=1)
    return output.logits[0, -1], cache


def assert_same_kv(one: DynamicCache, two: DynamicCache) -> None:
    for a, b in zip(one.layers, two.layers, strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reuse_is_bit_equal_to_a_prefill_split_at_the_same_boundaries(
    store: LocalStore, new_engine: Callable[..., Engine], dtype: torch.dtype
) -> None:
    model, ids = tiny(dtype), prompt(5 * CHUNK + 3)
    writer, reader = new_engine(store, model), new_engine(store, model)
    cold = writer.prefill(ids)
    warm = reader.prefill(ids)
    assert (writer.usage.pulled, writer.usage.published) == (0, 5)
    assert (reader.usage.pulled, reader.usage.published) == (5 * CHUNK, 0)
    assert reader.usage.pulled_bytes == 5 * reader.namespace.parts[0].nbytes
    yardstick = split_prefill(model, ids)
    for logits, cache in (cold, warm):
        assert torch.equal(logits, yardstick[0])
        assert_same_kv(cache, yardstick[1])


def test_greedy_tokens_are_those_of_a_plain_generate(
    store: LocalStore, new_engine: Callable[..., Engine], model: LlamaForCausalLM
) -> None:
    ids = prompt(4 * CHUNK + 5)
    plain = model.generate(ids, max_new_tokens=24, do_sample=False)
    for pulled in (0, 4 * CHUNK):
        engine = new_engine(store)
        assert torch.equal(engine.generate(ids, max_new_tokens=24, do_sample=False), plain)
        assert engine.usage.pulled == pulled


def test_a_conversation_computes_and_publishes_only_what_is_new(
    store: LocalStore, new_engine: Callable[..., Engine], model: LlamaForCausalLM
) -> None:
    first = new_engine(store)
    turn = first.generate(prompt(2 * CHUNK), max_new_tokens=CHUNK, do_sample=False)
    assert first.usage.published == 2
    ids = torch.cat([turn, prompt(CHUNK, seed=2)], dim=1)
    second = new_engine(store)
    logits, _ = second.prefill(ids)
    assert (second.usage.pulled, second.usage.published) == (2 * CHUNK, 2)
    assert torch.equal(logits, split_prefill(model, ids)[0])


@pytest.mark.parametrize(
    ("tokens", "pulled"), [(1, 0), (CHUNK - 1, 0), (CHUNK, 0), (CHUNK + 1, CHUNK), (48, 32)]
)
def test_the_last_token_is_always_computed(
    store: LocalStore, new_engine: Callable[..., Engine], tokens: int, pulled: int
) -> None:
    ids = prompt(tokens)
    cold, _ = new_engine(store).prefill(ids)
    reader = new_engine(store)
    warm, cache = reader.prefill(ids)
    assert reader.usage.matched == tokens // CHUNK * CHUNK
    assert reader.usage.pulled == pulled
    assert cache.get_seq_length() == tokens
    assert torch.equal(cold, warm)


def test_prompts_share_what_they_begin_with(
    store: LocalStore, new_engine: Callable[..., Engine], model: LlamaForCausalLM
) -> None:
    common = prompt(3 * CHUNK + 7)
    new_engine(store).prefill(torch.cat([common, prompt(40, seed=2)], dim=1))
    ids = torch.cat([common, prompt(40, seed=3)], dim=1)
    engine = new_engine(store)
    logits, _ = engine.prefill(ids)
    assert engine.usage.pulled == 3 * CHUNK
    assert torch.equal(logits, split_prefill(model, ids)[0])


def test_a_damaged_chunk_is_computed_and_published_anew(
    store: LocalStore, new_engine: Callable[..., Engine]
) -> None:
    ids = prompt(4 * CHUNK + 1)
    writer = new_engine(store)
    want, _ = writer.prefill(ids)
    with connect(store) as client:
        session = client.open(writer.namespace)
        with session.match(ids[0].numpy()) as match:
            extent(client, match, 2)[-1] ^= 1
    for pulled, published in ((2 * CHUNK, 1), (4 * CHUNK, 0)):
        engine = new_engine(store)
        assert torch.equal(engine.prefill(ids)[0], want)
        assert (engine.usage.pulled, engine.usage.published) == (pulled, published)


# ---- identity

CHANGES_THE_KV: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-3,
    "attention_bias": True,
    "mlp_bias": True,
    "vocab_size": 256,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
}


@pytest.mark.parametrize("field", CHANGES_THE_KV)
def test_each_field_that_changes_the_kv_changes_the_namespace(
    model: LlamaForCausalLM, field: str
) -> None:
    other = tiny(**{field: CHANGES_THE_KV[field]})
    same, different = (namespace_for(m, name="tiny", revision="1") for m in (model, other))
    assert same.digest("t") != different.digest("t")


@pytest.mark.parametrize(
    "options",
    [
        {"name": "other"},
        {"revision": "2"},
        {"adapter": "lora"},
        {"salt": "s"},
        {"chunk_tokens": 2 * CHUNK},
    ],
)
def test_each_option_changes_the_namespace(
    model: LlamaForCausalLM, options: dict[str, Any]
) -> None:
    base: dict[str, Any] = {"name": "tiny", "revision": "1", "chunk_tokens": CHUNK}
    changed = namespace_for(model, **base | options)
    assert namespace_for(model, **base).digest("t") != changed.digest("t")


def test_the_type_of_the_kv_changes_the_namespace() -> None:
    one, two = (
        namespace_for(tiny(dtype), name="tiny", revision="1")
        for dtype in (torch.float16, torch.bfloat16)  # equal in size
    )
    assert one.digest("t") != two.digest("t")


@pytest.mark.parametrize(
    ("field", "value"), [("pad_token_id", 1), ("eos_token_id", 1), ("use_cache", False)]
)
def test_what_cannot_change_the_kv_does_not_change_the_namespace(
    model: LlamaForCausalLM, field: str, value: object
) -> None:
    other = tiny()
    setattr(other.config, field, value)
    same = [namespace_for(m, name="tiny", revision="1") for m in (model, other)]
    assert same[0] == same[1]


def test_a_model_from_the_hub_names_its_weights_itself() -> None:
    model = tiny()
    model.config._name_or_path, model.config._commit_hash = "org/tiny", "12ab"
    namespace = namespace_for(model)
    assert namespace.model == "org/tiny" and namespace.revision.startswith("12ab/")


def test_weights_without_a_revision_are_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(InvalidError, match="say name=… and revision=…"):
        namespace_for(model, name="tiny")


def test_a_sliding_window_is_refused_by_the_name_of_its_layers() -> None:
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=32))
    with pytest.raises(InvalidError, match="DynamicSlidingWindowLayer"):
        namespace_for(model, name="tiny", revision="1")


def test_an_untested_version_is_refused_with_the_tested_ones(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "TESTED", ("4.0.0",))
    with pytest.raises(ConfigError, match=r"transformers 5\.\d.* 4\.0\.0"):
        Engine(model, None, name="tiny", revision="1")


# ---- what is not one prompt


def test_more_than_one_prompt_is_refused(new_engine: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidError, match=r"\(2, 8\): one prompt at a time"):
        new_engine(None).prefill(prompt(16).view(2, 8))


def test_padding_is_refused(new_engine: Callable[..., Engine]) -> None:
    mask = torch.tensor([[0, 1, 1, 1]])
    with pytest.raises(InvalidError, match="padded"):
        new_engine(None).generate(prompt(4), attention_mask=mask)


def test_beams_are_refused(new_engine: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidError, match="num_beams=2"):
        new_engine(None).generate(prompt(4), num_beams=2)


# ---- the store in trouble


def test_an_engine_goes_on_while_the_store_is_away_and_uses_it_when_it_is_back(
    tmp_path: Path, new_engine: Callable[..., Engine], model: LlamaForCausalLM
) -> None:
    ids = prompt(3 * CHUNK + 1)
    want = split_prefill(model, ids)[0]
    engine = new_engine(f"unix:{tmp_path / 'k.sock'}", deadline_s=0.2)
    assert torch.equal(engine.prefill(ids)[0], want)
    assert engine.usage.trouble
    daemon = RunningDaemon(tmp_path, "--no-populate", "--headroom", "0")
    try:
        engine = new_engine(daemon.address, deadline_s=0.5)
        engine.prefill(ids)
        assert (engine.usage.published, engine.usage.trouble) == (3, "")
        daemon.signal(signal.SIGSTOP)
        assert torch.equal(engine.prefill(ids)[0], want)
        assert (engine.usage.pulled, bool(engine.usage.trouble)) == (0, True)
        daemon.signal(signal.SIGCONT)
        daemon.kill()
        assert torch.equal(engine.prefill(ids)[0], want)
        assert (engine.usage.pulled, bool(engine.usage.trouble)) == (0, True)
    finally:
        daemon.close()


def test_a_full_store_is_trouble_and_no_error(
    new_engine: Callable[..., Engine], model: LlamaForCausalLM
) -> None:
    with closing(LocalStore(1 << 20, chunks=4096)) as store:
        pinned, ids = prompt(100 * CHUNK, seed=2), prompt(3 * CHUNK + 1)
        engine = new_engine(store)
        engine.prefill(pinned)
        with connect(store) as client:
            client.open(engine.namespace).pin(pinned[0].numpy())
            logits, _ = engine.prefill(ids)
        assert torch.equal(logits, split_prefill(model, ids)[0])
        assert "total" in engine.usage.trouble
