"""`recover_` in memory: every recipe wins something back, and hands back a plain 2:4 model."""

import copy
import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

import twofour
from twofour.errors import InputError, TwoFourError
from twofour.pattern import check_pattern
from twofour.recover import Recover
from twofour.recover.options import RECIPES, default_rate
from twofour.select import select

LENGTH = 24


def small(seed=0, vocabulary=40, **changed):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "vocab_size": vocabulary}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    # Large weights: a model with opinions, of which pruning leaves less.
    return LlamaForCausalLM(LlamaConfig(**{**shape, "initializer_range": 0.3, **changed})).eval()


@pytest.fixture(scope="module")
def teacher():
    return small()


@pytest.fixture(scope="module")
def windows(teacher):
    from types import SimpleNamespace

    from twofour.calibrate.written import write_windows

    return write_windows(teacher, SimpleNamespace(bos_token_id=1, eos_token_id=None), 256, LENGTH, batch=256)


@pytest.fixture
def student(teacher):
    return twofour.prune_(copy.deepcopy(teacher))


def quick(**changed):
    return Recover(**{"tokens": 40 * 8 * LENGTH, "batch": 8, "lr": 3e-3, **changed})


@torch.no_grad()
def loss_of(model, windows):
    logits = model(windows).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten()).item()


def weights(model):
    return {
        layer.name: model.get_parameter(f"{layer.name}.weight").detach() for layer in select(model).layers
    }


def require_plain_2_of_4(model):
    assert len(weights(model)) == 14
    for name, weight in weights(model).items():
        assert check_pattern(weight).legal, name
        assert not (weight.view({4: torch.int32, 2: torch.int16}[weight.element_size()])[weight == 0]).any()
    assert not [key for key in model.state_dict() if "mask" in key or "lora" in key]
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not model.training


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_wins_something_back(student, teacher, windows, recipe):
    held_out, rest = windows[:32], windows[32:]
    zeros = {name: weight == 0 for name, weight in weights(student).items()}
    before = loss_of(student, held_out)
    others = {n: p.detach().clone() for n, p in student.named_parameters() if n.endswith("norm.weight")}
    given = student
    got = twofour.recover_(
        student, rest, teacher if recipe != "masked" else None, quick(recipe=recipe), held_out=held_out
    )
    assert got is given
    require_plain_2_of_4(student)
    lost = before - loss_of(teacher, held_out)
    assert lost > 0.3
    assert loss_of(student, held_out) < before - (0.2 if recipe != "lora" else 0.1) * lost
    moved = sum(int((weight[zeros[name]] != 0).sum()) for name, weight in weights(student).items())
    assert (moved > 0) == (recipe == "adaptive")
    changed = [
        name for name, before in others.items() if not torch.equal(student.get_parameter(name), before)
    ]
    assert bool(changed) == (recipe != "lora")  # which trains adapters only


def test_distillation_learns_the_teachers_predictions_without_looking_at_the_text(student, teacher, windows):
    """Random tokens teach nothing about the text; what the teacher makes of them does."""
    noise = torch.randint(0, 40, (200, LENGTH), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def distance():
        p, q = (model(noise[:32]).logits.log_softmax(-1) for model in (student, teacher))
        return F.kl_div(p, q, reduction="sum", log_target=True).item()

    before = distance()
    twofour.recover_(student, noise, teacher, quick(task_weight=0.0))
    assert distance() < 0.7 * before


def by_hand(model, windows, teacher, options, steps):
    """The same training as one would write it down."""
    masks = {f"{name}.weight": weight != 0 for name, weight in weights(model).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    from twofour.recover.data import Windows

    data = Windows.of(windows)
    for step in range(steps):
        batch = data.batch(options.seed, step, options.batch)
        logits = model(batch).logits
        loss = options.task_weight * F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        with torch.no_grad():
            wanted = teacher(batch).logits
        p, q = ((x / 2).log_softmax(-1).flatten(0, 1) for x in (logits, wanted))
        loss = loss + options.kl_weight * 4 * F.kl_div(p, q, reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        loss.backward()
        for name, mask in masks.items():
            model.get_parameter(name).grad.mul_(mask)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = options.rate(step)
        optimizer.step()
        with torch.no_grad():
            for name, mask in masks.items():
                model.get_parameter(name).mul_(mask)


def test_it_is_the_training_one_would_write_by_hand(student, teacher, windows):
    options = Recover(
        tokens=12 * 8 * LENGTH, batch=8, lr=2e-3, weight_decay=0.1, clip=0.5, task_weight=0.3, kl_weight=0.8
    )
    options = dataclasses.replace(options, temperature=2.0, eval_every=12, seqlen=LENGTH, warmup=0.2)
    expected = copy.deepcopy(student)
    by_hand(expected.train(), windows[16:], teacher, options, 12)
    twofour.recover_(student, windows[16:], teacher, options, held_out=windows[:16])
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(parameter, expected.get_parameter(name), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    "how",
    [{"accumulate": 4}, {"checkpointing": True}, {"teacher_offload": True}],
    ids=["accumulate", "checkpointing", "offload"],
)
def test_how_it_is_computed_does_not_change_what_comes_out(student, teacher, windows, how):
    other = copy.deepcopy(student)
    short = {"tokens": 8 * 8 * LENGTH}
    twofour.recover_(student, windows, copy.deepcopy(teacher), quick(**short))
    twofour.recover_(other, windows, copy.deepcopy(teacher), quick(**short, **how))
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(other.get_parameter(name), parameter, rtol=1e-3, atol=2e-5)
    require_plain_2_of_4(other)
    assert not other.is_gradient_checkpointing


def test_in_16_bit_the_masters_are_32(student, teacher, windows):
    """Steps of 1e-4 are below what bfloat16 can tell apart at 0.3: without masters little would move."""
    student, wide = student.bfloat16(), copy.deepcopy(student).float()
    before = {name: weight.clone() for name, weight in weights(student).items()}
    options = quick(
        dtype="bf16", lr=1e-4, schedule="constant", warmup=0.0, tokens=24 * 8 * LENGTH, eval_every=24
    )
    twofour.recover_(student, windows, teacher, options)
    require_plain_2_of_4(student)
    assert {p.dtype for p in student.parameters()} == {torch.bfloat16}
    moved = torch.cat([(weight != before[name]).flatten() for name, weight in weights(student).items()])
    assert moved.float().mean() > 0.05
    twofour.recover_(wide, windows, teacher, dataclasses.replace(options, dtype="fp32"))
    for name, weight in weights(student).items():
        torch.testing.assert_close(weight.float(), weights(wide)[name], rtol=0.02, atol=1e-3)


def test_the_best_weights_are_kept_and_patience_ends(student, teacher, windows):
    """A rate that first helps and then ruins."""
    held_out = windows[:32]
    seen = []
    options = quick(
        lr=0.05, schedule="constant", warmup=0.0, clip=1e9, eval_every=2, patience=3, task_weight=1.0
    )
    options = dataclasses.replace(options, tokens=200 * 8 * LENGTH)

    def watch(done, total, label):
        if done % 2 == 0:
            seen.append((loss_of(student, held_out), done))

    twofour.recover_(student, windows[32:], teacher, options, held_out=held_out, on_progress=watch)
    best, step = min(seen)
    assert seen[-1][1] == step + 3 * 2  # three evaluations without a gain
    assert seen[-1][1] < 200
    assert loss_of(student, held_out) == pytest.approx(best, rel=1e-5)
    require_plain_2_of_4(student)


@pytest.mark.parametrize(("recipe", "lr"), [("distill", 10), ("distill", 1e30), ("adaptive", 10)])
def test_a_diverging_loss_ends_with_the_start(student, teacher, windows, recipe, lr):
    before = copy.deepcopy(student.state_dict())
    options = quick(recipe=recipe, lr=lr, clip=1e9, warmup=0.0, schedule="constant", eval_every=1000)
    with pytest.raises(TwoFourError, match=r"diverged at step \d+.*Lower --lr") as caught:
        twofour.recover_(student, windows, teacher, options)
    assert caught.value.exit_status == 1
    require_plain_2_of_4(student)
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.state_dict().items())


def test_a_model_that_is_not_2_of_4_is_named_and_left_alone(teacher, windows):
    dense = copy.deepcopy(teacher).bfloat16()
    before = copy.deepcopy(dense.state_dict())
    with pytest.raises(
        InputError, match=r"^model\.layers\.0\.self_attn\.q_proj: row 0, group 0 keeps 4 of 4"
    ):
        twofour.recover_(dense, windows, teacher, quick())
    assert {p.dtype for p in dense.parameters()} == {torch.bfloat16}
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())


def test_layers_that_were_left_dense_stay_so(teacher, windows):
    student = twofour.prune_(copy.deepcopy(teacher), exclude=["*.0.*"])
    twofour.recover_(student, windows, teacher, quick(tokens=4 * 8 * LENGTH), exclude=["*.0.*"])
    for name, weight in weights(student).items():
        assert check_pattern(weight).legal == (".1." in name)


def test_a_teacher_of_another_vocabulary_is_refused(student, windows):
    with pytest.raises(InputError, match="vocabulary of 44 tokens, and the model one of 40"):
        twofour.recover_(student, windows, small(vocabulary=44), quick())


def test_tokens_beyond_the_vocabulary_are_refused(student, windows):
    with pytest.raises(InputError, match="beyond the model's vocabulary of 40"):
        twofour.recover_(student, windows + 20, None, quick())


def test_distill_without_a_teacher(student, windows):
    with pytest.raises(InputError, match="--teacher"):
        twofour.recover_(student, windows, None, quick(recipe="distill"))


def test_the_callers_random_numbers_are_left_alone(student, windows):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    twofour.recover_(student, windows, None, quick(tokens=8 * LENGTH))
    assert torch.equal(torch.rand(4), expected)


WRONG = [
    ({"recipe": "alchemy"}, "no recipe 'alchemy'"),
    ({"schedule": "lunar"}, "no schedule 'lunar'"),
    ({"dtype": "fp8"}, "no dtype 'fp8'"),
    ({"tokens": 0}, "tokens must be at least 1"),
    ({"batch": -1}, "batch must be at least 1"),
    ({"seqlen": 1}, "nothing to predict"),
    ({"lr": 0.0}, "lr must be a finite number above 0"),
    ({"clip": math.inf}, "clip must be"),
    ({"weight_decay": -1.0}, "weight-decay must be"),
    ({"warmup": 1.5}, "share of the steps"),
    ({"until": 0.0}, "may never move"),
    ({"kl_weight": 0.0, "task_weight": 0.0}, "nothing to learn"),
]


@pytest.mark.parametrize(("changed", "words"), WRONG, ids=[str(c) for c, _ in WRONG])
def test_wrong_settings(changed, words):
    with pytest.raises(InputError, match=words):
        Recover(**changed)


def test_settings_are_completed():
    known = {"parameters": 15_000_000, "longest": 256, "has_teacher": True, "processes": 1}
    found = Recover(tokens=98_304_000).settled(**known)
    assert (found.recipe, found.seqlen, found.batch, found.steps) == ("distill", 256, 128, 3000)
    assert found.lr == pytest.approx(1e-3)
    assert found.eval_every == found.save_every == 300
    small = Recover(tokens=1_000_000, accumulate=3).settled(**{**known, "has_teacher": False, "processes": 2})
    assert (small.recipe, small.batch) == ("masked", 12)
    with pytest.raises(InputError, match="multiple of 6"):
        Recover(batch=8, accumulate=3).settled(**{**known, "processes": 2})
    with pytest.raises(InputError, match="256 tokens at most"):
        Recover(seqlen=512).settled(**known)
    assert default_rate(1000, "distill", 2048) == 2e-3
    assert 2e-5 == default_rate(10**11, "distill", 2048) < default_rate(10**9, "distill", 2048) < 1e-4
    assert default_rate(10**9, "lora", 2048) == pytest.approx(10 * default_rate(10**9, "distill", 2048))
    assert default_rate(15_000_000, "distill", 100) == pytest.approx(3e-4)
    assert default_rate(15_000_000, "distill", 32768) == pytest.approx(1e-3)


def test_schedules():
    base = {"tokens": 100 * 16, "batch": 1, "seqlen": 16, "lr": 1.0, "warmup": 0.1}
    rates = {
        name: [Recover(**base, schedule=name).rate(s) for s in range(100)]
        for name in ("cosine", "linear", "constant")
    }
    for found in rates.values():
        assert found[:10] == pytest.approx([(s + 1) / 11 for s in range(10)])
        assert found[10] == 1.0
    assert rates["constant"][-1] == 1.0
    assert rates["linear"][55] == pytest.approx(0.5)
    assert rates["cosine"][55] == pytest.approx(0.5)
    assert rates["cosine"][-1] < 1e-3 < rates["linear"][-1]
    assert rates["cosine"][10:] == sorted(rates["cosine"][10:], reverse=True)
