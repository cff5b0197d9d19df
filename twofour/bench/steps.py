"""The steps of a model that are timed: prefill of a text, and one token more for each of several texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    what: Literal["prefill", "decode"]
    batch: int
    tokens: int  # prefill: of each sequence; decode: places in the cache, the new token's included
    graph: bool = False
    attention: Literal["sdpa", "grouped"] | None = "sdpa"  # None: as the model was loaded


CASES = (
    Case("prefill", 1, 2048),
    Case("prefill", 4, 2048),
    Case("decode", 1, 1024),
    *(Case("decode", batch, 1024, graph=True) for batch in (1, 16, 64)),
    *(Case("decode", batch, 1024, graph=True, attention="grouped") for batch in (1, 16, 64)),
)

#: Those that a scheme of 8 or 4 bits is measured in.
FEW_CASES = tuple(c for c in CASES if c.what == "prefill" or c.attention == "grouped")


def prefill_step(model: Any, case: Case, seed: int = 0) -> Callable[[], Tensor]:
    tokens = random_tokens(model, case.batch, case.tokens, seed)

    def step() -> Tensor:
        logits: Tensor = model(tokens, use_cache=False, logits_to_keep=1).logits
        return logits

    return step


def decode_step(model: Any, case: Case, seed: int = 0) -> Callable[[], Tensor]:
    """One token after tokens - 1 others. All it reads has a fixed address, as a graph needs."""
    from transformers import StaticCache

    config, device = model.config.get_text_config(decoder=True), model.device
    tokens = random_tokens(model, case.batch, 1, seed)
    position = torch.full((case.batch, 1), case.tokens - 1, device=device)
    cache = StaticCache(config=config, max_cache_len=case.tokens)
    queries = config.num_attention_heads
    heads = (
        getattr(config, "num_key_value_heads", None) or queries,
        getattr(config, "head_dim", None) or config.hidden_size // queries,
    )
    cache.early_initialization(case.batch, *heads, dtype=model.dtype, device=device)
    random = torch.Generator(device).manual_seed(seed)
    for layer in cache.layers:
        layer.keys.normal_(generator=random)
        layer.values.normal_(generator=random)
        layer.cumulative_length.fill_(case.tokens - 1)
    sliding = [layer for layer in cache.layers if hasattr(layer, "cumulative_length_int")]
    # A sliding window that is full rolls its places and counts no further on the device.
    lengths = [x.cumulative_length for x in cache.layers if case.tokens <= x.max_cache_len]

    def step() -> Tensor:
        for layer in sliding:
            layer.cumulative_length_int = case.tokens - 1
        out = model(tokens, position_ids=position, past_key_values=cache, use_cache=True, logits_to_keep=1)
        # Every layer counted the new token; one kernel takes it back, inside the graph.
        if lengths:
            torch._foreach_sub_(lengths, 1)
        logits: Tensor = out.logits
        return logits

    return step


def random_tokens(model: Any, batch: int, tokens: int, seed: int) -> Tensor:
    random = torch.Generator(model.device).manual_seed(seed)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (batch, tokens), device=model.device, generator=random)
