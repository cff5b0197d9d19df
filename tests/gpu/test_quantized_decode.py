"""The kernel of cuda/quantized_decode_sm80.cu against float64, on whatever GPU from sm_80 on is here."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from tests.kernels.test_quantized_decode import DTYPES, WEIGHTS
from tests.kernels.test_quantized_decode_emulated import random_weight
from twofour.kernels import quantized_decode
from twofour.packed import Packed24, pack, to_nibbles

CUDA = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs sm_80 or later",
    ),
]
ROOMS = (8, 16, 32, 64)


def candidates(tokens, codes, group, dtype=torch.bfloat16):
    """All for one kind of weight, of the others some: compiling takes long.

    Every seventh, because neighbours differ in step and split, of which there are two and three: every sixth
    would always have the same.
    """
    clusters = torch.cuda.get_device_capability() >= (9, 0)
    every = quantized_decode.configs(tokens, codes, group, clusters)
    return every if (codes, group, dtype) == ("int4", 128, torch.bfloat16) else every[::7]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """All at once, on all cores."""
    for (codes, group), dtype in itertools.product(WEIGHTS, DTYPES):
        every = list(dict.fromkeys(c for room in ROOMS for c in candidates(room, codes, group, dtype)))
        quantized_decode.compile_all(every, dtype, codes, group, CUDA)


def weight(n, k, codes, group, dtype):
    return random_weight(n, k, codes, group, dtype, "cuda")


def product(x, packed, bias, codes, group, config, out=None):
    return quantized_decode.linear(
        x, packed.values, packed.meta, packed.scale, bias, codes, group, config, out
    )


def error(y, exact):
    return float((y.double() - exact).norm() / exact.norm())


class Expected:
    """The exact product, and the error of a dense one with the same weights.

    These have more bits than 16-bit numbers hold, so a dense product of them is one in float32, rounded once.
    `weight`: in place of code × scale, unrounded.
    """

    def __init__(self, x, packed, bias=None, weight=None):
        w = packed.unpack(torch.float64) if weight is None else weight
        self.exact = x.double() @ w.t() + (0 if bias is None else bias.double())
        dense = F.linear(x.float(), w.float(), None if bias is None else bias.float()).to(x.dtype)
        self.dense = max(error(dense, self.exact), error(self.exact.to(x.dtype), self.exact))

    def check(self, y, *what):
        got = error(y, self.exact)
        if got <= 1.2 * self.dense + 1e-7:
            return
        size = self.exact.abs()
        wrong = ~((y.double() - self.exact).abs() <= 0.02 * size.mean() + 0.02 * size)
        tokens, rows = wrong.any(1).nonzero().flatten(), wrong.any(0).nonzero().flatten()
        raise AssertionError(
            f"{what}: error {got:.3g}, dense {self.dense:.3g}; {int(wrong.sum())} of {wrong.numel()} outputs "
            f"are wrong, {int(y.isnan().sum())} are NaN; tokens {tokens[:20].tolist()} of {len(tokens)}, "
            f"rows {rows[:20].tolist()} of {len(rows)}"
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", ["int8", "fp8", "int4"])
def test_every_code_is_exact(codes, dtype):
    """Each code alone in its row, times one: the output is the code itself, -0.0 apart."""
    group = 32 if codes == "int4" else None
    if codes == "fp8":
        every = torch.arange(256, dtype=torch.uint8, device=CUDA)
        every = every[every & 0x7F != 0x7F].view(torch.float8_e4m3fn)
    else:
        low, high = (-8, 8) if codes == "int4" else (-128, 128)
        every = torch.arange(low, high, device=CUDA, dtype=torch.int8)
    k = 256
    for column in (0, 1, 2, 7, 31, 64, 100, 191, 255):
        full = torch.zeros(len(every), k, device=CUDA).to(every.dtype)
        full[:, column] = every
        packed = pack(full)
        values = to_nibbles(packed.values) if codes == "int4" else packed.values
        scale = torch.ones(len(every), k // group if group else 1, device=CUDA, dtype=dtype)
        packed = Packed24(values, packed.meta, k, scale)
        x = torch.ones(1, k, device=CUDA, dtype=dtype)
        for config in candidates(1, codes, group, dtype):
            y = product(x, packed, None, codes, group, config)[0]
            assert torch.equal(y.double(), every.double()), (column, config)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("codes", "group"), WEIGHTS)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 32), (37, 96), (200, 384), (1001, 1184), (130, 4064), (4100, 2048), (300, 5120)]
)
@pytest.mark.parametrize("tokens", [1, 3, 8, 17, 64, 65, 200])
def test_every_configuration(n, k, tokens, codes, group, dtype):
    packed = weight(n, k, codes, group, dtype)
    x = torch.randn(tokens, k, device=CUDA, dtype=dtype)
    bias = torch.randn(n, device=CUDA, dtype=dtype)
    for b in (bias, None):
        expected = Expected(x, packed, b)
        for config in candidates(tokens, codes, group, dtype):
            y = torch.full((tokens, n), torch.nan, device=CUDA, dtype=dtype)
            product(x, packed, b, codes, group, config, y)
            expected.check(y, config, "no bias" if b is None else "bias")


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(("codes", "group"), WEIGHTS)
def test_tiles_of_every_size_take_any_number_of_tokens(room, codes, group):
    packed = weight(333, 640, codes, group, torch.bfloat16)
    for tokens in (1, 5, 40, 129):
        x = torch.randn(tokens, 640, device=CUDA, dtype=torch.bfloat16)
        expected = Expected(x, packed)
        for config in candidates(room, codes, group):
            expected.check(product(x, packed, None, codes, group, config), config, tokens)


@pytest.mark.parametrize("tokens", [1, 16, 64, 200])
@pytest.mark.parametrize(("codes", "group"), [("int4", 128), ("int8", None)])
def test_fifty_runs_give_the_same_bits(tokens, codes, group):
    n, k = 4096, 4096
    packed = weight(n, k, codes, group, torch.bfloat16)
    x = torch.randn(tokens, k, device=CUDA, dtype=torch.bfloat16)
    bias = torch.randn(n, device=CUDA, dtype=torch.bfloat16)
    for config in candidates(tokens, codes, group):
        first = product(x, packed, bias, codes, group, config)
        for _ in range(50):
            assert torch.equal(product(x, packed, bias, codes, group, config), first), config


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize(("codes", "group"), [("int4", 128), ("fp8", None)])
def test_x_that_the_kernel_before_makes(tokens, codes, group):
    """The kernel may start while the one before still runs: it must not read x, nor write y, too early."""
    n = k = 2048
    packed = weight(n, k, codes, group, torch.bfloat16)
    big = torch.randn(4096, 4096, device=CUDA, dtype=torch.bfloat16)
    inputs = [torch.randn(tokens, k, device=CUDA, dtype=torch.bfloat16) for _ in range(4)]
    for config in candidates(tokens, codes, group):
        expected = [product(i * 2, packed, None, codes, group, config) for i in inputs]
        chained = [product(e, packed, None, codes, group, config) for e in expected]
        torch.cuda.synchronize()
        x, y, z = torch.empty_like(inputs[0]), torch.empty_like(expected[0]), torch.empty_like(expected[0])
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for step in range(8):
                i = step % 4
                torch.mm(big, big)  # keeps the GPU busy, so that all launches below queue up
                torch.mul(inputs[i], 2, out=x)
                product(x, packed, None, codes, group, config, y)
                product(y, packed, None, codes, group, config, z)
                kept_y, kept_z = y.clone(), z.clone()
                x.fill_(torch.nan)
                y.fill_(torch.nan)
                stream.synchronize()
                assert torch.equal(kept_y, expected[i]), (config, step)
                assert torch.equal(kept_z, chained[i]), (config, step)


@pytest.mark.parametrize(("codes", "group"), [("int4", 64), ("int8", None)])
def test_cuda_graph(codes, group):
    n, k = 1024, 2048
    packed = weight(n, k, codes, group, torch.bfloat16)
    clusters = torch.cuda.get_device_capability() >= (9, 0)
    config = quantized_decode.guess(n, k, 8, codes, group, clusters=clusters)
    x = torch.randn(8, k, device=CUDA, dtype=torch.bfloat16)
    product(x, packed, None, codes, group, config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product(torch.relu(x), packed, None, codes, group, config)
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, product(torch.relu(x), packed, None, codes, group, config))


def test_one_launch_object_serves_every_weight_of_a_shape():
    n, k, tokens = 300, 512, 5
    config = quantized_decode.guess(n, k, tokens, "int4", 128)
    launches = quantized_decode.Launches(n, k, torch.bfloat16, "int4", 128, config, 0)
    for rows in (tokens, 1, 20, tokens):
        packed = weight(n, k, "int4", 128, torch.bfloat16)
        x = torch.randn(rows, k, device=CUDA, dtype=torch.bfloat16)
        y = x.new_empty((rows, n))
        launches.run(x, packed.values, packed.meta, packed.scale, None, y)
        Expected(x, packed).check(y, config, rows)


@pytest.mark.parametrize("tokens", [8, 64])
@pytest.mark.parametrize(("codes", "group"), WEIGHTS)
def test_special_values(tokens, codes, group):
    packed = weight(128, 256, codes, group, torch.bfloat16)
    w = packed.unpack(torch.float64)
    x = torch.randn(tokens, 256, device=CUDA, dtype=torch.bfloat16)
    x[0] = 0
    x[1, 3] = torch.inf
    x[2, 5] = torch.nan
    x[3] = -0.0
    x[4] *= 1e30
    x[5] *= 1e-30
    # One by one: the large would hide what is wrong in the small.
    expected = {token: Expected(x[token : token + 1], packed) for token in range(4, 8)}
    for config in candidates(tokens, codes, group):
        y = product(x, packed, None, codes, group, config)
        assert torch.equal(y[0], torch.zeros_like(y[0])), config
        assert torch.equal(y[3].abs(), torch.zeros_like(y[3])), config
        assert not bool(y[1][w[:, 3] != 0].isfinite().any()), config
        assert bool(y[2][w[:, 5] != 0].isnan().all()), config
        for token, only in expected.items():
            only.check(y[token : token + 1], config, token)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("codes", "group"), WEIGHTS)
def test_extreme_scales_and_rows_of_zeros(codes, group, dtype):
    packed = weight(256, 512, codes, group, dtype)
    smallest = 2.0**-17 if dtype == torch.float16 else 2.0**-60
    packed.scale[0::3] = smallest
    packed.scale[1::3] = 2.0**4 if dtype == torch.float16 else 2.0**60
    packed.values.view(torch.uint8)[5] = 0
    x = torch.randn(12, 512, device=CUDA).to(dtype) / 512
    bias = torch.randn(256, device=CUDA).to(dtype)
    exact = x.double() @ packed.unpack(torch.float64).t()
    for config in candidates(12, codes, group, dtype):
        y = product(x, packed, None, codes, group, config)
        assert torch.equal(y[:, 5], torch.zeros_like(y[:, 5])), config
        assert torch.equal(product(x, packed, bias, codes, group, config)[:, 5], bias[5].expand(12)), config
        for rows in (slice(1, None, 3), slice(2, None, 3)):
            assert error(y[:, rows], exact[:, rows]) < 4e-3, (config, rows)
        if dtype == torch.bfloat16:  # in float16 such outputs are below its normal numbers
            assert error(y[:, 0::3], exact[:, 0::3]) < 4e-3, config
