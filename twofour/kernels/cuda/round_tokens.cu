// Every token of x[tokens, k] as codes of 8 bits and the scale that makes them x again: its largest magnitude over the
// largest code (quantize/activations.py says what the special cases give). One block a token, which stays in registers
// between the search for the largest and the rounding, so memory is read and written once.
//
// Compiled per configuration: K (a multiple of 8), THREADS, CODES (1 e4m3, 2 int8), FP16 or bf16.

constexpr int CHUNKS = K / 8;  // 16 bytes of x, 8 of codes
constexpr int HELD = (CHUNKS + THREADS - 1) / THREADS;
constexpr float LIMIT = CODES == 1 ? 448.f : 127.f;
constexpr u32 NOT_FINITE = FP16 ? 0x7C00 : 0x7F80;  // magnitudes from here on, as integers

__device__ __forceinline__ u32 two_codes(float first, float second) {
#if CODES == 1
  u16 out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(second), "f"(first));
  return out;
#else
  return (__float2int_rn(first) & 255) | (__float2int_rn(second) & 255) << 8;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
round_tokens(const uint4* x, uint2* codes, float* scales) {  // not __restrict__: x must not be read by a cache that is
                                                             // not kept coherent, as the kernel before may still write it
  __shared__ u32 of_warps[THREADS / 32];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
  const uint4* from = x + (u64)blockIdx.x * CHUNKS;
  u32 held[HELD][4], largest = 0;
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int chunk = i * THREADS + threadIdx.x;
    const uint4 read = chunk < CHUNKS ? from[chunk] : make_uint4(0, 0, 0, 0);
    held[i][0] = read.x, held[i][1] = read.y, held[i][2] = read.z, held[i][3] = read.w;
#pragma unroll
    for (int j = 0; j < 4; ++j)  // magnitudes order as their bits do, infinity and NaN above all
      largest = max(largest, max(held[i][j] & 0x7FFF, held[i][j] >> 16 & 0x7FFF));
  }
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < THREADS / 32; ++w) largest = max(largest, of_warps[w]);

  const bool finite = largest < NOT_FINITE;
  const float most = from_16_bit((u16)largest);
  float scale = most / LIMIT;
  if (!(scale >= 1.17549435e-38f)) scale = 1.f;
  const float by = finite ? 1.f / scale : 0.f;
  if (threadIdx.x == 0) scales[blockIdx.x] = finite ? scale : __int_as_float(0x7FC00000);
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int chunk = i * THREADS + threadIdx.x;
    u32 out[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u32 two = finite ? held[i][j] : 0;  // infinity times zero would be NaN
      out[j] = two_codes(from_16_bit((u16)two) * by, from_16_bit((u16)(two >> 16)) * by);
    }
    if (chunk < CHUNKS)
      codes[(u64)blockIdx.x * CHUNKS + chunk] = make_uint2(out[0] | out[1] << 16, out[2] | out[3] << 16);
  }
}
