// The instructions of sm_80 and later that kernels for few tokens are made of; common.cuh comes first.

// Groups of copies that complete later (cp.async).
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// For what passes through the second cache once.
__device__ __forceinline__ u64 read_once() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}

// From sm_90 on the next kernel of a stream may start while this one still runs, and this one while the one before does.
__device__ __forceinline__ void next_may_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void kernel_before_has_ended() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Four 8×8 matrices of 16 bit. Lanes 8i … 8i+7 give the addresses of matrix i's rows; lane l gets the elements
// 2·(l%4) and the next of row l/4 of each.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// d += A·B for 16 rows of W, 32 columns (of which A has the 16 that are kept), 8 tokens. `places` are positions, in the
// lanes 2·SELECTOR and 2·SELECTOR + 1 of each quad.
template <int SELECTOR>
__device__ __forceinline__ void multiply_add(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4], u32 places) {
#if FP16
#define KIND "f32.f16.f16.f32"
#else
#define KIND "f32.bf16.bf16.f32"
#endif
  asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col." KIND
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(places),
        "n"(SELECTOR));
}
