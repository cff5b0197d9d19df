"""The chunked losses against what torch's own functions give."""

import shutil

import pytest
import torch
from torch.nn import functional as F

from twofour.errors import InputError
from twofour.recover import losses
from twofour.recover.losses import NONE, next_tokens, recovery_loss, summed_task_loss, task_loss


def plain(logits, targets, teacher, task, kl, temperature):
    """The same in two lines, all at once."""
    loss = task * F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=NONE)
    log_p, log_q = ((x / temperature).log_softmax(-1).flatten(0, -2) for x in (logits, teacher))
    return loss + kl * temperature**2 * F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)


@pytest.fixture
def batch():
    torch.manual_seed(0)
    logits, teacher = torch.randn(2, 3, 7, 50, dtype=torch.float64).mul(3).unbind(0)
    targets = next_tokens(torch.randint(50, (3, 7)))
    return logits.float(), targets, teacher.float()


@pytest.fixture(params=[1, 130, 1 << 20], ids=["a token", "two tokens", "all"])
def chunk(request, monkeypatch):
    """How many logits are looked at at a time must make no difference."""
    monkeypatch.setitem(losses.CHUNK, "cpu", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(
    ("task", "kl", "temperature"), [(1, 0, 1), (0, 1, 1), (0.3, 0.7, 1), (0.3, 0.7, 2.5)]
)
def test_loss_and_gradient(batch, task, kl, temperature):
    logits, targets, teacher = batch
    mine, theirs = (logits.clone().requires_grad_() for _ in range(2))
    loss = recovery_loss(mine, targets, teacher, task=task, kl=kl, temperature=temperature)
    expected = plain(theirs, targets, teacher, task, kl, temperature)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    (3 * loss).backward()  # an accumulated step scales its loss
    (3 * expected).backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.usefixtures("chunk")
def test_evaluation_sums_what_counts(batch):
    logits, targets, _ = batch
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(summed_task_loss(logits, targets), expected)
    assert task_loss(logits, targets).item() == pytest.approx(expected.item() / 18, rel=1e-5)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a compiler here")
def test_fused_it_is_the_same(batch):
    logits, targets, teacher = batch
    for some in (teacher, None):
        mine, plain = (logits.clone().requires_grad_() for _ in range(2))
        for each, fused in ((mine, True), (plain, False)):
            recovery_loss(each, targets, some, task=0.3, kl=0.7, fused=fused).backward()
        torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-4, atol=1e-7)
    assert losses._fused_chunk._run is not losses._chunk  # it did not fall back


def test_last_positions_have_no_target():
    assert next_tokens(torch.tensor([[4, 5, 6], [7, 8, 9]])).tolist() == [[5, 6, NONE], [8, 9, NONE]]


def test_without_a_teacher_it_is_the_task(batch):
    logits, targets, _ = batch
    loss = recovery_loss(logits, targets, None, task=0.5, kl=1.0)
    assert loss.item() == pytest.approx(0.5 * task_loss(logits, targets).item())


def test_16_bit_logits_keep_16_bit_gradients(batch):
    logits, targets, teacher = (x.bfloat16() if x.is_floating_point() else x for x in batch)
    mine = logits.clone().requires_grad_()
    recovery_loss(mine, targets, teacher, task=0.3, kl=0.7).backward()
    assert mine.grad.dtype == torch.bfloat16
    wide = logits.float().requires_grad_()
    plain(wide, targets, teacher.float(), 0.3, 0.7, 1.0).backward()
    torch.testing.assert_close(mine.grad.float(), wide.grad, rtol=1e-2, atol=1e-5)


def test_no_softmax_of_all_tokens_is_held(monkeypatch):
    """The largest tensor made beside the logits' gradient is a chunk's."""
    monkeypatch.setitem(losses.CHUNK, "cpu", 4 * 50)
    logits = torch.randn(400, 50, dtype=torch.bfloat16, requires_grad=True)
    teacher, targets = torch.randn(400, 50, dtype=torch.bfloat16), torch.randint(50, (400,))
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
                largest = max(largest, result.numel())
            return result

    with Watch():
        recovery_loss(logits, targets, teacher, task=1.0, kl=1.0, temperature=2.0)
    assert 0 < largest <= 4 * 50


def test_a_second_backward_is_refused(batch):
    logits, targets, _ = batch
    loss = task_loss(logits.requires_grad_(), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once already"):
        loss.backward()


def test_shapes_that_do_not_fit_are_refused(batch):
    """A kernel would read beyond the end of what is too short."""
    logits, targets, teacher = batch
    for other in (teacher[:, :-1], teacher[..., :-1], teacher.transpose(1, 2)):
        with pytest.raises(InputError, match=r"the teacher's logits are \[.*, and the model's \[3, 7, 50\]"):
            recovery_loss(logits, targets, other, task=1.0, kl=1.0)
    with pytest.raises(InputError, match="18 targets for logits of 21 tokens"):
        recovery_loss(logits, targets[:, :-1], teacher, task=1.0, kl=1.0)


def test_impossible_tokens_of_the_teacher_cost_nothing():
    """Logits of -inf (padded vocabularies) in both models: 0 · (-inf + inf) must not become NaN."""
    logits = torch.tensor([[0.0, 1.0, -torch.inf]]).requires_grad_()
    teacher = torch.tensor([[1.0, 0.0, -torch.inf]])
    loss = recovery_loss(logits, torch.tensor([1]), teacher, task=1.0, kl=1.0)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()
