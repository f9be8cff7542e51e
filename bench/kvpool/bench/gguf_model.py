"""Turns a GGUF file into a bfloat16 model folder that engines load: `gguf_model.py FILE FOLDER`.

Runs with an interpreter that has torch and transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(file: Path, folder: Path) -> None:
    """Writes `folder` whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(quantized.config)(**settings))
    model.load_state_dict(quantized.state_dict())
    partial = folder.with_name(f"{folder.name}.partial")
    model.to(torch.bfloat16).save_pretrained(partial)
    AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
    partial.rename(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
