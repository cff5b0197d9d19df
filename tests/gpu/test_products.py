"""The GPU kernels against float64, and everything they must compose with. Run by `make test-gpu`."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import twofour
from twofour.kernels import (
    cusparselt,
    dispatch,
    hopper,
    hopper_choices,
    hopper_launch,
    hopper_source,
    reference,
    relaunch,
)
from twofour.nn import SparseLinear
from twofour.packed import in_order, pack
from twofour.pattern import keep_best

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
only_on_hopper = pytest.mark.skipif(not HOPPER, reason="needs Hopper")


def weight(n, k, dtype=torch.bfloat16):
    w = torch.randn(n, k, device=CUDA, dtype=dtype) / k**0.5
    return w.where(keep_best(w.abs()), 0)


def layer(n, k, dtype=torch.bfloat16, bias=True, memory="auto"):
    dense = nn.Linear(k, n, bias, device=CUDA, dtype=dtype)
    dense.weight.data.copy_(weight(n, k, dtype))
    return dense, SparseLinear.from_dense(dense, memory=memory)


def error(y, exact):
    return float((y.double() - exact).norm() / exact.norm())


def exact(x, w, bias=None):
    y = x.double() @ w.double().t()
    return y if bias is None else y + bias.double()


def assert_as_good_as_dense(y, x, w, bias=None):
    wanted = exact(x, w, bias)
    assert error(y, wanted) <= 1.2 * error(F.linear(x, w, bias), wanted) + 1e-7


@only_on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (200, 384), (1008, 1152), (4096, 2048)])
@pytest.mark.parametrize("tokens", [1, 7, 16, 33, 64, 130, 256, 300, 1000])
@pytest.mark.parametrize("ordered", [False, True])
def test_hopper_every_configuration(n, k, tokens, ordered, dtype):
    if ordered and n % 64:
        pytest.skip("cuSPARSELt's order of positions needs multiples of 64 rows")
    w = weight(n, k, dtype)
    packed, x = pack(w), torch.randn(tokens, k, device=CUDA, dtype=dtype)
    meta = in_order(packed.meta) if ordered else packed.meta
    bias = torch.randn(n, device=CUDA, dtype=dtype)
    configurations = hopper_choices.configs(tokens, n)
    assert configurations
    hopper_source.compile_all(configurations, dtype, CUDA, ordered=ordered)
    for config in configurations:
        y = torch.full((tokens, n), torch.nan, device=CUDA, dtype=dtype)
        hopper_launch.linear(x, packed.values, meta, bias, config, out=y)
        assert_as_good_as_dense(y, x, w, bias)
        for _ in range(3):  # a race shows as a moving error
            assert torch.equal(hopper_launch.linear(x, packed.values, meta, bias, config), y), config


@only_on_hopper
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("n", "k", "ordered"), [(64, 128, 0), (200, 384, 0), (1032, 1152, 0), (64, 128, 1), (1088, 1152, 1)]
)
@pytest.mark.parametrize("tokens", [1, 16, 64, 130, 300, 1000])
def test_hopper_gated(n, k, tokens, ordered, activation):
    """Every configuration that can end in the activation of a gated MLP, against product and activation."""
    dtype = torch.bfloat16
    w = weight(2 * n, k, dtype)
    packed, x = pack(w), torch.randn(tokens, k, device=CUDA, dtype=dtype)
    bias = torch.randn(2 * n, device=CUDA, dtype=dtype)
    wanted = reference.gate(exact(x, w, bias), activation)
    allowed = 1.2 * error(reference.gate(F.linear(x, w, bias), activation), wanted)
    meta = in_order(packed.meta) if ordered else packed.meta
    configurations = [
        c for c in hopper_choices.configs(tokens, 2 * n) if c.gates and not (ordered and c.warpgroups == 3)
    ]
    assert configurations
    hopper_source.compile_all(configurations, dtype, CUDA, activation, ordered=bool(ordered))
    for config in configurations:
        y = hopper_launch.linear(x, packed.values, meta, bias, config, activation)
        assert error(y, wanted) <= allowed, config
        assert torch.equal(hopper_launch.linear(x, packed.values, meta, bias, config, activation), y)


@only_on_hopper
def test_many_tokens_give_the_same_bits_every_time():
    """Clusters, rings of buffers and tile after tile: a race would move the result."""
    w, dtype = weight(2048, 4096), torch.bfloat16
    packed, x = pack(w), torch.randn(4000, 4096, device=CUDA, dtype=dtype)
    for config in (hopper.Prefill(256), hopper.Prefill(128, 4, 2), hopper.Prefill(192, 3, 2)):
        first = hopper_launch.linear(x, packed.values, packed.meta, None, config)
        assert_as_good_as_dense(first, x, w)
        for _ in range(200):
            assert torch.equal(hopper_launch.linear(x, packed.values, packed.meta, None, config), first)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 40, 600])
def test_fused_models_compute_the_same(tokens):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 1000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "initializer_range": 0.05}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads)).to(CUDA, torch.bfloat16).eval()
    twofour.pack_(twofour.prune_(model))
    ids = torch.randint(1000, (1, tokens), device=CUDA)
    wanted = model(ids).logits
    assert twofour.fuse_(model) == 6
    got = model(ids).logits
    assert error(got, wanted.double()) < 0.02
    compiled = torch.compile(model, fullgraph=True)
    assert error(compiled(ids).logits, wanted.double()) < 0.02
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(ids, use_cache=False).logits
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, got)


@only_on_hopper
def test_hopper_special_values():
    w = weight(128, 256)
    packed = pack(w)
    x = torch.randn(8, 256, device=CUDA, dtype=torch.bfloat16)
    x[0] = 0
    x[1, 3] = torch.inf
    x[2, 5] = torch.nan
    x[3] = -0.0
    x[4] *= 1e30
    y = hopper_launch.linear(x, packed.values, packed.meta, None, hopper_choices.guess(128, 256, 8))
    dense = F.linear(x, w)
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    assert torch.equal(y[3].abs(), torch.zeros_like(y[3]))
    kept = w[:, 3] != 0
    assert torch.equal(y[1].isfinite(), ~kept)  # a pruned weight does not touch the infinity
    assert bool(dense[1].isfinite().logical_not().all())  # where dense multiplies it by zero
    assert torch.equal(y[2].isnan(), w[:, 5] != 0)
    assert error(y[4:], exact(x[4:], w)) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 8, 24, 100, 1024])
def test_cusparselt_every_algorithm(tokens, dtype):
    n, k = 512, 1024
    if reason := cusparselt.why_not(CUDA, dtype, n, k):
        pytest.skip(reason)
    w, bias = weight(n, k, dtype), torch.randn(n, device=CUDA, dtype=dtype)
    x = torch.randn(tokens, k, device=CUDA, dtype=dtype)
    product = dispatch.Product(n, k, dispatch.bucket_of(tokens), dtype, 0, True)
    packed, compressed = pack(w), cusparselt.compress(w)
    padded = tokens + -tokens % cusparselt.TOKEN_MULTIPLE
    for algorithm in cusparselt.algorithms(n, k, padded, dtype, CUDA):
        choice = dispatch.Choice("cusparselt", vars(algorithm))
        for b in (None, bias):
            y = dispatch.runner(product, choice)(x, packed.values, packed.meta, b, compressed)
            assert_as_good_as_dense(y, x, w, b)


@only_on_hopper
def test_cusparselts_kernel_is_launched_without_it():
    """The same bits as through the library, for tensors that it has not seen."""
    n, k, tokens = 4096, 4096, 2048  # other sizes are cleared with a second kernel first, and not learnt
    weights = [weight(n, k, torch.bfloat16) for _ in range(3)]
    plan = cusparselt.Plan(n, k, tokens, torch.bfloat16, CUDA, cusparselt.Algorithm(17))
    for w in weights:
        x = torch.randn(tokens, k, device=CUDA, dtype=torch.bfloat16)
        compressed, y, other = cusparselt.compress(w), x.new_zeros(tokens, n), x.new_zeros(tokens, n)
        plan.run(x, compressed, y)
        scratch = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=CUDA)
        pointers = [tensor.data_ptr() for tensor in (compressed, x, other, scratch)]
        plan._call(pointers, torch.cuda.current_stream().cuda_stream)
        assert torch.equal(y, other)
        assert_as_good_as_dense(y, x, w)
        beside = x.new_empty(x.numel() + 8)[8:].view_as(x).copy_(x)  # at a multiple of 16 bytes only
        plan.run(beside, compressed, y)
        assert torch.equal(y, other)
    assert isinstance(plan._learnt[0], relaunch.Relaunch)


@pytest.mark.parametrize("memory", ["small", "auto", "fast"])
@pytest.mark.parametrize(("n", "k"), [(256, 512), (250, 508), (4096, 4096)])
def test_layer_with_tokens_that_change(n, k, memory):
    dense, sparse = layer(n, k, memory=memory)
    for tokens in (1, 3, 17, 64, 65, 257, 513, 2000, 2048, 5, 1):
        x = torch.randn(tokens, k, device=CUDA, dtype=torch.bfloat16)
        assert_as_good_as_dense(sparse(x), x, dense.weight.data, dense.bias.data)


def test_shapes_of_the_input():
    dense, sparse = layer(384, 256)
    x = torch.randn(2, 5, 256, device=CUDA, dtype=torch.bfloat16)
    torch.testing.assert_close(sparse(x), dense(x), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(sparse(x.transpose(0, 1)), dense(x.transpose(0, 1)), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(sparse(x[0, 0]), dense(x[0, 0]), rtol=2e-2, atol=2e-2)
    assert sparse(x[:0]).shape == (0, 5, 384)
    wide = torch.randn(7, 512, device=CUDA, dtype=torch.bfloat16)[:, ::2]
    torch.testing.assert_close(sparse(wide), dense(wide), rtol=2e-2, atol=2e-2)
    odd = torch.randn(257, device=CUDA, dtype=torch.bfloat16)[1:].view(1, 256)  # at no multiple of 16 bytes
    torch.testing.assert_close(sparse(odd), dense(odd), rtol=2e-2, atol=2e-2)


def test_gradients_autocast_and_inference_mode():
    dense, sparse = layer(256, 256)
    x = torch.randn(9, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    (ours,) = torch.autograd.grad(sparse(x).float().square().sum(), x)
    (theirs,) = torch.autograd.grad(dense(x).float().square().sum(), x)
    torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = sparse(x.float())
    assert y.dtype == torch.bfloat16
    with torch.inference_mode():
        assert torch.equal(sparse(x), sparse(x))


@pytest.mark.parametrize("tokens", [1, 16, 300, 2048])
def test_cuda_graph(tokens):
    _, sparse = layer(512, 1024)
    x = torch.randn(tokens, 1024, device=CUDA, dtype=torch.bfloat16)
    sparse(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse(torch.relu(sparse(x)[:, :512].repeat(1, 2)))
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, sparse(torch.relu(sparse(x)[:, :512].repeat(1, 2))))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode):
    torch._dynamo.reset()
    _, sparse = layer(256, 256)
    model = nn.Sequential(sparse, nn.GELU(), copy.deepcopy(sparse))
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch.no_grad():
        for tokens in (4, 4, 4, 40):
            x = torch.randn(tokens, 256, device=CUDA, dtype=torch.bfloat16)
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("tokens", [4, 2048])  # one of our kernels, cuSPARSELt
def test_several_streams(tokens):
    _, sparse = layer(1024, 1024)
    inputs = [torch.randn(tokens, 1024, device=CUDA, dtype=torch.bfloat16) for _ in range(8)]
    expected = [sparse(x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(20):
        results = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(sparse(x))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("tokens", [4, 300, 2048])
def test_a_thread_that_has_not_used_cuda_yet(tokens):
    """The runtime gives it a context by itself, the driver, which launches our kernels, does not."""
    _, sparse = layer(1024, 1024)
    x = torch.randn(tokens, 1024, device=CUDA, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = sparse(x)
        torch.cuda.synchronize()

        def run():
            with torch.no_grad():
                return sparse(x)

        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(run).result()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


def test_graphs_of_one_stream_replayed_at_the_same_time():
    """Each has scratch memory of its own, also where cuSPARSELt runs."""
    _, sparse = layer(1024, 2048)
    inputs = [torch.randn(4096, 2048, device=CUDA, dtype=torch.bfloat16) for _ in range(4)]
    with torch.no_grad():
        expected = [sparse(x) for x in inputs]
        graphs, outputs, capturing = [], [], torch.cuda.Stream()
        for x in inputs:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], stream=capturing):
                outputs.append(sparse(x))
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_what_is_resident_and_what_is_saved(tmp_path):
    from safetensors.torch import load_file, save_file

    dense, sparse = layer(1024, 2048, bias=False, memory="fast")
    small = SparseLinear.from_dense(dense, memory="small")
    assert small.compressed_weight is None
    if HOPPER:  # one order of positions for our kernels and cuSPARSELt
        auto = SparseLinear.from_dense(dense)
        assert auto.weight_meta.dim() == 5
        inside = auto.compressed_weight.untyped_storage()
        for tensor in (auto.weight_values, auto.weight_meta):
            assert tensor.untyped_storage().data_ptr() == inside.data_ptr()
        assert inside.nbytes() <= 0.58 * dense.weight.nbytes
        assert torch.equal(auto.state_dict()["weight_meta"], small.weight_meta)
        assert torch.equal(auto.weight, dense.weight)
    if cusparselt.why_not(CUDA, torch.bfloat16, 1024, 2048) is None:
        assert sparse.compressed_weight is not None
        inside = sparse.weight_values.untyped_storage().data_ptr()
        assert inside == sparse.compressed_weight.untyped_storage().data_ptr()
    state = sparse.state_dict()
    assert set(state) == {"weight_values", "weight_meta"}
    save_file(state, tmp_path / "layer.safetensors")
    small.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(small.weight_values, sparse.weight_values)
    back = copy.deepcopy(sparse).to("cpu")
    assert back.compressed_weight is None
    assert torch.equal(back.weight, dense.weight.cpu())
    assert torch.equal(back.to(CUDA).weight, dense.weight)


def test_dense_is_kept_where_nothing_else_runs():
    dense, sparse = layer(48, 36, memory="fast")
    x = torch.randn(4, 36, device=CUDA, dtype=torch.bfloat16)
    assert sparse.dense_weight is not None
    assert torch.equal(sparse(x), dense(x))
    assert layer(48, 36)[1].dense_weight is None


def test_override(monkeypatch):
    dense, sparse = layer(256, 256, memory="fast")
    x = torch.randn(4, 256, device=CUDA, dtype=torch.bfloat16)
    dispatch.forget()
    monkeypatch.setenv("TWOFOUR_BACKEND", "nonsense")
    with pytest.raises(twofour.InputError, match="no backend 'nonsense'"):
        sparse(x)
    for backend in dispatch.BACKENDS:
        monkeypatch.setenv("TWOFOUR_BACKEND", backend)
        dispatch.forget()
        assert_as_good_as_dense(sparse(x), x, dense.weight.data, dense.bias.data)
    monkeypatch.delenv("TWOFOUR_BACKEND")
    dispatch.forget()


def test_generate_with_a_static_cache():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config).to(CUDA, torch.bfloat16).eval()
    twofour.prune_(model)
    tokens = torch.randint(3, 500, (2, 6), device=CUDA)
    dense = model(tokens).logits
    twofour.pack_(model)
    torch.testing.assert_close(model(tokens).logits, dense, rtol=3e-2, atol=3e-2)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    assert model.generate(tokens, **options).shape == (2, 14)
