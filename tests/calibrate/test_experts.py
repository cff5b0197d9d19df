"""Experts of a mixture that few tokens were sent to lean on what the others were sent."""

import pytest
import torch
from torch import nn

from twofour.calibrate import observe
from twofour.calibrate.blocks import run_blocks
from twofour.calibrate.statistics import Gram
from twofour.prune.admm import ADMM
from twofour.prune.hessian import relative_output_error
from twofour.prune.sparsegpt import SparseGPT
from twofour.select import select

SIZE = 64


class Experts(nn.Module):
    """The last expert gets the few tokens whose first channel is large, the others the rest in turn."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)) for _ in range(3)
        )

    def forward(self, hidden_states):
        flat = hidden_states.flatten(0, 1)
        turn = torch.where(flat[:, 0] > 2.0, 2, torch.arange(len(flat)) % 2)
        out = self.first(flat)
        for number, expert in enumerate(self.experts):
            out = out.index_add(0, (turn == number).nonzero()[:, 0], expert(flat[turn == number]))
        return out.reshape(hidden_states.shape)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Experts()])

    def forward(self, tokens, use_cache=False):
        """A token is a seed: its state lives near a space of few dimensions, as those of real models do."""
        mix = torch.randn(SIZE // 4, SIZE, generator=torch.Generator().manual_seed(7)) / 4
        rows = []
        for token in tokens.flatten().tolist():
            random = torch.Generator().manual_seed(token)
            rows.append(torch.randn(SIZE // 4, generator=random) @ mix)
            rows[-1] += 0.3 * torch.randn(SIZE, generator=random)
        return self.blocks[0](torch.stack(rows).reshape(*tokens.shape, SIZE))


def grams_of(windows):
    torch.manual_seed(0)
    model = Mixture().eval()
    found = {}
    run_blocks(model, select(model).layers, windows, lambda block: found.update(block.grams))
    return model, {layer.name.removeprefix("blocks.0."): gram for layer, gram in found.items()}


@pytest.mark.parametrize("method", [SparseGPT(), ADMM()])
def test_an_expert_with_few_tokens_does_better_on_other_text(method, monkeypatch):
    few, other = torch.arange(600).reshape(6, 100), torch.arange(1000, 7000).reshape(12, 500)
    model, truth = grams_of(other)
    _, leaning = grams_of(few)
    monkeypatch.setattr(observe, "_let_experts_lean", lambda *_: None)
    _, alone = grams_of(few)
    name = "experts.2.0"
    assert 3 < alone[name].tokens == leaning[name].tokens < SIZE // 2
    assert truth[name].tokens > 3 * SIZE
    weight = model.get_parameter(f"blocks.0.{name}.weight").detach()
    errors = [
        relative_output_error(weight, method.prune(weight, inputs=known[name]), truth[name])
        for known in (leaning, alone)
    ]
    assert errors[0] < 0.7 * errors[1]
    # Experts with enough tokens stand by themselves, and so does what is no expert.
    for other_name in ("experts.0.0", "experts.1.1", "first.0", "first.1"):
        assert torch.equal(leaning[other_name].mean, alone[other_name].mean)


def test_layers_that_see_all_tokens_do_not_lean():
    """With less text than columns they are short too, but there is nobody like them to lean on."""
    few = torch.arange(20).reshape(2, 10)
    _, leaning = grams_of(few)
    assert leaning["first.0"].tokens == 20
    assert int(torch.linalg.matrix_rank(leaning["first.0"].mean)) <= 20
    assert int(torch.linalg.matrix_rank(leaning["first.1"].mean)) <= 20


def test_how_much_is_leaned():
    x, others = torch.randn(2, 8), torch.eye(8)
    gram = Gram(8)
    gram.add(x)
    gram.lean_on(others)
    torch.testing.assert_close(gram.mean, 2 / 8 * (x.t() @ x / 2) + 6 / 8 * others)
    assert gram.tokens == 2
    enough = Gram(8)
    enough.add(torch.randn(8, 8))
    before = enough.mean.clone()
    enough.lean_on(others)
    assert torch.equal(enough.mean, before)
