// Codes of 8 or 4 bits as 16-bit numbers: code × scale, rounded once. The packed values [n, KEPT] of a quantized matrix
// become those of a 16-bit one; the positions stay as they are. For products with so many tokens that the arithmetic
// takes longer than this.
//
// Compiled per configuration: KEPT (values a row, a multiple of 8), PER_SCALE (values that share a scale), SCALES (a row),
// CODES (1 e4m3, 2 int8, 3 int4, 4 int4 in threads' order), FP16 or bf16. In threads' order (streamed.py) the positions become
// row by row on the way.

constexpr int CHUNKS = KEPT / 8;  // of a row; 16 bytes of the result each

__device__ __forceinline__ float number(u32 code) {
#if CODES == 1  // sign, 4 bits of exponent, 3 of mantissa: placed into a float they are 2⁻¹²⁰ of their value
  return __uint_as_float((code & 0x80) << 24 | (code & 0x7F) << 20) * 1.329227995784916e36f;
#elif CODES == 2
  return (float)(signed char)code;
#else
  return (float)((int)(code << 28) >> 28);
#endif
}

extern "C" __global__ void __launch_bounds__(256)
widen(const u8* __restrict__ codes, const u16* __restrict__ scales, uint4* __restrict__ out, long long chunks,
      const u16* __restrict__ positions, u16* __restrict__ by_rows) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
  const long long chunk = blockIdx.x * 256ll + threadIdx.x;
  if (chunk >= chunks) return;
  const long long row = chunk / CHUNKS;
  const int first = (int)(chunk % CHUNKS) * 8;
  float value[8];
#if CODES == 4  // a chunk is 16 columns: number j of a group's eight
  const int group = first / 64, j = first % 64 / 8, half = row / 8 % 2, pair = row % 64 / 16 * 8 + row % 8;
  const long long piece = row / 64 * SCALES + group;
  const float scale = from_16_bit(scales[(piece * 32 + pair) * 2 + half]);
  const int at = 4 * (2 * (j % 2) + half);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const u32 read = ((const u32*)codes)[(piece * 128 + 4 * pair + q) * 4 + j / 2];
    value[2 * q] = number(read >> at & 15) * scale;
    value[2 * q + 1] = number(read >> (16 + at) & 15) * scale;
  }
  by_rows[chunk] = positions[(piece * 128 + 4 * pair + j % 4) * 4 + 2 * (j / 4) + half];
#else
  const float scale = from_16_bit(scales[row * SCALES + first / PER_SCALE]);
#endif
#if CODES == 3
  const u32 read = ((const u32*)codes)[chunk];
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] = number(read >> 4 * i & 15) * scale;
#elif CODES < 3
  const uint2 read = ((const uint2*)codes)[chunk];
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] = number((i < 4 ? read.x : read.y) >> 8 * (i % 4) & 255) * scale;
#endif
  u32 two[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) two[i] = to_16_bit(value[2 * i]) | (u32)to_16_bit(value[2 * i + 1]) << 16;
  out[chunk] = make_uint4(two[0], two[1], two[2], two[3]);
}
