// y[tokens, n] = x[tokens, k] · Wᵀ (+ bias) for few tokens, W packed 2:4 in 4 bits with a scale for 128 columns of a row,
// x 16 bit, on Hopper (sm_90a).
//
// As in decode_sm90.cu the time is to be the time to read W once: the copy engine brings codes and positions as they are
// stored, clusters share columns, the next kernel may start early. But 3 bits a weight arrive five times as fast
// as 16, so what is done per weight must be little:
// * W comes in threads' order (streamed.py): of 64 rows × 128 columns, a thread finds its codes in one piece of 16 bytes, its
//   positions in one of 8, as wgmma.sp takes them, and the scales of its two rows in one of 4. A copy is kilobytes in a row.
// * Codes become 16-bit numbers in registers, exactly, and wgmma takes its sparse operand A from there; x it reads from
//   shared memory once for 64 rows. A scale never touches a weight (that would round): it multiplies the sum of the
//   products of its 128 columns, in float32, on the way to the total.
// * Two sets of registers. With few tokens they take turns: while the products of one group run, the next one's numbers are
//   made. With more (PAIRS) it is the products that take long, each waiting for the one before that adds to the same sums: two
//   groups are multiplied in turns.
// * TEAMS of warpgroups have the same rows and tile after tile in turns, so that few rows keep many threads busy.
//
// Compiled per configuration: TOKENS (8…64, more are several tiles), WARPGROUPS (of a team), TEAMS, SPLIT, STEP (256 or 512),
// STAGES, RESIDENT (blocks on a multiprocessor), GATED and FP16 or bf16; sm90.cuh, few_sm90.cuh and numbers.cuh come first,
// WGMMA(…) is generated. Any n that is a multiple of 64, any k of 128. What lies beyond the edges of x is filled with zeros
// by the copy engine.

constexpr int GROUPS = STEP / 128;  // of a tile
constexpr int A_BYTES = 64 * 128 / 4, E_BYTES = 64 * 128 / 8, S_BYTES = 64 * 2;  // of a group: codes, positions, scales
constexpr int E_FIRST = GROUPS * A_BYTES, S_FIRST = E_FIRST + GROUPS * E_BYTES;  // all codes, all positions, all scales
constexpr int W_BYTES = S_FIRST + GROUPS * S_BYTES;                              // of a warpgroup's rows
constexpr int B_BOX = TOKENS * 128;                                              // 64 columns of x
constexpr int B_BYTES = B_BOX * (STEP / 64);
constexpr int MULTIPLIERS = TEAMS * CONSUMERS;
constexpr bool PAIRS = TOKENS >= 32;
constexpr int COPIERS = WARPGROUPS;  // warps: a single one cannot ask for all that so many rows want (benchmarks/LOG.md)
static_assert(STAGES % TEAMS == 0, "whoever waits for a stage has seen it full before");
static_assert((TEAMS - 1) * ACCUMULATORS * CONSUMERS * 4 <= STAGES * (B_BYTES + WARPGROUPS * W_BYTES),
              "sums that teams hand over lie where the tiles were");

struct Group {  // what the products of a group read while they run
  u32 weights[4][4], places[2];
  __device__ __forceinline__ void hold() {
#pragma unroll
    for (int p = 0; p < 4; ++p)
      asm volatile("" : "+r"(weights[p][0]), "+r"(weights[p][1]), "+r"(weights[p][2]), "+r"(weights[p][3])::"memory");
    asm volatile("" : "+r"(places[0]), "+r"(places[1])::"memory");
  }
};

__device__ __forceinline__ void hold(float (&sum)[ACCUMULATORS]) {
#pragma unroll
  for (int j = 0; j < ACCUMULATORS; ++j) HOLD(sum[j]);
}

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(MULTIPLIERS + 32 * COPIERS, RESIDENT)
decode4(const char* __restrict__ values, const char* __restrict__ positions, const __grid_constant__ TensorMap x,
        u16* __restrict__ y, const u16* __restrict__ bias, int n, int tokens, int steps, int blocks, int tiles,
        int grouped, const char* __restrict__ scale, int k) {
  extern __shared__ char unaligned[];
  // By the same amount in every block of a cluster, which address each other's shared memory.
  char* shared = unaligned + ((1024 - (shared_address(unaligned) & 1023)) & 1023);
  char* weights = shared + STAGES * B_BYTES;                            // [STAGES][WARPGROUPS]
  float* gathered = (float*)(weights + STAGES * WARPGROUPS * W_BYTES);  // [SPLIT][SHARE][CONSUMERS]
  __shared__ alignas(8) u64 full[STAGES], x_full[STAGES], empty[STAGES];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Place place(steps, blocks, tiles, grouped);
  const int count = place.count, groups = k / 128;

  if (threadIdx.x == MULTIPLIERS) {
    prefetch_map(&x);
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(shared_address(&full[s]), COPIERS);
      barrier_init(shared_address(&x_full[s]), 1);
      barrier_init(shared_address(&empty[s]), 4 * WARPGROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  if (SPLIT > 1) cluster_arrive();

  if (warp >= MULTIPLIERS / 32) {  // the copying warps: each has the rows of a warpgroup, the first one x as well
    if (lane == 0) {
      u64 once, often;  // weights pass through the cache once; x is wanted again by every block
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(once));
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(often));
      const int w = warp - MULTIPLIERS / 32;
      const u32 first = shared_address(weights) + w * W_BYTES;
#if GATED
      const int block = w % 2 * (n / 64) + min(place.block * (WARPGROUPS / 2) + w / 2, n / 64 - 1);
#else
      const int block = min(place.block * WARPGROUPS + w, n / 64 - 1);  // rows beyond the last are the last again
#endif
      const long long from = (long long)block * groups + place.first * GROUPS;  // the group to be copied next
      const char *codes = values + from * A_BYTES, *places = positions + from * E_BYTES;
      const char* scales = scale + from * S_BYTES;
      int left = groups - place.first * GROUPS;  // groups up to the edge
      auto copy_weights = [&](int stage) {
        const u32 barrier = shared_address(&full[stage]), to = first + stage * (WARPGROUPS * W_BYTES);
        barrier_expect(barrier, W_BYTES);
        auto copy = [&](int at, int count) {
          copy_bytes(to + at * A_BYTES, codes, count * A_BYTES, barrier, once);
          copy_bytes(to + E_FIRST + at * E_BYTES, places, count * E_BYTES, barrier, once);
          copy_bytes(to + S_FIRST + at * S_BYTES, scales, count * S_BYTES, barrier, once);
        };
        if (left >= GROUPS) {
          copy(0, GROUPS);
        } else {
          copy(0, left);
#pragma unroll 1
          for (int at = left; at < GROUPS; ++at) copy(at, 1);  // beyond the edge x is zero: any weights will do
        }
        codes += GROUPS * A_BYTES, places += GROUPS * E_BYTES, scales += GROUPS * S_BYTES, left -= GROUPS;
      };
      const int ahead = min(STAGES, count);
      for (int i = 0; i < ahead; ++i) copy_weights(i);
      if (w == 0) asm volatile("griddepcontrol.wait;" ::: "memory");  // x is the work of the kernel before
      int stage = 0, phase = 0;
      for (int i = 0; i < count; ++i) {
        if (i >= ahead) {
          barrier_wait(shared_address(&empty[stage]), phase ^ 1);
          copy_weights(stage);
        }
        if (w == 0) {
          const u32 barrier = shared_address(&x_full[stage]);
          barrier_expect(barrier, B_BYTES);
          copy_slices(shared_address(shared) + stage * B_BYTES, &x, place.first_token, (place.first + i) * (STEP / 64),
                      barrier, often);
        }
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
    }
    __syncwarp();
    if (SPLIT > 1) {  // the cluster's barriers count every thread
      cluster_wait();
      cluster_arrive();
    }
    return;
  }

  float sum[ACCUMULATORS], part_0[ACCUMULATORS], part_1[ACCUMULATORS];
  Group group_0 = {}, group_1 = {};
#pragma unroll
  for (int j = 0; j < ACCUMULATORS; ++j) sum[j] = part_0[j] = part_1[j] = 0.f;

  const int thread = threadIdx.x % 128, team = threadIdx.x / CONSUMERS, warpgroup = warp / 4 % WARPGROUPS;
  // The numbers and positions of group g of a tile.
  auto convert = [&](const char* mine, int g, Group& to) {
    const uint4 codes = *(const uint4*)(mine + g * A_BYTES + 16 * thread);
    const uint2 places = *(const uint2*)(mine + E_FIRST + g * E_BYTES + 8 * thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to.weights[0][i] = four_bit_pair(codes.x, i);
      to.weights[1][i] = four_bit_pair(codes.y, i);
      to.weights[2][i] = four_bit_pair(codes.z, i);
      to.weights[3][i] = four_bit_pair(codes.w, i);
    }
    to.places[0] = places.x, to.places[1] = places.y;
  };
  // Start the products of a group, or of two that do not wait for each other.
  auto start = [&](u64 tile, int g, Group& of, float(&part)[ACCUMULATORS]) {
    const u64 b = tile + 2 * g * (B_BOX >> 4);
    of.hold();
    hold(part);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    WGMMA(part, of.weights[0], b, of.places[0], 0, 0);
    WGMMA(part, of.weights[1], b + 4, of.places[0], 1, 1);
    WGMMA(part, of.weights[2], b + (B_BOX >> 4), of.places[1], 0, 1);
    WGMMA(part, of.weights[3], b + (B_BOX >> 4) + 4, of.places[1], 1, 1);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  };
  auto start_two = [&](u64 tile, int g) {
    group_0.hold();
    group_1.hold();
    hold(part_0);
    hold(part_1);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    const u64 b = tile + 2 * g * (B_BOX >> 4), c = b + 2 * (B_BOX >> 4);
    WGMMA(part_0, group_0.weights[0], b, group_0.places[0], 0, 0);
    WGMMA(part_1, group_1.weights[0], c, group_1.places[0], 0, 0);
    WGMMA(part_0, group_0.weights[1], b + 4, group_0.places[0], 1, 1);
    WGMMA(part_1, group_1.weights[1], c + 4, group_1.places[0], 1, 1);
    WGMMA(part_0, group_0.weights[2], b + (B_BOX >> 4), group_0.places[1], 0, 1);
    WGMMA(part_1, group_1.weights[2], c + (B_BOX >> 4), group_1.places[1], 0, 1);
    WGMMA(part_0, group_0.weights[3], b + (B_BOX >> 4) + 4, group_0.places[1], 1, 1);
    WGMMA(part_1, group_1.weights[3], c + (B_BOX >> 4) + 4, group_1.places[1], 1, 1);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  };
  auto add = [&](float(&part)[ACCUMULATORS], u32 scales) {
    const float low = from_16_bit((u16)scales), high = from_16_bit((u16)(scales >> 16));
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; ++j) sum[j] = fmaf(part[j], j % 4 < 2 ? low : high, sum[j]);
  };

  int stage = team, phase = 0;
  for (int i = team; i < count; i += TEAMS) {
    barrier_wait(shared_address(&full[stage]), phase);
    // The same in all lanes, and the compiler is told: descriptors are then made where one instruction is enough.
    const u64 tile = full_descriptor(__shfl_sync(0xffffffff, low_word(shared_address(shared) + stage * B_BYTES), 0));
    const char* mine = weights + (stage * WARPGROUPS + warpgroup) * W_BYTES;
    u32 scales[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
      scales[g] = *(const u32*)(mine + S_FIRST + g * S_BYTES + (warp % 4 * 8 + lane / 4) * 4);
    convert(mine, 0, group_0);
    if constexpr (PAIRS) convert(mine, 1, group_1);
    barrier_wait(shared_address(&x_full[stage]), phase);
    if constexpr (PAIRS) {
#pragma unroll
      for (int g = 0; g < GROUPS; g += 2) {
        if (g) {
          convert(mine, g, group_0);
          convert(mine, g + 1, group_1);
        }
        start_two(tile, g);
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        group_0.hold();
        group_1.hold();
        hold(part_0);
        hold(part_1);
        add(part_0, scales[g]);
        add(part_1, scales[g + 1]);
      }
    } else {
      start(tile, 0, group_0, part_0);
#pragma unroll
      for (int g = 1; g <= GROUPS; ++g) {
        if (g == GROUPS) {
          asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        } else {
          convert(mine, g, g % 2 ? group_1 : group_0);
          if (g % 2) start(tile, g, group_1, part_1);
          else start(tile, g, group_0, part_0);
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        }
        if (g % 2) {
          group_0.hold();
          hold(part_0);
          add(part_0, scales[g - 1]);
        } else {
          group_1.hold();
          hold(part_1);
          add(part_1, scales[g - 1]);
        }
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&empty[stage]));
    stage += TEAMS;
    if (stage >= STAGES) stage -= STAGES, phase ^= 1;
  }

#if TEAMS > 1
  // The others hand their sums to the first team, in the place of the tiles, and it adds them in a fixed order.
  float* handed = (float*)shared + threadIdx.x % CONSUMERS;
  asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");
  if (team) {
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; ++j) handed[((team - 1) * ACCUMULATORS + j) * CONSUMERS] = sum[j];
  }
  asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");
  if (team) {
    if (SPLIT > 1) {
      cluster_wait();
      cluster_arrive();
    }
    return;
  }
#pragma unroll
  for (int other = 0; other < TEAMS - 1; ++other)
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; ++j) sum[j] += handed[(other * ACCUMULATORS + j) * CONSUMERS];
#endif
  gather(sum, gathered, place);
#if GATED
  // Even warpgroups have rows of the gate, odd ones the same rows of the matrix beside it: these hand theirs over.
  const int at = place.block * (ROWS / 2) + 64 * (warp / 8) + 16 * (warp % 4) + lane / 4;
  float biases[2] = {0.f, 0.f};
  if (bias && at < n) {
    const u16* own = bias + warpgroup % 2 * n + at;
    biases[0] = from_16_bit(own[0]), biases[1] = from_16_bit(own[8]);
  }
  float* beside = (float*)shared + warp / 8 * (128 * SHARE) + thread;
  asm volatile("bar.sync 2, %0;" ::"n"(CONSUMERS) : "memory");  // all have done with what was there
#pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    sum[i] += (place.rank * SHARE + i) % 4 < 2 ? biases[0] : biases[1];
    if (warpgroup % 2) beside[128 * i] = sum[i];
  }
  asm volatile("bar.sync 2, %0;" ::"n"(CONSUMERS) : "memory");
  if (warpgroup % 2) return;
#pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    const int j = place.rank * SHARE + i, token = place.token_of(j), here = at + (j % 4 < 2 ? 0 : 8);
    if (token < tokens && at < n) y[(long long)token * n + here] = to_16_bit(activate(sum[i]) * beside[128 * i]);
  }
#else
  write(sum, place, y, bias, n, tokens, nullptr, nullptr);
#endif
}
