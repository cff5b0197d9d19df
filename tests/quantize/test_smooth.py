"""Smoothing changes nothing that can be seen from outside, and makes the tokens easier to round."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from tests.quantize.models import TwoBlocks
from tests.recover.processes import leave
from twofour.calibrate.blocks import Call, run_blocks
from twofour.calibrate.experts import opened_experts
from twofour.calibrate.statistics import Gram
from twofour.errors import InputError
from twofour.pattern import check_pattern
from twofour.prune import prune_
from twofour.quantize import smooth_
from twofour.quantize.activations import round_tokens
from twofour.quantize.smooth import Smoothing
from twofour.select import select

TOKENS = torch.randint(0, 96, (4, 32), generator=torch.Generator().manual_seed(0))


def llama(**options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=4,
        **{"num_key_value_heads": 2, **options},
    )
    return with_outliers(LlamaForCausalLM(config))


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    return with_outliers(GPT2LMHeadModel(config))


@torch.no_grad()
def with_outliers(model):
    for name, module in model.named_modules():
        if "norm" in type(module).__name__.lower() and name:
            module.weight[5] = 60.0
            module.weight[9] = 0.01
        if getattr(module, "bias", None) is not None:
            module.bias.normal_()
        if name.endswith("up_proj"):
            module.weight[7] *= 60
    return prune_(model.eval())


def sources(number, *own):
    return [f"model.layers.{number}.{name}" for name in own or NORMS + UP]


NORMS = ("input_layernorm", "post_attention_layernorm")
UP = ("mlp.up_proj",)


def lost_by(model, reader):
    """How far rounding to int8 takes a layer's inputs from what they are, in units of what is usual there."""
    seen = []
    module = model.get_submodule(reader)
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
    model(TOKENS)
    hook.remove()
    codes, scale = round_tokens(seen[0], torch.int8)
    typical = seen[0].abs().median(0).values.clamp(min=1e-9)
    return float(((codes.float() * scale - seen[0]).abs() / typical).mean())


@torch.no_grad()
@pytest.mark.parametrize("make", [llama, gpt2])
def test_outputs_stay_and_rounding_gets_easier(make):
    model = make()
    before = copy.deepcopy(model)
    names = smooth_(model, TOKENS)
    # Both norms of each block, and the rows that down_proj reads; behind GPT-2's GELU there are none. The
    # last norm feeds the head, which is left alone.
    if make is llama:
        assert names == sources(0) + sources(1)
        readers = ["self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj"]
        readers = [f"model.layers.{number}.{name}" for number in range(2) for name in readers]
    else:
        assert names == [f"transformer.h.{i}.ln_{j}" for i in range(2) for j in (1, 2)]
        readers = ["transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_fc"]
    assert torch.equal(model(TOKENS).logits, before(TOKENS).logits)  # powers of two: every bit
    for reader in readers:
        assert lost_by(model, reader) < 0.5 * lost_by(before, reader), reader
    for (_, new), (name, old) in zip(model.named_parameters(), before.named_parameters(), strict=True):
        if old.dim() == 2:
            assert torch.equal(new == 0, old == 0), name  # a column times a power of two


@torch.no_grad()
def test_2_4_holds_and_factors_are_powers_of_two():
    model = llama()
    old = model.model.layers[0].self_attn.q_proj.weight.clone()
    smooth_(model, TOKENS)
    new = model.model.layers[0].self_attn.q_proj.weight
    assert check_pattern(new).legal
    kept = old != 0
    mantissa, _ = torch.frexp(new[kept] / old[kept])
    assert bool((mantissa == 0.5).all())
    assert not torch.equal(new, old)
    for name in ("up_proj", "down_proj"):
        assert check_pattern(model.model.layers[0].mlp.get_submodule(name).weight).legal


@torch.no_grad()
@pytest.mark.parametrize("exclude", [(), ("*.up_proj",)])
def test_rows_and_their_bias_are_divided(exclude):
    """Of a layer that will be rounded as of one that stays as it is."""
    model = llama(mlp_bias=True)
    old, out = copy.deepcopy(model), model(TOKENS).logits
    names = smooth_(model, TOKENS, exclude=exclude)
    # What is not rounded must not read smoothed channels: the second norm stays then.
    own = NORMS[:1] + UP if exclude else NORMS + UP
    assert names == sources(0, *own) + sources(1, *own)
    new, was = (m.model.layers[1].mlp for m in (model, old))
    factor = was.up_proj.bias / new.up_proj.bias
    assert float(factor[7]) >= 4  # the large channel
    rows = was.up_proj.weight / factor[:, None]
    if not exclude:  # its columns were multiplied for the norm
        norms = [m.model.layers[1].post_attention_layernorm.weight for m in (model, old)]
        rows *= norms[1] / norms[0]
    assert torch.equal(new.up_proj.weight, rows)
    assert torch.equal(new.down_proj.weight, was.down_proj.weight * factor)
    assert torch.equal(model(TOKENS).logits, out)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_16_bits(dtype):
    model = llama().to(dtype)
    out = model(TOKENS).logits
    assert smooth_(model, TOKENS) == sources(0) + sources(1)
    if dtype == torch.bfloat16:
        assert torch.equal(model(TOKENS).logits, out)
    else:  # below 6e-5 it has fewer bits, so not quite all stay
        torch.testing.assert_close(model(TOKENS).logits, out, rtol=2e-3, atol=2e-3)


@torch.no_grad()
def test_a_large_row_does_not_decide():
    """It has a scale of its own."""
    model, other = llama(), llama()
    other.model.layers[0].self_attn.v_proj.weight[3] *= 1024
    for each in (model, other):
        smooth_(each, TOKENS)
    one, two = (m.model.layers[0].input_layernorm.weight for m in (model, other))
    assert torch.equal(one, two)


@torch.no_grad()
def test_attention_with_as_many_values_as_channels_is_left_alone():
    """v_proj to o_proj would be exact as well, if nobody in another block reads the values."""
    model = llama(num_key_value_heads=4)
    assert smooth_(model, TOKENS) == sources(0) + sources(1)


@torch.no_grad()
def test_experts_are_left_alone():
    """The norm before them feeds the router, too, and which of them run depends on the text."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = with_outliers(MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=4)))
    with opened_experts(model):
        old, out = copy.deepcopy(model.state_dict()), model(TOKENS).logits
        assert smooth_(model, TOKENS) == sources(0, NORMS[0]) + sources(1, NORMS[0])
        new = model.state_dict()
        assert all(torch.equal(new[name], old[name]) for name in new if ".mlp." in name)
        assert torch.equal(model(TOKENS).logits, out)


class OnePlus(nn.Module):
    """A norm whose scale is one plus its weight: dividing the weight divides something else."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((64,), 0.3))
        self.weight.data[5] = 40

    def forward(self, x):
        return x / x.square().mean(-1, keepdim=True).sqrt() * (1 + self.weight)


@torch.no_grad()
def test_what_is_no_plain_norm_is_left_as_it_was():
    model = llama()
    model.model.layers[1].input_layernorm = OnePlus()
    before = copy.deepcopy(model.state_dict())
    out = model(TOKENS).logits
    names = smooth_(model, TOKENS)
    assert names == sources(0) + sources(1, *NORMS[1:], *UP)
    assert torch.equal(
        model.model.layers[1].input_layernorm.weight, before["model.layers.1.input_layernorm.weight"]
    )
    key = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(model.state_dict()[key], before[key])
    assert torch.equal(model(TOKENS).logits, out)


@torch.no_grad()
def test_a_norm_with_another_reader_is_left_alone():
    """Excluding one of its readers keeps the norm as it is: the others cannot change without it."""
    model = llama()
    names = smooth_(model, TOKENS, exclude=["*.0.self_attn.k_proj"])
    assert names == sources(0, *NORMS[1:], *UP) + sources(1)


def test_strength_is_checked():
    with pytest.raises(InputError, match="strength"):
        smooth_(llama(), TOKENS, strength=1.5)


SIZE = 32


class Gated(nn.Module):
    """down(tanh(gate(x)) * up(x)), with what else may be done with the product."""

    layer = staticmethod(lambda n, k: nn.Linear(k, n))
    middle = staticmethod(lambda gate, up: gate.tanh() * up)

    def __init__(self):
        super().__init__()
        self.up, self.gate = self.layer(48, SIZE), self.layer(48, SIZE)  # gate runs first
        self.down, self.other = self.layer(SIZE, 48), self.layer(SIZE, 48)

    def forward(self, hidden_states):
        gate = self.gate(hidden_states)
        return hidden_states + self.read(self.middle(gate, self.up(hidden_states)))

    def read(self, product):
        return self.down(product)


class UpFirst(Gated):
    """The layer that runs last before the reader is not the one whose rows are its channels."""

    def forward(self, hidden_states):
        up = self.up(hidden_states)
        return hidden_states + self.read(self.middle(self.gate(hidden_states), up))


class Transposed(Gated):
    layer = staticmethod(Conv1D)


class ReLU(Gated):
    """Twice as much in is twice as much out: rows fold through it, too."""

    middle = staticmethod(lambda gate, up: up.relu())


class ReadTwice(Gated):
    def read(self, product):
        return self.down(product) + self.other(product).tanh()


class FaintReader(Gated):
    """The product goes somewhere else as well; the block's outputs hardly show it."""

    def read(self, product):
        return self.down(product) + 1e-4 * product[..., :SIZE]


class BoundedReader(Gated):
    def read(self, product):
        return self.down(product) + 0.01 * product[..., :SIZE].tanh()


class GELU(Gated):
    middle = staticmethod(lambda gate, up: nn.functional.gelu(up))


@torch.no_grad()
def toy(block):
    torch.manual_seed(0)
    model = TwoBlocks(block, 96, SIZE).eval()
    for part in model.blocks:
        part.up.bias.normal_()
        matrix = part.up.weight.t() if isinstance(part.up, Conv1D) else part.up.weight
        matrix[5] *= 40
    return prune_(model, include=["blocks.*"])


@torch.no_grad()
@pytest.mark.parametrize("block", [Gated, UpFirst, Transposed, ReLU, ReadTwice, FaintReader, GELU])
def test_whose_rows_can_be_divided(block):
    model = toy(block)
    old, out = copy.deepcopy(model), model(TOKENS)
    names = smooth_(model, TOKENS, include=["blocks.*"])
    assert torch.equal(model(TOKENS), out)
    if block in (FaintReader, GELU):
        assert names == []
        assert all(map(torch.equal, model.parameters(), old.parameters()))
        return
    assert names == ["blocks.0.up", "blocks.1.up"]
    new, was = model.blocks[0], old.blocks[0]
    factor = was.up.bias / new.up.bias
    assert float(factor[5]) > 2
    side = factor[:, None] if block is Transposed else factor
    assert torch.equal(new.down.weight, was.down.weight * side)
    assert torch.equal(new.other.weight, was.other.weight * side if block is ReadTwice else was.other.weight)
    assert torch.equal(new.gate.weight, was.gate.weight)


@torch.no_grad()
def test_a_huge_token_hides_no_change_of_the_others():
    model = toy(BoundedReader)
    model.embed.weight[TOKENS[0, 0]] *= 1e6
    assert smooth_(model, TOKENS, include=["blocks.*"]) == []


@torch.no_grad()
def test_what_another_block_has_as_well_is_left_alone():
    model = toy(Gated)
    model.blocks[1].up.bias = model.blocks[0].up.bias
    old = copy.deepcopy(model.state_dict())
    assert smooth_(model, TOKENS, include=["blocks.*"]) == []
    assert all(torch.equal(tensor, old[name]) for name, tensor in model.state_dict().items())


@torch.no_grad()
def test_what_may_not_change_does_not():
    model = toy(Gated)
    layers = select(model, ["blocks.*"]).layers
    smoothing = Smoothing(model, lambda name: name != "blocks.1.up.bias")
    run_blocks(model, layers, TOKENS, smoothing)
    assert smoothing.makers == ["blocks.0.up"]
    assert smoothing.changed == {"blocks.0": ("blocks.0.up.bias",), "blocks.1": ()}


@torch.no_grad()
def test_statistics_follow_and_targets_stay():
    """Gram matrices are those of the new inputs, and the block gives what the model as it was gives there."""
    model = llama()
    layers = select(model).layers
    seen = []

    def look(block):
        inputs = {layer: Gram(layer.columns) for layer in block.layers}
        hooks = [
            model.get_submodule(layer.name).register_forward_pre_hook(
                lambda _, args, gram=gram: gram.add(args[0])
            )
            for layer, gram in inputs.items()
        ]
        for call, origin, target in zip(block.calls, block.origins, block.targets, strict=True):
            given = Call(origin, call.rest, call.named).through(block.module, block.device)
            assert torch.equal(given, target)
        for hook in hooks:
            hook.remove()
        for layer, gram in inputs.items():
            torch.testing.assert_close(block.grams[layer].mean, gram.mean)
            seen.append(layer)

    run_blocks(model, layers, TOKENS, look, batch=2, follow=1.0, prepare=Smoothing(model))
    assert len(seen) == 14


def shared_out(rank, port, path):
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = toy(Gated)
    smooth_(model, TOKENS, include=["blocks.*"], batch=2)
    torch.save(model.state_dict(), f"{path}/{rank}.pt")
    leave()


def test_two_processes_give_what_one_gives(tmp_path):
    """Each sees two of the four windows, and the largest value of a channel is in one of them."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    mp.spawn(shared_out, (store.port, str(tmp_path)), nprocs=2)
    model = toy(Gated)
    assert smooth_(model, TOKENS, include=["blocks.*"], batch=2) == ["blocks.0.up", "blocks.1.up"]
    for rank in range(2):
        shared = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(tensor, shared[name]) for name, tensor in model.state_dict().items())
    half = toy(Gated)
    smooth_(half, TOKENS[:2], include=["blocks.*"], batch=2)
    assert not torch.equal(half.blocks[0].up.bias, model.blocks[0].up.bias)
