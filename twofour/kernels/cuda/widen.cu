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

#if CODES < 4
extern "C" __global__ void __launch_bounds__(256)
widen(const u8* __restrict__ codes, const u16* __restrict__ scales, uint4* __restrict__ out, long long chunks) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
  const long long chunk = blockIdx.x * 256ll + threadIdx.x;
  if (chunk >= chunks) return;
  const long long row = chunk / CHUNKS;
  const int first = (int)(chunk % CHUNKS) * 8;
  const float scale = from_16_bit(scales[row * SCALES + first / PER_SCALE]);
  float value[8];
#if CODES == 3
  const u32 read = ((const u32*)codes)[chunk];
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] = number(read >> 4 * i & 15) * scale;
#else
  const uint2 read = ((const uint2*)codes)[chunk];
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] = number((i < 4 ? read.x : read.y) >> 8 * (i % 4) & 255) * scale;
#endif
  u32 two[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) two[i] = to_16_bit(value[2 * i]) | (u32)to_16_bit(value[2 * i + 1]) << 16;
  out[chunk] = make_uint4(two[0], two[1], two[2], two[3]);
}

#else
// A block has a piece of 64 rows × 128 columns, a warp 16 of the rows. Each thread reads what is its own in threads' order, and
// by way of shared memory the warp writes rows.
extern "C" __global__ void __launch_bounds__(128)
widen(const uint4* __restrict__ codes, const u32* __restrict__ scales, uint4* __restrict__ out, const uint2* __restrict__ positions,
      uint4* __restrict__ by_rows) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
  alignas(16) __shared__ u32 values_of[4][16][36];  // four words more than a row has: eight rows are in different banks
  alignas(16) __shared__ u16 places_of[4][16][8];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
  const long long piece = blockIdx.x;
  const uint4 words = codes[piece * 128 + threadIdx.x];
  const uint2 places = positions[piece * 128 + threadIdx.x];
  const u32 both = scales[piece * 32 + 8 * warp + r];
  const float scale[2] = {from_16_bit((u16)both), from_16_bit((u16)(both >> 16))};
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const u32 word = p == 0 ? words.x : p == 1 ? words.y : p == 2 ? words.z : words.w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 left = to_16_bit(number(word >> 4 * i & 15) * scale[i % 2]);
      const u32 right = to_16_bit(number(word >> (16 + 4 * i) & 15) * scale[i % 2]);
      values_of[warp][r + 8 * (i % 2)][4 * (2 * p + i / 2) + q] = left | right << 16;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const u32 word = h ? places.y : places.x;
    places_of[warp][r][4 * h + q] = (u16)word;
    places_of[warp][r + 8][4 * h + q] = (u16)(word >> 16);
  }
  __syncwarp();
  const long long row = piece / SCALES * 64 + 16 * warp;
  const int group = (int)(piece % SCALES);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int own = 4 * i + lane / 8, part = lane % 8;
    out[(row + own) * CHUNKS + 8 * group + part] = *(const uint4*)&values_of[warp][own][4 * part];
  }
  if (lane < 16) by_rows[(row + lane) * SCALES + group] = *(const uint4*)places_of[warp][lane];
}
#endif
