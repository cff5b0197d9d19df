// What the kernels for many tokens share, after sm90.cuh: which tile is whose, rings of buffers, and the way of a tile's
// sums to y. A block owns 64·WARPGROUPS rows of W × TOKENS tokens; a warpgroup multiplies 64 rows with all TOKENS.

constexpr int ROWS = 64 * WARPGROUPS;
constexpr int CONSUMERS = 128 * WARPGROUPS;
constexpr int ACCUMULATORS = TOKENS / 2;
constexpr bool CUTS = WARPGROUPS < 3;  // whether units may be cut, see Work: more threads have no registers for that
constexpr bool AHEAD = CUTS;           // and whether what takes long to come is asked for early

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
// By the thread that fills a ring, at its end: until all buffers are free again the other blocks report to this one's
// barriers, so it must still be there.
template <int COUNT>
__device__ __forceinline__ void wait_for_all(Ring<COUNT> next, const u64 (&empty)[COUNT]) {
  for (int i = 0; i < COUNT; ++i) {
    barrier_wait(shared_address(&empty[next.stage]), next.phase ^ 1);  // one that was never filled passes at once
    next.advance();
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

// The way of a warpgroup's sums to y: times the scales of row and token where W and x are codes, plus the bias, rounded, and
// put where the last x of their tile was (and its W, where that is its neighbour). From there the copy engine fetches them while
// the next tile's products run, and leaves out what lies beyond the edges of y. Those of LEAVING tokens leave together.
constexpr int ROUNDS = TOKENS / LEAVING;
constexpr int OUT_PITCH = GATED ? 64 : 128;  // bytes of a token: 32 rows of y, or 64
constexpr int OUT_BYTES = OUT_PITCH * LEAVING;
constexpr int PLACES = (128 * TOKENS + (CODES ? 64 * ROWS : 0)) / (WARPGROUPS * OUT_BYTES);  // for each warpgroup's rounds
static_assert(PLACES > 0 && LEAVING % 16 == 0 && TOKENS % LEAVING == 0, "there is room for one, in whole swizzles");

struct Outgoing {
  int row, token;              // the warpgroup's first row of y, the tile's first token
  u32 scales[2], biases[2];    // of this thread's rows, two of W; 16 bits each

  // It takes long for the scales and biases to come.
  __device__ __forceinline__ void ask(const Unit& at, const u16* __restrict__ bias, const u16* __restrict__ row_scale, int n) {
    const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, eighth = threadIdx.x % 32 / 4;
    constexpr int OWN = GATED ? 32 : 64;
    row = (at.rows * WARPGROUPS + group) * OWN, token = at.token;
    const int own = row + (GATED ? 8 : 16) * warp + eighth, beside = GATED ? n + own : own + 8;
    const bool is_there = own < n, is_beside = GATED ? is_there : beside < n;
    scales[0] = CODES && is_there ? row_scale[own] : 0, scales[1] = CODES && is_beside ? row_scale[beside] : 0;
    biases[0] = bias && is_there ? bias[own] : 0, biases[1] = bias && is_beside ? bias[beside] : 0;
  }

  // As a number, and not before: the compiler would wait for it where it was asked for.
  __device__ __forceinline__ static float late(u32 bits) {
    asm volatile("" : "+r"(bits));
    return from_16_bit((u16)bits);
  }

  // Called by all warpgroups when they have done with the x at `place`. The scales are those of the tile's tokens.
  __device__ __forceinline__ void write(const Sum (&sum)[ACCUMULATORS], const float* token_scales, u32 place,
                                        const TensorMap* y) const {
    const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const float low = late(biases[0]), high = late(biases[1]);
    const float low_scale = CODES ? late(scales[0]) : 1.f, high_scale = CODES ? late(scales[1]) : 1.f;
    // This lane names the place of 8 rows of y, the 16 bytes `chunk` of a token: of token lane % 8 of eight. Lanes 8 to 15 do
    // so for the next rows, those from 16 on for the next eight tokens; with GATED lanes 8 to 15 for the next eight tokens.
#if GATED
    const int chunk = warp ^ lane % 8 / 2, of_token = lane % 16;
#else
    const int chunk = (2 * warp + lane / 8 % 2) ^ lane % 8, of_token = lane / 16 * 8 + lane % 8;
#endif
    place += group * (PLACES * OUT_BYTES);
    const u32 in_place = of_token * OUT_PITCH + chunk * 16;
    asm volatile("bar.sync %0, %1;" ::"n"(WARPGROUPS + 1), "n"(CONSUMERS) : "memory");  // nobody reads this x any more
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      u32 packed[LEAVING / 8][GATED ? 1 : 2];
#pragma unroll
      for (int j = 0; j < LEAVING / 8; ++j) {
        const int first = round * LEAVING + 8 * j;
        const float* of_tokens = token_scales + first + 2 * (lane % 4);
        const float2 scale = CODES ? *(const float2*)of_tokens : make_float2(1.f, 1.f);
        const Sum* of = sum + first / 2;
        auto number = [&](Sum sum) -> float {
          // Integers in their turn, not all at once, for which three warpgroups have no registers: what is added is zero,
          // as no scale is negative, but the compiler does not know.
          if constexpr (CODES == 2 && WARPGROUPS > 2) sum += __float_as_int(scale.x) >> 31;
          return sum;
        };
        const float a = number(of[0]) * (scale.x * low_scale) + low, b = number(of[1]) * (scale.y * low_scale) + low;
        const float c = number(of[2]) * (scale.x * high_scale) + high, d = number(of[3]) * (scale.y * high_scale) + high;
#if GATED
        packed[j][0] = pack_two(activate(a) * c, activate(b) * d);
#else
        packed[j][0] = pack_two(a, b), packed[j][1] = pack_two(c, d);
#endif
      }
      if (round >= PLACES) {  // those that were there must have left
        if (threadIdx.x % 128 == 0) stores_are_read<PLACES - 1>();
        together(group);
      }
      const u32 from = place + round % PLACES * OUT_BYTES, to = from + in_place;
#pragma unroll
      for (int j = 0; j < LEAVING / 8; j += 2)
#if GATED
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to + j * 8 * OUT_PITCH),
                     "r"(packed[j][0]), "r"(packed[j + 1][0])
                     : "memory");
#else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + j * 8 * OUT_PITCH),
                     "r"(packed[j][0]), "r"(packed[j][1]), "r"(packed[j + 1][0]), "r"(packed[j + 1][1])
                     : "memory");
#endif
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      together(group);
      if (threadIdx.x % 128 == 0) store_tile(y, from, row, token + round * LEAVING);
    }
  }
  __device__ __forceinline__ static void together(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }
};

// A warpgroup no longer needs the buffer from which its sums have left, see release_in_cluster.
__device__ __forceinline__ void release_when_read(u32 barrier) {
  if (threadIdx.x % 128) return;
  stores_are_read<0>();
  for (int block = 0; block < CLUSTER; ++block) barrier_arrive_at(barrier, block);
}
