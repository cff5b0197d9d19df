"""Which input channels may move: found in real models, and proved before anything does."""

import copy

import pytest
import torch
from torch import nn

from twofour.prune import trace
from twofour.prune.permute import find_foldable

from .models_to_permute import (
    DECODERS,
    IMAGES,
    LLAMA,
    TOKENS,
    Chain,
    Experts,
    expected,
    llama,
    mixtral,
    resnet,
    scrambled,
)


def found(model, inputs=TOKENS):
    return {(fold.kind, fold.name) for fold in find_foldable(model, inputs)}


@pytest.mark.parametrize("name", DECODERS)
def test_finds_the_folds_of_transformers(name):
    make, folds = DECODERS[name]
    assert found(make()) == folds


def test_experts_in_one_tensor_follow_the_stream():
    folds = find_foldable(mixtral(), TOKENS)
    assert [(f.kind, f.name) for f in folds[:1]] == [("residual", "residual stream")]
    assert {f.kind for f in folds[1:]} == {"heads"}


def test_experts_as_modules():
    torch.manual_seed(0)
    model = scrambled(Experts())
    names = {("chain", f"experts.{i}.2") for i in range(3)}
    # lm_head reads the stream without a norm between; it makes another number of channels.
    assert found(model) == names | {("residual", "residual stream")}
    # An expert that no token reaches stands still, and so does the stream that it would read.
    model.used = 2
    assert found(model) == {("chain", "experts.0.2"), ("chain", "experts.1.2")}


def test_convolutions():
    torch.manual_seed(0)
    folds = find_foldable(scrambled(Chain()), IMAGES)
    assert [(f.name, f.producers) for f in folds] == [("3", ("0",)), ("9", ("3",))]
    assert {site.tensor for site in folds[0].sites} == {"weight", "bias", "running_mean", "running_var"}


def test_of_residual_blocks_only_the_inner_channels():
    assert found(resnet(), IMAGES) == {("chain", f"{i}.conv2") for i in (2, 3, 4)}


def test_a_second_reader_forbids_or_joins():
    class Twice(nn.Module):
        def __init__(self, aside):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 16)
            self.aside = aside

        def forward(self, x):
            y = self.a(x).relu()
            return self.b(y) + self.c(y), (y if self.aside else y.sum(-1))

    x = torch.randn(4, 16)
    (fold,) = find_foldable(Twice(False), x)
    assert [layer.name for layer in fold.consumers] == ["b", "c"]
    assert find_foldable(Twice(True), x) == []


def test_nothing_is_proved_where_nothing_can_be_seen():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    model[2].weight.data.fill_(1.0)  # all columns equal: every order gives the same
    assert find_foldable(model, torch.randn(4, 16)) == []


def test_a_wrong_order_that_hardly_shows_in_the_outputs_is_seen_in_the_layer():
    """In 16 bits one layer of many moves the outputs by less than rounding; its own output it does not."""

    class Faint(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            y = self.a(x)
            return x + 0.01 * self.b(y * torch.linspace(-2, 2, 32, dtype=x.dtype))  # fixed to the places

    assert find_foldable(Faint().bfloat16(), torch.randn(8, 32, dtype=torch.bfloat16)) == []


def test_finding_leaves_the_model_as_it_was():
    model = llama(attention_dropout=0.5).train()
    model.model.norm.eval()
    modes = [m.training for m in model.modules()]
    before = copy.deepcopy(model.state_dict())
    assert len(find_foldable(model, TOKENS)) == 7
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_hooks for m in model.modules())


def test_blocks_that_are_alike_are_proved_together(monkeypatch):
    runs = []
    real = trace.run
    monkeypatch.setattr(trace, "run", lambda *args: runs.append(1) or real(*args))
    find_foldable(llama(num_hidden_layers=12), TOKENS)
    assert len(runs) < 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    assert found(llama().to(dtype)) == expected(True, *LLAMA)


def test_arguments_by_position_and_by_name():
    model = llama()
    for inputs in ((TOKENS,), {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}):
        assert found(model, inputs) == expected(True, *LLAMA)
