"""Every setting of vLLM, and of a request, that changes KV changes its keys.

The configurations are stand-ins with the attributes of vLLM 0.32's own; that a real engine has
them is shown in `test_vllm_connector.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.client.engines.versions import require
from kvpool.client.engines.vllm.identity import Identity, extras_of, fingerprint, variant_of
from kvpool.proto.errors import ConfigError
from kvpool.proto.keys import chain_keys


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


class Engine:
    """A configuration of vLLM, and a request to it, to be changed by one setting each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1024)
        self.hf: dict[str, Any] = {"rope_theta": 10000.0, "hidden_size": 256}
        self.version = "0.32.0"
        self.spec: Any = self.attention()
        self.config: Any = SimpleNamespace(
            model_config=SimpleNamespace(
                model=str(folder), revision=None, dtype="torch.bfloat16", quantization=None, seed=0
            ),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            load_config=SimpleNamespace(load_format="auto"),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
            ),
            device_config=SimpleNamespace(device_type="cuda"),
            attention_config=SimpleNamespace(backend=None),
            speculative_config=None,
        )
        self.cache: Any = SimpleNamespace(kv_tp_replicas=1, kv_cache_layout="LBNHC")
        self.request: Any = SimpleNamespace(
            lora_request=None,
            cache_salt=None,
            mm_features=[],
            prompt_embeds=None,
            prompt_is_token_ids=None,
        )
        self.groups: list[Any] | None = None

    @staticmethod
    def attention(**changes: Any) -> FullAttentionSpec:
        shape = {"block_size": 16, "unpadded_page_size_bytes": 4096, "sliding_window": None}
        return FullAttentionSpec(**{**shape, **changes})

    def identity(self) -> Identity:
        model = self.config.model_config
        model.hf_config = SimpleNamespace(to_dict=lambda: self.hf, _commit_hash=None)
        model.hf_text_config = SimpleNamespace(**self.hf)
        model.get_layers_start_end_indices = lambda parallel: (
            (0, 1) if parallel.rank < parallel.tensor_parallel_size else (1, 4)
        )
        layers = 4 // self.config.parallel_config.pipeline_parallel_size
        self.cache.kv_cache_groups = self.groups or [
            SimpleNamespace(kv_cache_spec=self.spec, layer_names=["layer"] * layers)
        ]
        self.cache.transfer_group_ids = tuple(range(len(self.cache.kv_cache_groups)))
        return Identity.of(self.config, self.cache, chunk_tokens=0, version=self.version)

    def key(self) -> bytes:
        """Of the first chunk of a prompt of zeros."""
        space = self.identity().namespace(variant_of(self.request))
        digest, size = space.digest("tenant"), space.chunk_tokens
        return chain_keys(digest, [0] * size, size, extras_of(self.request))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr("kvpool.client.engines.vllm.identity._processor", lambda: "H200")
    return Engine(tmp_path / "model")


def other_weights(engine: Engine) -> None:
    (engine.folder / "model.safetensors").write_bytes(bytes(range(255, -1, -1)) * 1024)


def other_name(engine: Engine) -> None:
    other = engine.folder.with_name("other")
    engine.folder.rename(other)
    engine.config.model_config.model = str(other)


def two_ranks(engine: Engine) -> None:
    engine.config.parallel_config.tensor_parallel_size = 2


def two_stages(engine: Engine) -> None:
    engine.config.parallel_config.pipeline_parallel_size = 2


def lora(engine: Engine) -> None:
    engine.request.lora_request = SimpleNamespace(lora_name="a", lora_path=str(engine.folder))


def draft_model(engine: Engine) -> None:
    engine.config.speculative_config = SimpleNamespace(method="eagle", model="draft")


def image(engine: Engine, identifier: str = "cafe", offset: int = 3) -> None:
    position = SimpleNamespace(offset=offset)
    engine.request.mm_features = [
        SimpleNamespace(modality="image", identifier=identifier, mm_position=position)
    ]


def assign(path: str, value: Any) -> Callable[[Engine], None]:
    def change(engine: Engine) -> None:
        *names, last = path.split(".")
        target: Any = engine
        for name in names:
            target = getattr(target, name)
        assert getattr(target, last) != value
        setattr(target, last, value)

    return change


CHANGES: dict[str, Callable[[Engine], None]] = {
    "weights": other_weights,
    "model": other_name,
    "random weights": assign("config.load_config.load_format", "dummy"),
    "settings of the model": lambda engine: engine.hf.update(hidden_size=512),
    "RoPE": lambda engine: engine.hf.update(rope_theta=20000.0),
    "RoPE scaling": lambda engine: engine.hf.update(rope_scaling={"factor": 2.0}),
    "dtype": assign("config.model_config.dtype", "torch.float16"),
    "quantisation": assign("config.model_config.quantization", "awq"),
    "KV dtype": assign("config.cache_config.cache_dtype", "fp8_e4m3"),
    "KV scales": assign("config.cache_config.cache_dtype", "fp8_per_token_head"),
    "layout": assign("cache.kv_cache_layout", "LBHNC"),
    "attention backend": assign("config.attention_config.backend", "FLASHINFER"),
    "device": assign("config.device_config.device_type", "cpu"),
    "version of vLLM": assign("version", "0.33.0"),
    "block size": assign("spec", Engine.attention(block_size=32)),
    "page size": assign("spec", Engine.attention(unpadded_page_size_bytes=8192)),
    "tensor parallelism": two_ranks,
    "pipeline parallelism": two_stages,
    "draft model": draft_model,
    "LoRA": lora,
    "cache salt": assign("request.cache_salt", "alice"),
    "salt that looks like none": assign("request.cache_salt", "none"),
    "image": image,
    "place of an image": lambda engine: image(engine, offset=4),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_kv_changes_the_key(engine: Engine, change: str) -> None:
    before = engine.key()
    assert engine.key() == before
    CHANGES[change](engine)
    assert engine.key() != before


def test_no_two_settings_are_taken_for_one_another(engine: Engine, tmp_path: Path) -> None:
    keys = {engine.key()}
    for name, change in CHANGES.items():
        (tmp_path / f"for {name}").mkdir()
        changed = Engine(tmp_path / f"for {name}" / engine.folder.name)
        change(changed)
        keys.add(changed.key())
    assert len(keys) == 1 + len(CHANGES)


def test_another_image_in_the_same_place_changes_the_key(engine: Engine) -> None:
    image(engine, "cafe")
    before = engine.key()
    image(engine, "beef")
    assert engine.key() != before


def test_the_same_weights_elsewhere_have_the_same_key(engine: Engine) -> None:
    before = engine.key()
    elsewhere = engine.folder.with_name("mirror") / engine.folder.name
    elsewhere.parent.mkdir()
    engine.folder.rename(elsewhere)
    os.utime(elsewhere / "model.safetensors", (1, 1))
    engine.config.model_config.model = str(elsewhere)
    assert engine.key() == before


def test_prompt_embeddings_end_what_is_shared(engine: Engine) -> None:
    engine.request.prompt_embeds = object()
    engine.request.prompt_is_token_ids = [True] * 5 + [False] * 9
    assert engine.key() == b""


def test_chunks_have_at_least_256_tokens_in_whole_blocks(engine: Engine) -> None:
    sizes = {}
    for block in (16, 48, 128, 512):
        engine.spec = Engine.attention(block_size=block)
        sizes[block] = engine.identity().chunk_tokens
    assert sizes == {16: 256, 48: 288, 128: 256, 512: 512}


def test_each_rank_and_stage_has_a_part_with_a_plane_per_layer_and_block(engine: Engine) -> None:
    two_ranks(engine)
    two_stages(engine)
    parts = engine.identity().namespace(variant_of(engine.request)).parts
    assert [(part.name, len(part.planes), part.nbytes) for part in parts] == [
        ("group0.pp0.tp0", 1 * 16, 1 * 16 * 4096),
        ("group0.pp0.tp1", 1 * 16, 1 * 16 * 4096),
        ("group0.pp1.tp0", 3 * 16, 3 * 16 * 4096),
        ("group0.pp1.tp1", 3 * 16, 3 * 16 * 4096),
    ]


def test_ranks_that_hold_the_same_kv_share_a_part(engine: Engine) -> None:
    engine.config.parallel_config.tensor_parallel_size = 4
    engine.cache.kv_tp_replicas = 4
    parts = engine.identity().namespace(variant_of(engine.request)).parts
    assert [part.name for part in parts] == ["group0.pp0.tp0"]


def test_a_sliding_window_is_needed_for_its_last_tokens_only(engine: Engine) -> None:
    window = SlidingWindowSpec(block_size=16, unpadded_page_size_bytes=4096, sliding_window=128)
    specs = [Engine.attention(), window]
    engine.groups = [SimpleNamespace(kv_cache_spec=s, layer_names=["a", "b"]) for s in specs]
    parts = engine.identity().namespace(variant_of(engine.request)).parts
    assert [(part.name, part.window) for part in parts] == [
        ("group0.pp0.tp0", None),
        ("group1.pp0.tp0", 128),
    ]


def test_what_cannot_be_served_is_refused_in_words(engine: Engine) -> None:
    engine.spec = MambaSpec()
    with pytest.raises(ConfigError, match="MambaSpec; supported are full"):
        engine.identity()
    engine.spec = Engine.attention()
    engine.config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ConfigError, match="context parallelism is not supported"):
        engine.identity()


def test_weights_without_a_name_are_refused(engine: Engine) -> None:
    engine.config.model_config.model = "somebody/model"
    with pytest.raises(ConfigError, match="set --revision"):
        engine.identity()


def test_a_fingerprint_needs_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weights"):
        fingerprint(str(tmp_path))


def test_a_missing_or_untested_version_is_named_with_the_tested_ones() -> None:
    assert require("NumPy", ("nothing-such", "numpy"), ("2",)).startswith("2.")
    with pytest.raises(ConfigError, match=r"NumPy 2\S+ is installed.* tested versions are 1\.9, 3"):
        require("NumPy", ("numpy",), ("1.9", "3"))
    with pytest.raises(ConfigError, match=r"vLLM is not installed: the tested versions are 0\.32"):
        require("vLLM", ("nothing-such",), ("0.32",))
