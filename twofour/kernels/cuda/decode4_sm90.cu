// y[tokens, n] = x[tokens, k] · Wᵀ (+ bias) for few tokens, W packed 2:4 in 4 bits with a scale for 128 columns of a row,
// x 16 bit, on Hopper (sm_90a).
//
// As in decode_sm90.cu the time is to be the time to read W once: the copy engine brings codes and positions as they are
// stored, clusters share columns, the next kernel may start early. But 3 bits a weight arrive five times as fast
// as 16, so what is done per weight must be little:
// * W comes in threads' order (streamed.py): of 64 rows × 128 columns, a thread finds its codes in one piece of 16 bytes, its
//   positions in one of 8, as wgmma.sp takes them, and the scales of its two rows in one of 4. A copy is kilobytes in a row.
// * Codes times scales become 16-bit numbers in registers, rounded once: the weight as it is in 16 bits (numbers.cuh). wgmma
//   takes its sparse operand A from there, and all products add to the same sums; x it reads from shared memory once for 64
//   rows.
// * Two sets of registers take turns: while the products of one group run, the next one's numbers are made.
// * W and x have rings of their own. W is read ahead as far as there is memory, also before x is there, which the kernel
//   before may still be making; x takes little of that memory from it, and its tiles are soon free again.
// * TEAMS of warpgroups have the same rows and tile after tile in turns, so that few rows keep many threads busy.
//
// Compiled per configuration: TOKENS (8…64, more are several tiles), WARPGROUPS (of a team), TEAMS, SPLIT, STEP (256 or 512),
// STAGES (of W), X_STAGES, RESIDENT (blocks on a multiprocessor), GATED and FP16 or bf16; sm90.cuh, few_sm90.cuh and numbers.cuh
// come first, WGMMA(…) is generated. Any n that is a multiple of 64, any k of 128. What lies beyond the edges of x is filled with
// zeros by the copy engine.

constexpr int GROUPS = STEP / 128;  // of a tile
constexpr int A_BYTES = 64 * 128 / 4, E_BYTES = 64 * 128 / 8, S_BYTES = 64 * 2;  // of a group: codes, positions, scales
constexpr int E_FIRST = GROUPS * A_BYTES, S_FIRST = E_FIRST + GROUPS * E_BYTES;  // all codes, all positions, all scales
constexpr int W_BYTES = S_FIRST + GROUPS * S_BYTES;                              // of a warpgroup's rows
constexpr int B_BOX = TOKENS * 128;                                              // 64 columns of x
constexpr int B_BYTES = B_BOX * (STEP / 64);
constexpr int MULTIPLIERS = TEAMS * CONSUMERS;
constexpr int COPIERS = WARPGROUPS + 1;  // warps: one for the rows of each warpgroup, and one for x
// Codes and scales of a group are read before the products of the one before it begin, if there are registers for that.
constexpr bool AHEAD = STEP == 256 || TOKENS > 8 || (RESIDENT == 1 && MULTIPLIERS < 512);
static_assert(STAGES % TEAMS == 0 && X_STAGES % TEAMS == 0, "whoever waits for a stage has seen it full before");
static_assert((TEAMS - 1) * ACCUMULATORS * CONSUMERS * 4 <= X_STAGES * B_BYTES + STAGES * WARPGROUPS * W_BYTES,
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
  char* weights = shared + X_STAGES * B_BYTES;                          // [STAGES][WARPGROUPS]
  float* gathered = (float*)(weights + STAGES * WARPGROUPS * W_BYTES);  // [SPLIT][SHARE][CONSUMERS]
  __shared__ alignas(8) u64 full[STAGES], empty[STAGES], x_full[X_STAGES], x_empty[X_STAGES];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Place place(steps, blocks, tiles, grouped);
  const int count = place.count, groups = k / 128;

  if (threadIdx.x == MULTIPLIERS) {
    prefetch_map(&x);
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(shared_address(&full[s]), WARPGROUPS);
      barrier_init(shared_address(&empty[s]), 4 * WARPGROUPS);
    }
    for (int s = 0; s < X_STAGES; ++s) {
      barrier_init(shared_address(&x_full[s]), 1);
      barrier_init(shared_address(&x_empty[s]), 4 * WARPGROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  if (SPLIT > 1) cluster_arrive();

  if (warp >= MULTIPLIERS / 32) {  // the copying warps
    const int w = warp - MULTIPLIERS / 32;
    u64 policy;  // weights pass through the cache once; x is wanted again by every block
    if (w == WARPGROUPS && lane == 0) {
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
      asm volatile("griddepcontrol.wait;" ::: "memory");  // x is the work of the kernel before
      int stage = 0, phase = 0;
      for (int i = 0; i < count; ++i) {
        const u32 barrier = shared_address(&x_full[stage]);
        barrier_wait(shared_address(&x_empty[stage]), phase ^ 1);  // the first round passes at once
        barrier_expect(barrier, B_BYTES);
        copy_slices(shared_address(shared) + stage * B_BYTES, &x, place.first_token, (place.first + i) * (STEP / 64), barrier,
                    policy);
        if (++stage == X_STAGES) stage = 0, phase ^= 1;
      }
    } else if (lane == 0) {
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
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
      int stage = 0, phase = 0;
      for (int i = 0; i < count; ++i) {
        barrier_wait(shared_address(&empty[stage]), phase ^ 1);
        const u32 barrier = shared_address(&full[stage]), to = first + stage * (WARPGROUPS * W_BYTES);
        barrier_expect(barrier, W_BYTES);
        auto copy = [&](int at, int count) {
          copy_bytes(to + at * A_BYTES, codes, count * A_BYTES, barrier, policy);
          copy_bytes(to + E_FIRST + at * E_BYTES, places, count * E_BYTES, barrier, policy);
          copy_bytes(to + S_FIRST + at * S_BYTES, scales, count * S_BYTES, barrier, policy);
        };
        if (left >= GROUPS) {
          copy(0, GROUPS);
        } else {
          copy(0, left);
#pragma unroll 1
          for (int at = left; at < GROUPS; ++at) copy(at, 1);  // beyond the edge x is zero: any weights will do
        }
        codes += GROUPS * A_BYTES, places += GROUPS * E_BYTES, scales += GROUPS * S_BYTES, left -= GROUPS;
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

  float sum[ACCUMULATORS];
  Group ready[2] = {};
#pragma unroll
  for (int j = 0; j < ACCUMULATORS; ++j) sum[j] = 0.f;

  const int thread = threadIdx.x % 128, team = threadIdx.x / CONSUMERS, warpgroup = warp / 4 % WARPGROUPS;
  const u32 mine = shared_address(weights) + warpgroup * W_BYTES;
  const u32 my_codes = mine + 16 * thread, my_places = mine + E_FIRST + 8 * thread;
  const u32 my_scales = mine + S_FIRST + (warp % 4 * 8 + lane / 4) * 4;
  u32 codes[4], both_scales;  // of a group
  auto load = [&](int offset, int g) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(codes[0]), "=r"(codes[1]), "=r"(codes[2]), "=r"(codes[3])
                 : "r"(my_codes + offset + g * A_BYTES));
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(both_scales) : "r"(my_scales + offset + g * S_BYTES));
  };
  // The numbers that they stand for. Positions are read here and not before: their registers are those that products read,
  // and until now products that read `to` were running.
  auto convert = [&](int offset, int g, Group& to) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(to.places[0]), "=r"(to.places[1])
                 : "r"(my_places + offset + g * E_BYTES));
    const Scales scales(both_scales);
#pragma unroll
    for (int p = 0; p < 4; ++p) four_bit_numbers(to.weights[p], codes[p], scales);
  };
  // Start the products of a group.
  auto start = [&](u64 b, Group& of) {
    of.hold();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    WGMMA(sum, of.weights[0], b, of.places[0], 0, 1);
    WGMMA(sum, of.weights[1], b + 4, of.places[0], 1, 1);
    WGMMA(sum, of.weights[2], b + (B_BOX >> 4), of.places[1], 0, 1);
    WGMMA(sum, of.weights[3], b + (B_BOX >> 4) + 4, of.places[1], 1, 1);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  };
  auto release = [&](u64* barrier) {  // a tile that this warp no longer needs
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(barrier));
  };

  int stage = team, phase = 0, x_stage = team, x_phase = 0;
  for (int i = team; i < count; i += TEAMS) {
    const int offset = stage * (WARPGROUPS * W_BYTES);
    barrier_wait(shared_address(&full[stage]), phase);
    load(offset, 0);
    // The same in all lanes, and the compiler is told: descriptors are then made where one instruction is enough.
    const u64 tile = full_descriptor(__shfl_sync(0xffffffff, low_word(shared_address(shared) + x_stage * B_BYTES), 0));
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      if (!AHEAD && g) load(offset, g);
      convert(offset, g, ready[g % 2]);
      if (AHEAD && g + 1 < GROUPS) load(offset, g + 1);
      if (g == 0) barrier_wait(shared_address(&x_full[x_stage]), x_phase);
      start(tile + 2 * g * (B_BOX >> 4), ready[g % 2]);
      if (g + 1 == GROUPS) {
        release(&empty[stage]);  // all of it is in registers
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      } else {
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      }
      ready[1 - g % 2].hold();  // in use until now
    }
    ready[1].hold();
    release(&x_empty[x_stage]);
    stage += TEAMS, x_stage += TEAMS;
    if (stage >= STAGES) stage -= STAGES, phase ^= 1;
    if (x_stage >= X_STAGES) x_stage -= X_STAGES, x_phase ^= 1;
  }
  hold(sum);
#pragma unroll
  for (int j = 0; j < ACCUMULATORS; ++j) sum[j] *= Scales::LARGER;

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
