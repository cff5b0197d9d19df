// What the kernels for few tokens share, after sm90.cuh: which rows, tokens and columns a block has, and the way of its
// sums to y. A block owns 64·HEIGHT rows of W × TOKENS tokens × its part of the columns, of which there are SPLIT.

constexpr int ROWS = 64 * HEIGHT;
constexpr int CONSUMERS = 128 * WARPGROUPS;
constexpr int TALL = (HEIGHT + WARPGROUPS - 1) / WARPGROUPS;  // sets of 64 rows that a warpgroup has, at most
constexpr int ACCUMULATORS = TOKENS / 2;                      // sums a thread for each of them
constexpr int SUMS = TALL * ACCUMULATORS;
constexpr int SHARE = SUMS / SPLIT;  // of which each block of a cluster finishes so many

// Blocks that run at the same time work on `grouped` row blocks and neighbouring tiles of tokens, so that what they
// read of W and x is still in the cache for each other.
struct Place {
  int rank, block, first_token, first, count;  // in the cluster, of the rows, and steps of the columns
  __device__ __forceinline__ Place(int steps, int blocks, int tiles, int grouped) {
    rank = blockIdx.x % SPLIT;
    const int unit = blockIdx.x / SPLIT;
    block = unit, first_token = 0;
    if (tiles > 1) {
      const int set = unit / (grouped * tiles) * grouped, rows_in_set = min(grouped, blocks - set);
      block = set + unit % (grouped * tiles) % rows_in_set;
      first_token = unit % (grouped * tiles) / rows_in_set * TOKENS;
    }
    first = steps * rank / SPLIT;
    count = steps * (rank + 1) / SPLIT - first;
  }
  // Of accumulator j of the tile: its token.
  __device__ __forceinline__ int token_of(int j) const {
    return first_token + 8 * (j / 4) + 2 * (threadIdx.x % 4) + j % 2;
  }
};

// Rows of W: block number `block` of them, from column x on.
__device__ __forceinline__ void copy_rows(u32 to, const TensorMap* map, int x, int block, u32 barrier, u64 policy) {
#if GATED
  copy_pairs(to, map, x, block * (ROWS / 16), barrier, policy);
#else
  copy_tile(to, map, x, block * ROWS, barrier, policy);
#endif
}

#if CODES
// Called by every thread that multiplies, at its beginning: the scales of the block's tokens, which the kernel before has
// made, into shared memory. `write` waits for all of them.
__device__ __forceinline__ void fetch_scales(float* token_scales, const float* from, int count) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int i = threadIdx.x; i < TOKENS; i += CONSUMERS) token_scales[i] = i < count ? load_fresh(from + i) : 1.f;
}
#endif

// The sums that the blocks of a cluster send each other come into `gathered`, [SPLIT][SHARE / SENT][CONSUMERS][SENT], SENT of them
// in one store, and a barrier counts their bytes: it is set up with the others, by the thread that sets these up.
constexpr int SENT = SHARE % 4 == 0 ? 4 : SHARE % 2 == 0 ? 2 : 1;
__device__ __forceinline__ void expect_sums(u32 barrier) {
  barrier_init(barrier, 1);
  barrier_expect(barrier, (SPLIT - 1) * SHARE * CONSUMERS * 4);
}

// Called by every thread that has sums: add up with the other blocks of the cluster, in a fixed order.
__device__ __forceinline__ void gather(Sum (&sum)[SUMS], Sum* gathered, u32 barrier, const Place& place) {
  if (SPLIT > 1) {
    cluster_wait();  // all blocks have started, so their shared memory is there
    const u32 here = shared_address(gathered + place.rank * SHARE * CONSUMERS + SENT * threadIdx.x);
    // Every block sends each other block that one's share of the sums, then adds up what it was sent and its own.
#pragma unroll
    for (int to = 0; to < SPLIT; ++to) {
      const u32 there = address_in(here, to), counted = address_in(barrier, to);
#pragma unroll
      for (int j = 0; j < SHARE; j += SENT)
        store_in<SENT>(there + j * CONSUMERS * 4, counted, here + j * CONSUMERS * 4, to == place.rank, sum + to * SHARE + j);
    }
    barrier_wait(barrier, 0);
    const Sum* sent = gathered + SENT * threadIdx.x;
#pragma unroll
    for (int j = 0; j < SHARE; ++j) {
      Sum total = 0;
#pragma unroll
      for (int from = 0; from < SPLIT; ++from) total += sent[(from * SHARE + j / SENT * SENT) * CONSUMERS + j % SENT];
      sum[j] = total;
    }
  }
}

// Eight rows × eight tokens of y, two of these tokens of row lane / 4 as a thread has them: they change places among the lanes,
// so that a thread stores two rows of token lane / 4, and those of a token lie together.
__device__ __forceinline__ void store_eights(u16* __restrict__ y, int n, int tokens, int row, int token, int end, u32 two_tokens) {
  u32 two_rows;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(two_rows) : "r"(two_tokens));
  row += 2 * (threadIdx.x % 4), token += threadIdx.x % 32 / 4;
  u16* at = y + (long long)token * n + row;
  const bool is_there = token < tokens && row < end, even = ((n | (u32)(u64)y >> 1) & 1) == 0;
  if (is_there && even) *(u32*)at = two_rows;
  if (is_there && !even) at[0] = (u16)two_rows;
  if (is_there && !even && row + 1 < end) at[1] = (u16)(two_rows >> 16);
}

// Then: scale, add the bias, perhaps gate, and write.
__device__ __forceinline__ void write(const Sum (&sum)[SUMS], const Place& place, u16* __restrict__ y,
                                      const u16* __restrict__ bias, int n, int tokens,
                                      const u16* __restrict__ row_scale, const float* token_scales) {
  const int warp = threadIdx.x / 32, group = warp / 4, eighth = threadIdx.x % 32 / 4;
#if CODES
  asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
#endif
  auto scale_of = [&](int j) { return CODES ? token_scales[place.token_of(j) - place.first_token] : 1.f; };
  auto value_of = [&](const u16* of, int row, int end, float otherwise) { return row < end ? from_16_bit(of[row]) : otherwise; };
#if GATED
  const int row = place.block * (ROWS / 2) + 32 * group + 8 * (warp % 4), at = row + eighth;
  const float low = bias ? value_of(bias, at, n, 0.f) : 0.f, high = bias ? value_of(bias + n, at, n, 0.f) : 0.f;
  const float low_scale = CODES ? value_of(row_scale, at, n, 1.f) : 1.f;
  const float high_scale = CODES ? value_of(row_scale + n, at, n, 1.f) : 1.f;
#pragma unroll
  for (int i = 0; i < SHARE; i += 4) {  // beside each gate, two further on
    const int j = place.rank * SHARE + i;
    float out[2];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float scale = scale_of(j + b);
      out[b] = activate(sum[i + b] * (scale * low_scale) + low) * (sum[i + b + 2] * (scale * high_scale) + high);
    }
    store_eights(y, n, tokens, row, place.first_token + 2 * j, n, pack_two(out[0], out[1]));
  }
#else
  constexpr int TOGETHER = SHARE % 2 ? 1 : 2;  // tokens of a row that a thread has
#pragma unroll
  for (int i = 0; i < SHARE; i += TOGETHER) {
    const int j = place.rank * SHARE + i, t = j / ACCUMULATORS, in_set = j % ACCUMULATORS;  // of the thread's sets of rows
    const int beside = 64 * (group + t * WARPGROUPS) + 16 * (warp % 4) + (in_set % 4 < 2 ? 0 : 8);
    const int row = place.block * ROWS + beside, end = TALL == 1 || beside < ROWS ? n : 0;  // not every warpgroup has all sets
    const float added = bias ? value_of(bias, row + eighth, end, 0.f) : 0.f;
    const float scale = CODES ? value_of(row_scale, row + eighth, end, 1.f) : 1.f;
    const float first = sum[i] * (scale_of(in_set) * scale) + added;
    if constexpr (TOGETHER == 2) {
      const float second = sum[i + 1] * (scale_of(in_set + 1) * scale) + added;
      store_eights(y, n, tokens, row, place.first_token + in_set / 4 * 8, end, pack_two(first, second));
    } else {
      const int token = place.token_of(in_set);
      if (token < tokens && row + eighth < end) y[(long long)token * n + row + eighth] = to_16_bit(first);
    }
  }
#endif
}
