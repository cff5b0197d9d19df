"""Text that a model writes itself, for when there is none at hand.

Sampled at temperature 1 from nothing but the first token, so the text is distributed as the model believes
text to be. It knows nothing of the texts that the model will be used on: real ones are better.

On a GPU the next tokens are drawn there, for hundreds of windows at once, and nothing waits for the CPU; the
text is then another one than a CPU would write, but the same for the same seed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twofour.progress import OnProgress, silent

#: Windows written at the same time.
BATCH = 16


@torch.no_grad()
def write_windows(
    model: Any,
    tokenizer: Any,
    samples: int,
    length: int,
    seed: int = 0,
    on_progress: OnProgress = silent,
    batch: int = BATCH,
) -> Tensor:
    """Windows [samples, length] of tokens sampled from a causal language model."""
    begin = next(
        (token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None), None
    )
    device = model.device if model.device.type == "cuda" else torch.device("cpu")
    random = torch.Generator(device).manual_seed(seed)
    written = []
    for start in range(0, samples, batch):
        count = min(batch, samples - start)
        if begin is None:
            vocabulary = model.config.get_text_config().vocab_size
            first = torch.randint(vocabulary, (count, 1), generator=random, device=device)
        else:
            first = torch.full((count, 1), begin, device=device)
        written.append(_write(model, first, length, tokenizer.eos_token_id, begin, random).cpu())
        on_progress(start + count, samples, "writing text")
    return torch.cat(written)


def _write(
    model: Any, first: Tensor, length: int, end: int | None, begin: int | None, random: torch.Generator
) -> Tensor:
    tokens = torch.empty(len(first), length, dtype=torch.long, device=first.device)
    tokens[:, :1] = last = first
    cache = None
    for position in range(1, length):
        out = model(last.to(model.device), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        chances = out.logits[:, -1].float().softmax(-1).to(tokens.device)
        new = _draw(chances, random)
        if end is not None and begin is not None and begin != end:
            # A finished document is followed by the next one, as in windows of real text.
            new = torch.where(last == end, begin, new)
        tokens[:, position : position + 1] = last = new
    return tokens


def _draw(chances: Tensor, random: torch.Generator) -> Tensor:
    """One entry of each row [rows, 1], by its chance."""
    if chances.device.type == "cpu":
        return torch.multinomial(chances, 1, generator=random)
    # Of exponential clocks with these rates each is the first to ring by its chance. torch's multinomial does
    # the same, but first asks the GPU whether the chances are valid, and waits for the answer.
    clocks = torch.empty_like(chances).exponential_(generator=random)
    return (chances / clocks).argmax(-1, keepdim=True)
