"""What a causal language model writes after a prompt, greedily: the same words whenever it is run again."""

from __future__ import annotations

from typing import Any

import torch

#: One prompt each for a story, a fact and code: what a model has lost shows in different places.
PROMPTS = ("Once upon a time", "The capital of France is", "def fibonacci(n):")


@torch.inference_mode()
def write_on(model: Any, tokenizer: Any, prompt: str, new_tokens: int) -> list[int]:
    """The tokens that follow the prompt, at most so many."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    ids = {key: inputs[key] for key in ("input_ids", "attention_mask") if key in inputs}
    given = ids["input_ids"].shape[1]
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    new = new_tokens if limit is None else min(new_tokens, limit - given)  # learned positions end there
    if new < 1:
        return []
    out = model.generate(**ids, max_new_tokens=new, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    tokens: list[int] = out[0, given:].tolist()
    return tokens


def same_beginning(one: list[int], other: list[int]) -> int:
    """How many tokens two texts share before they part.

    >>> same_beginning([5, 6, 7], [5, 6, 9, 7]), same_beginning([], [1])
    (2, 0)
    """
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
