# Triton reads annotations in its own way, and is there only where there is a GPU.
# mypy: disable-error-code="no-untyped-def,import-not-found"
"""The recovery loss and its gradient as one launch: a Triton kernel for GPUs.

A program takes one token, and reads its rows of logits twice, a block of the vocabulary at a time. The first
time it finds what the softmaxes are divided by: a maximum, and a sum that is scaled down whenever a larger
one is found. The second time it writes the gradient to where it stays, and sums up the loss. Memory sees the
logits once or twice and the gradient once, nothing in float32 is as wide as the vocabulary, and no result
depends on the order of programs. The arithmetic is that of `losses._chunk`, which is the reference; sums
are in another order, so results agree up to rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twofour.recover.losses import NONE

#: Logits that a program holds at a time, and the warps that hold them. With these every lane has 16 of each
#: model, which leaves registers for other programs on the same multiprocessor to read while this one reduces.
BLOCK, WARPS = 4096, 8

#: Programs that scale a gradient, at most. Enough to fill a GPU, and few enough to cost nothing when there is
#: nothing to do.
SCALERS = 1024


@triton.jit
def _with_block(most, total, x):
    """A softmax's maximum, and each lane's part of its sum, after one more block."""
    now = tl.maximum(most, tl.max(x, axis=0))
    shift = tl.where(now == float("-inf"), 0.0, now)  # a padded vocabulary may begin with a block of -inf
    return now, total * tl.exp(most - shift) + tl.exp(x - shift)


@triton.jit
def _rows(
    losses,  # [rows], float32: each row's weighted part of the loss
    gradient,  # [rows, vocabulary], contiguous; or None
    logits,  # [rows, vocabulary], as is the teacher's, or None; each with the stride of its rows
    teacher,
    targets,  # [rows], int64
    each_task,  # the weight of one row's loss, a number on the device, as only that knows what counts
    each_kl,
    temperature,
    stride,
    teacher_stride,
    vocabulary: tl.constexpr,  # a model has one, and a compiler that knows it can leave out masks
    TASK: tl.constexpr,
    TEMPERED: tl.constexpr,
    NONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # times a stride it passes 2³¹
    lane = tl.arange(0, BLOCK)
    sharpness = 1.0 / temperature
    logits += row * stride
    # Without a temperature the student has one softmax for both losses, the one called `soft`.
    BOTH: tl.constexpr = TASK and TEMPERED
    most, total = float("-inf"), tl.zeros((BLOCK,), dtype=tl.float32)
    soft_most, soft_total = float("-inf"), tl.zeros((BLOCK,), dtype=tl.float32)
    aim_most, aim_total = float("-inf"), tl.zeros((BLOCK,), dtype=tl.float32)
    if teacher is not None:
        teacher += row * teacher_stride
    for start in range(0, vocabulary, BLOCK):
        inside = start + lane < vocabulary
        x = tl.load(logits + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        if teacher is not None:  # before anything waits for x
            y = tl.load(teacher + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        if BOTH:
            most, total = _with_block(most, total, x)
        if TEMPERED:
            x = x * sharpness
        soft_most, soft_total = _with_block(soft_most, soft_total, x)
        if teacher is not None:
            if TEMPERED:
                y = y * sharpness
            aim_most, aim_total = _with_block(aim_most, aim_total, y)
    soft_norm = soft_most + tl.log(tl.sum(soft_total, axis=0))
    norm = soft_norm
    if BOTH:
        norm = most + tl.log(tl.sum(total, axis=0))

    loss = 0.0
    if TASK:
        wide = tl.load(targets + row)
        legal = (wide >= 0) & (wide < vocabulary)
        target = wide.to(tl.int32)  # the vocabulary's columns are counted in 32 bits
        weight = tl.where(wide == NONE, 0.0, tl.load(each_task))
        # A target that no vocabulary has makes the loss NaN: looking for one would make the GPU wait.
        at_target = tl.load(logits + wide, mask=legal, other=float("nan")).to(tl.float32)
        loss = tl.where(wide == NONE, 0.0, weight * (norm - at_target))
    if teacher is not None:
        aim_norm = aim_most + tl.log(tl.sum(aim_total, axis=0))
        pull = each_kl * temperature
        divergence = tl.zeros((BLOCK,), dtype=tl.float32)
    if gradient is not None or teacher is not None:
        last = (vocabulary - 1) // BLOCK * BLOCK
        for back in range(0, vocabulary, BLOCK):
            column = last - back + lane  # from the end: what was read last is still in a cache
            inside = column < vocabulary
            # Nobody reads these logits again.
            x = tl.load(logits + column, mask=inside, other=float("-inf"), eviction_policy="evict_first")
            x = x.to(tl.float32)
            slope = tl.zeros((BLOCK,), dtype=tl.float32)
            if TASK:
                slope = weight * (tl.exp(x - norm) - tl.where(column == target, 1.0, 0.0))
            if teacher is not None:
                y = tl.load(teacher + column, mask=inside, other=float("-inf"), eviction_policy="evict_first")
                y = y.to(tl.float32)
                if TEMPERED:
                    x, y = x * sharpness, y * sharpness
                log_p, log_q = x - soft_norm, y - aim_norm
                q = tl.exp(log_q)
                # A token that is impossible to the teacher (-inf, in a padded vocabulary) counts for nothing.
                divergence += tl.where(q == 0.0, 0.0, q * (log_q - log_p))
                slope += pull * (tl.exp(log_p) - q)
            if gradient is not None:
                tl.store(gradient + row * vocabulary + column, slope, mask=inside)
    if teacher is not None:
        loss += pull * temperature * tl.sum(divergence, axis=0)
    tl.store(losses + row, loss)


@triton.jit
def _scale(values, by, count, BLOCK: tl.constexpr):
    scale = tl.load(by)
    if scale != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        while start < count:
            place = start + tl.arange(0, BLOCK)
            inside = place < count
            value = tl.load(values + place, mask=inside).to(tl.float32)
            tl.store(values + place, value * scale, mask=inside)
            start += tl.num_programs(0) * BLOCK


def row_losses(
    logits: Tensor,
    targets: Tensor,
    teacher: Tensor | None,
    each_task: Tensor | None,
    each_kl: float,
    temperature: float,
    gradient: Tensor | None,
) -> Tensor:
    """Each row's weighted part of the loss, and the gradient by the logits into `gradient`, contiguous.

    Without a weight there is no loss by targets. The gradient may not take the logits' own memory: whoever
    made them may need them in their own backward.
    """
    rows, vocabulary = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    if not rows:
        return losses
    logits, teacher = _with_plain_rows(logits), None if teacher is None else _with_plain_rows(teacher)
    with torch.cuda.device_of(logits):
        _rows[(rows,)](
            *(losses, gradient, logits, teacher, targets.contiguous(), each_task, each_kl),
            *(float(temperature), logits.stride(0), 0 if teacher is None else teacher.stride(0)),
            vocabulary=vocabulary,
            TASK=each_task is not None,
            TEMPERED=teacher is not None and temperature != 1.0,
            NONE=NONE,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return losses


def scale_(gradient: Tensor, by: Tensor) -> Tensor:
    """`gradient.mul_(by)` for one number on the GPU. If that is 1, as it mostly is, no memory is touched.

    The GPU itself finds that out: asking for the number would make everyone wait.
    """
    count = gradient.numel()
    with torch.cuda.device_of(gradient):
        _scale[(min(SCALERS, triton.cdiv(count, BLOCK)) or 1,)](
            gradient, by, count, BLOCK=BLOCK, num_warps=WARPS
        )
    return gradient


def _with_plain_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
