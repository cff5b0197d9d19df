// What the Hopper kernels share, after common.cuh: barriers, the tensor copy engine, clusters, wgmma's descriptors.

// Sums of products, as operands of instructions, and a place that the compiler must not move them across.
#if CODES == 2
typedef int Sum;
#define SUM_IN(s) "r"(s)
#define SUM_OUT(s) "=r"(s)
#define HOLD(s) asm volatile("" : "+r"(s)::"memory")
#else
typedef float Sum;
#define SUM_IN(s) "f"(s)
#define SUM_OUT(s) "=f"(s)
#define HOLD(s) asm volatile("" : "+f"(s)::"memory")
#endif

struct alignas(64) TensorMap { char opaque[128]; };

// True for one thread of a warp. Unlike with `lane == 0` the compiler knows that it is one, and makes no loop over all that
// might be there of each instruction that wants the same operands in all lanes: copies, and what sets up a barrier.
__device__ __forceinline__ bool elected() {
  u32 is;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is));
  return is;
}

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ u32 address_in(u32 address, u32 block) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}
// Arrive at the same barrier of another block of the cluster.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 block) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(barrier, block)) : "memory");
}
// Store 1, 2 or 4 sums in a block of the cluster, whose barrier counts the bytes; or here, if that block is this one. `there` and
// `barrier` are addresses in that block. All in one piece: what the compiler does with sums itself it may do too early (C7514).
template <int COUNT>
__device__ __forceinline__ void store_in(u32 there, u32 barrier, u32 here, bool is_here, const Sum* sums) {
  static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4, "words of one store");
  const u32 which = is_here;
  if constexpr (COUNT == 4)
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %7, 0;\n@p st.shared.v4.b32 [%6], {%0, %1, %2, %3};\n"
                 "@!p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%4], {%0, %1, %2, %3}, [%5];\n}" ::SUM_IN(
                     sums[0]),
                 SUM_IN(sums[1]), SUM_IN(sums[2]), SUM_IN(sums[3]), "r"(there), "r"(barrier), "r"(here), "r"(which)
                 : "memory");
  else if constexpr (COUNT == 2)
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p st.shared.v2.b32 [%4], {%0, %1};\n"
                 "@!p st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%2], {%0, %1}, [%3];\n}" ::SUM_IN(sums[0]),
                 SUM_IN(sums[1]), "r"(there), "r"(barrier), "r"(here), "r"(which)
                 : "memory");
  else
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n@p st.shared.b32 [%3], %0;\n"
                 "@!p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%1], %0, [%2];\n}" ::SUM_IN(sums[0]),
                 "r"(there), "r"(barrier), "r"(here), "r"(which)
                 : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, int phase) {
  asm volatile(
      "{\n.reg .pred done;\nwaiting:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra waiting;\nfinished:\n}" ::"r"(barrier), "r"(phase) : "memory");
}
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, int x, int y, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
      : "memory");
}
// The same tile into every block of the cluster that `blocks` names, at the same place in each one's shared
// memory, and each one's barrier counts the bytes.
__device__ __forceinline__ void copy_tile_to(u32 to, const TensorMap* map, int x, int y, u32 barrier, u64 policy,
                                             u16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %6, %5;" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier),
      "l"(policy), "h"(blocks)
      : "memory");
}
// Slices of 64 columns, one after the other, from number `slice` on.
__device__ __forceinline__ void copy_slices(u32 to, const TensorMap* map, int row, int slice, u32 barrier,
                                            u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(slice), "r"(barrier),
      "l"(policy)
      : "memory");
}
// Rows of a gate and of the matrix beside it in turns, eight at a time: the map has the dimensions (column, row
// of eight, which of the two matrices, eight rows), so the copy engine interleaves them on the way.
__device__ __forceinline__ void copy_pairs(u32 to, const TensorMap* map, int x, int eights, u32 barrier,
                                           u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %6, %6, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(x), "r"(eights), "r"(barrier),
      "l"(policy), "r"(0)
      : "memory");
}
// A box of five dimensions, at (0, b, c, d, 0).
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, int b, int c, int d, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%7, %2, %3, %4, %7}], [%5], %6;" ::"r"(to), "l"(map), "r"(b), "r"(c), "r"(d), "r"(barrier),
      "l"(policy), "r"(0)
      : "memory");
}
// Neighbouring bytes, a multiple of 16.
__device__ __forceinline__ void copy_bytes(u32 to, const char* from, int bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// From shared memory to a matrix, as far as it has such rows, and soon on to memory: what the second cache has room for is
// needed for W and x. `stores_are_read` waits until that memory may be written again:
// of all this thread's stores, but for the newest `BUT`.
__device__ __forceinline__ void store_tile(const TensorMap* map, u32 from, int x, int y) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2}], [%3], %4;\n"
      "cp.async.bulk.commit_group;" ::"l"(map), "r"(x), "r"(y), "r"(from), "l"(policy)
      : "memory");
}
template <int BUT>
__device__ __forceinline__ void stores_are_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(BUT) : "memory");
}
// The cluster's barrier says only that its blocks have come so far: where it is to order memory as well (`.release`), every
// thread waits for a fence of the whole GPU. What blocks tell each other goes by barriers in shared memory instead.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// What the kernel before has made. This kernel was started before that one had ended, so what the first cache holds of
// such an address may be older, from a kernel before both: ask the second.
__device__ __forceinline__ float load_fresh(const float* from) {
  float out;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(out) : "l"(from) : "memory");
  return out;
}

// A shared-memory matrix of 128-byte rows under the 128-byte swizzle: 8 rows are 1024 bytes.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// The half of a descriptor that depends on the address, and the whole of it.
__device__ __forceinline__ u32 low_word(u32 address) { return (u32)descriptor(address); }
__device__ __forceinline__ u64 full_descriptor(u32 low) {
  u64 out;
  asm("mov.b64 %0, {%1, %2};" : "=l"(out) : "r"(low), "r"((u32)(descriptor(0) >> 32)));
  return out;
}

// Two neighbours in one word, the first in the low half.
__device__ __forceinline__ u32 pack_two(float first, float second) {
  u32 out;
#if FP16
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
#endif
  return out;
}

#if GATED
// The activation of a gated MLP: 1 silu, 2 gelu, 3 gelu by tanh.
__device__ __forceinline__ float activate(float v) {
#if GATED == 1
  return v / (1.f + __expf(-v));
#elif GATED == 2
  return 0.5f * v * (1.f + erff(v * 0.70710678f));
#else
  return v / (1.f + __expf(-1.59576912f * (v + 0.044715f * v * v * v)));  // (1 + tanh u) / 2 = 1 / (1 + e⁻²ᵘ)
#endif
}
#endif
