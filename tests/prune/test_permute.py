"""Permutation of input channels: that nothing changes when they move, and what it gains."""

import copy

import pytest
import torch
from torch.nn import functional as F

from twofour.calibrate.statistics import Gram
from twofour.errors import InputError, TwoFourError
from twofour.pattern import keep_best
from twofour.prune.permute import Constraint, apply, find_foldable, permute_, saliency_norms

from .models_to_permute import (
    DECODERS,
    IMAGES,
    TOKENS,
    Chain,
    gpt2,
    llama,
    mixtral,
    opt,
    scrambled,
)

# Moving


@pytest.mark.parametrize("name", DECODERS)
def test_apply_changes_the_weights_but_not_the_outputs(name):
    model = DECODERS[name][0]()
    with torch.no_grad():
        before = model(TOKENS)[0]
        for i, fold in enumerate(find_foldable(model, TOKENS)):
            weights = [model.get_parameter(f"{layer.name}.weight").clone() for layer in fold.consumers]
            apply(fold, fold.constraint.random(torch.Generator().manual_seed(i)))
            for layer, old in zip(fold.consumers, weights, strict=True):
                assert not torch.equal(model.get_parameter(f"{layer.name}.weight"), old)
        after = model(TOKENS)[0]
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4 * float(before.abs().max()))


def test_apply_takes_the_order_as_search_gives_it_and_can_be_undone():
    model = llama()
    fold = next(f for f in find_foldable(model, TOKENS) if f.kind == "chain")
    down = model.model.layers[0].mlp.down_proj.weight
    old = down.detach().clone()
    order = fold.constraint.random(torch.Generator().manual_seed(0))
    apply(fold, order)
    assert torch.equal(down, old[:, order])
    apply(fold, order.argsort())
    assert torch.equal(down, old)


def test_heads_that_share_keys_move_alike():
    model = llama(num_key_value_heads=2)
    fold = next(f for f in find_foldable(model, TOKENS) if f.kind == "heads")
    assert fold.constraint == Constraint(16, 8)
    order = fold.constraint.random(torch.Generator().manual_seed(0))
    old = model.model.layers[0].self_attn.o_proj.weight.detach().clone()
    apply(fold, order)
    inside = order.reshape(2, 8) % 8
    columns = torch.cat([inside[head // 2] + 8 * head for head in range(4)])
    assert torch.equal(model.model.layers[0].self_attn.o_proj.weight, old[:, columns])


# All of it


@pytest.mark.parametrize("make", [llama, gpt2, opt, mixtral])
def test_permute_keeps_the_model_and_more_of_the_scores(make):
    model = make()
    with torch.no_grad():
        before = model(TOKENS).logits
        notes = permute_(model, TOKENS)
        torch.testing.assert_close(model(TOKENS).logits, before, rtol=1e-3, atol=1e-3)
    assert all(note["kept"] >= note["kept_before"] - 1e-6 for note in notes)
    chains = [note for note in notes if note["kind"] == "chain"]
    assert all(note["kept"] > note["kept_before"] + 0.01 for note in chains)


def test_permute_only_the_kinds_wanted():
    assert {note["kind"] for note in permute_(llama(), TOKENS, kinds=["chain", "heads"])} == {
        "chain",
        "heads",
    }
    (note,) = permute_(llama(), TOKENS, kinds=["residual"])
    assert len(note["consumers"]) == 3 * 5


def test_permute_counts_channels_by_their_norms():
    # Each group of four has the same norm, so that whole groups matter and others do not: the worst order.
    norms = {
        f"model.layers.{i}.mlp.down_proj": torch.arange(20.0).exp().repeat_interleave(4) for i in range(3)
    }
    by_norm, by_size = llama(), llama()
    notes = permute_(by_norm, TOKENS, norms, kinds=["chain"])
    permute_(by_size, TOKENS, kinds=["chain"])
    assert [note["fold"] for note in notes] == sorted(norms)
    assert all(note["kept_before"] < 0.93 < 0.97 < note["kept"] for note in notes)
    down = [m.model.layers[0].mlp.down_proj.weight for m in (by_norm, by_size)]
    assert not torch.equal(*down)


def test_saliency_norms_are_what_is_left_when_the_others_repair():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=random) @ torch.randn(6, 6, generator=random)
    x[:, 4] = 0
    inputs = Gram(6)
    inputs.add(x)
    found = saliency_norms(inputs, damping=1e-6)
    for j in (0, 1, 2, 3, 5):  # the distance of a channel to the space of all others
        others = x[:, [i for i in range(6) if i not in (j, 4)]]
        rest = x[:, j] - others @ torch.linalg.lstsq(others, x[:, j]).solution
        assert float(found[j]) == pytest.approx(float(rest.square().mean().sqrt()), rel=0.02)
    assert found[4] == 0


@pytest.mark.parametrize("every_tap", [False, True])
def test_permute_convolutions(every_tap):
    torch.manual_seed(0)
    model = scrambled(Chain())
    before = model(IMAGES).detach()
    columns = {"3": 9 * 32, "9": 28} if every_tap else {"3": 32, "9": 26}
    notes = permute_(model, IMAGES, {name: torch.rand(n) for name, n in columns.items()})
    torch.testing.assert_close(model(IMAGES), before, rtol=1e-3, atol=1e-4 * float(before.abs().max()))
    assert all(note["kept"] > note["kept_before"] for note in notes)
    mask = keep_best(F.pad(model[9].weight.detach().abs().reshape(48, 26), (0, 2)))
    assert mask[:, 24:26].all()  # a short group keeps both


def test_permute_refuses_norms_of_another_model():
    with pytest.raises(InputError, match=r"layers.0.mlp.down_proj: 3 channel norms were given"):
        permute_(llama(), TOKENS, {"model.layers.0.mlp.down_proj": torch.ones(3)})


def test_permute_puts_back_what_changed_the_outputs(monkeypatch):
    model = llama()
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr("twofour.prune.permute.outputs_differ", lambda *_: True)
    with pytest.raises(TwoFourError, match="put back"):
        permute_(model, TOKENS)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
