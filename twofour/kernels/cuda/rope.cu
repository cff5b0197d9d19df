// Rotary embedding of queries and keys together: every pair (a, b) of a head, half the rotated width apart, becomes
// (a·cos − b·sin, b·cos + a·sin), and what lies past the rotated width is copied.
//
// Given before this text: FP16, WIDE (cos and sin are float32), STEPS (every product is rounded to 16 bit before the
// sum, as arithmetic in 16 bit does), VECTOR (neighbours that one access takes: 8, or 1 where addresses or widths are
// odd), HEAD and ROTATED (widths), THREADS.
//
// A thread has one piece of VECTOR pairs of one token, reads its cos and sin once, and goes through every `groups`-th
// head: neighbouring threads have neighbouring pieces, then heads, so that a warp reads whole lines.

#define PAIR_PIECES (ROTATED / 2 / VECTOR)
#define PIECES (PAIR_PIECES + (HEAD - ROTATED) / VECTOR)

#if WIDE
typedef float Factor;
#else
typedef u16 Factor;
#endif

// Neighbours in registers.
template <typename T>
struct Vector {
  T lane[VECTOR];
};

#if VECTOR == 8  // in words of 16 bytes: left to itself the compiler takes an access to `lane` apart
__device__ __forceinline__ void load(Vector<u16>& to, const u16* from) {
  const uint4 words = *(const uint4*)from;
  const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) to.lane[i] = word[i / 2] >> (i % 2 * 16);
}
__device__ __forceinline__ void load(Vector<float>& to, const float* from) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 part = *(const float4*)(from + i);
    to.lane[i] = part.x, to.lane[i + 1] = part.y, to.lane[i + 2] = part.z, to.lane[i + 3] = part.w;
  }
}
__device__ __forceinline__ void store(u16* to, const Vector<u16>& from) {
  u32 word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = from.lane[2 * i] | (u32)from.lane[2 * i + 1] << 16;
  __stcg((uint4*)to, make_uint4(word[0], word[1], word[2], word[3]));
}
#else
template <typename T>
__device__ __forceinline__ void load(Vector<T>& to, const T* from) {
  to.lane[0] = *from;
}
__device__ __forceinline__ void store(u16* to, const Vector<u16>& from) { *to = from.lane[0]; }
#endif

// Where a tensor lies: strides in elements.
struct Place {
  u64 at;
  long long batch, head, token;
};

// All numbers have 8 bytes, so that the host can write them as one array.
struct Work {
  Place queries, keys, cos, sin, new_queries, new_keys;
  long long tokens, query_heads, heads, groups, count;
};

__device__ __forceinline__ float number(float value) { return value; }
__device__ __forceinline__ float number(u16 value) { return from_16_bit(value); }
// No fused multiply-add anywhere: it would round once where the model rounds twice.
__device__ __forceinline__ float times(float a, float b) {
  float product = __fmul_rn(a, b);
  return STEPS ? from_16_bit(to_16_bit(product)) : product;
}

__device__ __forceinline__ long long offset(const Place& place, u32 batch, u32 head, u32 token) {
  return batch * place.batch + head * place.head + token * place.token;
}

// A head's place: queries first, then keys.
struct Head {
  const u16* from;
  u16* to;
  __device__ __forceinline__ Head(const Work& work, u32 batch, u32 head, u32 token, u32 column) {
    const bool key = head >= (u32)work.query_heads;
    const u32 own = key ? head - (u32)work.query_heads : head;
    const Place& source = key ? work.keys : work.queries;
    const Place& target = key ? work.new_keys : work.new_queries;
    from = (const u16*)source.at + offset(source, batch, own, token) + column;
    to = (u16*)target.at + offset(target, batch, own, token) + column;
  }
};

__device__ __forceinline__ void rotate(const Work& work, u32 batch, u32 token, u32 first, u32 column) {
  Vector<Factor> cos[2], sin[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 here = column + half * (ROTATED / 2);
    load(cos[half], (const Factor*)work.cos.at + offset(work.cos, batch, 0, token) + here);
    load(sin[half], (const Factor*)work.sin.at + offset(work.sin, batch, 0, token) + here);
  }
#pragma unroll 2
  for (u32 head = first; head < (u32)work.heads; head += (u32)work.groups) {
    const Head at(work, batch, head, token, column);
    Vector<u16> a, b;
    load(a, at.from);
    load(b, at.from + ROTATED / 2);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const float x = from_16_bit(a.lane[i]), y = from_16_bit(b.lane[i]);
      a.lane[i] = to_16_bit(__fadd_rn(times(x, number(cos[0].lane[i])), times(-y, number(sin[0].lane[i]))));
      b.lane[i] = to_16_bit(__fadd_rn(times(y, number(cos[1].lane[i])), times(x, number(sin[1].lane[i]))));
    }
    store(at.to, a);
    store(at.to + ROTATED / 2, b);
  }
}

__device__ __forceinline__ void copy(const Work& work, u32 batch, u32 token, u32 first, u32 column) {
  for (u32 head = first; head < (u32)work.heads; head += (u32)work.groups) {
    const Head at(work, batch, head, token, column);
    Vector<u16> same;
    load(same, at.from);
    store(at.to, same);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 6) rope(const __grid_constant__ Work work) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");  // the queries are the work of the kernel before
#endif
  u32 unit = blockIdx.x * THREADS + threadIdx.x;
  if (unit >= (u32)work.count) return;
  const u32 piece = unit % PIECES, groups = work.groups, tokens = work.tokens;
  unit /= PIECES;
  const u32 first = unit % groups;
  unit /= groups;
  const u32 token = unit % tokens, batch = unit / tokens;
  if (piece < PAIR_PIECES)
    rotate(work, batch, token, first, piece * VECTOR);
  else
    copy(work, batch, token, first, ROTATED + (piece - PAIR_PIECES) * VECTOR);
}
