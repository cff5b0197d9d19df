"""Channels reordered inside a block while the model is streamed over text."""

import copy

import pytest
import torch

from twofour.calibrate.blocks import run_blocks
from twofour.calibrate.statistics import Gram
from twofour.errors import InputError
from twofour.pattern import check_pattern
from twofour.prune import prune_
from twofour.prune.permute_block import permute_block_
from twofour.select import select

from .models_to_permute import DECODERS, TOKENS, llama

WINDOWS = torch.randint(3, 96, (16, 24), generator=torch.Generator().manual_seed(2))
CAUSAL = [name for name in DECODERS if name != "bert"]


def reordered(model, layers=None, saliencies=True, may_change=lambda name: True):
    """All blocks of the model reordered, what was said of each, and the Gram matrices after that."""
    said, grams = [], {}

    def change(block):
        said.append(permute_block_(block, model.config, saliencies=saliencies, may_change=may_change))
        grams.update(block.grams)

    run_blocks(model, list(layers or select(model).layers), WINDOWS, change)
    return said, grams


@pytest.mark.parametrize("saliencies", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_the_model_computes_the_same_and_keeps_more(name, saliencies):
    model, folds = DECODERS[name][0](), DECODERS[name][1]
    old = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        before = model(TOKENS).logits
        said, _ = reordered(model, saliencies=saliencies)
        after = model(TOKENS).logits
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4 * float(before.abs().max()))
    notes = {layer.name: note for block in said for layer, note in block.notes.items()}
    # All but the residual stream, which is not one block's.
    assert {(note["kind"], name) for name, note in notes.items()} == {f for f in folds if f[0] != "residual"}
    for note in notes.values():
        assert note["kept"] >= note["kept_before"] - 1e-6
        assert 0 <= note["output_change"] < 1e-4
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, old[name])}
    assert changed
    assert changed <= {name for block in said for name in block.changed}


def test_gram_matrices_are_those_of_the_new_order():
    model = llama()
    layers = list(select(model).layers)
    _, grams = reordered(model, layers)
    measured: dict[str, Gram] = {}
    run_blocks(
        model, layers, WINDOWS, lambda block: measured.update({x.name: g for x, g in block.grams.items()})
    )
    for layer in layers:
        torch.testing.assert_close(grams[layer].mean, measured[layer.name].mean, rtol=1e-3, atol=1e-4)
        assert grams[layer].tokens == WINDOWS.numel()
    by_name = {layer.name: gram for layer, gram in grams.items()}
    up, gate = (by_name[f"model.layers.0.mlp.{name}_proj"] for name in ("up", "gate"))
    assert up is gate


def test_only_what_is_pruned_counts_and_what_must_stay_does():
    model = llama()
    down = list(select(model, ["*.1.mlp.down_proj"]).layers)
    said, _ = reordered(model, down)
    (block,) = said
    assert [layer.name for layer in block.notes] == ["model.layers.1.mlp.down_proj"]
    assert set(block.changed) == {f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "gate", "down")}
    said, _ = reordered(llama(), may_change=lambda name: not name.endswith("up_proj.weight"))
    assert {note["kind"] for block in said for note in block.notes.values()} == {"heads"}


def test_layers_that_read_nothing_that_may_move_are_no_reason_to_refuse():
    model = llama()
    said, _ = reordered(model, list(select(model, ["*.q_proj"]).layers))
    assert all(not block.notes and not block.changed for block in said)


def test_a_model_without_anything_to_fold_is_refused():
    with pytest.raises(
        InputError, match=r"^model\.layers\.0: no channels of this block.*without permutation"
    ):
        reordered(llama(), may_change=lambda name: False)


def test_nan_names_the_layer_and_is_not_taken_for_a_fold_that_fails():
    model = llama()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj"):
        reordered(model)
    model = llama()
    model.model.layers[1].post_attention_layernorm.weight.data[0] = torch.inf
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.mlp\.\w+_proj: the inputs .* NaN"):
        reordered(model)


@pytest.mark.parametrize("method", ["wanda", "admm"])
def test_prune_with_permute_loses_less_of_what_was_reordered(method):
    """Down reads what no pruned layer but up and gate made: prune it alone, and only the order differs."""
    lost = {}
    inputs = torch.randint(3, 96, (4, 24), generator=torch.Generator().manual_seed(3))
    for permute in (False, True):
        model = llama(intermediate_size=160)
        with torch.no_grad():
            dense = model(inputs).logits
            prune_(model, method, ["*.0.mlp.down_proj"], windows=WINDOWS, permute=permute)
            assert check_pattern(model.model.layers[0].mlp.down_proj.weight).legal
            lost[permute] = float((model(inputs).logits - dense).norm())
    assert lost[True] < lost[False]


def test_prune_says_where_it_cannot_permute():
    with pytest.raises(InputError, match="magnitude does not look at any.*permute_"):
        prune_(llama(), "magnitude", windows=WINDOWS, permute=True)
    with pytest.raises(InputError, match="layer by layer over data"):
        prune_(llama(), "wanda", data=[TOKENS], permute=True)
