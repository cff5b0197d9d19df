"""The rotary kernel without a GPU: its text is compiled for GPUs, and run as C++, thread after thread."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from twofour import ops
from twofour.kernels import rope
from twofour.kernels.nvrtc import cuda_text
from twofour.kernels.rope import Config

nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not here")
compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not here")


def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
    """As models with 16-bit cos spell it out."""

    def turn(x: Tensor) -> Tensor:
        width = cos.shape[-1]
        rest, x = x[..., width:], x[..., :width]
        half = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), -1)
        return torch.cat((x * cos.unsqueeze(heads_dim) + half * sin.unsqueeze(heads_dim), rest), -1)

    return turn(q), turn(k)


def drawn(batch, tokens, heads, kv_heads, head, rotated, dtype, *, wide=False, rows=None):
    """q, k, cos and sin as attention has them: q and k are parts of one product, heads before tokens."""
    random = torch.Generator().manual_seed(batch * tokens + heads)
    both = torch.randn(batch, tokens, (heads + kv_heads) * head + 8, generator=random).to(dtype)
    q, k, _ = both.split([heads * head, kv_heads * head, 8], -1)
    factors = torch.float32 if wide else dtype
    shape = (rows or batch, tokens, rotated)
    cos, sin = (torch.randn(shape, generator=random).to(factors) for _ in "cs")
    q, k = (x.unflatten(-1, (x.shape[-1] // head, head)).transpose(1, 2) for x in (q, k))
    return q, k, cos, sin


# ------------------------------------------------------------------------------------------------------------
# The operator.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rotated", [16, 8])
def test_the_reference_is_what_models_spell_out(dtype, rotated):
    q, k, cos, sin = drawn(2, 3, 4, 2, 16, rotated, dtype)
    for got, wanted in zip(ops.rope(q, k, cos, sin, 1, True), plain(q, k, cos, sin, 1), strict=True):
        assert torch.equal(got, wanted)
        assert got.transpose(1, 2).is_contiguous(), "tokens before heads, without gaps"
    other = ops.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2, True)
    assert all(map(torch.equal, (x.transpose(1, 2) for x in other), ops.rope(q, k, cos, sin, 1, True)))


def test_without_rounded_steps_it_is_nearer_to_the_truth():
    q, k, cos, sin = drawn(2, 30, 4, 2, 64, 64, torch.bfloat16)
    exact = plain(q.double(), k.double(), cos.double(), sin.double(), 1)[0]
    errors = [(ops.rope(q, k, cos, sin, 1, steps)[0] - exact).abs().mean() for steps in (False, True)]
    assert errors[0] < 0.8 * errors[1]
    wide = ops.rope(q, k, cos.float(), sin.float(), 1, True)
    assert torch.equal(wide[0], ops.rope(q, k, cos, sin, 1, False)[0]), "float32 cos: rounded once"


def test_the_operator_is_well_made():
    for dtype, rotated in ((torch.bfloat16, 16), (torch.float32, 8)):
        torch.library.opcheck(ops.rope, (*drawn(2, 3, 4, 2, 16, rotated, dtype), 1, True))
    q, k, cos, sin = drawn(2, 0, 4, 2, 16, 16, torch.float32)
    assert ops.rope(q, k, cos, sin, 1, True)[0].shape == (2, 4, 0, 16)


# ------------------------------------------------------------------------------------------------------------
# The kernel.

CONFIGS = [
    Config(128, 128, torch.bfloat16, wide=False, round_steps=True),
    Config(64, 16, torch.float16, wide=True, round_steps=False),
    Config(80, 80, torch.float16, wide=False, round_steps=False),
    Config(10, 6, torch.bfloat16, wide=True, round_steps=False, vector=1),
]


@nvcc
@pytest.mark.parametrize("architecture", ["80", "90a"])
@pytest.mark.parametrize("config", CONFIGS)
def test_compiles_without_spills(config, architecture, tmp_path):
    (tmp_path / "kernel.cu").write_text(rope.source(config))
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = ["nvcc", target, "-std=c++17", "-use_fast_math", "-cubin", "-Xptxas", "-v", "kernel.cu"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "warning" not in ran.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in ran.stderr
    (registers,) = re.findall(r"Used (\d+) registers", ran.stderr)
    assert int(registers) <= 80


#: What the text takes from CUDA and from common.cuh, for a CPU. Rounding is to nearest, ties to even.
ON_A_CPU = """
#include <cstdint>
#include <cstring>
typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64;
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static long writes = 0;
static void __stcg(uint4* to, uint4 value) {
  if ((u64)to % 16) writes = -1000000;
  *to = value;
}
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static struct { u32 x; } blockIdx, threadIdx;
#if FP16
static u16 to_16_bit(float value) { _Float16 h = (_Float16)value; u16 out; memcpy(&out, &h, 2); return out; }
static float from_16_bit(u16 value) { _Float16 h; memcpy(&h, &value, 2); return (float)h; }
#else
static u16 to_16_bit(float value) {
  u32 bits; memcpy(&bits, &value, 4); return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static float from_16_bit(u16 value) {
  u32 bits = (u32)value << 16; float out; memcpy(&out, &bits, 4); return out;
}
#endif
"""

RUN_ALL = """
extern "C" long run(const Work* work, int blocks) {
  for (blockIdx.x = 0; blockIdx.x < (u32)blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) rope(*work);
  return writes;
}
"""


@pytest.fixture(scope="module")
def on_a_cpu(tmp_path_factory):
    """The kernel's own text as a function (places, sizes, config, processors)."""
    folder: Path = tmp_path_factory.mktemp("rope")
    made: dict[Config, ctypes.CDLL] = {}

    def run(places, sizes, config, processors):
        if config not in made:
            name = f"kernel{len(made)}"
            text = rope.constants(config) + ON_A_CPU + cuda_text("rope.cu") + RUN_ALL
            (folder / f"{name}.cpp").write_text(text)
            command = ["g++", "-O1", "-std=c++17", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
            command += [f"{name}.cpp", "-o", f"{name}.so"]
            ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            assert ran.returncode == 0, ran.stderr
            made[config] = ctypes.CDLL(str(folder / f"{name}.so"))
        numbers = rope.work(places, sizes, config, processors)
        blocks = -(-numbers[-1] // rope.THREADS)
        assert made[config].run((ctypes.c_int64 * len(numbers))(*numbers), blocks) == 0, "an uneven address"

    return run


@compiler
@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "wide", "steps", "rows", "vector"),
    [
        ((2, 7, 8, 2, 128, 128), False, True, None, 8),  # Llama
        ((3, 1, 8, 2, 128, 128), False, True, None, 8),  # a token each
        ((3, 5, 4, 4, 64, 16), False, False, 1, 8),  # a part of a head, the same positions for all
        ((2, 3, 5, 1, 80, 80), True, False, 1, 8),  # float32 cos, uneven groups of heads
        ((2, 5, 3, 1, 10, 6), False, True, None, 1),  # widths that fit no vector
        ((1, 4, 2, 1, 24, 24), True, False, None, 1),
    ],
)
def test_the_kernel_gives_the_bits_of_the_reference(
    on_a_cpu, shape, wide, steps, rows, vector, heads_dim, dtype
):
    q, k, cos, sin = drawn(*shape, dtype, wide=wide, rows=rows)
    if heads_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    wanted = ops.rope(q, k, cos, sin, heads_dim, steps)
    for processors in (1000, 0.01):  # every thread one head, or as many as there may be
        new_q, new_k = (torch.full_like(x, torch.nan) for x in (q, k))
        places = rope.places_of((q, k, cos, sin, new_q, new_k), heads_dim)
        config = rope.config_of(q, cos, places, steps)
        assert config == Config(*shape[-2:], dtype, wide, steps and not wide, vector)
        on_a_cpu(places, rope.sizes_of(q, k, heads_dim), config, processors)
        assert torch.equal(new_q, wanted[0])
        assert torch.equal(new_k, wanted[1])


def test_uneven_addresses_are_taken_one_by_one():
    q, k, cos, sin = drawn(2, 3, 4, 2, 64, 64, torch.bfloat16)

    def vector(q, cos, sin):
        places = rope.places_of((q, k, cos, sin, torch.empty_like(q), torch.empty_like(k)), 1)
        return rope.config_of(q, cos, places, True).vector

    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    stretched = torch.empty(2, 4, 3, 66, dtype=q.dtype)[..., :64]
    assert vector(q, cos, sin) == 8
    assert vector(shifted, cos, sin) == vector(stretched, cos, sin) == 1
    assert vector(q, cos[..., :62], sin[..., :62]) == vector(q, cos[..., :40], sin[..., :40]) == 1


def test_why_not_says_what_is_missing():
    assert "CUDA" in rope.why_not(*drawn(1, 2, 2, 1, 16, 16, torch.bfloat16))
