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

// The way of a thread's sums to y: times the scales of row and token where W and x are codes, plus the bias, rounded, and
// stored, without a detour through shared memory, which the products leave little time for (benchmarks/LOG.md).
//
// A thread has the sums of two rows. The copy engine has put every second row of 16 into the first eight, so these
// two are neighbours, and eight threads have 32 bytes of a token. Of a gate and the matrix beside it they become
// one: there two threads exchange tokens, so that each has two neighbours of one.
struct Outgoing {
  int row, token;               // the first of y that this thread writes; tokens are those of the tile
  float low, high;              // the biases of its two rows
  float low_scale, high_scale;  // and their scales: asked for at the beginning of a tile, as it takes long

  __device__ __forceinline__ Outgoing(const Unit& at, const u16* __restrict__ bias, const u16* __restrict__ row_scale,
                                      int n) {
    const int warp = threadIdx.x / 32, eighth = threadIdx.x % 32 / 4;
#if GATED
    const int own = at.rows * (ROWS / 2) + 8 * warp + eighth, beside = n + own;
    row = own - eighth % 2, token = 2 * (threadIdx.x % 4) + eighth % 2;
#else
    const int own = at.rows * ROWS + 16 * warp + 2 * eighth, beside = own + 1;
    row = own, token = 2 * (threadIdx.x % 4);
#endif
    low = bias && own < n ? from_16_bit(bias[own]) : 0.f;
    high = bias && own < n ? from_16_bit(bias[beside]) : 0.f;
    low_scale = CODES && own < n ? from_16_bit(row_scale[own]) : 1.f;
    high_scale = CODES && own < n ? from_16_bit(row_scale[beside]) : 1.f;
  }

  // `left`: tokens of y from the tile's first on.
  __device__ __forceinline__ void write(const Sum (&sum)[ACCUMULATORS], const float* token_scales, u16* __restrict__ y,
                                        int n, int left) const {
    u16* to = y + (long long)token * n + row;
    left = row < n ? left - token : 0;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j) {
      const float* scales = token_scales + 8 * j + 2 * (threadIdx.x % 4);
      const float2 scale = CODES ? *(const float2*)scales : make_float2(1.f, 1.f);
      const Sum* of = sum + 4 * j;
      auto number = [&](Sum sum) -> float {
        // Integers in their turn, not all at once, for which three warpgroups have no registers: what is added is zero,
        // as no scale is negative, but the compiler does not know.
        if constexpr (CODES == 2 && WARPGROUPS > 2) sum += __float_as_int(scale.x) >> 31;
        return sum;
      };
      const float a = number(of[0]) * (scale.x * low_scale) + low, b = number(of[1]) * (scale.y * low_scale) + low;
      const float c = number(of[2]) * (scale.x * high_scale) + high, d = number(of[3]) * (scale.y * high_scale) + high;
#if GATED
      const u32 own = pack_two(activate(a) * c, activate(b) * d);
      const u32 other = __shfl_xor_sync(0xffffffff, own, 4);
      store(to, token % 2 ? __byte_perm(own, other, 0x3276) : __byte_perm(own, other, 0x5410), left > 8 * j);
#else
      store(to, pack_two(a, c), left > 8 * j);
      store(to + n, pack_two(b, d), left > 8 * j + 1);
#endif
      to += 8ll * n;
    }
  }
  __device__ __forceinline__ static void store(u16* to, u32 two, bool is_there) {
    if (is_there) asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(two) : "memory");
  }
};
