"""Block by block: a layer's statistics are those of its inputs after the blocks before it were changed."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from twofour.calibrate.blocks import find_blocks, run_blocks
from twofour.calibrate.statistics import Gram
from twofour.calibrate.windows import sample_windows
from twofour.errors import InputError
from twofour.select import select

WINDOWS = torch.randint(3, 128, (6, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(_dense):
    return AutoModelForCausalLM.from_pretrained(_dense).eval()


def inputs_of(model, names):
    """What reaches each layer when the whole model runs."""
    found = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, n=name: found[n].append(args[0]))
        for name in names
    ]
    with torch.no_grad():
        model(WINDOWS)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts).reshape(-1, parts[0].shape[-1]) for name, parts in found.items()}


def test_gram_is_the_mean_of_outer_products():
    x = torch.randn(50, 6)
    gram = Gram(6)
    for part in (x[:7], x[7:7], x[7:].reshape(1, 43, 6)):
        gram.add(part)
    assert gram.tokens == 50
    torch.testing.assert_close(gram.mean, x.t() @ x / 50)
    torch.testing.assert_close(gram.channel_norms, x.square().mean(0).sqrt())


@pytest.mark.parametrize("batch", [1, 4])
def test_statistics_are_those_of_the_whole_model(model, batch):
    layers = select(model).layers
    expected = inputs_of(model, [layer.name for layer in layers])
    seen = {}
    run_blocks(model, layers, WINDOWS, lambda _, grams: seen.update(grams), batch=batch)
    assert set(seen) == set(layers)
    for layer, gram in seen.items():
        x = expected[layer.name]
        assert gram.tokens == len(x)
        torch.testing.assert_close(gram.mean, x.t() @ x / len(x), rtol=1e-4, atol=1e-5)


def test_layers_with_one_input_share_one_matrix(model):
    layers = {layer.name: layer for layer in select(model).layers}
    seen = {}
    run_blocks(model, list(layers.values()), WINDOWS, lambda _, grams: seen.update(grams))
    first = "model.layers.0."
    of = {name: seen[layer] for name, layer in layers.items() if name.startswith(first)}
    assert of[f"{first}self_attn.q_proj"] is of[f"{first}self_attn.v_proj"]
    assert of[f"{first}mlp.gate_proj"] is of[f"{first}mlp.up_proj"]
    assert len({id(gram) for gram in of.values()}) == 4


def test_the_second_block_sees_what_the_changed_first_one_gives(model):
    layers = select(model).layers
    seen = {}

    def change(number, grams):
        seen[number] = {layer.name: gram.mean.clone() for layer, gram in grams.items()}
        if number == 0:
            for layer in grams:
                model.get_parameter(f"{layer.name}.weight").mul_(0.5)

    run_blocks(model, layers, WINDOWS, change)
    name = "model.layers.1.mlp.down_proj"
    x = inputs_of(model, [name])[name]  # the model as it is now, its first block changed
    torch.testing.assert_close(seen[1][name], x.t() @ x / len(x), rtol=1e-4, atol=1e-5)


def test_finished_blocks_are_only_passed_through(model):
    layers = select(model).layers
    numbers = []
    run_blocks(model, layers, WINDOWS, lambda number, _: numbers.append(number), finished=1)
    assert numbers == [1]


def test_blocks_are_found_without_knowing_the_model(model):
    name, blocks = find_blocks(model, select(model).layers)
    assert name == "model.layers"
    assert len(blocks) == 2
    with pytest.raises(InputError, match="no list of blocks"):
        find_blocks(nn.Sequential(nn.Linear(32, 32)), select(nn.Sequential(nn.Linear(32, 32))).layers)


def test_layers_outside_the_blocks_are_refused(model):
    layers = select(model, include=["lm_head", "model.layers.*.mlp.*"]).layers
    with pytest.raises(InputError, match="lm_head"):
        run_blocks(model, layers, WINDOWS, lambda *_: None)


def test_windows(_dense):
    tokenizer = AutoTokenizer.from_pretrained(_dense)
    windows = sample_windows(tokenizer, ["abc " * 30, "xyz " * 30], 5, 12, seed=3)
    assert windows.shape == (5, 12)
    assert torch.equal(windows, sample_windows(tokenizer, ["abc " * 30, "xyz " * 30], 5, 12, seed=3))
    assert not torch.equal(windows, sample_windows(tokenizer, ["abc " * 30, "xyz " * 30], 5, 12, seed=4))
    text = "<s>" + "abc " * 30 + "<s>" + "xyz " * 30
    for window in windows:
        assert tokenizer.decode(window).replace(" ", "") in text.replace(" ", "")
    with pytest.raises(InputError, match="less than one window"):
        sample_windows(tokenizer, ["short"], 1, 12)
