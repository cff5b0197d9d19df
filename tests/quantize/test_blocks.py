"""What a layer is rounded on: its inputs as they are by then, beside those that it had, by another road."""

import copy

import pytest
import torch
from torch import nn

from tests.quantize.models import TwoBlocks
from twofour.calibrate.blocks import Teacher, run_blocks
from twofour.io.quantize import QuantizeOptions, quantize_
from twofour.nn.quantized import QuantizedLinear
from twofour.pattern import check_pattern
from twofour.prune import prune_
from twofour.quantize import blocks
from twofour.quantize.activations import as_rounded
from twofour.quantize.blocks import inputs_in_order
from twofour.quantize.schemes import SCHEMES
from twofour.quantize.tune import TUNING, TUNING_TO_DENSE
from twofour.select import select

SIZE = 32
WINDOWS = torch.arange(24).reshape(4, 6)


class Block(nn.Module):
    """Two layers with the same input, one behind them, and two experts that see half of the tokens each."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(SIZE, SIZE)  # first in the list of modules, last to run
        self.gate, self.up = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))

    def forward(self, hidden_states):
        x = hidden_states + self.down(self.gate(hidden_states).tanh() * self.up(hidden_states))
        flat = x.flatten(0, 1)
        turn = torch.arange(len(flat)) % 2
        for number, expert in enumerate(self.experts):
            flat = flat.index_add(
                0, (turn == number).nonzero()[:, 0], expert(x.flatten(0, 1)[turn == number])
            )
        return flat.reshape(hidden_states.shape)


def model():
    torch.manual_seed(0)
    return prune_(
        TwoBlocks(Block, 32, SIZE).eval(),
        include=["blocks.*.gate", "blocks.*.up", "blocks.*.down", "blocks.*.experts.*"],
    )


def inputs_of(module, name, tokens):
    seen = []
    hook = module.get_submodule(name).register_forward_pre_hook(
        lambda _, args: seen.append(args[0].flatten(0, -2))
    )
    module(tokens)
    hook.remove()
    return seen[0]


@torch.no_grad()
@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_inputs_are_measured_when_their_turn_comes(name):
    """Layers change by a half as they come: a layer sees all changes before it, and none after."""
    changed, original = model(), model()
    seen, order = {}, []

    def change(block):
        for stage, gram, drift in inputs_in_order(block, SCHEMES[name]):
            check(stage, gram, drift)

    def check(stage, gram, drift):
        for layer in stage:
            now, before = (inputs_of(m, layer.name, WINDOWS) for m in (changed, original))
            now = as_rounded(now, SCHEMES[name])
            order.append(layer.name.removeprefix("blocks."))
            if drift is None:
                seen[layer.name] = gram.tokens
            else:
                torch.testing.assert_close(gram.mean, now.t() @ now / len(now))
                torch.testing.assert_close(drift.mean, (before - now).t() @ now / len(now))
                seen[layer.name] = float(drift.mean.abs().max())
                last = [each.unflatten(0, WINDOWS.shape)[3::4].flatten(0, 1) for each in (now, before)]
                held_gram, held_drift = drift.held_out
                torch.testing.assert_close(held_gram.mean, last[0].t() @ last[0] / len(last[0]))
                torch.testing.assert_close(held_drift, (last[1] - last[0]).t() @ last[0] / len(last[0]))
        for layer in stage:
            changed.get_parameter(f"{layer.name}.weight").mul_(0.5)

    layers = select(changed, include=["blocks.*"], exclude=[]).layers
    run_blocks(changed, layers, WINDOWS, change, batch=2, follow=1.0)
    of_block = ["gate", "up", "down", "experts.0", "experts.1"]
    assert order == [f"{number}.{name}" for number in range(2) for name in of_block]
    if name == "int4":
        assert seen["blocks.0.gate"] == 0  # nothing has changed before the first
    assert seen["blocks.0.down"] > 0
    assert seen["blocks.1.gate"] > 0
    assert seen["blocks.1.experts.0"] == 12  # half of the tokens: no telling which it would have got


@torch.no_grad()
def test_a_model_with_experts_is_quantized():
    before = model()
    rounded = quantize_(copy.deepcopy(before), "int8", WINDOWS, include=["blocks.*"])
    layers = [m for m in rounded.modules() if isinstance(m, QuantizedLinear)]
    assert len(layers) == 10
    assert all(check_pattern(m.packed.unpack()).legal for m in layers)
    wanted = before(WINDOWS)
    assert float((rounded(WINDOWS) - wanted).norm() / wanted.norm()) < 0.02


@pytest.mark.parametrize(
    ("rounding", "taught", "half"),
    [("compensated", False, False), ("compensated", True, True), ("joint", False, True)],
)
def test_what_pruning_changed_is_repaired_by_half(rounding, taught, half, monkeypatch):
    """In what was rounded all of it is: without a dense model to come near to, there is nothing else."""
    followed = []

    def fitted(weight, gram, drift, aim, follow):
        followed.append(follow)
        return weight

    monkeypatch.setattr(blocks, "fitted_target", fitted)
    torch.manual_seed(0)
    dense, which = TwoBlocks(Block, 32, SIZE).eval(), ["blocks.*.gate", "blocks.*.up", "blocks.*.down"]
    made = copy.deepcopy(dense)
    made = made if rounding == "joint" else prune_(made, include=which)
    teacher = dense if taught else None
    quantize_(made, "int4", WINDOWS, group=32, rounding=rounding, teacher=teacher, include=which)
    assert followed
    assert set(followed) == {0.5 if half else 1.0}
    options = QuantizeOptions("int4", rounding=rounding, tune=True, teacher=teacher)
    assert options.tuning == (TUNING_TO_DENSE if half else TUNING)


def test_without_a_fit_tuning_begins_with_what_the_layers_do(monkeypatch):
    """Rounding then follows nobody: what is tuned has the codes of the model's own weights on its inputs."""

    def nothing(*_):
        raise AssertionError("a target was fitted")

    begun = {}

    def tune(block, rounded, *_):
        begun.update({layer.name: codes for layer, codes in rounded.items()})
        return rounded, None

    monkeypatch.setattr(blocks, "fitted_target", nothing)
    monkeypatch.setattr(blocks, "tune_", tune)
    torch.manual_seed(0)
    dense, which = TwoBlocks(Block, 32, SIZE).eval(), ["blocks.0.gate", "blocks.0.up"]
    pruned = prune_(copy.deepcopy(dense), include=which)
    own = {name: pruned.get_submodule(name).weight.detach().clone() for name in which}
    layers = select(pruned, which).layers
    blocks.quantize_blocks(
        *(pruned, layers, WINDOWS, SCHEMES["int8"], "compensated", lambda *_: None),
        **{"device": "cpu", "tune": TUNING_TO_DENSE, "teacher": Teacher(dense), "fit": False},
    )
    assert set(begun) == set(which)
    for name, weight in own.items():
        assert float((begun[name].weight() - weight).abs().max() / weight.abs().max()) < 0.02
        assert not begun[name].weight()[weight == 0].any()
