// Codes as 16-bit numbers (FP16 or bf16), two at a time, in registers; after common.cuh.

// a·b + c for two 16-bit numbers at once. Everything below is exact, and numbers too small to be normal are kept.
__device__ __forceinline__ u32 two(u32 a, u32 b, u32 c) {
  u32 out;
#if FP16
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
#endif
  return out;
}

// (a & b) ^ c and (a & b) | c as one instruction: left to itself the compiler makes two of them.
__device__ __forceinline__ u32 and_xor(u32 a, u32 b, u32 c) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}
__device__ __forceinline__ u32 and_or(u32 a, u32 b, u32 c) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// The two 4-bit codes that are byte number `byte` of a word.
//
// A code with its upper bit turned is code + 8. In the last bits of 128 (bf16: 0x4300) or 1024 (fp16: 0x6400) it is
// 136 or 1032 + code. fp16 has room for it 4 bits further up as well, times 16.
__device__ __forceinline__ u32 four_bit_numbers(u32 word, u32 byte) {
#if FP16
  const u32 twice = __byte_perm(word, 0, 0x0101 * byte);
  return two(and_xor(twice, 0x00F0000F, 0x64806408), 0x2C003C00, 0xD480E408);
#else
  // A product moves the second code up: it is not done where the other instructions are, which are the bottleneck.
  u32 apart;
  asm("mul.lo.u32 %0, %1, 0x1001;" : "=r"(apart) : "r"(__byte_perm(word, 0, 0x4440 + byte)));
  return two(and_xor(apart, 0x000F000F, 0x43084308), 0x3F803F80, 0xC308C308);
#endif
}

// The two 4-bit codes at bits 4·`number` of both halves of a word.
__device__ __forceinline__ u32 four_bit_pair(u32 word, int number) {
#if FP16
  const u32 near = number < 2 ? word : word >> 8;
  if (number % 2) return two(and_xor(near, 0x00F000F0, 0x64806480), 0x2C002C00, 0xD480D480);
  return two(and_xor(near, 0x000F000F, 0x64086408), 0x3C003C00, 0xE408E408);
#else
  return two(and_xor(word >> 4 * number, 0x000F000F, 0x43084308), 0x3F803F80, 0xC308C308);
#endif
}
