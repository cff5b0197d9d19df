"""Calibration text that the model writes itself, for when there is none at hand.

Sampled at temperature 1 from nothing but the first token, so the text is distributed as the model believes
text to be. It knows nothing of the texts that the model will be used on: real ones are better.
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
    model: Any, tokenizer: Any, samples: int, length: int, seed: int = 0, on_progress: OnProgress = silent
) -> Tensor:
    """Windows [samples, length] of tokens sampled from a causal language model."""
    begin = next(
        (token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None), None
    )
    random = torch.Generator().manual_seed(seed)  # on the CPU: the same text on every device
    written = []
    for start in range(0, samples, BATCH):
        count = min(BATCH, samples - start)
        if begin is None:
            first = torch.randint(model.config.get_text_config().vocab_size, (count, 1), generator=random)
        else:
            first = torch.full((count, 1), begin)
        written.append(_write(model, first, length, tokenizer.eos_token_id, begin, random))
        on_progress(start + count, samples, "writing calibration text")
    return torch.cat(written)


def _write(
    model: Any, first: Tensor, length: int, end: int | None, begin: int | None, random: torch.Generator
) -> Tensor:
    tokens, cache = first, None
    for _ in range(length - 1):
        out = model(tokens[:, -1:].to(model.device), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        chances = out.logits[:, -1].float().softmax(-1).cpu()
        new = torch.multinomial(chances, 1, generator=random)
        if end is not None and begin is not None and begin != end:
            # A finished document is followed by the next one, as in windows of real text.
            new = torch.where(tokens[:, -1:] == end, begin, new)
        tokens = torch.cat([tokens, new], 1)
    return tokens
