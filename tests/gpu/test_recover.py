"""Recovery on a GPU: what the CPU tests cannot see (bfloat16, the fused loss, writing, compiling)."""

import copy
from types import SimpleNamespace

import pytest
import torch

import twofour
from twofour.calibrate.written import write_windows
from twofour.pattern import check_pattern
from twofour.recover import Recover, loop, losses
from twofour.recover.beside import Beside
from twofour.recover.losses import next_tokens, recovery_loss
from twofour.select import select

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTH = 64


def small(**changed):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 300}
    shape |= changed
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


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_a_quantized_model_learns_by_its_scales(windows, scheme):
    """Of a shape whose codes lie in threads' order on Hopper: what comes back is in the order of files."""
    dense = small(hidden_size=128, intermediate_size=256).to(torch.bfloat16)
    model = twofour.quantize_(twofour.prune_(copy.deepcopy(dense)), scheme, rounding="nearest")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = []
    twofour.recover_(
        *(model, windows, dense, Recover(tokens=60 * 16 * LENGTH, batch=16)),
        on_progress=lambda done, total, label: seen.append(
            float(label.split("perplexity ")[1].split(",")[0])
        ),
    )
    assert seen[-1] < seen[0]
    after = model.state_dict()
    for name, tensor in before.items():
        same = torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8))
        assert same != name.endswith(("weight_scale", "norm.weight")), name
    fresh = twofour.quantize_(twofour.prune_(copy.deepcopy(dense)), scheme, rounding="nearest")
    fresh.load_state_dict(after)
    with torch.no_grad():
        assert torch.equal(model(windows[:4].cuda()).logits, fresh(windows[:4].cuda()).logits)


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


def logits_of(rows, vocabulary, dtype=torch.bfloat16, teachers=torch.bfloat16):
    """A student's, targets of which some do not count, and a teacher's with a padded vocabulary."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(2, rows, vocabulary, device="cuda").mul(3).unbind(0)
    teacher[:, -5:] = -torch.inf
    targets = next_tokens(torch.randint(vocabulary - 5, (rows // 100, 100), device="cuda")).flatten()
    return logits.to(dtype), targets, teacher.to(teachers)


def loss_and_gradient(logits, targets, teacher, outer=1.0, **options):
    own = logits.clone().requires_grad_()
    loss = recovery_loss(own, targets, teacher, task=0.3, kl=0.7, **options)
    (outer * loss).backward()
    return loss.detach(), own.grad


@pytest.mark.parametrize("vocabulary", [40_000, 32_003, 32_000, 100])
@pytest.mark.parametrize("outer", [1.0, 3.0])
@pytest.mark.parametrize(
    ("dtype", "teachers", "temperature"),
    [
        (torch.float32, torch.float32, 1.0),
        (torch.float32, torch.bfloat16, 2.0),
        (torch.bfloat16, torch.bfloat16, 1.0),
        (torch.bfloat16, torch.float32, 2.0),
        (torch.float16, torch.float16, 1.0),
        (torch.bfloat16, None, 1.0),
    ],
)
def test_the_fused_loss(dtype, teachers, temperature, outer, vocabulary):
    logits, targets, teacher = logits_of(3000, vocabulary, dtype, teachers or dtype)
    given = logits, targets, teacher if teachers else None, outer
    assert losses._kernel_works(logits.device)
    loss, gradient = loss_and_gradient(*given, temperature=temperature)
    expected, slope = loss_and_gradient(*given, temperature=temperature, fused=False)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    # Many of float16's are below its smallest normal number.
    absolute = 2e-7 if dtype == torch.float16 else 1e-9
    torch.testing.assert_close(gradient, slope, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=absolute)
    again, same = loss_and_gradient(*given, temperature=temperature)
    assert torch.equal(again, loss)
    assert torch.equal(same, gradient)


def test_the_compiled_loss():
    given = logits_of(3000, 40_000)
    loss, gradient = loss_and_gradient(*given, fused=True)
    expected, slope = loss_and_gradient(*given, fused=False)
    assert losses._fused_chunk._run is not losses._chunk  # it did not fall back
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient, slope, rtol=2e-2, atol=1e-8)


def test_the_fused_loss_takes_memory_for_its_gradient_only():
    logits, targets, teacher = logits_of(3000, 40_000)
    logits.requires_grad_()
    recovery_loss(logits, targets, teacher, task=0.3, kl=0.7)  # compiles
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = recovery_loss(logits, targets, teacher, task=0.3, kl=0.7)
    assert loss.requires_grad  # it holds its gradient now
    assert torch.cuda.max_memory_allocated() - before < 1.01 * logits.nbytes


def test_predictions_from_another_device(monkeypatch):
    """They come in parts, and each row is what it is."""
    monkeypatch.setitem(losses.CHUNK, "cuda", 700 * 1000)
    logits, targets, teacher = logits_of(2000, 1000)
    loss, gradient = loss_and_gradient(logits, targets, teacher)
    other, same = loss_and_gradient(logits, targets, teacher.cpu())
    torch.testing.assert_close(other, loss, rtol=1e-6, atol=1e-6)
    assert torch.equal(same, gradient)


def test_what_is_computed_beside_is_what_is_computed_alone():
    """Many times without a wait in between, in memory that each turn leaves to the next."""

    def slow(x):
        for _ in range(20):
            x = x @ x
            x /= x.abs().amax()
        return x

    torch.manual_seed(0)
    given = torch.randn(30, 1024, 1024, device="cuda")
    found = []
    for wanted in (False, True):
        beside, total = Beside(given.device, wanted), torch.zeros(1024, 1024, device="cuda")
        for x in given:
            mine = x + 1  # made in this stream, and read in the other
            theirs = beside.begin(lambda mine=mine: slow(mine))
            own = x.mul(2)
            with beside.joined():
                total += own * theirs
            del mine, theirs, own
        found.append(total)
    assert found[0].isfinite().all()
    assert found[0].any()
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_teacher_beside_the_student_changes_no_bit(teacher, windows, monkeypatch, compiled):
    torch.use_deterministic_algorithms(True, warn_only=True)  # or two runs of the same may differ
    try:
        start, found = twofour.prune_(copy.deepcopy(teacher)), []
        for beside in (False, True):
            monkeypatch.setattr(loop, "RUNS_BESIDE", beside)
            student = copy.deepcopy(start)
            options = Recover(tokens=20 * 16 * LENGTH, batch=16, accumulate=2, lr=1e-3, compile=compiled)
            twofour.recover_(student, windows, teacher, options)
            found.append(student.state_dict())
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert any(not torch.equal(found[0][name], value) for name, value in start.state_dict().items())


@pytest.mark.parametrize("beside", [False, True])
def test_a_step_does_not_wait_for_the_gpu(teacher, windows, tmp_path, monkeypatch, beside):
    from twofour.recover.data import Windows
    from twofour.recover.loop import Trainer
    from twofour.recover.state import Store
    from twofour.recover.train import settle

    monkeypatch.setattr(loop, "RUNS_BESIDE", beside)
    # Without an attention mask transformers looks for packed sequences in every forward, and waits for the
    # answer. That wait is its own; there are none here.
    packed = "transformers.masking_utils.find_packed_sequence_indices"
    monkeypatch.setattr(packed, lambda position_ids: None, raising=False)
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
