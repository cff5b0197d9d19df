"""Experts stored as one tensor, taken apart into linears."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, OlmoeConfig, OlmoeForCausalLM
from transformers.integrations.moe import use_experts_implementation

import twofour
from twofour.calibrate.blocks import run_blocks
from twofour.calibrate.experts import OpenExperts, open_experts_, opened_experts, stack_experts_
from twofour.pattern import check_pattern
from twofour.select import select, stacked_experts

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
TOKENS = torch.arange(3, 51).reshape(2, 24)


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)).eval()


def olmoe():
    torch.manual_seed(0)
    return OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=8)).eval()


class Config:
    _experts_implementation = "eager"


@use_experts_implementation(has_gate=False, has_bias=True)
class Ungated(nn.Module):
    """One product up, one down, with biases: the other form that the decorator knows."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = 3
        self.up_proj = nn.Parameter(torch.randn(3, 40, 32))
        self.up_proj_bias = nn.Parameter(torch.randn(3, 40))
        self.down_proj = nn.Parameter(torch.randn(3, 32, 40))
        self.down_proj_bias = nn.Parameter(torch.randn(3, 32))
        self.act_fn = nn.ReLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for token, (experts, weights) in enumerate(zip(top_k_index, top_k_weights, strict=True)):
            for e, weight in zip(experts.tolist(), weights, strict=True):
                up = self.act_fn(self.up_proj[e] @ hidden_states[token] + self.up_proj_bias[e])
                out[token] += weight * (self.down_proj[e] @ up + self.down_proj_bias[e])
        return out


class Holder(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts


def routed(tokens=10, experts=3):
    torch.manual_seed(1)
    chosen = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)])
    return torch.randn(tokens, 32), chosen, torch.rand(tokens, 2)


@pytest.mark.parametrize("make", [mixtral, olmoe])
@torch.no_grad()
def test_the_model_computes_the_same(make):
    model = make()
    before, names = model(TOKENS).logits, list(model.state_dict())
    with opened_experts(model) as opened:
        assert list(opened) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
        torch.testing.assert_close(model(TOKENS).logits, before)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(TOKENS).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@torch.no_grad()
def test_whatever_implementation_transformers_was_told(implementation):
    model = olmoe()
    model.set_experts_implementation(implementation)
    before = model(TOKENS).logits
    open_experts_(model)
    torch.testing.assert_close(model(TOKENS).logits, before)


def test_linears_have_the_names_of_the_files():
    model = mixtral()
    open_experts_(model)
    names = [layer.name for layer in select(model, include=["model.layers.1.mlp.*"]).layers]
    assert names[:4] == [f"model.layers.1.mlp.experts.{n}" for n in ("0.w1", "0.w3", "0.w2", "1.w1")]
    expert = model.model.layers[1].mlp.experts[2]
    fresh = mixtral().model.layers[1].mlp.experts
    assert torch.equal(expert["w1"].weight, fresh.gate_up_proj[2, :48])
    assert torch.equal(expert["w3"].weight, fresh.gate_up_proj[2, 48:])
    assert torch.equal(expert["w2"].weight, fresh.down_proj[2])


@torch.no_grad()
def test_biases_and_no_gate():
    holder = Holder(Ungated(Config()))
    x, chosen, weights = routed()
    want = holder.experts(x, chosen, weights)
    with opened_experts(holder):
        assert [layer.name for layer in select(holder).layers][:2] == [
            "experts.0.up_proj",
            "experts.0.down_proj",
        ]
        torch.testing.assert_close(holder.experts(x, chosen, weights), want)
        holder.experts[1]["up_proj"].weight.zero_()  # in place, in the memory of the stacked one
        holder.experts[2]["down_proj"].bias.data = torch.ones(32)  # in memory of its own
    assert not holder.experts.up_proj[1].any()
    assert bool((holder.experts.down_proj_bias[2] == 1).all())


def test_gradients_are_those_of_the_stacked_tensor():
    holder = Holder(Ungated(Config())).double()
    x, chosen, weights = routed()
    x, weights = x.double(), weights.double()
    holder.experts(x, chosen, weights).square().sum().backward()
    want = {name: parameter.grad for name, parameter in holder.experts.named_parameters()}
    open_experts_(holder)
    holder.experts(x, chosen, weights).square().sum().backward()
    for number, expert in enumerate(holder.experts):
        torch.testing.assert_close(expert["up_proj"].weight.grad, want["up_proj"][number])
        torch.testing.assert_close(expert["down_proj"].bias.grad, want["down_proj_bias"][number])


def test_an_error_puts_them_together_again():
    model = mixtral()
    with pytest.raises(ZeroDivisionError), opened_experts(model):
        raise ZeroDivisionError
    assert isinstance(stacked_experts(model.model.layers[0].mlp.experts), tuple)


@torch.no_grad()
def test_copies_and_pickles():
    model = olmoe()
    want = model(TOKENS).logits
    open_experts_(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        model.model.layers[0].mlp.experts[0]["up_proj"].weight.add_(1)  # not shared
        torch.testing.assert_close(other(TOKENS).logits, want)
        model.model.layers[0].mlp.experts[0]["up_proj"].weight.sub_(1)


@torch.no_grad()
def test_a_graph_holds_all_experts():
    model = olmoe()
    open_experts_(model)
    experts = model.model.layers[0].mlp.experts
    x, chosen, weights = routed(experts=8)
    compiled = torch.compile(experts, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, chosen, weights), experts(x, chosen, weights))
    experts[7]["up_proj"].weight.fill_(float("inf"))
    chosen[chosen == 7] = 0
    assert bool(compiled(x, chosen, weights).isfinite().all())


def test_a_gram_matrix_an_expert():
    """As many tokens as were sent there, and what these look like; gate and up share theirs."""
    model = olmoe()
    seen = {}
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda _, args: seen.update(x=args[0], chosen=args[1]))
    with torch.no_grad():
        model(TOKENS)
    found = {}
    with opened_experts(model):
        run_blocks(model, select(model).layers, TOKENS, lambda block: found.update(block.grams), batch=2)
    grams = {layer.name: gram for layer, gram in found.items() if "layers.0.mlp.experts" in layer.name}
    assert len(grams) == 24
    for e in range(8):
        own = seen["x"][(seen["chosen"] == e).any(dim=1)]
        up = grams[f"model.layers.0.mlp.experts.{e}.up_proj"]
        assert up is grams[f"model.layers.0.mlp.experts.{e}.gate_proj"]
        assert up.tokens == len(own)
        if len(own) >= 32:  # with fewer it leans on the others
            torch.testing.assert_close(up.mean, own.t() @ own / len(own))
        elif len(own):
            alone, pooled = own.t() @ own / len(own), (up.mean - own.t() @ own / 32) / (1 - len(own) / 32)
            assert not torch.allclose(up.mean, alone)
            assert float(torch.linalg.eigvalsh(pooled)[0]) > -1e-4
    assert any(0 < gram.tokens < 32 for gram in grams.values())


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_pruned_in_place(method):
    model = olmoe()
    stacked = model.model.layers[0].mlp.experts
    memory = stacked.down_proj.data_ptr()
    windows = None if method == "magnitude" else TOKENS
    twofour.prune_(model, method, windows=windows, exclude=["*.experts.5.*"])
    assert model.model.layers[0].mlp.experts is stacked
    assert stacked.down_proj.data_ptr() == memory
    for weight in (stacked.gate_up_proj.detach(), stacked.down_proj.detach()):
        legal = [check_pattern(one).legal for one in weight]
        assert legal == [e != 5 for e in range(8)]


def test_what_cannot_be_taken_apart_says_why():
    experts = Ungated(Config())
    assert stacked_experts(experts) == ("up_proj", "down_proj")
    reasons = {
        "stored as [in, out]": lambda e: setattr(e, "is_transposed", True),
        "spread over processes": lambda e: setattr(e, "_is_expert_parallel", True),
        "beside the weights": lambda e: setattr(e, "norm", nn.LayerNorm(32)),
        "not [experts, out, in]": lambda e: setattr(e, "num_experts", 5),
    }
    for reason, change in reasons.items():
        other = Holder(copy.deepcopy(experts))
        change(other.experts)
        assert reason in stacked_experts(other.experts)
        assert open_experts_(other) == {}
        assert reason in {x.name: x.reason for x in select(other).left}["experts"]
    assert stacked_experts(nn.Linear(4, 4)) is None
    left = {x.name: x.reason for x in select(Holder(experts)).left}
    assert left == {"experts": "its experts are stored as one tensor"}


def test_opened_experts_are_a_list_of_modules():
    model = mixtral()
    opened = open_experts_(model)
    assert all(
        isinstance(module, OpenExperts) and isinstance(module, nn.ModuleList) for module in opened.values()
    )
    assert open_experts_(model) == {}  # nothing left to do


@pytest.mark.parametrize("make", [mixtral, olmoe])
@torch.no_grad()
def test_stacked_again_it_is_the_model_that_it_was(make):
    model, fresh = make(), make()
    model.model.layers[0].mlp.experts.requires_grad_(False)
    open_experts_(model)
    model.load_state_dict(model.state_dict(), assign=True)  # no views of the old tensors any more
    stack_experts_(model)
    assert not any(isinstance(module, OpenExperts) for module in model.modules())
    for (name, ours), (wanted, weight) in zip(
        model.named_parameters(), fresh.named_parameters(), strict=True
    ):
        assert name == wanted
        assert torch.equal(ours, weight)
        assert ours.requires_grad == (".0.mlp.experts." not in name)
    assert torch.equal(model(TOKENS).logits, fresh(TOKENS).logits)


@torch.no_grad()
def test_stacked_again_with_biases_and_what_was_trained():
    holder = Holder(Ungated(Config()))
    x, chosen, weights = routed()
    open_experts_(holder)
    holder.experts[1]["up_proj"].bias.data = torch.ones(40)
    want = holder.experts(x, chosen, weights)
    stack_experts_(holder)
    assert isinstance(holder.experts, Ungated)
    assert bool((holder.experts.up_proj_bias[1] == 1).all())
    torch.testing.assert_close(holder.experts(x, chosen, weights), want)


def test_packed_experts_stay_apart():
    model = twofour.pack_(twofour.prune_(mixtral()), include=["model.layers.1.mlp.experts.2.w1"])
    stack_experts_(model)
    apart = {name for name, module in model.named_modules() if isinstance(module, OpenExperts)}
    assert apart == {"model.layers.1.mlp.experts"}
