// What the kernels for many tokens share, after sm90.cuh: which tile is whose, rings of buffers, and the way of a tile's
// sums to y. A block owns 64·WARPGROUPS rows of W × TOKENS tokens; a warpgroup multiplies 64 rows with all TOKENS.

constexpr int ROWS = 64 * WARPGROUPS;
constexpr int CONSUMERS = 128 * WARPGROUPS;
constexpr int ACCUMULATORS = TOKENS / 2;
constexpr bool CUTS = WARPGROUPS < 3;  // whether units may be cut, see Work: more threads have no registers for that

// Which rows and tokens a cluster's unit of work is: units that run at the same time lie in `grouped` sets of rows
// and neighbouring tiles of tokens, so that what they read is still in the cache for each other.
struct Unit {
  int rows, token;
  __device__ __forceinline__ Unit(int unit, int sets, int tiles, int grouped, int rank) {
    const int first = unit / (grouped * tiles) * grouped, height = min(grouped, sets - first);
    rows = (first + unit % (grouped * tiles) % height) * CLUSTER + rank;
    token = unit % (grouped * tiles) / height * TOKENS;
  }
};

// What a cluster does at a time. Every cluster takes a unit a round, and where the last round has few of them left, these
// are cut into `parts` along the columns, so that more clusters have something to do: the one with a unit's last part
// adds to its sums those that the others leave it.
struct Work {
  int steps, sets, tiles, grouped, whole, parts;  // steps of 128 columns; `whole` units are not cut
  __device__ __forceinline__ int left() const { return sets * tiles - whole; }
  __device__ __forceinline__ int pieces() const { return whole + left() * parts; }
};
struct Piece {
  Unit at;
  int first = 0, steps, cut = -1, part = 0;  // columns; which of the units that are cut
  __device__ __forceinline__ Piece(int number, const Work& work, int rank)
      : at(!CUTS || number < work.whole ? number : work.whole + (number - work.whole) % work.left(), work.sets,
           work.tiles, work.grouped, rank),
        steps(work.steps) {
    if (!CUTS || number < work.whole) return;
    cut = (number - work.whole) % work.left();
    part = (number - work.whole) / work.left();
    constexpr int TOGETHER = COLUMNS / 128;  // positions come for so many steps at a time
    const int sets = (work.steps + TOGETHER - 1) / TOGETHER;
    first = sets * part / work.parts * TOGETHER;
    steps = min(work.steps, sets * (part + 1) / work.parts * TOGETHER) - first;
  }
};

// Which buffer of a ring is next, and in which state its barrier is then.
template <int COUNT>
struct Ring {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == COUNT) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ int before() const { return stage ? stage - 1 : COUNT - 1; }
};

// Called by all threads when the barriers are set up: nobody may write to a block whose barriers are not there yet.
__device__ __forceinline__ void begin_together() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  if (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  }
}
// And at the end: the other blocks still report to this one's barriers.
__device__ __forceinline__ void end_together() {
  if (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  }
}

// A warpgroup no longer needs a buffer that a block of the cluster shares with the others: tell all of them.
__device__ __forceinline__ void release_in_cluster(u32 barrier) {
  if (CLUSTER > 1) {
    if (threadIdx.x % 128 < CLUSTER) barrier_arrive_at(barrier, threadIdx.x % 128);
  } else {
    if (threadIdx.x % 128 == 0) barrier_arrive(barrier);
  }
}

// The sums of a part go through memory, warp by warp: `ready` is the mark that they are there. That memory holds whatever
// was there before, so the mark is a number that cannot be there by chance, and it is wiped out when it has been seen.
struct Parts {
  char* memory;  // for each block of each part but the last of each unit: marks of its warps, and its sums
  u64 mark;

  static constexpr int WARPS = 4 * WARPGROUPS, BYTES = 8 * WARPS + 4 * ROWS * TOKENS;
  __device__ __forceinline__ char* block_of(const Work& work, const Piece& piece, int part, int rank) const {
    return memory + (long long)((piece.cut * (work.parts - 1) + part) * CLUSTER + rank) * BYTES;
  }
  __device__ __forceinline__ static Sum* sums_in(char* block) {  // of this thread, four and four
    return (Sum*)(block + 8 * WARPS) + 4 * threadIdx.x;
  }
  __device__ __forceinline__ void leave(const Sum (&sum)[ACCUMULATORS], const Work& work, const Piece& piece,
                                        int rank) const {
    char* block = block_of(work, piece, piece.part, rank);
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; j += 4)
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(sums_in(block) + j * CONSUMERS), SUM_IN(sum[j]),
                   SUM_IN(sum[j + 1]), SUM_IN(sum[j + 2]), SUM_IN(sum[j + 3])
                   : "memory");
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      u64* ready = (u64*)block + threadIdx.x / 32;
      asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.u64 [%0], %1;" ::"l"(ready), "l"(mark) : "memory");
    }
  }
  // In a fixed order, so that the result does not depend on who was first.
  __device__ __forceinline__ void add(Sum (&sum)[ACCUMULATORS], const Work& work, const Piece& piece, int rank) const {
    for (int part = 0; part < work.parts - 1; ++part) {
      char* block = block_of(work, piece, part, rank);
      u64* ready = (u64*)block + threadIdx.x / 32;
      if (threadIdx.x % 32 == 0) {
        u64 seen;
        do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(ready) : "memory");
        while (seen != mark);
      }
      __syncwarp();
      constexpr int ASKED = ACCUMULATORS % 16 ? 8 : 16;  // at once, of those that the registers have room for
#pragma unroll
      for (int j = 0; j < ACCUMULATORS; j += ASKED) {
        Sum other[ASKED];  // from the second cache: the first may have what was here before
#pragma unroll
        for (int i = 0; i < ASKED; i += 4)
          asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                       : SUM_OUT(other[i]), SUM_OUT(other[i + 1]), SUM_OUT(other[i + 2]), SUM_OUT(other[i + 3])
                       : "l"(sums_in(block) + (j + i) * CONSUMERS)
                       : "memory");
#pragma unroll
        for (int i = 0; i < ASKED; ++i) sum[j + i] += other[i];
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0)
        asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(ready), "l"(0ull) : "memory");
    }
  }
};

// Four 8×8 matrices to shared memory, their columns as rows of 16 bytes at the addresses that the lanes give.
__device__ __forceinline__ void store_transposed(u32 to, const u32 (&in)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(in[0]),
               "r"(in[1]), "r"(in[2]), "r"(in[3])
               : "memory");
}
__device__ __forceinline__ void load_16_bytes(u32 (&out)[4], u32 from) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void store_16_bytes(u16* to, const u32 (&in)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3])
               : "memory");
}

// The sums of a warp, times the scales of row and token where W and x are codes, plus the bias, to y.
//
// A thread has the sums of its two rows for tokens 8j + 2·(lane % 4) and one more; y wants neighbouring rows of one
// token. Turn by turn of WIDE tokens: transpose (stmatrix does) into one of two buffers of 512 bytes, and while the
// next turn's sums are rounded, the last one's are on their way back. So 16 bytes at a time leave for y.
__device__ __forceinline__ void write_tile(const Sum (&sum)[ACCUMULATORS], const Unit& at, u32 turns,
                                           u16* __restrict__ y, const u16* __restrict__ bias,
                                           const u16* __restrict__ row_scale, const float* token_scales, int n,
                                           int tokens) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto scales_of = [&](int token) {  // of the tile's tokens, in shared memory, and of the one after it
    return CODES ? *(const float2*)(token_scales + token + 2 * (lane % 4)) : make_float2(1.f, 1.f);
  };
#if GATED
  constexpr int WIDE = 32;  // 8 rows of each: 16 bytes
  const int low_row = at.rows * (ROWS / 2) + 8 * warp + lane / 4;
  const float low = bias && low_row < n ? from_16_bit(bias[low_row]) : 0.f;
  const float high = bias && low_row < n ? from_16_bit(bias[n + low_row]) : 0.f;
  const float low_scale = CODES && low_row < n ? from_16_bit(row_scale[low_row]) : 1.f;
  const float high_scale = CODES && low_row < n ? from_16_bit(row_scale[n + low_row]) : 1.f;
  const int column = low_row - lane / 4, own_token = lane;
  const u32 write_at = 16 * lane, read_at = 16 * lane;
  auto gated = [&](const Sum* of, float scale) {
    return activate(of[0] * (scale * low_scale) + low) * (of[2] * (scale * high_scale) + high);
  };
  auto round = [&](int token, u32(&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Sum* of = sum + token / 2 + 4 * i;
      const float2 scale = scales_of(token + 8 * i);
      out[i] = pack_two(gated(of, scale.x), gated(of + 1, scale.y));
    }
  };
#else
  constexpr int WIDE = 16;  // 16 rows of each: 32 bytes, whose halves change places so that banks do not clash
  const int low_row = at.rows * ROWS + 16 * warp + lane / 4, high_row = low_row + 8;
  const float low = bias && low_row < n ? from_16_bit(bias[low_row]) : 0.f;
  const float high = bias && high_row < n ? from_16_bit(bias[high_row]) : 0.f;
  const float low_scale = CODES && low_row < n ? from_16_bit(row_scale[low_row]) : 1.f;
  const float high_scale = CODES && high_row < n ? from_16_bit(row_scale[high_row]) : 1.f;
  const int column = low_row - lane / 4 + 8 * (lane % 2), own_token = lane / 2;
  auto place = [](int token, int half) { return (u32)(32 * token + 16 * (half ^ (token / 4 & 1))); };
  const u32 write_at = place(lane / 16 * 8 + lane % 8, lane / 8 % 2), read_at = place(own_token, lane % 2);
  auto round = [&](int token, u32(&out)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Sum* of = sum + token / 2 + 4 * i;
      const float2 scale = scales_of(token + 8 * i);
      out[2 * i] = pack_two(of[0] * (scale.x * low_scale) + low, of[1] * (scale.y * low_scale) + low);
      out[2 * i + 1] = pack_two(of[2] * (scale.x * high_scale) + high, of[3] * (scale.y * high_scale) + high);
    }
  };
#endif
  u32 rounded[4], turned[4];
  auto write_out = [&](int token) {
    const int to = at.token + token + own_token;
    if (to < tokens && column < n) store_16_bytes(y + (long long)to * n + column, turned);
  };
#pragma unroll
  for (int token = 0; token < TOKENS; token += WIDE) {
    const u32 turn = turns + token / WIDE % 2 * 512;
    round(token, rounded);
    store_transposed(turn + write_at, rounded);
    if (!GATED && token) write_out(token - WIDE);
    __syncwarp();
    load_16_bytes(turned, turn + read_at);
    if (GATED) write_out(token);  // the activation needs the registers
  }
  if (!GATED) write_out(TOKENS - WIDE);
}
