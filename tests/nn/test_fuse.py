"""Fused layers compute the same, keep their names in the state dict, and come apart again."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import twofour
from twofour.errors import InputError
from twofour.kernels import reference
from twofour.nn import SparseLinear, fuse_, packed_layers, unfuse_
from twofour.nn.fused import GatedMLP, SharedInput, gated


def tiny_llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, **options)).eval()
    twofour.prune_(model)
    return twofour.pack_(model, memory="small")


@pytest.fixture
def tokens():
    return torch.randint(100, (2, 9), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_a_llama_computes_the_same_with_four_products_a_layer_instead_of_seven(tokens):
    model = tiny_llama()
    wanted, before = model(tokens).logits, model.state_dict()
    assert fuse_(model) == 2 * 3
    assert len([m for m in model.modules() if isinstance(m, SparseLinear)]) == 2 * 4
    assert len([m for m in model.modules() if isinstance(m, GatedMLP)]) == 2
    torch.testing.assert_close(model(tokens).logits, wanted)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@torch.no_grad()
def test_unfusing_gives_the_model_back(tokens):
    model = tiny_llama(attention_bias=True)
    names, wanted = list(packed_layers(model)), model(tokens).logits
    fuse_(model)
    assert list(packed_layers(model)) != names
    unfuse_(model)
    assert sorted(packed_layers(model)) == sorted(names)
    assert torch.equal(model(tokens).logits, wanted)
    assert not any(isinstance(m, SharedInput | GatedMLP) for m in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("how", ["save_pretrained", "save"])
def test_what_a_fused_model_saves_is_what_it_was_made_of(tokens, tmp_path, how):
    from transformers import AutoModelForCausalLM

    model = tiny_llama()
    names, wanted = sorted(packed_layers(model)), model(tokens).logits
    fuse_(model)
    if how == "save":
        twofour.save(model, tmp_path / "saved")
    else:
        model.save_pretrained(tmp_path / "saved")
    assert twofour.check(tmp_path / "saved").ok
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert sorted(packed_layers(loaded)) == names
    torch.testing.assert_close(loaded(tokens).logits, wanted)
    fuse_(loaded)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(again(tokens).logits, wanted)


def test_any_module_is_saved_under_the_names_it_had(tmp_path):
    model, x = packed(nn.Sequential(Swapped())), torch.randn(5, 32)
    with torch.no_grad():
        wanted = model(x)
        fuse_(model, x)
        twofour.save(model, tmp_path / "saved")
        loaded = twofour.load(tmp_path / "saved", model=nn.Sequential(Swapped()))
        torch.testing.assert_close(loaded(x), wanted)


def test_modules_keep_the_mode_they_are_in():
    model = packed(nn.Sequential(nn.Dropout(0.5), Branches(), nn.BatchNorm1d(56)))
    model.train()
    model[2].eval()
    before, statistics = [m.training for m in model[::2]], model[2].running_mean.clone()
    fuse_(model, torch.randn(5, 32))
    assert [m.training for m in model[::2]] == before == [True, False]
    assert torch.equal(model[2].running_mean, statistics)


@torch.no_grad()
def test_generates_and_copies(tokens):
    model = tiny_llama()
    wanted = model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0)
    fuse_(model)
    assert torch.equal(model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0), wanted)
    double = copy.deepcopy(model)
    torch.testing.assert_close(double(tokens).logits, model(tokens).logits)
    shared = [m for m in double.modules() if isinstance(m, SharedInput)]
    assert shared
    assert not any(m in list(model.modules()) for m in shared)
    with pytest.raises(InputError, match="unfuse_"):
        model.load_state_dict(model.state_dict())


def test_compiles_without_a_graph_break(tokens):
    model = tiny_llama()
    fuse_(model)
    with torch.no_grad():
        wanted = model(tokens).logits
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(tokens).logits, wanted)
        torch.testing.assert_close(compiled(tokens.flip(1)).logits, model(tokens.flip(1)).logits)


def test_gradients_for_the_input_pass_through(tokens):
    model = tiny_llama()
    embedded = model.get_input_embeddings()(tokens).detach()

    def gradient():
        x = embedded.clone().requires_grad_()
        model(inputs_embeds=x).logits.square().mean().backward()
        return x.grad

    wanted = gradient()
    fuse_(model)
    torch.testing.assert_close(gradient(), wanted)


class Branches(nn.Module):
    """Two layers on the same input, one on another."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 16), nn.Linear(32, 24, bias=False)
        self.c = nn.Linear(32, 16)

    def forward(self, x):
        return torch.cat([self.a(x), self.b(x), self.c(x + 1)], -1)


class Odd(nn.Module):
    """Looks like a gated MLP and is none."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.w2(torch.tanh(self.w1(x)) + self.w3(x))


class Swapped(Odd):
    def forward(self, x):
        return self.w2(F.gelu(self.w3(x)) * self.w1(x))


def packed(module):
    torch.manual_seed(0)
    return twofour.pack_(twofour.prune_(module.eval()), memory="small")


@torch.no_grad()
@pytest.mark.parametrize(("kind", "saved"), [(Branches, 1), (Odd, 1), (Swapped, 1)])
def test_only_what_was_seen_to_share_an_input_is_fused(kind, saved):
    model = packed(nn.Sequential(kind()))
    x = torch.randn(5, 32)
    wanted = model(x)
    assert fuse_(model, x) == saved
    assert any(isinstance(m, GatedMLP) for m in model.modules()) == (kind is Swapped)
    for _ in range(3):
        torch.testing.assert_close(model(x), wanted)
    torch.testing.assert_close(model(x * 2), unfuse_(model)(x * 2))


def test_a_part_called_twice_or_alone_is_right_too():
    model = packed(nn.Sequential(Branches()))
    x, other = torch.randn(5, 32), torch.randn(7, 32)
    branches = model[0]
    wanted = {name: (getattr(branches, name)(x), getattr(branches, name)(other)) for name in "ab"}
    fuse_(model, x)
    for name in "aabab":
        for given, expected in zip((x, other), wanted[name], strict=True):
            torch.testing.assert_close(getattr(branches, name)(given), expected)


def test_without_an_example_the_error_says_what_to_give():
    with pytest.raises(InputError, match="second argument"):
        fuse_(packed(nn.Sequential(Odd())))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_the_gated_operator(activation):
    layer = SparseLinear.from_dense(twofour.prune_(nn.Sequential(nn.Linear(32, 48)))[0], memory="small")
    x = torch.randn(3, 5, 32)
    with torch.no_grad():
        both = layer(x)
        first, second = both[..., :24], both[..., 24:]
        wanted = reference.ACTIVATIONS[activation](first) * second
        torch.testing.assert_close(gated(layer, x, activation), wanted)
        assert gated(layer, x[:0], activation).shape == (0, 5, 24)
    arguments = (x, layer.weight_values, layer.weight_meta, None, layer.bias, 32, activation)
    torch.library.opcheck(
        torch.ops.twofour.gated_linear.default,
        tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments),
    )


class MLP(nn.Module):
    """A gated MLP, up first, with whatever is asked for around it."""

    def __init__(self, activate=F.silu, std=0.1, end=lambda y: y, change=lambda y: y):
        super().__init__()
        self.up_proj, self.gate_proj, self.down_proj = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.activate, self.end, self.change = activate, end, change
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=std)

    def forward(self, x):
        return self.end(self.down_proj(self.activate(self.gate_proj(x)) * self.change(self.up_proj(x))))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("std", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_which_activation_it_is_does_not_depend_on_how_large_the_weights_are(activation, std, dtype):
    model = packed(nn.Sequential(MLP(reference.ACTIVATIONS[activation], std)).to(dtype))
    x = torch.randn(5, 32, dtype=dtype)
    fuse_(model, x)
    assert isinstance(model[0], GatedMLP)
    assert (model[0].activation, model[0].fused.names) == (activation, ["gate_proj", "up_proj"])


@torch.no_grad()
@pytest.mark.parametrize(
    "mlp",
    [
        MLP(lambda v: v * torch.sigmoid(1.702 * v)),
        MLP(torch.relu),
        MLP(lambda v: 0.99 * F.silu(v)),
        MLP(lambda v: F.silu(v.clamp(max=10.0))),
        MLP(change=lambda v: v.clamp(-10.0, 10.0)),
        MLP(change=torch.abs),
        MLP(end=lambda y: 0.96 * y),
        MLP(end=lambda y: y.mul_(0.96)),
        MLP(end=lambda y: y + 1e-4),
        MLP(end=lambda y: (y, None)),
    ],
    ids=[
        *("quick gelu", "relu", "factor inside", "gate clamped", "up clamped", "up without sign"),
        *("factor", "factor in place", "summand", "two outputs"),
    ],
)
def test_what_is_only_nearly_a_gated_mlp_is_not_fused_into_one(mlp):
    x = torch.randn(5, 32)
    model = packed(nn.Sequential(mlp))
    fuse_(model, x)
    assert not any(isinstance(m, GatedMLP) for m in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("device", [None, "meta"], ids=["", "another default device"])
def test_a_gated_mlp_may_work_in_place(device):
    class InPlace(MLP):
        def forward(self, x):
            return self.down_proj(self.up_proj(x).mul_(F.silu(self.gate_proj(x), inplace=True)))

    model, x = packed(nn.Sequential(InPlace())), torch.randn(5, 32)
    wanted = model(x)
    with torch.device(device) if device else contextlib.nullcontext():
        fuse_(model, x)
    assert isinstance(model[0], GatedMLP)
    torch.testing.assert_close(model(x), wanted)


@torch.no_grad()
def test_a_long_example_is_looked_at_in_a_corner():
    class Counting(MLP):
        def forward(self, x):
            seen.append(tuple(x.shape))
            return super().forward(x)

    seen = []
    model = packed(nn.Sequential(Counting()))
    fuse_(model, torch.randn(3, 500, 32))
    assert isinstance(model[0], GatedMLP)
    assert seen[0] == (3, 500, 32)
    assert set(seen[1:]) == {(3, 8, 32)}


@torch.no_grad()
def test_an_example_without_tokens_tells_no_activation():
    model = packed(nn.Sequential(MLP()))
    fuse_(model, torch.empty(0, 32))
    assert not any(isinstance(m, GatedMLP) for m in model.modules())


@torch.no_grad()
def test_an_input_that_is_changed_in_place_is_another_one():
    class Changing(Branches):
        def forward(self, x, factor=1.0):
            first = self.a(x)
            return torch.cat([first, self.b(x.mul_(factor)), self.c(x + 1)], -1)

    x = torch.randn(5, 32)
    model = packed(nn.Sequential(Changing()))
    assert fuse_(model, x.clone()) == 0  # also by one: it is changed
    model = packed(nn.Sequential(Branches()))
    wanted = [model[0].a(x), model[0].b(2 * x)]
    assert fuse_(model, x.clone()) == 1
    first = model[0].a(x)
    torch.testing.assert_close([first, model[0].b(x.mul_(2))], wanted)


def test_biases_learn_again_when_they_are_apart_again():
    model, x = packed(nn.Sequential(Branches())), torch.randn(5, 32)
    model[0].a.bias.requires_grad_(False)
    model[0].c.bias.requires_grad_(True)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    fuse_(model, x)
    assert {name: p.requires_grad for name, p in unfuse_(model).named_parameters()} == before
    assert packed(nn.Sequential(Branches()))[0].a.bias.requires_grad
