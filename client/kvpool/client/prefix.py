"""How much of a match an engine may use."""

from __future__ import annotations

from kvpool.proto.errors import InvalidError


def usable_prefix(matched_tokens: int, prompt_tokens: int, block_tokens: int = 1) -> int:
    """Tokens that need no prefill: at most `prompt_tokens` - 1, floored to engine blocks.

    The last token is always computed, because its logits are not stored. Never rounds up. Raises
    `InvalidError` for blocks of less than one token.
    """
    if block_tokens < 1:
        raise InvalidError(f"a block has at least 1 token, not {block_tokens}")
    usable = min(matched_tokens, prompt_tokens - 1)
    return max(0, usable) // block_tokens * block_tokens
