"""The loss's Triton kernel on a CPU, in Triton's interpreter, where `test_fused_loss` runs this file."""

import math

import pytest
import torch
from torch.nn import functional as F

from twofour.recover import fused_loss, losses
from twofour.recover.losses import NONE

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

#: How far two gradients may be apart: of each number, and of the largest, as a number whose parts cancel is
#: no more exact than they are. The interpreter cuts bfloat16 off where a GPU rounds it.
APART = {FP32: (1e-5, 1e-7), BF16: (2**-7, 1e-5), FP16: (2**-10, 1e-5)}


@pytest.fixture(params=[256, fused_loss.BLOCK], ids=["many blocks", "as on a GPU"])
def _block(request, monkeypatch):
    monkeypatch.setattr(fused_loss, "BLOCK", request.param)


def by(chunk, logits, targets, teacher, task, kl, temperature, outer=1.0):
    """The loss and its gradient; without a chunk by the kernel."""
    own = logits.detach().requires_grad_()
    loss = losses._Loss.apply(
        own, targets, teacher, task, kl if teacher is not None else 0.0, temperature, chunk
    )
    (outer * loss).backward()
    assert own.grad.dtype == logits.dtype
    return loss.detach(), own.grad


def exact(logits, targets, teacher, task, kl, temperature, outer=1.0):
    """In float64 by torch's own functions and its derivatives."""
    own = logits.detach().double().requires_grad_()
    loss = task * F.cross_entropy(own, targets, ignore_index=NONE, reduction="sum")
    loss = loss / (targets != NONE).sum().clamp(min=1)
    if teacher is not None:
        log_p, log_q = ((x.double() / temperature).log_softmax(-1) for x in (own, teacher))
        each = torch.where(log_q == -torch.inf, 0.0, log_q.exp() * (log_q - log_p))
        loss = loss + kl * temperature**2 * each.sum() / len(own)
    (outer * loss).backward()
    return loss.detach(), own.grad


def batch(rows, vocabulary, dtype, teachers):
    """Logits as models have them, some targets that do not count, and tokens no teacher believes in."""
    torch.manual_seed(vocabulary)
    logits, teacher = torch.randn(2, rows, vocabulary).mul(3).unbind(0)
    teacher[:, -max(1, vocabulary // 50) :] = -torch.inf
    targets = torch.randint(vocabulary - 1, (rows,))
    targets[1::3] = NONE
    return logits.to(dtype), targets, teacher.to(teachers)


def assert_agree(arguments, dtype):
    loss, gradient = by(None, *arguments)
    for expected, slope in (exact(*arguments), by(losses._chunk, *arguments)):
        torch.testing.assert_close(loss, expected.float(), rtol=3e-6, atol=1e-6)
        relative, of_largest = APART[dtype]
        wide, other = gradient.double(), slope.double()
        torch.testing.assert_close(wide, other, rtol=relative, atol=of_largest * float(other.abs().max()))


@pytest.mark.usefixtures("_block")
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(
    ("dtype", "teachers"),
    [(FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32), (FP32, BF16), (FP16, BF16)],
)
def test_dtypes(dtype, teachers, temperature):
    assert_agree((*batch(4, 1000, dtype, teachers), 0.3, 0.7, temperature), dtype)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(("task", "kl"), [(1.0, 0.0), (0.0, 1.0), (0.3, 0.7)])
@pytest.mark.parametrize("vocabulary", [2, 257, 4096, 32003])
def test_vocabularies_and_weights(vocabulary, task, kl, temperature):
    logits, targets, teacher = batch(3, vocabulary, FP32, FP32)
    assert_agree((logits, targets, teacher if kl else None, task, kl, temperature, 3.0), FP32)


@pytest.mark.usefixtures("_block")
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_padded_vocabulary_that_begins_with_padding(temperature):
    """Whole blocks of -inf in both models, before anything else was seen and after."""
    logits, targets, teacher = batch(2, 1000, FP32, FP32)
    for each in (logits, teacher):
        each[:, :300] = each[:, -300:] = -torch.inf
    targets[0] = 500
    assert_agree((logits, targets, teacher, 0.3, 0.7, temperature), FP32)


def test_large_logits():
    """Far beyond what exp can hold, and growing, so that every block has a new maximum."""
    logits, targets, teacher = batch(2, 10_000, FP32, FP32)
    logits += torch.linspace(-300, 300, 10_000)
    teacher += torch.linspace(-300, 300, 10_000)
    assert_agree((logits, targets, teacher, 0.3, 0.7, 1.0), FP32)


def test_rows_that_lie_apart():
    """Strides of their own for both, and rows that are columns of another matrix."""
    logits, targets, teacher = batch(4, 1000, FP32, FP32)
    expected = by(None, logits, targets, teacher, 0.3, 0.7, 1.0)
    wide, wider = torch.full((4, 1040), torch.nan), torch.full((4, 1301), torch.nan)
    wide[:, :1000], wider[:, :1000] = logits, teacher
    transposed = logits.t().contiguous().t()
    spread = torch.stack([targets, targets], 1)[:, 0]
    for mine, theirs in ((wide[:, :1000], wider[:, :1000]), (transposed, teacher.t().contiguous().t())):
        loss, gradient = by(None, mine, spread, theirs, 0.3, 0.7, 1.0)
        assert torch.equal(loss, expected[0])
        assert torch.equal(gradient, expected[1])


def test_offsets_beyond_32_bits():
    """Of the 4 GB only two rows are ever touched, so no more is taken from the machine."""
    far = 2**30 + 16
    try:
        memory = torch.empty(2 * far + 1000, dtype=BF16)
    except RuntimeError as error:
        pytest.skip(f"4 GB of addresses are not to be had: {error}")
    logits, targets, teacher = batch(3, 1000, BF16, BF16)
    apart = memory.as_strided((3, 1000), (far, 1)).copy_(logits)
    rest = targets, teacher, torch.tensor(1.0), 1.0, 1.0, None
    assert torch.equal(fused_loss.row_losses(apart, *rest), fused_loss.row_losses(logits, *rest))
    near, far_away = (
        fused_loss.row_losses(logits.flip(1), targets, beliefs, torch.tensor(1.0), 1.0, 1.0, None)
        for beliefs in (logits, apart)
    )
    assert near.isfinite().all()
    assert torch.equal(near, far_away)


@pytest.mark.parametrize("taught", [True, False])
def test_without_a_gradient_it_is_the_same_loss(taught):
    logits, targets, teacher = batch(4, 1000, BF16, BF16)
    given = targets, teacher if taught else None, 0.3, 0.7 if taught else 0.0, 1.0
    assert torch.equal(losses._Loss.apply(logits, *given, None), by(None, logits, *given)[0])


def test_no_target_counts():
    logits, targets, _ = batch(3, 100, FP32, FP32)
    loss, gradient = by(None, logits, torch.full_like(targets, NONE), None, 1.0, 0.0, 1.0)
    assert loss == 0
    assert not gradient.any()


def test_no_tokens():
    loss, gradient = by(None, torch.empty(0, 100), torch.empty(0, dtype=torch.long), None, 1.0, 0.0, 1.0)
    assert loss == 0
    assert gradient.shape == (0, 100)


@pytest.mark.parametrize("target", [100, 4096, -1, 2**32 + 5])
def test_a_target_outside_the_vocabulary_shows(target):
    logits, targets, _ = batch(3, 100, FP32, FP32)
    targets[0] = target
    assert math.isnan(by(None, logits, targets, None, 1.0, 0.0, 1.0)[0])


@pytest.mark.parametrize(("task", "kl"), [(1.0, 0.0), (0.0, 1.0)])
def test_a_broken_model_shows(task, kl):
    logits, targets, teacher = batch(3, 1000, FP32, FP32)
    logits[2, 17] = torch.nan
    loss, gradient = by(None, logits, targets, teacher if kl else None, task, kl, 1.0)
    assert math.isnan(loss)
    assert gradient[2].isnan().all()
    assert not gradient[:2].isnan().any()


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("scale", [1.0, 3.0, 0.1, 0.0, math.nan])
def test_scaling(dtype, scale, monkeypatch):
    """Also where each of the programs has several blocks, and the last is not full."""
    monkeypatch.setattr(fused_loss, "BLOCK", 64)
    monkeypatch.setattr(fused_loss, "SCALERS", 3)
    gradient = torch.randn(11, 100).to(dtype)
    expected = gradient * torch.tensor(scale)
    fused_loss.scale_(gradient, torch.tensor(scale))
    apart = 0 if scale == 1.0 else APART[dtype][0]
    torch.testing.assert_close(gradient, expected, rtol=apart, atol=0, equal_nan=True)
