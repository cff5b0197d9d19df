// Codes as 16-bit numbers (FP16 or bf16), two at a time, in registers; after common.cuh.

// a·b + c for two 16-bit numbers at once, rounded once; numbers too small to be normal are kept.
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

// 4-bit codes times the scales of their two rows, rounded once. Codes of the first row are at bits 0 and 8 of both halves of
// a word, those of the second at bits 4 and 12.
//
// In bf16 the last eight bits of a number alone are that many times 2⁻¹³³, also the code + 8 at bits 4 to 7, which is 16 times
// as much: one multiplication with the scale times 2¹³³ and one addition of -8 scales, and there is nothing to shift. As bf16
// ends before 2¹³³, all are made smaller by LARGER, which is for the sums to undo. So scales must lie within 2⁻⁶⁶ and 2⁵⁵
// (streamed.py sees to it).
#if FP16
struct Scales {
  static constexpr float LARGER = 1.f;
  u32 first, second;
  __device__ __forceinline__ Scales(u32 both) : first(__byte_perm(both, 0, 0x1010)), second(__byte_perm(both, 0, 0x3232)) {}
};
__device__ __forceinline__ void four_bit_numbers(u32 (&out)[4], u32 word, const Scales& scales) {
  const u32 later = word >> 8;
  out[0] = two(two(and_xor(word, 0x000F000F, 0x64086408), 0x3C003C00, 0xE408E408), scales.first, 0x80008000);
  out[1] = two(two(and_xor(word, 0x00F000F0, 0x64806480), 0x2C002C00, 0xD480D480), scales.second, 0x80008000);
  out[2] = two(two(and_xor(later, 0x000F000F, 0x64086408), 0x3C003C00, 0xE408E408), scales.first, 0x80008000);
  out[3] = two(two(and_xor(later, 0x00F000F0, 0x64806480), 0x2C002C00, 0xD480D480), scales.second, 0x80008000);
}
#else
struct Scales {
  static constexpr float LARGER = 1152921504606846976.f;  // 2⁶⁰
  u32 first, second, first_less, second_less;
  __device__ __forceinline__ Scales(u32 both) {
    const u32 of_first = __byte_perm(both, 0, 0x1010), of_second = __byte_perm(both, 0, 0x3232);
    first = two(of_first, 0x64006400, 0x80008000), second = two(of_second, 0x62006200, 0x80008000);          // 2⁷³, 2⁶⁹
    first_less = two(of_first, 0xA300A300, 0x80008000), second_less = two(of_second, 0xA300A300, 0x80008000);  // -2⁻⁵⁷
  }
};
__device__ __forceinline__ void four_bit_numbers(u32 (&out)[4], u32 word, const Scales& scales) {
  const u32 later = word >> 8;
  out[0] = two(and_xor(word, 0x000F000F, 0x00080008), scales.first, scales.first_less);
  out[1] = two(and_xor(word, 0x00F000F0, 0x00800080), scales.second, scales.second_less);
  out[2] = two(and_xor(later, 0x000F000F, 0x00080008), scales.first, scales.first_less);
  out[3] = two(and_xor(later, 0x00F000F0, 0x00800080), scales.second, scales.second_less);
}
#endif
