"""Rotary embeddings as one kernel: the same bits, in this model only, and only if a function is just that."""

import copy
import functools
import importlib
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.nn.test_fuse import tiny_llama
from twofour.nn import fuse_, unfuse_
from twofour.nn.fuse_rope import _kinds, fuse_rope_, is_rope_fused

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOKENS = torch.randint(100, (2, 9), generator=torch.Generator().manual_seed(1))
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


class Operators(TorchDispatchMode):
    """Counts how often the operator is called."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, kinds, args=(), named=None):
        self.count += function is torch.ops.twofour.rope.default
        return function(*args, **(named or {}))


def tiny(family, dtype=BF16, **options):
    """A dense model of a family, two layers."""
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**(shape | HEADS | tokens | options))
    return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()


def fused_modules(model):
    return [name for name, module in model.named_modules() if is_rope_fused(module)]


def called(model, tokens=TOKENS):
    with torch.no_grad(), Operators() as operators:
        model(tokens)
    return operators.count


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {}),
        ("Qwen3", {"head_dim": 24}),  # norms between the projections and the embedding
        ("GPTNeoX", {"rotary_pct": 0.25}),  # a part of every head
        ("Olmo2", {}),  # float32 cos
        ("Phi3", {}),  # q, k and v in one projection already
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_same_bits_in_one_operator_a_layer(family, options, dtype):
    model = tiny(family, dtype, **options)
    one = TOKENS[:1, :1]
    wanted = [model(TOKENS).logits, model(one).logits]
    assert called(model) == 0
    assert fuse_rope_(model) == (2, {})
    assert called(model) == 2
    assert torch.equal(model(TOKENS).logits, wanted[0])
    assert torch.equal(model(one).logits, wanted[1])
    assert fuse_rope_(model) == (0, {}), "a second time there is nothing to do"


@pytest.mark.parametrize("family", ["Glm", "Cohere"])
def test_neighbours_turned_together_are_left_and_named(family):
    """Their function has the same name and parameters, and pairs neighbours instead of halves."""
    model = tiny(family, head_dim=16)
    result = fuse_(model)
    assert result.rotary == 0
    assert list(result.left) == [f"model.layers.{i}.self_attn" for i in (0, 1)]
    assert all("computes something else" in why for why in result.left.values())


def test_which_functions_are_taken_and_for_what():
    def function(family):
        return importlib.import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb

    whole = {(t, t, False): True for t in (BF16, FP16, FP32)}
    assert _kinds(function("llama")) == _kinds(function("mistral")) == whole
    assert _kinds(function("gpt_neox")) == whole | {(t, t, True): True for t in (BF16, FP16, FP32)}
    olmo = _kinds(function("olmo2"))  # its cos is float32, and it gives back the type of q
    assert olmo == whole | {(t, FP32, False): True for t in (BF16, FP16)}
    wide = _kinds(function("modernbert"))  # computes in float32 whatever it gets
    assert wide == {(t, c, False): c == FP32 for t in (BF16, FP16) for c in (t, FP32)} | {
        (FP32, FP32, False): True
    }
    for other in ("cohere", "glm", "helium", "gptj", "gpt_oss", "ernie4_5"):
        assert _kinds(function(other)) == {}, other


@torch.no_grad()
def test_only_this_model_changes():
    model, other = tiny("Llama"), tiny("Llama")
    kind = type(model.model.layers[0].self_attn)
    function = importlib.import_module(kind.__module__).apply_rotary_pos_emb
    fuse_rope_(model)
    assert called(other) == 0
    assert type(other.model.layers[0].self_attn) is kind
    assert isinstance(model.model.layers[0].self_attn, kind)
    assert importlib.import_module(kind.__module__).apply_rotary_pos_emb is function


@torch.no_grad()
def test_fuse_says_what_it_did_and_unfuse_undoes_it():
    model = tiny_llama()
    wanted, kinds = model(TOKENS).logits, {name: type(m) for name, m in model.named_modules()}
    result = fuse_(model)
    assert (result, result.norms, result.rotary, result.left) == (6, 5, 2, {})
    assert called(model) == 2
    torch.testing.assert_close(model(TOKENS).logits, wanted)
    unfuse_(model)
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    assert torch.equal(model(TOKENS).logits, wanted)
    dense = fuse_(tiny("Llama"))
    assert (dense, dense.norms, dense.rotary) == (0, 5, 2)


@torch.no_grad()
def test_copied_pickled_and_saved(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny("Llama", FP32)  # bfloat16 would round its frequencies, which are not saved
    wanted, names = model(TOKENS).logits, list(model.state_dict())
    fuse_rope_(model)
    for double in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert fused_modules(double) == fused_modules(model)
        assert called(double) == 2
        assert torch.equal(double(TOKENS).logits, wanted)
        double.model.layers[0].self_attn.q_proj.weight.zero_()
        assert torch.equal(model(TOKENS).logits, wanted), "a copy has its own weights"
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert fused_modules(loaded) == []
    assert torch.equal(loaded(TOKENS).logits, wanted)


def test_training_keeps_the_models_own_function():
    model = tiny("Llama", FP32)

    def gradient():
        model.zero_grad()
        with Operators() as operators:
            model(TOKENS).logits.square().mean().backward()
        assert operators.count == 0
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    wanted = gradient()
    fuse_rope_(model)
    assert torch.equal(gradient(), wanted)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with Operators() as operators:
        model(TOKENS)
    assert operators.count == 2, "nothing needs a gradient here"


@torch.no_grad()
def test_generates_compiles_and_records():
    model = tiny("Llama", FP32)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    wanted = model.generate(TOKENS, **options)
    fuse_rope_(model)
    assert torch.equal(model.generate(TOKENS, **options), wanted)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(TOKENS).logits, model(TOKENS).logits)
    model.set_attn_implementation("eager")
    assert len(model(TOKENS, output_attentions=True).attentions) == 2


# ------------------------------------------------------------------------------------------------------------
# Attention of other makes.


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Attention(nn.Module):
    """Gives back what it rotated."""

    scale = 1.0

    def forward(self, q, k, cos, sin, *, order=1):
        q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=order)
        return q * self.scale, k


class Super(Attention):
    def forward(self, q, k, cos, sin):
        own = apply_rotary_pos_emb(q, k, cos, sin)
        again, _ = super().forward(q, k, cos, sin)
        return own[0] + again, own[1]


class Positional(nn.Module):
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin, 2)


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **named):
        return function(*args, **named)

    return wrapper


class Decorated(nn.Module):
    @decorated
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)


class Attribute(nn.Module):
    """Has the name, but not from the globals."""

    def forward(self, q, k, cos, sin):
        return self.apply_rotary_pos_emb(q, k, cos, sin)

    def apply_rotary_pos_emb(self, q, k, cos, sin):
        return q, k


def drawn(dtype=FP32, factors=None, batch=2):
    q, k = torch.randn(batch, 3, 4, 8, dtype=dtype), torch.randn(batch, 3, 2, 8, dtype=dtype)
    cos, sin = (torch.randn(batch, 3, 8, dtype=factors or dtype) for _ in "cs")
    return q, k, cos, sin


def both(module, *args, **named):
    """What the module gives and what it gives fused, and how often the operator was called."""
    wanted = module(*args, **named)
    fused = nn.Sequential(copy.deepcopy(module))
    assert fuse_rope_(fused) == (1, {})
    with Operators() as operators:
        got = fused[0](*args, **named)
    assert all(map(torch.equal, got, wanted))
    assert [x.dtype for x in got] == [x.dtype for x in wanted]
    return operators.count


def test_any_module_and_any_order():
    q, k, cos, sin = drawn()
    assert both(Attention(), q.transpose(1, 2), k.transpose(1, 2), cos, sin) == 1
    assert both(Attention(), q, k, cos, sin, order=2) == 1
    assert both(Attention(), q[:, :0], k[:, :0], cos[:, :0], sin[:, :0], order=2) == 1
    assert both(Attention(), q, k, cos[:1], sin[:1], order=2) == 1, "the same positions for the whole batch"
    # `super()` still finds the class the code was written in, and that one's forward is not fused.
    assert both(Super(), q.transpose(1, 2), k.transpose(1, 2), cos, sin) == 1


def test_what_was_not_seen_to_be_the_same_goes_to_the_function():
    q, k, cos, sin = drawn(BF16, FP32)  # this function gives float32 then
    assert both(Attention(), q.transpose(1, 2), k.transpose(1, 2), cos, sin) == 0
    q, k, cos, sin = drawn()
    assert both(Positional(), q, k, cos, sin) == 0
    assert both(Attention(), q[0], k[0], cos[0], sin[0], order=1) == 0, "three dimensions"
    fused = nn.Sequential(Attention())
    fuse_rope_(fused)
    with pytest.raises(RuntimeError, match="must match the size"):
        fused[0](q.transpose(1, 2), k.transpose(1, 2), cos[..., :4], sin[..., :4])


def test_what_cannot_be_rebound_is_named():
    replaced = Attention()
    replaced.forward = decorated(replaced.forward)
    model = nn.ModuleDict({"decorated": Decorated(), "replaced": replaced, "attribute": Attribute()})
    fused, left = fuse_rope_(model)
    assert fused == 0
    assert list(left) == ["decorated", "replaced"]
    assert "decorator" in left["decorated"]
    assert "replaced" in left["replaced"]
