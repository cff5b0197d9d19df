"""Block reconstruction and `best`: the mask holds, the error falls, and the guard keeps what was better."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from twofour.calibrate.blocks import Block, Call, run_blocks
from twofour.errors import InputError
from twofour.pattern import check_pattern
from twofour.prune import chosen_method, options_of, prune_, reconstruct
from twofour.prune.admm import ADMM
from twofour.prune.best import Best
from twofour.prune.magnitude import Magnitude
from twofour.prune.reconstruct import Reconstruct, reconstruct_
from twofour.select import Layer, select

# Random tokens have no structure to learn, but a random model's outputs on them do.
WINDOWS = torch.randint(3, 128, (16, 24), generator=torch.Generator().manual_seed(0))
QUICK = Reconstruct(epochs=4, tokens=48)


@pytest.fixture
def model(_dense):
    return AutoModelForCausalLM.from_pretrained(_dense, dtype=torch.float32).eval()


class Mixer(nn.Module):
    """A block with everything: a norm, a pruned layer with a bias, one that was left alone."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.left = nn.Linear(64, 32)

    def forward(self, x):
        return x + self.left(torch.relu(self.up(self.norm(x))))


def pruned_mixer(dtype=torch.float32):
    """A dense block's outputs as targets, and the block with one layer pruned."""
    torch.manual_seed(0)
    module = Mixer()
    calls = [Call(torch.randn(2, 12, 32).to(dtype), (), {}) for _ in range(16)]
    with torch.no_grad():
        targets = [module(call.states.float()).to(dtype) for call in calls]
        module.up.weight.copy_(Magnitude().prune(module.up.weight))
    layer = Layer("blocks.3.up", "linear", (64, 32))
    return Block(3, "blocks.3", module.to(dtype), [layer], {}, calls, targets, torch.device("cpu"))


def test_the_error_falls_and_the_mask_holds():
    block = pruned_mixer()
    before = copy.deepcopy(block.module)
    done = reconstruct_(block, QUICK)
    assert done.kept
    assert done.error_after < 0.9 * done.error_before
    module = block.module
    gone = before.up.weight == 0
    assert gone.sum() == gone.numel() // 2
    assert (module.up.weight[gone] == 0).all()
    assert not torch.signbit(module.up.weight[gone]).any()
    assert (module.up.weight[~gone] != before.up.weight[~gone]).any()
    for name in ("norm.weight", "norm.bias", "up.bias"):
        assert not torch.equal(module.get_parameter(name), before.get_parameter(name)), name
        assert f"blocks.3.{name}" in done.changed
    for name in ("left.weight", "left.bias"):  # left alone, its bias as well
        assert torch.equal(module.get_parameter(name), before.get_parameter(name)), name
    assert all(p.requires_grad and p.grad is None for p in module.parameters())


def test_norms_and_biases_stay_where_asked():
    for options, may_change in ((dataclasses.replace(QUICK, norms=False), None), (QUICK, lambda name: False)):
        block = pruned_mixer()
        before = copy.deepcopy(block.module)
        done = reconstruct_(block, options, *([may_change] if may_change else []))
        assert done.kept
        assert done.changed == ()
        for name, parameter in block.module.named_parameters():
            assert torch.equal(parameter, before.get_parameter(name)) == (name != "up.weight"), name


def test_the_guard_takes_a_harmful_tuning_back():
    """So large a rate gives NaN on the way, in the second attempt as well."""
    block = pruned_mixer()
    before = copy.deepcopy(block.module)
    done = reconstruct_(block, dataclasses.replace(QUICK, rate=1e30))
    assert not done.kept
    assert done.changed == ()
    assert done.error_after == done.error_before
    for name, parameter in block.module.named_parameters():
        assert torch.equal(parameter, before.get_parameter(name)), name
    unguarded = pruned_mixer()
    assert reconstruct_(unguarded, dataclasses.replace(QUICK, rate=1e30, guard=False)).kept
    assert not torch.equal(unguarded.module.up.weight, before.up.weight)


def test_what_overshoots_goes_back_part_of_the_way():
    """At this rate the tuned weights themselves are worse on the windows held out than the old ones."""
    wild = dataclasses.replace(QUICK, rate=5.0, rounds=1)
    block, unguarded = pruned_mixer(), pruned_mixer()
    start = copy.deepcopy(block.module)
    done, whole = reconstruct_(block, wild), reconstruct_(unguarded, dataclasses.replace(wild, guard=False))
    assert whole.error_after > whole.error_before
    assert done.kept
    assert done.error_after < 0.97 * done.error_before
    moved, whole_way = ((m.up.weight - start.up.weight).detach() for m in (block.module, unguarded.module))
    share = float((moved * whole_way).sum() / whole_way.square().sum())
    assert 0 < share < 0.9
    torch.testing.assert_close(moved, share * whole_way, rtol=1e-3, atol=1e-6)
    assert (block.module.up.weight[start.up.weight == 0] == 0).all()


def test_a_tuning_that_blew_up_ends_early(monkeypatch):
    """After the rise of the learning rate, and the second attempt, in smaller steps, goes to the end."""
    steps = []
    schedule = reconstruct._schedule
    monkeypatch.setattr(
        reconstruct, "_schedule", lambda step, count: steps.append(step) or schedule(step, count)
    )
    done = reconstruct_(pruned_mixer(), dataclasses.replace(QUICK, rate=8.0, rounds=1))
    count = QUICK.epochs * 14  # of 16 batches two are held out
    risen = math.ceil(reconstruct.WARM_UP * count)
    assert steps == [*range(risen + 1), *range(count)]
    assert done.kept
    assert done.error_after < done.error_before


@pytest.mark.parametrize(("more_from", "passes"), [(None, 4), (10**6, 4), (1, 5)])
def test_one_more_pass_where_there_is_much_text(more_from, passes, monkeypatch):
    counts = []
    schedule = reconstruct._schedule
    monkeypatch.setattr(
        reconstruct, "_schedule", lambda step, count: counts.append(count) or schedule(step, count)
    )
    reconstruct_(pruned_mixer(), dataclasses.replace(QUICK, rounds=1, one_more_from=more_from))
    assert set(counts) == {passes * 14}


def test_another_round_while_what_is_learnt_carries_over():
    """With much to learn and inputs of one kind the held-out error falls with the other: all rounds are used.

    Two batches are learnt by heart: the error on the third falls less, and one round is all.
    """
    once, thrice = (
        reconstruct_(pruned_mixer(), dataclasses.replace(QUICK, rounds=rounds)) for rounds in (1, 3)
    )
    assert once.rounds == 1
    assert thrice.rounds > 1
    assert thrice.error_after < once.error_after
    block = pruned_mixer()
    del block.calls[3:], block.targets[3:]
    assert reconstruct_(block, dataclasses.replace(QUICK, epochs=30)).rounds <= 1


def test_16_bit_weights_are_tuned_in_32():
    block, wide = pruned_mixer(torch.bfloat16), pruned_mixer()
    done, reference = reconstruct_(block, QUICK), reconstruct_(wide, QUICK)
    assert {p.dtype for p in block.module.parameters()} == {torch.bfloat16}
    assert done.kept
    # Steps of a rate of 2 % would mostly round to nothing in 8 bits; so near it can only be in 32.
    assert done.error_after < 1.2 * reference.error_after


def test_nan_and_too_few_windows():
    block = pruned_mixer()
    block.calls[-1].states[0, 0, 0] = torch.nan
    with pytest.raises(InputError, match=r"^blocks\.3: .*NaN"):
        reconstruct_(block, QUICK)
    block = pruned_mixer()
    del block.calls[1:], block.targets[1:]
    with pytest.raises(InputError, match=r"two windows.*--samples"):
        reconstruct_(block, QUICK)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rate", 0.0),
        ("rate", float("nan")),
        ("epochs", -1),
        ("rounds", 0),
        ("held_out", 1.0),
        ("follow", 1.5),
    ],
)
def test_options_that_make_no_sense(option, value):
    with pytest.raises(InputError, match=option):
        Reconstruct(**{option: value})


# best


def test_best_is_nearer_to_the_dense_model_than_admm(model):
    dense = copy.deepcopy(model)
    fresh = torch.randint(3, 128, (8, 24), generator=torch.Generator().manual_seed(1))
    lost = {}
    for method in (ADMM(), Best(reconstruct=QUICK)):
        pruned = prune_(copy.deepcopy(model), method, windows=WINDOWS)
        with torch.no_grad():
            lost[method.name] = float((pruned(fresh).logits - dense(fresh).logits).square().mean())
        for layer in select(model).layers:
            assert check_pattern(pruned.get_parameter(f"{layer.name}.weight")).legal
    assert lost["best"] < 0.9 * lost["admm"]


def test_the_same_seed_gives_the_same_bits(model):
    one, other, third = (
        prune_(copy.deepcopy(model), Best(reconstruct=dataclasses.replace(QUICK, seed=s)), windows=WINDOWS)
        for s in (0, 0, 1)
    )
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(one.get_parameter(name), third.get_parameter(name))


def test_nan_activations_name_the_layer(model):
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = torch.nan
    with pytest.raises(InputError, match=r"^model\.layers\.1\.self_attn\.q_proj: the inputs .* NaN"):
        prune_(model, Best(reconstruct=QUICK), windows=WINDOWS)


def test_the_default_depends_on_the_text():
    assert chosen_method(None, has_text=True) == Best()
    assert chosen_method(None, has_text=False) == Magnitude()
    assert chosen_method("admm", has_text=False) == ADMM()
    options = options_of(Best())
    assert options["method"] == "best"
    assert options["reconstruct"]["guard"] is True


def test_best_without_text_says_so(model):
    with pytest.raises(InputError, match="best looks at the inputs"):
        prune_(model, "best")
    with pytest.raises(InputError, match=r"^up: best .*Give calibration text"):
        Best().prune(torch.randn(8, 32), "up")


def test_shared_inputs_are_factored_once(model, monkeypatch):
    from twofour.prune import admm, sparsegpt

    counted = []
    for module in (admm, sparsegpt):
        original = module.damped_cholesky
        monkeypatch.setattr(
            module, "damped_cholesky", lambda *a, original=original: counted.append(a[2]) or original(*a)
        )
    for method in ("admm", "sparsegpt"):
        counted.clear()
        prune_(copy.deepcopy(model), method, windows=WINDOWS)
        assert len(counted) == 2 * 4  # qkv, o, gate and up, down


def test_grams_are_freed_as_they_are_used(model):
    left = []

    def change(block):
        from twofour.prune import prune_block

        prune_block(block, ADMM())
        left.append(len(block.grams))

    run_blocks(model, select(model).layers, WINDOWS, change)
    assert left == [0, 0]
