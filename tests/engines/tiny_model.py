"""Writes a tiny Llama of random weights: `tiny_model.py FOLDER SEED`. Needs transformers.

The weights are large enough that each token depends on all before it: an engine that used wrong KV
would say something else.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 512


def write(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    # vLLM wants a tokenizer to exist; prompts are token ids.
    words = {f"t{number}": number for number in range(VOCABULARY)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "t0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model}
    nothing = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    (folder / "tokenizer.json").write_text(json.dumps({**dict.fromkeys(nothing), **tokenizer}))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
