"""What makes the KV of a vLLM engine what it is: its configuration as a namespace.

Only attributes of vLLM's configuration objects are read here; nothing is imported from vLLM.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvpool.proto.errors import ConfigError
from kvpool.proto.keys import Extra
from kvpool.proto.layout import Part, Plane
from kvpool.proto.namespace import Namespace

CHUNK_TOKENS = 256
"""Chunks have at least as many tokens: smaller ones cost more lookups than they save prefill."""
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


@dataclass(frozen=True, slots=True)
class Variant:
    """What of a request, beside its tokens, decides who may share its KV."""

    adapter: str = "none"
    salt: str = "none"


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose blocks vLLM manages together. A chunk has `blocks` of them per layer."""

    number: int
    block_tokens: int
    page_bytes: int
    """Of one block of one layer on one rank, without padding."""
    layers: tuple[int, ...]
    """Number of layers by pipeline stage."""
    window: int | None


@dataclass(frozen=True, slots=True)
class Identity:
    """The namespaces of one engine, and how its blocks make up chunks."""

    chunk_tokens: int
    groups: tuple[Group, ...]
    shards: int
    """Ranks of a tensor-parallel group that hold different KV."""
    fields: tuple[tuple[str, str], ...]
    """The fields of a namespace that the engine decides."""

    @classmethod
    def of(cls, config: Any, cache: Any, *, chunk_tokens: int, version: str) -> Identity:
        """From vLLM's `VllmConfig` and `KVCacheConfig`. `chunk_tokens` 0: the default.

        Raises `ConfigError` for what the connector cannot serve.
        """
        parallel = config.parallel_config
        for ranks in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, ranks, 1) != 1:
                raise ConfigError(f"{ranks} is not 1: context parallelism is not supported")
        groups = tuple(_groups(config, cache))
        if all(group.window is not None for group in groups):
            raise ConfigError("every layer has a sliding window; one without is needed")
        common = math.lcm(*(group.block_tokens for group in groups))
        size = chunk_tokens or -(-CHUNK_TOKENS // common) * common
        if size % common:
            raise ConfigError(f"chunk_tokens={size} is no multiple of vLLM's {common}-token blocks")
        return cls(
            size,
            groups,
            parallel.tensor_parallel_size // cache.kv_tp_replicas,
            (
                ("model", _model_name(config.model_config)),
                ("revision", _revision(config)),
                ("kv_dtype", _kv_dtype(config)),
                ("kv_scales", _kv_scales(config)),
                ("layout", _layout(config, cache, groups, version)),
                ("rope", _rope(config.model_config.hf_text_config)),
            ),
        )

    @property
    def hybrid(self) -> bool:
        """Groups of several kinds: a load is whole or nothing, and ends where chunks do."""
        return len(self.groups) > 1

    @property
    def block_tokens(self) -> int:
        """Blocks of every group end at multiples of this."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    def namespace(self, variant: Variant) -> Namespace:
        return Namespace(
            **dict(self.fields),
            chunk_tokens=self.chunk_tokens,
            parts=tuple(self._parts()),
            key_scheme="tokens",
            adapter=variant.adapter,
            salt=variant.salt,
        )

    def _parts(self) -> Iterator[Part]:
        """One per group and rank, a plane per layer and block: so a block is read and verified
        without its neighbours."""
        for group in self.groups:
            blocks = range(self.chunk_tokens // group.block_tokens)
            for stage, layers in enumerate(group.layers):
                planes = tuple(
                    Plane(plane_name(layer, block), group.page_bytes, 0)
                    for layer in range(layers)
                    for block in blocks
                )
                for shard in range(self.shards):
                    yield Part(part_name(group.number, stage, shard), planes, group.window)


def part_name(group: int, stage: int, shard: int) -> str:
    return f"group{group}.pp{stage}.tp{shard}"


def plane_name(layer: int, block: int) -> str:
    """Layer of a part, block of a chunk."""
    return f"{layer}.{block}"


# ---- of a request


def variant_of(request: Any) -> Variant:
    """From vLLM's `Request`."""
    lora, salt = request.lora_request, request.cache_salt
    return Variant(
        adapter=f"{lora.lora_name}@{fingerprint(lora.lora_path)}" if lora else "none",
        salt=f"salt:{salt}" if salt is not None else "none",
    )


def extras_of(request: Any) -> list[Extra]:
    """What the tokens of a request do not show: images and the like by vLLM's own hash of them.

    Prompt embeddings have none: nothing is shared from the first one on.
    """
    extras = [
        Extra(
            feature.mm_position.offset,
            hashlib.sha256(f"{feature.modality}:{feature.identifier}".encode()).digest(),
        )
        for feature in request.mm_features
    ]
    if request.prompt_embeds is not None:
        known = request.prompt_is_token_ids
        extras.append(Extra(known.index(False) if known and False in known else 0, None))
    return extras


# ---- of the engine


def _groups(config: Any, cache: Any) -> Iterator[Group]:
    stages = config.parallel_config.pipeline_parallel_size
    for number in cache.transfer_group_ids:
        group = cache.kv_cache_groups[number]
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        every = list(specs.values()) if specs else [group.kv_cache_spec]
        kinds = {type(spec).__name__ for spec in every}
        if not kinds <= {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"}:
            raise ConfigError(
                f"KV cache group {number} has layers of {', '.join(sorted(kinds))}; supported are "
                "full, latent (MLA) and sliding-window attention"
            )
        shapes = {
            (s.block_size, s.unpadded_page_size_bytes, getattr(s, "sliding_window", None))
            for s in every
        }
        if len(shapes) != 1:
            raise ConfigError(f"KV cache group {number} has layers of different shapes: {shapes}")
        ((block_tokens, page_bytes, window),) = shapes
        yield Group(
            number,
            block_tokens,
            page_bytes,
            _layers(config, len(cache.kv_cache_groups), len(group.layer_names), stages),
            window if kinds == {"SlidingWindowSpec"} else None,
        )


def _layers(config: Any, groups: int, here: int, stages: int) -> tuple[int, ...]:
    """Layers of a group by stage. `here`: on this one, which is all that vLLM's scheduler knows."""
    if stages == 1:
        return (here,)
    if groups > 1:
        raise ConfigError("pipeline parallelism is supported for models with one KV cache group")
    bounds = [
        config.model_config.get_layers_start_end_indices(
            _At(config.parallel_config, stage)  # reads nothing but sizes and the rank
        )
        for stage in range(stages)
    ]
    return tuple(end - start for start, end in bounds)


class _At:
    """vLLM's parallel configuration as rank 0 of another stage sees it."""

    def __init__(self, parallel: Any, stage: int) -> None:
        self._parallel = parallel
        self.rank = stage * parallel.tensor_parallel_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parallel, name)


def _model_name(model: Any) -> str:
    path = Path(model.model)
    return path.resolve().name if path.is_dir() else str(model.model)


def _revision(config: Any) -> str:
    """The weights, what vLLM makes of them, and every setting of the model's own configuration."""
    model = config.model_config
    if config.load_config.load_format == "dummy":
        weights = f"dummy-{model.seed}"
    elif Path(model.model).is_dir():
        weights = fingerprint(model.model)
    else:
        weights = getattr(model.hf_config, "_commit_hash", None) or model.revision
    if not weights:
        raise ConfigError(
            f"nothing says which weights of {model.model!r} these are: set --revision"
        )
    words = [weights, _word(model.dtype), f"quantization={model.quantization or 'none'}"]
    words.append(_digest(model.hf_config.to_dict()))
    draft = config.speculative_config
    if draft is not None:  # the draft model's layers are among the cached ones
        words.append(f"draft={draft.method}:{draft.model}")
    return "/".join(words)


def _kv_dtype(config: Any) -> str:
    dtype = str(config.cache_config.cache_dtype)
    return _word(config.model_config.dtype) if dtype == "auto" else dtype


def _kv_scales(config: Any) -> str:
    """Static scales are part of the weights; scales per token and head lie inside the blocks."""
    dtype = str(config.cache_config.cache_dtype)
    if dtype in ("auto", "float16", "bfloat16"):
        return "none"
    return "in-block" if "per_token" in dtype else "of-the-weights"


def _layout(config: Any, cache: Any, groups: Sequence[Group], version: str) -> str:
    device = config.device_config.device_type
    backend = _word(getattr(config.attention_config, "backend", None) or "auto")
    blocks = [str(group.block_tokens) for group in groups]
    return layout_name(version, cache.kv_cache_layout, [device, backend, *blocks])


def layout_name(version: str, order: object, words: Sequence[str]) -> str:
    """The bytes inside a block are vLLM's own affair: they may differ between its versions,
    attention backends and devices. On CPUs they are packed for the matrix unit, if there is one."""
    release = ".".join(version.partition("+")[0].split(".")[:2])
    text = "-".join(["vllm", release, _processor(), str(order), *words])
    return "native:" + re.sub(r"[^A-Za-z0-9._+-]", "_", text)


def _processor() -> str:
    """What computes attention here."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{platform.machine()}{'+amx' if torch.cpu._is_amx_tile_supported() else ''}"


def _rope(text: Any) -> str:
    names = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    found = {name: getattr(text, name, None) for name in names}
    return json.dumps(
        {k: v for k, v in found.items() if v is not None}, sort_keys=True, default=str
    )


def _word(value: Any) -> str:
    """`torch.bfloat16` → `bfloat16`; an enum's member → its name."""
    return str(value).rpartition(".")[2]


def _digest(settings: dict[str, Any]) -> str:
    volatile = ("_name_or_path", "transformers_version")
    kept = {key: value for key, value in settings.items() if key not in volatile}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(folder: str) -> str:
    """Identifies the weights in `folder` by names, sizes and evenly spread samples of each file."""
    paths = sorted({path for pattern in _WEIGHTS for path in Path(folder).glob(pattern)})
    stats = [(str(path), path.stat()) for path in paths]
    return _fingerprint(tuple((name, s.st_size, s.st_mtime_ns) for name, s in stats))


@lru_cache(maxsize=256)
def _fingerprint(files: tuple[tuple[str, int, int], ...]) -> str:
    if not files:
        raise ConfigError("no weights are there to identify")
    digest = hashlib.sha256()
    for name, nbytes, _ in files:
        digest.update(f"{Path(name).name}\0{nbytes}\0".encode())
        with open(name, "rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(0, nbytes - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
