"""The kernel of cuda/decode4_sm90.cu against float64: 4 bits, a scale for 128 columns, on Hopper.

The weight is code × scale as 16-bit numbers have it: what it multiplies with, and what `unpack` gives.
"""

from functools import cache

import pytest
import torch

from tests.gpu.test_quantized_decode import Expected as ExpectedOf
from tests.gpu.test_quantized_decode import error
from tests.kernels.test_quantized_decode import DTYPES
from tests.kernels.test_quantized_decode_emulated import random_weight
from twofour.kernels import hopper_choices, hopper_launch, hopper_source, reference
from twofour.packed import Packed24, pack, to_nibbles
from twofour.streamed import is_streamed, stream, within_reach

CUDA = torch.device("cuda", 0)
BF16, FP16 = torch.bfloat16, torch.float16
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
    ),
]
ROOMS = (8, 16, 32, 64)
# Rows and columns that do not fill their last tile, and fewer columns than a tile has.
SHAPES = ((256, 256), (960, 384), (64, 1152), (4096, 4096), (576, 128))


def candidates(room, dtype=BF16):
    """Each that compiles to something else, with the least and the most tiles of x.

    In float16, where only the conversion is another, every fifth.
    """
    every = hopper_choices.configs4(room)
    first, last = (
        {(c.warpgroups, c.blocks, c.teams, c.split, c.step): c for c in some} for some in (every[::-1], every)
    )
    found = list(dict.fromkeys([*first.values(), *last.values()]))
    return found if dtype == BF16 else found[::5]


def gated(room):
    """Those that can end in an activation, each with one of two."""
    found = [config for config in candidates(room) if config.gates]
    return [(config, ("silu", "gelu")[i // 2 % 2]) for i, config in enumerate(found)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """All at once, on all cores."""
    for dtype in DTYPES:
        hopper_source.compile_all([c for room in ROOMS for c in candidates(room, dtype)], dtype, CUDA)
    for activation in ("silu", "gelu"):
        ending = [c for room in ROOMS for c, ends_in in gated(room) if ends_in == activation]
        hopper_source.compile_all(ending, BF16, CUDA, activation)


def weight(n, k, dtype=BF16):
    return random_weight(n, k, "int4", 128, dtype, CUDA.type)


def in_16_bits(packed):
    return packed.unpack(packed.scale.dtype).double()


def Expected(x, packed, bias=None):
    return ExpectedOf(x, packed, bias, in_16_bits(packed))


def tokens_of(room):
    return (1, room, 150) if room == 64 else (1, room)


@cache
def launches(n, k, dtype, config, activation=None):
    return hopper_launch.Launches(n, k, dtype, config, 0, activation)


def product(x, packed, config, bias=None, activation=None, out=None):
    rows, k = packed.shape
    n = rows // 2 if activation else rows
    out = x.new_full((len(x), n), torch.nan) if out is None else out
    packed = packed if is_streamed(packed.meta) else streamed(packed)
    launches(n, k, x.dtype, config, activation).run(x, packed.values, packed.meta, bias, out, packed.scale)
    return out


def streamed(packed):
    values, meta, scale = stream(packed.values, packed.meta, packed.scale)
    return Packed24(values, meta, packed.columns, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_configuration(n, k, room, dtype):
    packed, bias = weight(n, k, dtype), torch.randn(n, device=CUDA).to(dtype)
    for tokens in tokens_of(room):
        x = torch.randn(tokens, k, device=CUDA).to(dtype)
        for b in (bias, None):
            expected = Expected(x, packed, b)
            for config in candidates(room, dtype):
                expected.check(
                    product(x, packed, config, b), config, tokens, "no bias" if b is None else "bias"
                )


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gated(n, k, room):
    packed, bias = weight(2 * n, k), torch.randn(2 * n, device=CUDA, dtype=BF16)
    for tokens in tokens_of(room):
        x = torch.randn(tokens, k, device=CUDA, dtype=BF16)
        for b in (bias, None):
            apart = x.double() @ in_16_bits(packed).t() + (0 if b is None else b.double())
            exact = {activation: reference.gate(apart, activation) for activation in ("silu", "gelu")}
            rounded = {activation: error(y.to(BF16), y) for activation, y in exact.items()}
            for config, activation in gated(room):
                found = error(product(x, packed, config, b, activation), exact[activation])
                assert found <= 1.2 * rounded[activation] + 1e-5, (config, activation, tokens, found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_exact(dtype):
    """Each code alone in its row, times one: the output is the code itself."""
    k, every = 512, torch.arange(-8, 8, device=CUDA, dtype=torch.int8)
    x = torch.ones(1, k, device=CUDA, dtype=dtype)
    for column in (0, 1, 2, 7, 31, 64, 100, 127, 128, 255, 256, 383, 511):
        full = torch.zeros(64, k, device=CUDA, dtype=torch.int8)
        full[:, column] = every.repeat(4)
        codes = pack(full)
        ones = torch.ones(64, k // 128, device=CUDA, dtype=dtype)
        packed = Packed24(to_nibbles(codes.values), codes.meta, k, ones)
        for config in candidates(8, dtype):
            y = product(x, packed, config)[0].double()
            assert torch.equal(y, every.repeat(4).double()), (column, config)


@pytest.mark.parametrize("room", ROOMS)
def test_twenty_runs_give_the_same_bits(room):
    """Clusters, and tiles in turns: a race would move the result."""
    packed, bias = weight(4096, 4096), torch.randn(4096, device=CUDA, dtype=BF16)
    x = torch.randn(tokens_of(room)[-1], 4096, device=CUDA, dtype=BF16)
    for config in candidates(room):
        first = product(x, packed, config, bias)
        for _ in range(20):
            assert torch.equal(product(x, packed, config, bias), first), config


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("room", ROOMS)
def test_zeros(room, dtype):
    """Rows of zeros and tokens of zeros, also of -0.0, give the bias, or zeros without one."""
    packed, bias = weight(192, 640, dtype), torch.randn(192, device=CUDA).to(dtype)
    packed.values[3::7] = 0
    x = torch.randn(8, 640, device=CUDA).to(dtype)
    x[1], x[2] = 0, -0.0
    expected = Expected(x[3:], packed, bias)
    for config in candidates(room, dtype):
        y = product(x, packed, config, bias)
        assert torch.equal(y[1], bias), config
        assert torch.equal(y[2], bias), config
        assert torch.equal(y[:, 3::7], bias[3::7].expand(8, -1)), config
        expected.check(y[3:], config)
        plain = product(x, packed, config)
        assert not bool(plain[1:3].any()), config
        assert not bool(plain[:, 3::7].any()), config


@pytest.mark.parametrize("room", ROOMS)
def test_what_is_not_finite_stays_in_its_token(room):
    packed = weight(192, 640)
    weights = packed.unpack(torch.float64)
    tokens = tokens_of(room)[-1]
    x = torch.randn(tokens, 640, device=CUDA, dtype=BF16)
    bad = {2: torch.inf, 3: -torch.inf, tokens - 1: torch.nan}
    dirty = x.clone()
    for token, value in bad.items():
        dirty[token, 130 + token] = value
    others = [token for token in range(tokens) if token not in bad]
    for config in candidates(room):
        y, clean = product(dirty, packed, config), product(x, packed, config)
        assert torch.equal(y[others], clean[others]), config
        for token in bad:
            reached = weights[:, 130 + token] != 0
            assert not bool(y[token][reached].isfinite().any()), (config, token)
        assert bool(y[tokens - 1][weights[:, 129 + tokens] != 0].isnan().all()), config


@pytest.mark.parametrize("room", ROOMS)
def test_the_largest_codes_and_scales_of_float16(room):
    """Weights as large as numbers go: only an output may be too large, then it is infinite."""
    n, k = 256, 512
    kept = torch.zeros(n, k, dtype=torch.int8, device=CUDA)
    kept[:, 1::4], kept[:, 2::4] = 7, -8
    codes = pack(kept)
    scale = torch.full((n, k // 128), 8188.0, device=CUDA, dtype=FP16)  # times -8: the largest there is
    scale[1::2] = 2.0**-24  # and the smallest
    assert within_reach(scale)
    assert not within_reach(scale * 1.01)
    packed = Packed24(to_nibbles(codes.values), codes.meta, k, scale)
    x = torch.randn(room, k, device=CUDA)
    x[0::2] /= 16  # outputs about as large as float16 goes
    x[1::2] *= 2.0**-20  # below its normal numbers
    x = x.to(FP16)
    exact = x.double() @ packed.unpack(torch.float64).t()
    fits, too_large = exact.abs() < 65400, exact.abs() > 65600
    assert bool(too_large.any())
    assert bool(fits[0::2].any())
    for config in candidates(room, FP16):
        y = product(x, packed, config).double()
        assert torch.equal(y[too_large], torch.inf * exact[too_large].sign()), config
        for of in (slice(0, None, 2), slice(1, None, 2)):  # the large would hide what is wrong in the small
            wanted, got = exact[of].where(fits[of], 0), y[of].where(fits[of], 0)
            assert error(got, wanted) <= 1.2 * error(wanted.to(FP16), wanted) + 1e-7, (config, of)


def test_scales_of_every_size_in_bfloat16():
    """Group by group of the same row: a scale of another group would be off by far."""
    n, k = 256, 1024
    packed = weight(n, k)
    powers = torch.tensor([0.0, -55, 20, -20, 60, -40, 40, -8], device=CUDA)
    packed.scale.copy_(packed.scale * 2.0**powers)
    assert within_reach(packed.scale)
    for group, power in enumerate(powers.tolist()):
        x = torch.zeros(8, k, device=CUDA, dtype=BF16)
        x[:, 128 * group : 128 * (group + 1)] = torch.randn(8, 128, device=CUDA) * 2.0**-power
        expected = Expected(x, packed)
        for config in candidates(8):
            expected.check(product(x, packed, config), config, group)


@pytest.mark.parametrize("room", ROOMS)
def test_x_that_the_kernel_before_makes(room):
    """The kernel may start while the one before still runs: it must not read x, nor write y, too early."""
    n = k = 2048
    packed = streamed(weight(n, k))  # now, not between the kernels
    big = torch.randn(4096, 4096, device=CUDA, dtype=BF16)
    inputs = [torch.randn(room, k, device=CUDA, dtype=BF16) for _ in range(4)]
    for config in candidates(room):
        expected = [product(i * 2, packed, config) for i in inputs]
        chained = [product(e, packed, config) for e in expected]
        torch.cuda.synchronize()
        x, y, z = torch.empty_like(inputs[0]), torch.empty_like(expected[0]), torch.empty_like(expected[0])
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for step in range(8):
                i = step % 4
                torch.mm(big, big)  # keeps the GPU busy, so that all launches below queue up
                torch.mul(inputs[i], 2, out=x)
                product(x, packed, config, out=y)
                product(y, packed, config, out=z)
                kept_y, kept_z = y.clone(), z.clone()
                x.fill_(torch.nan)
                y.fill_(torch.nan)
                stream.synchronize()
                assert torch.equal(kept_y, expected[i]), (config, step)
                assert torch.equal(kept_z, chained[i]), (config, step)


@pytest.mark.parametrize("room", ROOMS)
def test_cuda_graph(room):
    packed, x = streamed(weight(1024, 2048)), torch.randn(room, 2048, device=CUDA, dtype=BF16)
    for config in (hopper_choices.guess4(1024, room), candidates(room)[0], candidates(room)[-1]):
        product(x, packed, config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = product(torch.relu(x), packed, config)
        for _ in range(5):
            x.copy_(torch.randn_like(x))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, product(torch.relu(x), packed, config)), config


def test_one_launch_object_serves_every_weight_and_number_of_tokens():
    x = torch.randn(200, 640, device=CUDA, dtype=BF16)
    config = hopper_choices.guess4(320, 8)
    for tokens in (5, 1, 200, 5):  # at the same address
        packed = weight(320, 640)
        Expected(x[:tokens], packed).check(product(x[:tokens], packed, config), config, tokens)
