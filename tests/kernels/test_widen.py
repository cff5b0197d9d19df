"""cuda/widen.cu on the CPU: compiled by g++ with CUDA's words made those of C++, a thread for each thread."""

import ctypes
import shutil
import subprocess

import pytest
import torch

from tests.kernels.test_quantized_decode_emulated import random_weight
from twofour.kernels import widen
from twofour.kernels.nvrtc import cuda_text
from twofour.streamed import stream

SHIM = r"""
#include <barrier>
#include <bit>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Index { int x; };
static thread_local Index threadIdx, blockIdx;
static thread_local std::barrier<>* own_warp;
static void __syncwarp() { own_warp->arrive_and_wait(); }
static float __uint_as_float(u32 bits) { return std::bit_cast<float>(bits); }
#if FP16
static u16 to_16_bit(float value) { return std::bit_cast<u16>((_Float16)value); }
static float from_16_bit(u16 value) { return (float)std::bit_cast<_Float16>(value); }
#else
static u16 to_16_bit(float value) {
  const u32 bits = std::bit_cast<u32>(value);
  return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
static float from_16_bit(u16 value) { return std::bit_cast<float>((u32)value << 16); }
#endif
"""
RUN = """
extern "C" void run(int blocks, int threads, u64* given) {
  for (int block = 0; block < blocks; ++block) {
    std::vector<std::thread> all;
    std::vector<std::barrier<>*> warps;
    for (int warp = 0; warp < threads / 32; ++warp) warps.push_back(new std::barrier<>(32));
    for (int thread = 0; thread < threads; ++thread)
      all.emplace_back([=] {
        threadIdx.x = thread, blockIdx.x = block, own_warp = warps[thread / 32];
        widen(CALL);
      });
    for (auto& thread : all) thread.join();
    for (auto warp : warps) delete warp;
  }
}
"""
PLAIN = "(const u8*)given[0], (const u16*)given[1], (uint4*)given[2], (long long)given[3]"
STREAMED = (
    "(const uint4*)given[0], (const u32*)given[1], (uint4*)given[2], (const uint2*)given[3], (uint4*)given[4]"
)


@pytest.fixture
def _on_the_cpu(monkeypatch, tmp_path):
    """The real source and host code; compiled, loaded and launched by others."""

    def load(text, architecture, name, shared, device):
        own, streamed = text.replace(cuda_text("common.cuh"), SHIM), "#define CODES 4" in text
        assert own != text
        source, made = tmp_path / "widen.cpp", tmp_path / f"{abs(hash(text))}.so"
        source.write_text(own + RUN.replace("CALL", STREAMED if streamed else PLAIN))
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", "-o", made, source]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(made)).run

    def launcher(function, threads, shared, arguments, early):
        def launch(blocks, stream):
            given = [ctypes.c_uint64.from_address(at).value for at in arguments]
            function(blocks, threads, (ctypes.c_uint64 * len(given))(*given))

        return launch

    monkeypatch.setattr(widen.nvrtc, "load", load)
    monkeypatch.setattr(widen.nvrtc, "launcher", launcher)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    widen._kernel.cache_clear()
    yield
    widen._kernel.cache_clear()


@pytest.mark.usefixtures("_on_the_cpu")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("codes", "group", "streamed"),
    [
        ("int4", 128, True),
        ("int4", 128, False),
        ("int4", 32, False),
        ("int8", None, False),
        ("fp8", None, False),
    ],
)
def test_values_and_positions_are_those_of_the_dequantized_matrix(codes, group, streamed, dtype):
    torch.manual_seed(0)
    packed = random_weight(128, 384, codes, group, dtype)
    held = (packed.values, packed.meta, packed.scale)
    held = stream(*held) if streamed else held
    values, meta = widen.widen(*held, 384)
    assert values.dtype == dtype
    assert torch.equal(meta, packed.meta)
    nibbles = torch.stack([meta & 15, meta >> 4], -1).flatten(1).long()
    kept = torch.stack([nibbles & 3, nibbles >> 2], -1) + 4 * torch.arange(96)[:, None]
    assert torch.equal(values, packed.unpack().gather(1, kept.flatten(1)))
