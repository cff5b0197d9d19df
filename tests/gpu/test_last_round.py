"""Units of work that are cut into parts, whose sums meet in memory. Run by `make test-gpu`."""

import pytest
import torch
from torch.nn import functional as F

from twofour.bench.random_codes import random_codes
from twofour.kernels import dispatch, dispatch_codes, hopper, hopper_launch, hopper_source, reference
from twofour.packed import pack
from twofour.pattern import keep_best
from twofour.quantize.activations import round_tokens
from twofour.quantize.schemes import scheme_named

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
    ),
]
CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16


def weight(n, k, dtype=BF16):
    w = torch.randn(n, k, device=CUDA, dtype=dtype) / k**0.5
    return w.where(keep_best(w.abs()), 0)


def error(y, exact):
    return float((y.double() - exact).norm() / exact.norm())


def shares(n, k, tokens, config, codes=None):
    launches = hopper_launch.Launches(n, k, BF16, config, 0, codes=codes)
    units = config.row_units(n) * -(-tokens // config.tokens)
    return config.share_out(units, -(-k // config.step), launches.resident)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "tokens"),
    [
        (4352, 4224, 1000),  # one round, then two units; an odd number of steps, a ragged last tile
        (256, 8192, 100),  # a single unit
        (4096, 4096, 512),
        (8720, 4096, 1024),  # two rounds, then few
        (1008, 14336, 300),
    ],
)
def test_parts_add_up(n, k, tokens, bias, dtype):
    w = weight(n, k, dtype)
    packed, x = pack(w), torch.randn(tokens, k, device=CUDA, dtype=dtype)
    b = torch.randn(n, device=CUDA, dtype=dtype) if bias else None
    exact = x.double() @ w.double().t() + (0 if b is None else b.double())
    allowed = 1.2 * error(F.linear(x, w, b), exact)
    configs = [hopper.Prefill(t, 2, cluster) for t in (256, 192, 128) for cluster in (2, 1)]
    hopper_source.compile_all(configs, dtype, CUDA)
    cut = 0
    for config in configs:
        cut += shares(n, k, tokens, config).parts > 1
        y = torch.full((tokens, n), torch.nan, device=CUDA, dtype=dtype)
        hopper_launch.linear(x, packed.values, packed.meta, b, config, out=y)
        assert error(y, exact) <= allowed, config
        for _ in range(20):  # a race shows as a moving error
            assert torch.equal(hopper_launch.linear(x, packed.values, packed.meta, b, config), y), config
    assert cut, "none of these was cut"


def test_parts_of_a_gated_product_add_up():
    n, k, tokens, config = 2176, 4224, 1000, hopper.Prefill(256)
    assert shares(2 * n, k, tokens, config).parts > 1
    w, x = weight(2 * n, k), torch.randn(tokens, k, device=CUDA, dtype=BF16)
    packed = pack(w)
    exact = reference.gate(x.double() @ w.double().t(), "silu")
    y = hopper_launch.linear(x, packed.values, packed.meta, None, config, "silu")
    assert error(y, exact) <= 1.2 * error(reference.gate(F.linear(x, w), "silu"), exact)
    for _ in range(20):
        assert torch.equal(hopper_launch.linear(x, packed.values, packed.meta, None, config, "silu"), y)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_parts_of_codes_add_up(name):
    n, k, tokens, config, scheme = 4352, 2176, 1000, hopper.Prefill8(256), scheme_named(name)
    assert shares(n, k, tokens, config, scheme.stored).parts > 1
    packed = random_codes(n, k, scheme, BF16, torch.Generator(CUDA).manual_seed(0))
    x = torch.randn(tokens, k, device=CUDA, dtype=BF16)
    product = dispatch_codes.Product(n, k, 1024, BF16, 0, scheme.stored, scheme.scale_width(k), True)
    run = dispatch_codes.runner(product, dispatch.Choice("codes", hopper.as_dict(config)))
    y = run(x, packed.values, packed.meta, packed.scale, None)
    codes, scale = round_tokens(x, scheme.stored)
    rounded = (codes.double() * scale.double()) @ packed.unpack(torch.float64).t()
    assert error(y, rounded) <= 0.005
    for _ in range(50):
        assert torch.equal(run(x, packed.values, packed.meta, packed.scale, None), y)


def test_at_once_in_two_streams_and_from_two_graphs():
    """The same weight: sums of one call must never meet those of another."""
    n, k, tokens = 4352, 4096, 1024
    packed, config = pack(weight(n, k)), hopper.Prefill(256)
    assert shares(n, k, tokens, config).parts > 1
    xs = [torch.randn(tokens, k, device=CUDA, dtype=BF16) for _ in range(2)]

    def product(x):
        return hopper_launch.linear(x, packed.values, packed.meta, None, config)

    wanted = [product(x) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    for _ in range(100):
        got = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(product(x))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    graphs, outs = [torch.cuda.CUDAGraph() for _ in xs], []
    for graph, x in zip(graphs, xs, strict=True):
        with torch.cuda.graph(graph):
            outs.append([product(x) for _ in range(3)])
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for out, right in zip(outs, wanted, strict=True):
            assert all(torch.equal(y, right) for y in out)
            for y in out:
                y.zero_()
        torch.cuda.synchronize()
