"""Layers of 8 and 4 bits on a GPU, against float64, and everything they must compose with.

What is exact depends on the way that is chosen: on few tokens activations stay as they are, on many they are
rounded where the scheme says so. Either is right; an output must be near one of the two.
"""

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import twofour
from twofour import ops
from twofour.bench.random_codes import random_codes
from twofour.kernels import dispatch, dispatch_codes, hopper, hopper_source, quantized_decode, reference
from twofour.nn.quantized import put_quantized_
from twofour.packed import Packed24
from twofour.quantize.activations import round_tokens
from twofour.quantize.schemes import SCHEMES, scheme_named
from twofour.select import Layer
from twofour.streamed import is_streamed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs sm_80 or later",
    ),
]
CUDA = torch.device("cuda", 0)
BF16, FP16 = torch.bfloat16, torch.float16
ALL = {**SCHEMES, "int4-64": scheme_named("int4", 64), "int4-32": scheme_named("int4", 32)}
TOKENS = (1, 7, 64, 65, 300, 2048)
# Rows that are no multiple of 8 or of anything, columns that are a multiple of 32 but not of 128, of neither.
SHAPES = ((256, 512), (1001, 640), (200, 416), (1000, 1184), (50, 100))
OTHER_SHAPES = ((512, 512), (384, 256), (1000, 1152), (1024, 512), (512, 1024), (1024, 1024), (256, 256))
ERROR_OF_ROUNDING = {"int8": 0.02, "fp8": 0.06}  # of tokens, in an output


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """What the tests need, on all cores at once: one after another takes minutes."""
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(compile_choices, scheme, dtype, activation)
            for scheme, dtype, activation in itertools.product(ALL.values(), (BF16, FP16), (None, "silu"))
            if activation is None or dtype == BF16
        ]
        for job in jobs:
            job.result()


def compile_choices(scheme, dtype, activation):
    """Kernels of the shapes and tokens of this file, as they are chosen; others are compiled as they run."""
    few, many, wide, of_four_bits = [], [], [], []
    for (n, k), tokens in itertools.product((*SHAPES, *OTHER_SHAPES), (*TOKENS, 16, 200)):
        if activation is not None and n % 16:
            continue
        bucket = dispatch.bucket_of(tokens)
        streamed = scheme.group == 128 and n % 64 == 0 and k % 128 == 0
        of = (scheme.stored, scheme.scale_width(k), scheme.rounds_activations, activation, streamed)
        product = dispatch_codes.Product(n // 2 if activation else n, k, bucket, dtype, 0, *of)
        choice = dispatch_codes.choose(product)
        if choice.backend == "decode":
            few.append(quantized_decode.Config(**choice.config))
        elif choice.backend in ("codes", "decode4"):
            config = hopper.from_dict(choice.config)
            if activation is None or config.gates:
                (many if choice.backend == "codes" else of_four_bits).append(config)
        elif choice.backend == "widen":
            then = dispatch.choose(dispatch.Product(n, k, bucket, dtype, 0, False))
            wide += [hopper.from_dict(then.config)] if then.backend == "hopper" else []
    quantized_decode.compile_all(few, dtype, scheme.codes, scheme.group, CUDA)
    hopper_source.compile_all(many, dtype, CUDA, activation, scheme.stored)
    hopper_source.compile_all(of_four_bits, dtype, CUDA, activation)
    hopper_source.compile_all(wide, dtype, CUDA)


def layer(n, k, name="int8", dtype=BF16, bias=True):
    scheme = ALL[name]
    packed = random_codes(n, k, scheme, dtype, torch.Generator(CUDA).manual_seed(n + k))
    return with_codes(packed, scheme, bias)


def with_codes(packed, scheme, bias=True):
    n, k = packed.shape
    linear = nn.Linear(k, n, bias, device=CUDA, dtype=packed.scale.dtype).requires_grad_(False)
    model = nn.Sequential(linear)
    put_quantized_(model, {Layer("0", "linear", (n, k)): packed}, scheme)
    return model[0].eval()


def error(y, exact):
    return float((y.double() - exact).norm() / exact.norm())


def assert_right(y, x, of):
    """Near the product with the tokens as they are or, if the scheme rounds them, as rounded."""
    x = x.reshape(-1, of.in_features)
    y = y.reshape(-1, of.out_features)
    weight, bias = of.packed.unpack(torch.float64), 0 if of.bias is None else of.bias.double()
    exact = x.double() @ weight.t() + bias
    dense = error(F.linear(x, of.unpacked(), of.bias), exact)
    found = error(y, exact)
    if found <= 2 * dense + 1e-7:  # widening rounds once more, and sums in another order
        return
    assert of.rounds_activations, (found, dense)
    codes, scale = round_tokens(x, of.weight_values.dtype)
    rounded = (codes.double() * scale.double()) @ weight.t() + bias
    assert error(y, rounded) <= 0.005, (found, dense, error(y, rounded))


def reference_of(of, x):
    with dispatch.force("reference"):
        return of(x)


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "shape"), [*((BF16, shape) for shape in SHAPES), *((FP16, shape) for shape in SHAPES[:3])]
)
@pytest.mark.parametrize("name", ALL)
def test_against_float64(name, shape, dtype):
    for bias in (True, False):
        quantized = layer(*shape, name, dtype, bias)
        for tokens in TOKENS:
            x = torch.randn(tokens, shape[1], device=CUDA, dtype=dtype)
            y = quantized(x)
            assert y.dtype == dtype
            assert_right(y, x, quantized)


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_agrees_with_the_reference(name):
    quantized = layer(256, 512, name)
    allowed = ERROR_OF_ROUNDING[name] if quantized.rounds_activations else 0.01
    for tokens in TOKENS:
        x = torch.randn(tokens, 512, device=CUDA, dtype=BF16)
        assert error(quantized(x), reference_of(quantized, x).double()) < allowed, tokens


@torch.no_grad()
@pytest.mark.parametrize("backend", ["ampere", "hopper"])
@pytest.mark.parametrize("name", ALL)
def test_every_way_at_every_number_of_tokens(name, backend):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    quantized = layer(256, 512, name)
    for tokens in (1, 16, 65, 300):
        x = torch.randn(tokens, 512, device=CUDA, dtype=BF16)
        with dispatch.force(backend):
            assert_right(quantized(x), x, quantized)


@torch.no_grad()
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_gated(name, activation):
    quantized = layer(512, 512, name)
    tensors = (quantized.weight_values, quantized.weight_meta, quantized.weight_scale, quantized.bias, 512)
    operator = ops.quantized_gated_linear if quantized.rounds_activations else ops.gated_linear
    for tokens in (1, 16, 64, 65, 300, 2048):
        x = torch.randn(tokens, 512, device=CUDA, dtype=BF16)
        weight = quantized.packed.unpack(torch.float64)
        exact = reference.gate(x.double() @ weight.t() + quantized.bias.double(), activation)
        allowed = 2 * ERROR_OF_ROUNDING[name] if quantized.rounds_activations else 0.01
        y = operator(x, *tensors, activation)
        assert y.shape == (tokens, 256)
        assert error(y, exact) < allowed, tokens
        # And the two steps of which it is one.
        apart = reference.gate(quantized(x).double(), activation)
        assert error(y, apart) < allowed, tokens


@torch.no_grad()
@pytest.mark.parametrize("tokens", [8, 300])
@pytest.mark.parametrize("name", ALL)
def test_zeros(name, tokens):
    scheme = ALL[name]
    packed = random_codes(256, 512, scheme, BF16, torch.Generator(CUDA).manual_seed(0))
    values = packed.values.view(torch.uint8).clone()
    values[3::7] = 0
    quantized = with_codes(Packed24(values.view(packed.values.dtype), packed.meta, 512, packed.scale), scheme)
    x = torch.randn(tokens, 512, device=CUDA, dtype=BF16)
    x[1] = 0
    x[2] = -0.0
    y = quantized(x)
    bias = quantized.bias
    assert torch.equal(y[1], bias)
    assert torch.equal(y[2], bias)
    assert torch.equal(y[:, 3::7], bias[3::7].expand(tokens, -1))
    assert_right(y[3:], x[3:], quantized)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [8, 300])
@pytest.mark.parametrize("name", ALL)
def test_what_is_not_finite_stays_in_its_token(name, tokens):
    quantized = layer(256, 512, name)
    x = torch.randn(tokens, 512, device=CUDA, dtype=BF16)
    clean = quantized(x)
    bad = {2: torch.inf, 3: -torch.inf, tokens - 1: torch.nan}
    for token, value in bad.items():
        x[token, 5 + token] = value
    y = quantized(x)
    touched = torch.zeros(tokens, dtype=torch.bool, device=CUDA)
    touched[list(bad)] = True
    assert torch.equal(y[~touched], clean[~touched])
    weight = quantized.packed.unpack(torch.float64)
    for token in bad:
        reached = weight[:, 5 + token] != 0
        assert not bool(y[token][reached].isfinite().any())
    if quantized.rounds_activations and tokens > 64 and torch.cuda.get_device_capability() == (9, 0):
        assert bool(y[touched].isnan().all())


@torch.no_grad()
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_tokens_of_every_size(name):
    """One by one: the large would hide what is wrong in the small."""
    quantized = layer(256, 512, name, bias=False)
    x = torch.randn(300, 512, device=CUDA, dtype=BF16)
    sizes = [10.0**power for power in range(-30, 31, 6)]
    for token, size in enumerate(sizes):
        x[token] *= size
    y = quantized(x)
    for token in range(len(sizes)):
        assert_right(y[token : token + 1], x[token : token + 1], quantized)


def test_shapes_of_the_input():
    for name in ALL:
        quantized = layer(384, 256, name)
        x = torch.randn(2, 5, 256, device=CUDA, dtype=BF16)
        wide = torch.randn(7, 512, device=CUDA, dtype=BF16)[:, ::2]
        odd = torch.randn(257, device=CUDA, dtype=BF16)[1:].view(1, 256)  # at no multiple of 16 bytes
        for given in (x, x.transpose(0, 1), x[0, 0], wide, odd):
            for tracked in (False, True):  # around the operator, and through it
                with torch.set_grad_enabled(tracked):
                    y = quantized(given)
                assert y.shape == (*given.shape[:-1], 384)
                assert_right(y, given, quantized)
        assert quantized(x[:0]).shape == (0, 5, 384)
        assert quantized(x[:, :0]).shape == (2, 0, 384)


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_gradients(name):
    quantized = layer(256, 512, name)
    for tokens in (8, 300):
        x = torch.randn(tokens, 512, device=CUDA, dtype=BF16, requires_grad=True)
        grad = torch.randn(tokens, 256, device=CUDA, dtype=BF16)
        (ours,) = torch.autograd.grad(quantized(x), x, grad)
        assert error(ours, grad.double() @ quantized.packed.unpack(torch.float64)) < 0.01


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_int4_in_threads_order_and_in_that_of_files(tokens):
    """On Hopper a layer holds it in the first, unless it is to be "small"; both give the same."""
    quantized = layer(256, 1152, "int4")
    stored = quantized.state_dict()
    assert is_streamed(quantized.weight_meta) == (torch.cuda.get_device_capability() == (9, 0))
    x = torch.randn(tokens, 1152, device=CUDA, dtype=BF16)
    assert_right(quantized(x), x, quantized)
    with dispatch.force("ampere"):
        assert_right(quantized(x), x, quantized)
    quantized.set_memory("small")
    assert not is_streamed(quantized.weight_meta)
    assert all(torch.equal(tensor, stored[key]) for key, tensor in quantized.state_dict().items())
    assert_right(quantized(x), x, quantized)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 16, 300, 2048])
@pytest.mark.parametrize("name", ["int8", "fp8", "int4", "fp8-weight"])
def test_fifty_runs_give_the_same_bits(name, tokens):
    quantized = layer(1024, 1152, name)
    x = torch.randn(tokens, 1152, device=CUDA, dtype=BF16)
    first = quantized(x)
    for _ in range(50):
        assert torch.equal(quantized(x), first)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_cuda_graph(name, tokens):
    first, second = layer(1024, 512, name), layer(512, 1024, name)
    x = torch.randn(tokens, 512, device=CUDA, dtype=BF16)

    def both():
        return second(torch.relu(first(x)))

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = both()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, both())


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_compile(name):
    torch._dynamo.reset()
    quantized = layer(256, 256, name)
    model = nn.Sequential(quantized, nn.GELU(), copy.deepcopy(quantized))
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for tokens in (4, 4, 300):
            x = torch.randn(tokens, 256, device=CUDA, dtype=BF16)
            # GELU is rounded elsewhere when it is fused, and that may move a token's rounding.
            assert error(compiled(x), model(x).double()) < ERROR_OF_ROUNDING.get(name, 0.01)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [4, 200])
@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_several_streams(name, tokens):
    quantized = layer(1024, 1024, name)
    inputs = [torch.randn(tokens, 1024, device=CUDA, dtype=BF16) for _ in range(8)]
    expected = [quantized(x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(20):
        results = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(quantized(x))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_x_that_the_kernel_before_makes(name):
    """Kernels may start while the one before still runs: they must not read x, nor write, too early."""
    quantized = layer(1024, 1024, name)
    big = torch.randn(4096, 4096, device=CUDA, dtype=BF16)
    for tokens in (4, 300):
        inputs = [torch.randn(tokens, 1024, device=CUDA, dtype=BF16) for _ in range(4)]
        expected = [quantized(quantized(i * 2)) for i in inputs]
        torch.cuda.synchronize()
        x = torch.empty_like(inputs[0])
        for step in range(12):
            torch.mm(big, big)  # keeps the GPU busy, so that all launches below queue up
            torch.mul(inputs[step % 4], 2, out=x)
            y = quantized(quantized(x))
            x.fill_(torch.nan)
            torch.cuda.synchronize()
            assert torch.equal(y, expected[step % 4]), (tokens, step)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 40, 600])
@pytest.mark.parametrize("name", ["int8", "fp8", "int4", "int8-weight"])
def test_fused_models_compute_the_same(name, tokens):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 1000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "initializer_range": 0.05}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads)).to(CUDA, BF16).eval()
    twofour.quantize_(twofour.prune_(model), name)
    ids = torch.randint(1000, (1, tokens), device=CUDA)
    wanted = model(ids).logits
    with dispatch.force("reference"):
        plain = model(ids).logits
    allowed = 2 * ERROR_OF_ROUNDING.get(name, 0.01)
    assert error(wanted, plain.double()) < allowed
    assert twofour.fuse_(model) == 6
    got = model(ids).logits
    assert error(got, wanted.double()) < allowed
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(ids, use_cache=False).logits
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, model(ids, use_cache=False).logits)
    if tokens == 40:  # compiling takes long
        compiled = torch.compile(model, fullgraph=True)
        assert error(compiled(ids).logits, wanted.double()) < allowed


@torch.no_grad()
def test_override(monkeypatch):
    quantized = layer(256, 256, "fp8")
    x = torch.randn(4, 256, device=CUDA, dtype=BF16)
    monkeypatch.setenv("TWOFOUR_BACKEND", "nonsense")
    with pytest.raises(twofour.InputError, match="no backend 'nonsense'"):
        quantized(x)
    monkeypatch.setenv("TWOFOUR_BACKEND", "cusparselt")
    with pytest.raises(twofour.InputError, match="cusparselt cannot run"):
        quantized(x)
    for backend in ("reference", "ampere"):
        monkeypatch.setenv("TWOFOUR_BACKEND", backend)
        assert_right(quantized(x), x, quantized)


@torch.no_grad()
def test_moves_and_dtypes():
    for name in ALL:
        quantized = layer(256, 512, name)
        x = torch.randn(8, 512, device=CUDA, dtype=BF16)
        y = quantized(x)
        back = copy.deepcopy(quantized).cpu()
        allowed = ERROR_OF_ROUNDING[name] if quantized.rounds_activations else 0.01
        assert error(back(x.cpu()).to(CUDA), y.double()) < allowed
        assert torch.equal(back.to(CUDA)(x), y)
        half = copy.deepcopy(quantized).to(FP16)
        assert_right(half(x.to(FP16)), x.to(FP16), half)
        wide = copy.deepcopy(quantized).float()
        assert_right(wide(x.float()), x.float(), wide)
