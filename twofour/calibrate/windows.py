"""Text as windows of tokens of one length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from twofour.errors import InputError
from twofour.progress import OnProgress, silent

#: Characters that are tokenized before anyone asks where it is.
A_MOMENT = 1 << 20


def one_by_one(documents: Sequence[str], on_progress: OnProgress) -> Iterator[str]:
    """The documents to tokenize, telling how far they are: much text takes longer than its few windows."""
    done, total = 0, sum(map(len, documents))
    for document in documents:
        if total > A_MOMENT:
            on_progress(done, total, "tokenizing the text")
        yield document
        done += len(document)


def token_stream(tokenizer: Any, documents: Sequence[str], on_progress: OnProgress = silent) -> Tensor:
    """The tokens of the documents, laid end to end with BOS before each."""
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    stream: list[int] = []
    for document in one_by_one(documents, on_progress):
        # verbose=False: it would warn that the document is longer than the model's context.
        stream += bos + tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(stream, dtype=torch.long)


def sample_windows(
    tokenizer: Any,
    documents: Sequence[str],
    samples: int,
    length: int,
    seed: int = 0,
    on_progress: OnProgress = silent,
) -> Tensor:
    """Windows [samples, length] from random places of the documents, laid end to end with BOS before each.

    Packed, not padded: every token of every window is real text. No two windows overlap if there is text
    enough for that: some of them are held out to say what carries over to other text.
    """
    require_text(samples, length)
    tokens = token_stream(tokenizer, documents, on_progress)
    if len(tokens) < length:
        raise InputError(
            f"the calibration text has {len(tokens)} tokens, less than one window of {length}.",
            hint="Give more text, or a smaller --seqlen.",
        )
    random = torch.Generator().manual_seed(seed)
    left = len(tokens) - samples * length  # tokens that are in no window
    if left >= 0:
        before = torch.randint(0, left + 1, (samples,), generator=random).sort().values
        starts = before + length * torch.arange(samples)
        starts = starts[torch.randperm(samples, generator=random)]
    else:
        starts = torch.randint(0, len(tokens) - length + 1, (samples,), generator=random)
    return torch.stack([tokens[start : start + length] for start in starts.tolist()])


def require_text(samples: int, length: int) -> None:
    """Refuse windows that hold no text."""
    if samples < 1 or length < 2:
        raise InputError(
            f"{samples} windows of {length} tokens are no text to calibrate on.",
            hint="Take one window or more (--samples) of two tokens or more (--seqlen).",
        )


def require_windows(windows: Any, model: Any = None) -> None:
    """Refuse what are no token ids [count, length], or none of this model."""
    if not isinstance(windows, Tensor):
        raise InputError(f"windows are a tensor of token ids, not a {type(windows).__name__}.")
    whole = not (windows.is_floating_point() or windows.is_complex() or windows.dtype == torch.bool)
    if windows.dim() != 2 or windows.shape[1] < 2 or not len(windows) or not whole:
        raise InputError(
            "windows are token ids [count, length] with two tokens or more, "
            f"not {list(windows.shape)} of {windows.dtype}."
        )
    require_vocabulary(windows, model)


def require_vocabulary(tokens: Tensor, model: Any) -> None:
    """Refuse tokens that the model does not know, where its config tells which it does."""
    config_of = getattr(getattr(model, "config", None), "get_text_config", None)
    vocabulary = None if config_of is None else config_of().vocab_size
    if vocabulary is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise InputError(f"the windows have tokens beyond the model's vocabulary of {vocabulary}.")
