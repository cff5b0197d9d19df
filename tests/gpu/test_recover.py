"""Recovery on a GPU: what the CPU tests cannot see (bfloat16, the fused loss, writing, compiling)."""

import copy
from types import SimpleNamespace

import pytest
import torch

import twofour
from twofour.calibrate.written import write_windows
from twofour.pattern import check_pattern
from twofour.recover import Recover
from twofour.recover.losses import next_tokens, recovery_loss
from twofour.select import select

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTH = 64


def small():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 300}
    config = LlamaConfig(**shape, num_attention_heads=2, max_position_embeddings=128, initializer_range=0.2)
    return LlamaForCausalLM(config).cuda().eval()


@pytest.fixture(scope="module")
def teacher():
    return small()


@pytest.fixture(scope="module")
def windows(teacher):
    return write_windows(teacher, SimpleNamespace(bos_token_id=1, eos_token_id=None), 600, LENGTH, batch=300)


def test_writing_follows_the_models_chances(teacher, windows):
    tokenizer = SimpleNamespace(bos_token_id=1, eos_token_id=None)
    assert torch.equal(windows, write_windows(teacher, tokenizer, 600, LENGTH, batch=300))
    with torch.no_grad():
        likely = teacher(torch.tensor([[1]], device="cuda")).logits[0, -1].softmax(-1).cpu()
    second = write_windows(teacher, tokenizer, 20_000, 2, batch=20_000)[:, 1]
    counted = torch.bincount(second, minlength=300) / 20_000
    assert float((counted - likely).abs().max()) < 0.02


@pytest.mark.parametrize("recipe", ["masked", "distill", "adaptive", "lora"])
def test_every_recipe_in_bfloat16(teacher, windows, recipe):
    student = twofour.prune_(copy.deepcopy(teacher))
    seen = []
    twofour.recover_(
        *(student, windows, teacher, Recover(recipe=recipe, tokens=60 * 16 * LENGTH, batch=16, lr=2e-3)),
        on_progress=lambda done, total, label: seen.append(
            float(label.split("perplexity ")[1].split(",")[0])
        ),
    )
    assert seen[-1] < seen[0]
    for layer in select(student).layers:
        assert check_pattern(student.get_parameter(f"{layer.name}.weight")).legal


def test_compiled_it_is_the_same_training(teacher, windows):
    start, found = twofour.prune_(copy.deepcopy(teacher)), []
    for compiled in (False, True):
        student = copy.deepcopy(start)
        options = Recover(tokens=10 * 16 * LENGTH, batch=16, lr=1e-3, dtype="fp32", compile=compiled)
        twofour.recover_(student, windows, teacher, options)
        found.append(student)
    # Not weight by weight: where a gradient is next to nothing, Adam makes a whole step of its rounding.
    with torch.no_grad():
        before, one, other = (model(windows[:8].cuda()).logits for model in (start, *found))
    assert (one - other).norm() < 0.1 * (one - before).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_loss(dtype):
    torch.manual_seed(0)
    logits, teacher = torch.randn(2, 3000, 40_000, device="cuda", dtype=dtype).mul(3).unbind(0)
    targets = next_tokens(torch.randint(40_000, (30, 100), device="cuda")).flatten()
    gradients, losses = [], []
    for fused in (True, False):
        own = logits.clone().requires_grad_()
        loss = recovery_loss(own, targets, teacher, task=0.3, kl=0.7, fused=fused)
        loss.backward()
        gradients.append(own.grad)
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=2e-2, atol=1e-8)


def test_a_step_does_not_wait_for_the_gpu(teacher, windows, tmp_path):
    from twofour.recover.data import Windows
    from twofour.recover.loop import Trainer
    from twofour.recover.state import Store
    from twofour.recover.train import settle

    student = twofour.prune_(copy.deepcopy(teacher))
    options = settle(student, teacher, Recover(tokens=100 * 16 * LENGTH, batch=16, seqlen=LENGTH))
    trainer = Trainer(
        student, Windows.of(windows), windows[:8], teacher, options, Store(tmp_path), (), (), (), {}
    )
    trainer.recipe.attach(trainer.optimizer)
    for step in range(3):
        trainer.step(step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3, 6):
            trainer.step(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
