"""Hugging Face transformers: the KV of a prompt's prefix goes in and out as a `DynamicCache`.

The KV of a prompt is always computed in whole, aligned chunks, whatever the store has of it. Hence
an engine that reuses a prefix gets the bits, and the tokens, of one that computes it.

Layout: native, tokens outermost (plane = token → K/V → head → dim), because a cache has one tensor
per layer for all chunks. A pull lands in the memory that the cache then refers to, without another
copy; portable planes begin with the head, so those of several chunks would have to be joined.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpool.client.api import Client
from kvpool.client.engines.versions import require
from kvpool.client.results import Match
from kvpool.proto.errors import InvalidError
from kvpool.proto.keys import TokenArray, as_tokens
from kvpool.proto.layout import native
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

TESTED = ("5.19.0",)
LAYOUT = "native:hf.token-kv-head-dim"

_NOT_IN_THE_KV = frozenset(
    {
        "_name_or_path",
        "bos_token_id",
        "dtype",  # the KV's own is in the namespace
        "eos_token_id",
        "pad_token_id",
        "transformers_version",
        "use_cache",
    }
)


def namespace_for(
    model: PreTrainedModel,
    *,
    name: str = "",
    revision: str = "",
    adapter: str = "none",
    salt: str = "none",
    chunk_tokens: int = 256,
) -> Namespace:
    """The identity of the KV that `model` computes: one part, one plane per layer.

    `name` and `revision` say which weights these are; a model from the hub knows both. The whole
    configuration goes into the identity, except what cannot change the KV. `adapter` names the
    LoRA weights that are active. Raises `InvalidError` for what is not known, and for models whose
    cache is no `DynamicCache` of full attention alone.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if kinds != {DynamicLayer}:
        others = ", ".join(sorted(kind.__name__ for kind in kinds - {DynamicLayer}))
        raise InvalidError(f"only caches of full attention are supported, not {others or 'none'}")
    name = name or model.config._name_or_path
    revision = revision or getattr(model.config, "_commit_hash", None) or ""
    if not name or not revision:
        raise InvalidError(
            f"weights {name!r} of revision {revision!r} have no identity: say name=… and revision=…"
        )
    if getattr(model, "peft_config", None) and adapter == "none":
        raise InvalidError("the model has LoRA weights: say adapter=…")
    text = model.config.get_text_config(decoder=True)
    layers, kv_heads, head_dim = _geometry(text)
    nbytes = chunk_tokens * 2 * kv_heads * head_dim * model.dtype.itemsize
    names = [f"layer.{number}" for number in range(layers)]
    return Namespace(
        model=name,
        revision=f"{revision}/config-{_digest(model.config)}",
        kv_dtype=str(model.dtype).removeprefix("torch."),
        kv_scales="none",
        layout=LAYOUT,
        chunk_tokens=chunk_tokens,
        parts=(native("all", layers=names, nbytes=nbytes, runs=1),),
        key_scheme="tokens",
        adapter=adapter,
        rope=json.dumps(getattr(text, "rope_parameters", None) or "none", sort_keys=True),
        salt=salt,
    )


def _geometry(text: PreTrainedConfig) -> tuple[int, int, int]:
    """(layers, KV heads, dim of a head)."""
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return text.num_hidden_layers, kv_heads, head_dim


def _digest(config: PreTrainedConfig) -> str:
    fields = {k: v for k, v in config.to_dict().items() if k not in _NOT_IN_THE_KV}
    encoded = json.dumps(fields, sort_keys=True, default=str).encode()
    return hashlib.sha256(encoded).hexdigest()[:32]


@dataclass(slots=True)
class Usage:
    """What the store did for one prompt."""

    matched: int = 0  # tokens whose KV was in the store
    pulled: int = 0  # tokens whose KV came from there
    pulled_bytes: int = 0
    published: int = 0  # chunks
    trouble: str = ""  # why the engine went on without the store; empty: it did not have to


class Engine:
    """A causal language model that takes what the store has of a prompt, and gives what it lacks.

    For one prompt at a time, without padding. Keeps nothing from one prompt to the next. The store
    can only save time: whatever fails there, the model computes. Not thread-safe.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        client: Client | None,
        *,
        name: str = "",
        revision: str = "",
        adapter: str = "none",
        salt: str = "none",
        chunk_tokens: int = 256,
        deadline_s: float = 1.0,
    ) -> None:
        """`client` None: everything is computed. `deadline_s`: how long a call waits for the store;
        after a first failure the engine leaves it alone until the next prompt. For the rest see
        `namespace_for`. Raises as it does, as `Client.open`, and `ConfigError` for a version of
        transformers that was not tested.
        """
        require("transformers", ["transformers"], TESTED)
        import torch

        self.model = model
        self.namespace = namespace_for(
            model,
            name=name,
            revision=revision,
            adapter=adapter,
            salt=salt,
            chunk_tokens=chunk_tokens,
        )
        self.usage = Usage()
        """Of the last prompt."""
        self._session = client.open(self.namespace, deadline_s=deadline_s) if client else None
        self._deadline_s = deadline_s
        layers, kv_heads, head_dim = _geometry(model.config.get_text_config(decoder=True))
        shape = (layers, chunk_tokens, 2, kv_heads, head_dim)
        self._payload = torch.empty(shape, dtype=model.dtype)

    def prefill(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, DynamicCache]:
        """Logits (vocab,) of what comes after `input_ids` (1, n), and the KV of all n tokens.

        Raises `InvalidError` for more than one prompt.
        """
        cache = self._prefix(input_ids)
        return self._forward(input_ids, cache), cache

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """As ``model.generate(input_ids, **options)``, for one prompt (1, n) and one answer.

        The full chunks of the prompt are published. Those that the answer completes are not: their
        KV was computed row by row, which equals a chunk's only up to rounding. They will be when
        they belong to a prompt. Raises `InvalidError` for padding, beams, and more than one prompt
        or answer.
        """
        for option in ("num_beams", "num_return_sequences"):
            if options.get(option) not in (None, 1):
                raise InvalidError(f"{option}={options[option]}: one answer at a time")
        mask = options.pop("attention_mask", None)
        if mask is not None and not mask.all():
            raise InvalidError("the attention mask hides tokens: prompts must not be padded")
        cache = self._prefix(input_ids)
        answer: torch.Tensor = self.model.generate(
            input_ids,
            attention_mask=input_ids.new_ones(input_ids.shape),
            past_key_values=cache,
            **options,
        )
        self._publish(input_ids, cache)
        return answer

    def _prefix(self, input_ids: torch.Tensor) -> DynamicCache:
        """The KV of all chunks that end before the last token: pulled, or computed and published.

        The last token is always computed anew, because its logits are not stored.
        """
        from transformers import DynamicCache

        if input_ids.dim() != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
            raise InvalidError(f"input_ids of shape {tuple(input_ids.shape)}: one prompt at a time")
        self.usage = Usage()
        size, length = self.namespace.chunk_tokens, input_ids.shape[1]
        cache = DynamicCache(config=self.model.config)
        with self._match(input_ids) as match:
            # Under the lease nothing of the prefix is evicted, so that new chunks have a parent.
            if wanted := match.usable_prefix(length, size):
                self._pull(match, wanted, cache)
            for end in range(cache.get_seq_length() + size, length, size):
                self._forward(input_ids[:, :end], cache)
        return cache

    def _forward(self, input_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Computes what `cache` lacks of `input_ids`; logits (vocab,) of the last token."""
        import torch

        with torch.no_grad():
            rest = input_ids[:, cache.get_seq_length() :]
            output = self.model(rest, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._publish(input_ids, cache)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _match(self, input_ids: torch.Tensor) -> Match:
        if self._session is None:
            return Match(b"", self.namespace.chunk_tokens)
        match = self._session.match(_tokens(input_ids), deadline_s=self._deadline_s)
        self.usage.matched, self.usage.trouble = match.tokens, match.error
        return match

    def _pull(self, match: Match, wanted: int, cache: DynamicCache) -> None:
        """Puts the first `wanted` tokens of `match` into `cache`, or as many as are intact."""
        import torch

        assert self._session is not None
        layers, size = self._payload.shape[:2]
        landing = self._payload.new_empty((layers, wanted, *self._payload.shape[2:]))
        planes = landing.view(torch.uint8).numpy()
        into = [[plane[at : at + size] for plane in planes] for at in range(0, wanted, size)]
        pull = self._session.pull(match, into, tokens=(0, wanted), deadline_s=self._deadline_s)
        self.usage.pulled = pull.chunks * size
        self.usage.pulled_bytes = pull.nbytes
        self.usage.trouble = self.usage.trouble or pull.error
        if not pull.chunks:
            return
        landed = landing[:, : pull.chunks * size].to(self.model.device)
        for layer, plane in zip(cache.layers, landed, strict=True):
            keys, values = plane.permute(1, 2, 0, 3).unsqueeze(1)  # each (1, heads, tokens, dim)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values  # `update` would copy; the next forward does

    def _publish(self, input_ids: torch.Tensor, cache: DynamicCache) -> None:
        """Publishes the last chunk of `input_ids` from `cache`, if it is full; never fails."""
        chunks, tail = divmod(input_ids.shape[1], self.namespace.chunk_tokens)
        if self._session is None or self.usage.trouble or tail:
            return
        start, end = (chunks - 1) * self.namespace.chunk_tokens, input_ids.shape[1]
        for layer, plane in zip(cache.layers, self._payload, strict=True):
            for number, tensor in enumerate((layer.keys, layer.values)):
                plane[:, number].copy_(tensor[0, :, start:end].transpose(0, 1))
        done = self._session.publish(
            _tokens(input_ids), [self._payload], first=chunks - 1, deadline_s=self._deadline_s
        )
        outcome = Outcome(done.outcomes[0])
        self.usage.published += outcome is Outcome.OK
        if outcome not in (Outcome.OK, Outcome.EXISTS, Outcome.WRITING):
            self.usage.trouble = done.text or outcome.name


def _tokens(input_ids: torch.Tensor) -> TokenArray:
    return as_tokens(input_ids[0].cpu().numpy())
