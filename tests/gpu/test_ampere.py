"""The kernel of cuda/mma_sm80.cu against float64, on whatever GPU from sm_80 on is here."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from twofour.kernels import ampere
from twofour.packed import pack
from twofour.pattern import keep_best

CUDA = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs sm_80 or later",
    ),
]
DTYPES = [torch.bfloat16, torch.float16]
ROOMS = (8, 16, 32, 64)


def weight(n, k, dtype=torch.bfloat16):
    w = torch.randn(n, k, device=CUDA, dtype=dtype) / k**0.5
    return w.where(keep_best(w.abs()), 0)


def error(y, exact):
    return float((y.double() - exact).norm() / exact.norm())


def assert_as_good_as_dense(y, x, w, bias=None):
    exact = x.double() @ w.double().t()
    exact = exact if bias is None else exact + bias.double()
    assert error(y, exact) <= 1.2 * error(F.linear(x, w, bias), exact) + 1e-7


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """All at once, on all cores."""
    every = list(dict.fromkeys(itertools.chain.from_iterable(map(ampere.configs, ROOMS))))
    for dtype in DTYPES:
        ampere.compile_all(every, dtype, CUDA)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(37, 96), (200, 384), (1001, 1184), (130, 4064), (4100, 2048)])
@pytest.mark.parametrize("tokens", [1, 3, 8, 17, 64, 65, 200])
def test_every_configuration(n, k, tokens, dtype):
    w = weight(n, k, dtype)
    packed, x = pack(w), torch.randn(tokens, k, device=CUDA, dtype=dtype)
    bias = torch.randn(n, device=CUDA, dtype=dtype)
    for config in ampere.configs(tokens):
        for b in (bias, None):
            y = torch.full((tokens, n), torch.nan, device=CUDA, dtype=dtype)
            ampere.linear(x, packed.values, packed.meta, b, config, y)
            assert_as_good_as_dense(y, x, w, b)


@pytest.mark.parametrize("room", ROOMS)
def test_tiles_of_every_size_take_any_number_of_tokens(room):
    w = weight(333, 640)
    packed = pack(w)
    for tokens, config in itertools.product((1, 5, 40, 129), ampere.configs(room)):
        x = torch.randn(tokens, 640, device=CUDA, dtype=torch.bfloat16)
        assert_as_good_as_dense(ampere.linear(x, packed.values, packed.meta, None, config), x, w)


@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 64, 200])
def test_fifty_runs_give_the_same_bits(tokens):
    n, k = 4096, 4096
    packed = pack(weight(n, k))
    x = torch.randn(tokens, k, device=CUDA, dtype=torch.bfloat16)
    bias = torch.randn(n, device=CUDA, dtype=torch.bfloat16)
    for config in ampere.configs(tokens):
        first = ampere.linear(x, packed.values, packed.meta, bias, config)
        for _ in range(50):
            assert torch.equal(ampere.linear(x, packed.values, packed.meta, bias, config), first), config


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_x_that_the_kernel_before_makes(tokens):
    """The kernel may start while the one before still runs: it must not read x, nor write y, too early."""
    n = k = 2048
    w = weight(n, k)
    packed = pack(w)
    big = torch.randn(4096, 4096, device=CUDA, dtype=torch.bfloat16)
    inputs = [torch.randn(tokens, k, device=CUDA, dtype=torch.bfloat16) for _ in range(4)]
    for config in ampere.configs(tokens):
        expected = [ampere.linear(i * 2, packed.values, packed.meta, None, config) for i in inputs]
        chained = [ampere.linear(e, packed.values, packed.meta, None, config) for e in expected]
        torch.cuda.synchronize()
        x, y, z = torch.empty_like(inputs[0]), torch.empty_like(expected[0]), torch.empty_like(expected[0])
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for step in range(20):
                i = step % 4
                torch.mm(big, big)  # keeps the GPU busy, so that all launches below queue up
                torch.mul(inputs[i], 2, out=x)
                ampere.linear(x, packed.values, packed.meta, None, config, y)
                ampere.linear(y, packed.values, packed.meta, None, config, z)
                kept_y, kept_z = y.clone(), z.clone()
                x.fill_(torch.nan)
                y.fill_(torch.nan)
                stream.synchronize()
                assert torch.equal(kept_y, expected[i]), (config, step)
                assert torch.equal(kept_z, chained[i]), (config, step)


def test_cuda_graph():
    n, k = 1024, 2048
    packed = pack(weight(n, k))
    config = ampere.guess(n, k, 8)
    x = torch.randn(8, k, device=CUDA, dtype=torch.bfloat16)
    ampere.linear(x, packed.values, packed.meta, None, config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ampere.linear(torch.relu(x), packed.values, packed.meta, None, config)
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, ampere.linear(torch.relu(x), packed.values, packed.meta, None, config))


def test_one_launch_object_serves_every_weight_of_a_shape():
    n, k, tokens = 300, 512, 5
    config = ampere.guess(n, k, tokens)
    launches = ampere.Launches(n, k, torch.bfloat16, config, 0)
    for rows in (tokens, 1, 20, tokens):
        w = weight(n, k)
        packed, x = pack(w), torch.randn(rows, k, device=CUDA, dtype=torch.bfloat16)
        y = x.new_empty((rows, n))
        launches.run(x, packed.values, packed.meta, None, y)
        assert_as_good_as_dense(y, x, w)


@pytest.mark.parametrize("tokens", [8, 64])
def test_special_values(tokens):
    w = weight(128, 256)
    packed = pack(w)
    x = torch.randn(tokens, 256, device=CUDA, dtype=torch.bfloat16)
    x[0] = 0
    x[1, 3] = torch.inf
    x[2, 5] = torch.nan
    x[3] = -0.0
    x[4] *= 1e30
    for config in ampere.configs(tokens):
        y = ampere.linear(x, packed.values, packed.meta, None, config)
        assert torch.equal(y[0], torch.zeros_like(y[0]))
        assert torch.equal(y[3].abs(), torch.zeros_like(y[3]))
        assert not bool(y[1][w[:, 3] != 0].isfinite().any())
        assert bool(y[2][w[:, 5] != 0].isnan().all())
        assert_as_good_as_dense(y[4:], x[4:], w)


def test_zeros_in_the_weight():
    w = weight(256, 512, torch.float16)
    w[torch.rand_like(w, dtype=torch.float32) < 0.4] = 0  # groups with one nonzero, or none
    w[5] = 0
    packed, x = pack(w), torch.randn(12, 512, device=CUDA, dtype=torch.float16)
    for config in ampere.configs(12):
        y = ampere.linear(x, packed.values, packed.meta, None, config)
        assert_as_good_as_dense(y, x, w)
        assert torch.equal(y[:, 5], torch.zeros_like(y[:, 5]))
