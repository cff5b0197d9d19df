"""What a student is trained on: the task's own loss, and its distance from the teacher's predictions.

    loss = task · mean of -log p(next token)  +  kl · T² · mean of KL(teacher ‖ student) at temperature T

T² keeps the size of the gradient when T changes. Logits are [tokens, vocabulary], and a vocabulary has a
hundred thousand entries: the softmaxes of both models in float32 would take more memory than the models. So
tokens go in chunks; of each only its losses and its gradient are kept, the latter in the dtype of the logits.
The gradient is made together with the loss, where the softmaxes are at hand, so nothing is computed twice.
On a GPU a kernel of `fused_loss` does all tokens at once, and holds no softmax at all.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from twofour.errors import InputError
from twofour.recover.fused import Fused

#: A target that does not count: the last position of a window has no next token.
NONE = -100

#: Logits in a chunk. On a GPU enough for full speed, on a CPU what stays in the cache.
CHUNK = {"cuda": 1 << 26, "cpu": 1 << 20}


def next_tokens(windows: Tensor) -> Tensor:
    """The targets of windows [count, length]: each position's next token, and NONE for the last."""
    return torch.cat([windows[:, 1:], windows.new_full((len(windows), 1), NONE)], 1)


def task_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of -log p(target) over the targets that count."""
    return recovery_loss(logits, targets, None, task=1.0, kl=0.0)


def perplexity(loss: float | None) -> float:
    return math.nan if loss is None else math.exp(min(loss, 700))


@torch.no_grad()
def summed_task_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of -log p(target), for evaluation: no gradient is made."""
    rows, flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    total = torch.zeros((), device=logits.device)
    for part in _parts(rows):
        total += F.cross_entropy(rows[part].float(), flat[part], ignore_index=NONE, reduction="sum")
    return total


def recovery_loss(
    logits: Tensor,
    targets: Tensor,
    teacher: Tensor | None,
    *,
    task: float,
    kl: float,
    temperature: float = 1.0,
    fused: bool | None = None,
) -> Tensor:
    """The loss that the module opens with. `logits` and `teacher` [..., vocabulary], `targets` [...].

    Without a teacher it is the task's loss alone. A GPU has a kernel for all of it, a CPU goes by plain
    chunks; `fused` asks for chunks on either, True for compiled ones and False for plain ones.
    """
    vocabulary = logits.shape[-1]
    rows = logits.reshape(-1, vocabulary)
    beliefs = None if teacher is None or not kl else teacher.detach()
    if beliefs is None:
        kl = 0.0
    elif beliefs.shape[-1] != vocabulary or beliefs.numel() != rows.numel():
        raise InputError(
            f"the teacher's logits are {list(beliefs.shape)}, and the model's {list(logits.shape)}.",
            hint="Both must come from the same tokens and the same vocabulary.",
        )
    else:
        beliefs = beliefs.reshape(-1, vocabulary)
    if targets.numel() != len(rows):
        raise InputError(
            f"{targets.numel()} targets for logits of {len(rows)} tokens.",
            hint=f"Give one for each token, and {NONE} where there is none.",
        )
    chunk: Callable[..., tuple[Tensor, ...]] | None
    if fused is None and logits.is_cuda:
        chunk = None if _kernel_works(logits.device) else _fused_chunk
    else:
        chunk = _fused_chunk if fused else _chunk
    loss: Tensor = _Loss.apply(rows, targets.reshape(-1), beliefs, task, kl, temperature, chunk)
    return loss


def _chunk(
    logits: Tensor, targets: Tensor, teacher: Tensor | None, task: Tensor, kl: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The weighted sum of a chunk's losses, and its gradient by the logits.

    The gradient is right everywhere but at the targets; where they are and what it is there comes apart, so
    that what is as wide as the vocabulary is plain arithmetic and can be one kernel.
    """
    counts = (targets != NONE)[:, None]
    aim = torch.where(counts, targets[:, None], 0)
    log_p = logits.log_softmax(-1, dtype=torch.float32)
    loss = -task * torch.where(counts, log_p.gather(-1, aim), 0.0).sum()
    p = log_p.exp()
    gradient = p * (task * counts)
    if teacher is not None:
        if temperature == 1.0:
            log_q = teacher.log_softmax(-1, dtype=torch.float32)
        else:
            log_q = (teacher.float() / temperature).log_softmax(-1)
            log_p = (logits.float() / temperature).log_softmax(-1)
            p = log_p.exp()
        q = log_q.exp()
        # A token that is impossible to the teacher (-inf, in a padded vocabulary) counts for nothing.
        loss = loss + kl * temperature**2 * (q * (log_q - log_p).nan_to_num(nan=0.0)).sum()
        gradient = gradient + (kl * temperature) * (p - q)
    at_aim = gradient.gather(-1, aim) - task * counts
    return loss, gradient.to(logits.dtype), aim, at_aim.to(logits.dtype)


#: On a GPU the plain one spends most of a small model's step on memory.
_fused_chunk = Fused(_chunk, "the loss")


@functools.cache
def _kernel_works(device: torch.device) -> bool:
    """Triton compiles on first use and may find no compiler then: find out on one token, and say so once."""
    try:
        from twofour.recover import fused_loss

        one = torch.ones((1, 1), device=device)
        target = torch.zeros(1, dtype=torch.long, device=device)
        fused_loss.row_losses(one, target, one, one, 1.0, 1.0, fused_loss.scale_(one.clone(), one))
    except Exception as error:
        warnings.warn(f"the loss is computed without its Triton kernel, slower: {error}", stacklevel=3)
        return False
    return True


def _parts(rows: Tensor) -> Iterator[slice]:
    """Chunks of one size, as far as that goes: each size is compiled for itself."""
    most = max(1, CHUNK["cpu" if rows.device.type == "cpu" else "cuda"] // rows.shape[1])
    count = -(-len(rows) // max(1, -(-len(rows) // most)))
    for start in range(0, len(rows), max(1, count)):
        yield slice(start, start + count)


class _Loss(torch.autograd.Function):
    """By chunks or, where none is given, by the kernel, which needs none.

    The gradient is used up by the backward pass, which scales it in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        teacher: Tensor | None,
        task: float,
        kl: float,
        temperature: float,
        chunk: Callable[..., tuple[Tensor, ...]] | None,
    ) -> Tensor:
        # On the device: looking at how many targets count would make the GPU wait.
        each_task = task / (targets != NONE).sum().clamp(min=1).float()
        each_kl = kl / max(len(logits), 1)
        keeps = ctx.needs_input_grad[0]
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format) if keeps else None
        loss = torch.zeros((), device=logits.device)
        if chunk is None:
            from twofour.recover.fused_loss import row_losses, scale_
        # The kernel needs no chunks, but predictions that lie elsewhere are not fetched all at once.
        elsewhere = teacher is not None and teacher.device != logits.device
        for part in _parts(logits) if chunk or elsewhere else (slice(None),):
            beliefs = None if teacher is None else teacher[part].to(logits.device)
            into = None if gradient is None else gradient[part]
            some = logits[part], targets[part], beliefs
            if chunk is None:
                loss += row_losses(*some, each_task if task else None, each_kl, temperature, into).sum()
            else:
                summed, slope, aim, at_aim = chunk(
                    *some, each_task, torch.full_like(each_task, each_kl), temperature
                )
                loss += summed
                if into is not None:
                    into.copy_(slope).scatter_(-1, aim, at_aim)
        ctx.gradient, ctx.scale_ = gradient, Tensor.mul_ if chunk else scale_
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Any, ...]:
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("this loss went backward once already, and kept nothing for a second time.")
        return ctx.scale_(gradient, outer), None, None, None, None, None, None
