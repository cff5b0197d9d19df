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
    const int unit = blockIdx.x / SPLIT, set = unit / (grouped * tiles) * grouped;
    const int rows_in_set = min(grouped, blocks - set);
    block = set + unit % (grouped * tiles) % rows_in_set;
    first_token = unit % (grouped * tiles) / rows_in_set * TOKENS;
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

// Called by every thread that has sums: add up with the other blocks of the cluster through `gathered`
// ([SPLIT][SHARE][CONSUMERS], in shared memory), in a fixed order.
__device__ __forceinline__ void gather(Sum (&sum)[SUMS], Sum* gathered, const Place& place) {
  if (SPLIT > 1) {
    cluster_wait();  // all blocks have started, so their shared memory is there
    // Every block sends each other block that one's share of the sums, then adds up what it was sent.
#pragma unroll
    for (int to = 0; to < SPLIT; ++to) {
      u32 there;
      const u32 here = shared_address(gathered + (place.rank * SHARE) * CONSUMERS + threadIdx.x);
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(to));
#pragma unroll
      for (int j = 0; j < SHARE; ++j)
        STORE_IN_CLUSTER(there + j * CONSUMERS * 4, sum[to * SHARE + j]);
    }
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int j = 0; j < SHARE; ++j) {
      Sum total = 0;
#pragma unroll
      for (int from = 0; from < SPLIT; ++from) total += gathered[(from * SHARE + j) * CONSUMERS + threadIdx.x];
      sum[j] = total;
    }
  }
}

// Then: scale, add the bias, perhaps gate, and write.
__device__ __forceinline__ void write(const Sum (&sum)[SUMS], const Place& place, u16* __restrict__ y,
                                      const u16* __restrict__ bias, int n, int tokens,
                                      const u16* __restrict__ row_scale, const float* token_scales) {
  const int rank = place.rank, block = place.block, first_token = place.first_token;
  const int warp = threadIdx.x / 32, group = warp / 4, lane = threadIdx.x % 32;
#if CODES
  asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
#endif
  auto scale_of = [&](int token) { return CODES ? token_scales[token - first_token] : 1.f; };
#if GATED
  const int at = block * (ROWS / 2) + 32 * group + 8 * (warp % 4) + lane / 4;
  const float low = bias && at < n ? from_16_bit(bias[at]) : 0.f;
  const float high = bias && at < n ? from_16_bit(bias[n + at]) : 0.f;
  const float low_scale = CODES && at < n ? from_16_bit(row_scale[at]) : 1.f;
  const float high_scale = CODES && at < n ? from_16_bit(row_scale[n + at]) : 1.f;
#pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    if (i % 4 > 1) continue;  // beside, used with its gate
    const int token = place.token_of(rank * SHARE + i);
    const float scale = scale_of(token);
    const float out = activate(sum[i] * (scale * low_scale) + low) * (sum[i + 2] * (scale * high_scale) + high);
    if (token < tokens && at < n) y[(long long)token * n + at] = to_16_bit(out);
  }
#else
#pragma unroll
  for (int t = 0; t < TALL; ++t) {
    const int beside = 64 * (group + t * WARPGROUPS), at = block * ROWS + beside + 16 * (warp % 4) + lane / 4;
    const int end = TALL == 1 || beside < ROWS ? n : 0;  // not every warpgroup has rows of the last ones
    const float low = bias && at < end ? from_16_bit(bias[at]) : 0.f;
    const float high = bias && at + 8 < end ? from_16_bit(bias[at + 8]) : 0.f;
    const float low_scale = CODES && at < end ? from_16_bit(row_scale[at]) : 1.f;
    const float high_scale = CODES && at + 8 < end ? from_16_bit(row_scale[at + 8]) : 1.f;
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      const int j = rank * SHARE + i - t * ACCUMULATORS, token = place.token_of(j), here = at + (j % 4 < 2 ? 0 : 8);
      if (TALL > 1 && (j < 0 || j >= ACCUMULATORS)) continue;
      const float scale = scale_of(token) * (j % 4 < 2 ? low_scale : high_scale);
      if (token < tokens && here < end)
        y[(long long)token * n + here] = to_16_bit(sum[i] * scale + (j % 4 < 2 ? low : high));
    }
  }
#endif
}
