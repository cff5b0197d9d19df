// What all kernels share: short names of types, addresses in shared memory, 16-bit numbers (FP16 or bf16).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u16 to_16_bit(float value) {
  u16 out;
#if FP16
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
#endif
  return out;
}
__device__ __forceinline__ float from_16_bit(u16 value) {
#if FP16
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value));
  return out;
#else
  return __uint_as_float((u32)value << 16);
#endif
}
