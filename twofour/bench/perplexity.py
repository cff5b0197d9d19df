"""Perplexity of a causal language model, and its agreement with another one.

The protocol, which every figure carries with it: each document is tokenized with the tokenizer's BOS in
front if it has one, and cut into windows of at most `context` tokens that start `stride` apart. A window
scores the tokens that no window before it has scored, so every token of a document but the first is scored
exactly once. By default `stride` is half of `context`, so that every token sees at least half a window
before it, if its document has that much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from twofour.calibrate.windows import one_by_one
from twofour.errors import InputError
from twofour.progress import OnProgress, silent

#: Windows longer than this gain little and cost quadratically; the model's own limit counts if lower.
LONGEST_CONTEXT = 2048

#: Tokens per forward pass: bounds the logits, which are this × vocabulary × 4 bytes.
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Window:
    tokens: tuple[int, ...]
    scored_from: int  # the first position in the window whose token counts


@dataclass(frozen=True)
class Perplexity:
    perplexity: float  # NaN if the model gives NaN
    tokens: int  # scored
    documents: int
    windows: int
    context: int
    stride: int
    bos: bool
    seconds: float
    agreement: float | None = None  # share of positions with the same most likely token as `against`
    kl: float | None = None  # mean KL divergence from `against`, in nats
    against_perplexity: float | None = None  # of `against`, over the same tokens


def evaluate(
    model: Any,
    tokenizer: Any,
    documents: Sequence[str],
    *,
    context: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    against: Any = None,
    on_progress: OnProgress = silent,
) -> Perplexity:
    """Perplexity of `model` on the documents and, where `against` is another model, how near they are."""
    context = longest_context(model) if context is None else context
    stride = max(context // 2, 1) if stride is None else stride
    if context < 2 or not 0 < stride < context:
        raise InputError(
            f"a context of {context} with stride {stride} scores nothing; need 0 < stride < context."
        )
    if max_tokens is not None and max_tokens < 1:
        raise InputError(f"max_tokens is {max_tokens}: there is nothing to score.")
    for who, one in (("the model", model), ("the model to compare with", against)):
        positions = None if one is None else _positions(one)
        if positions is not None and context > positions:
            raise InputError(
                f"windows have {context} tokens, and {who} takes {positions} (max_position_embeddings).",
                hint=f"Give a context of at most {positions}.",
            )
    read = one_by_one(documents, on_progress)
    windows = list(_first(cut(tokenizer, read, context, stride), max_tokens))
    total = sum(len(w.tokens) - w.scored_from for w in windows)
    if not total:
        raise InputError("the text is too short: not one token could be scored.")
    start = time.perf_counter()
    loss = other_loss = same = divergence = 0.0
    done = 0
    for batch in _batches(windows):
        tokens, scored = _tensors(batch, model.device)
        log_p, targets = _log_probabilities(model, tokens, scored)
        loss -= float(log_p.gather(-1, targets[:, None]).sum())
        if against is not None:
            log_q, _ = _log_probabilities(against, tokens.to(against.device), scored.to(against.device))
            log_q = log_q.to(log_p.device)
            if log_p.shape != log_q.shape:
                raise InputError(
                    f"the models predict {log_p.shape[-1]} and {log_q.shape[-1]} tokens: "
                    "their predictions cannot be compared."
                )
            other_loss -= float(log_q.gather(-1, targets[:, None]).sum())
            same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
            divergence += float(F.kl_div(log_p, log_q, reduction="sum", log_target=True))
        done += len(targets)
        on_progress(done, total, f"perplexity so far {math.exp(min(loss / done, 700)):.2f}")
    return Perplexity(
        perplexity=math.exp(min(loss / total, 700)),
        tokens=total,
        documents=len(documents),
        windows=len(windows),
        context=context,
        stride=stride,
        bos=tokenizer.bos_token_id is not None,
        seconds=time.perf_counter() - start,
        # The largest of NaN is anything: there is no agreement then, as there is no divergence.
        agreement=(math.nan if math.isnan(loss + other_loss) else same / total)
        if against is not None
        else None,
        kl=divergence / total if against is not None else None,
        against_perplexity=math.exp(min(other_loss / total, 700)) if against is not None else None,
    )


def longest_context(model: Any) -> int:
    return min(_positions(model) or LONGEST_CONTEXT, LONGEST_CONTEXT)


def _positions(model: Any) -> int | None:
    """How many tokens the model was made for, where its config tells."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or None


def require_same_words(tokenizer: Any, other: Any, model: object, against: object) -> None:
    """Refuse to compare predictions of models to which the same numbers are other words."""
    if tokenizer.get_vocab() != other.get_vocab():
        raise InputError(
            f"{model} and {against} have different tokenizers: their predictions cannot be compared.",
            hint="Give the dense model that it was pruned from with --against.",
        )


def cut(tokenizer: Any, documents: Iterable[str], context: int, stride: int) -> Iterable[Window]:
    """Documents as windows of tokens."""
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for document in documents:
        # verbose=False: it would warn that the document is longer than the model's context.
        own = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        tokens = (*bos, *own)
        scored = 1
        start = 0
        while scored < len(tokens):
            end = min(start + context, len(tokens))
            yield Window(tokens[start:end], scored - start)
            scored = end
            start = min(start + stride, end - 1)


def _first(windows: Iterable[Window], max_tokens: int | None) -> Iterable[Window]:
    """As many windows from the start as make up `max_tokens` scored tokens; the last one is cut to fit."""
    left = math.inf if max_tokens is None else max_tokens
    for window in windows:
        if left <= 0:
            return
        scored = len(window.tokens) - window.scored_from
        if scored > left:
            window = Window(window.tokens[: window.scored_from + int(left)], window.scored_from)
        yield window
        left -= scored


def _batches(windows: list[Window]) -> Iterable[list[Window]]:
    """Windows of like length together, at most BATCH_TOKENS with padding."""
    batch: list[Window] = []
    for window in sorted(windows, key=lambda w: -len(w.tokens)):
        if batch and len(batch[0].tokens) * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _tensors(batch: list[Window], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids, padded on the right (a causal model never looks there), and which of them count."""
    width = max(len(w.tokens) for w in batch)
    tokens = torch.zeros(len(batch), width, dtype=torch.long)
    scored = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, window in enumerate(batch):
        tokens[row, : len(window.tokens)] = torch.tensor(window.tokens)
        scored[row, window.scored_from : len(window.tokens)] = True
    return tokens.to(device), scored.to(device)


@torch.inference_mode()
def _log_probabilities(model: Any, tokens: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [positions, vocabulary] that predict the scored tokens, and those tokens."""
    logits = model(tokens, use_cache=False).logits[:, :-1]
    chosen = scored[:, 1:]
    return F.log_softmax(logits[chosen].float(), -1), tokens[:, 1:][chosen]
