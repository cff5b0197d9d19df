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
// * Where there are many rows a block may have more than 64 for each warpgroup (HEIGHT times 64 in all), which then has
//   several sets of sums: x is read less often, and rows go into the multiprocessors more evenly.
//
// Compiled per configuration: TOKENS (8…64, more are several tiles), WARPGROUPS (of a team), TEAMS, HEIGHT, SPLIT, STEP (256 or
// 512), STAGES (of W), X_STAGES, RESIDENT (blocks on a multiprocessor), GATED and FP16 or bf16; sm90.cuh, few_sm90.cuh and numbers.cuh
// come first, WGMMA(…) is generated. Any n that is a multiple of 64, any k of 128. What lies beyond the edges of x is filled with
// zeros by the copy engine.

constexpr int GROUPS = STEP / 128;  // of a tile
constexpr int A_BYTES = 64 * 128 / 4, E_BYTES = 64 * 128 / 8, S_BYTES = 64 * 2;  // of a group: codes, positions, scales
constexpr int E_FIRST = GROUPS * A_BYTES, S_FIRST = E_FIRST + GROUPS * E_BYTES;  // all codes, all positions, all scales
constexpr int W_BYTES = S_FIRST + GROUPS * S_BYTES;                              // of a warpgroup's rows
constexpr int B_BOX = TOKENS * 128;                                              // 64 columns of x
constexpr int B_BYTES = B_BOX * (STEP / 64);
constexpr int MULTIPLIERS = TEAMS * CONSUMERS;
// Warps that copy W: one for the rows of each warpgroup, or half as many where sums take many registers. One more copies x.
constexpr int W_COPIERS = TALL > 1 && WARPGROUPS > 3 ? WARPGROUPS / 2 : WARPGROUPS;
constexpr int COPIED = (HEIGHT + W_COPIERS - 1) / W_COPIERS;  // blocks of 64 rows that each of them copies, at most
// Codes and scales of a group are read before the products of the one before it begin, if there are registers for that.
constexpr bool AHEAD = STEP == 256 || TOKENS > 8 || (RESIDENT == 1 && MULTIPLIERS < 512);
static_assert(STAGES % TEAMS == 0 && X_STAGES % TEAMS == 0, "whoever waits for a stage has seen it full before");
constexpr int TILE_BYTES = X_STAGES * B_BYTES + STAGES * HEIGHT * W_BYTES;
static_assert((TEAMS - 1) * ACCUMULATORS * CONSUMERS * 4 <= TILE_BYTES, "sums that teams hand over lie where the tiles were");
static_assert(TEAMS == 1 || TALL == 1, "only one set of sums is handed over");
static_assert(!GATED || TALL == 1 || (HEIGHT == 2 * WARPGROUPS && SPLIT == 1), "a thread has both sums of an output");

template <int N> struct Bytes { char of[N]; };  // a number that is known when compiled

struct Group {  // what the products of a group read while they run
  u32 weights[4][4], places[2];
  __device__ __forceinline__ void hold() {
#pragma unroll
    for (int p = 0; p < 4; ++p)
      asm volatile("" : "+r"(weights[p][0]), "+r"(weights[p][1]), "+r"(weights[p][2]), "+r"(weights[p][3])::"memory");
    asm volatile("" : "+r"(places[0]), "+r"(places[1])::"memory");
  }
};

__device__ __forceinline__ void hold(float (&sum)[SUMS]) {
#pragma unroll
  for (int j = 0; j < SUMS; ++j) HOLD(sum[j]);
}

constexpr int THREADS = MULTIPLIERS + 32 * (W_COPIERS + 1);

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS, RESIDENT)
decode4(const char* __restrict__ values, const char* __restrict__ positions, const __grid_constant__ TensorMap x,
        u16* __restrict__ y, const u16* __restrict__ bias, int n, int tokens, int steps, int blocks, int tiles,
        int grouped, const char* __restrict__ scale, int k) {
  extern __shared__ char unaligned[];
  // By the same amount in every block of a cluster, which address each other's shared memory.
  char* shared = unaligned + ((1024 - (shared_address(unaligned) & 1023)) & 1023);
  char* weights = shared + X_STAGES * B_BYTES;  // [STAGES][HEIGHT]
  float* gathered = (float*)(shared + TILE_BYTES);
  __shared__ alignas(8) u64 full[STAGES], empty[STAGES], x_full[X_STAGES], x_empty[X_STAGES], sums_sent;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Place place(steps, blocks, tiles, grouped);
  const int count = place.count, groups = k / 128;

  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (warp == MULTIPLIERS / 32) {  // the first copying warp sets up the barriers, and does not wait for the others
    if (elected()) {
      for (int s = 0; s < STAGES; ++s) {
        barrier_init(shared_address(&full[s]), W_COPIERS);
        barrier_init(shared_address(&empty[s]), 4 * WARPGROUPS);
      }
      for (int s = 0; s < X_STAGES; ++s) {
        barrier_init(shared_address(&x_full[s]), 1);
        barrier_init(shared_address(&x_empty[s]), 4 * WARPGROUPS);
      }
      if (SPLIT > 1) expect_sums(shared_address(&sums_sent));
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("bar.arrive 0, %0;" ::"n"(THREADS) : "memory");
  } else {
    asm volatile("bar.sync 0, %0;" ::"n"(THREADS) : "memory");
  }
  if (SPLIT > 1) cluster_arrive();

  if (warp >= MULTIPLIERS / 32) {  // the copying warps
    const int w = warp - MULTIPLIERS / 32;
    u64 policy;  // weights pass through the cache once; x is wanted again by every block
    const bool leads = elected();
    if (w == W_COPIERS && leads) {
      prefetch_map(&x);
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
    } else if (leads) {
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
      const u32 first = shared_address(weights) + w * W_BYTES;
      const char *codes[COPIED], *places[COPIED], *scales[COPIED];  // of the group to be copied next
#pragma unroll
      for (int t = 0; t < COPIED; ++t) {
        const int number = w + t * W_COPIERS;  // rows beyond the last are the last again
#if GATED
        const int beside = TALL > 1 ? number / WARPGROUPS : number % 2;
        const int pair = TALL > 1 ? number % WARPGROUPS : number / 2;
        const int block = beside * (n / 64) + min(place.block * (HEIGHT / 2) + pair, n / 64 - 1);
#else
        const int block = min(place.block * HEIGHT + number, n / 64 - 1);
#endif
        const long long from = (long long)block * groups + place.first * GROUPS;
        codes[t] = values + from * A_BYTES, places[t] = positions + from * E_BYTES;
        scales[t] = scale + from * S_BYTES;
      }
      const int copied = w + (COPIED - 1) * W_COPIERS < HEIGHT ? COPIED : COPIED - 1;
      int left = groups - place.first * GROUPS;  // groups up to the edge
      int stage = 0, phase = 0;
      for (int i = 0; i < count; ++i) {
        barrier_wait(shared_address(&empty[stage]), phase ^ 1);
        const u32 barrier = shared_address(&full[stage]);
        barrier_expect(barrier, copied * W_BYTES);
#pragma unroll
        for (int t = 0; t < COPIED; ++t) {
          if (t == copied) break;
          const u32 to = first + (stage * HEIGHT + t * W_COPIERS) * W_BYTES;
          auto copy = [&](int at, int count) {
            copy_bytes(to + at * A_BYTES, codes[t], count * A_BYTES, barrier, policy);
            copy_bytes(to + E_FIRST + at * E_BYTES, places[t], count * E_BYTES, barrier, policy);
            copy_bytes(to + S_FIRST + at * S_BYTES, scales[t], count * S_BYTES, barrier, policy);
          };
          if (left >= GROUPS) {
            copy(0, GROUPS);
          } else {
            copy(0, left);
#pragma unroll 1
            for (int at = left; at < GROUPS; ++at) copy(at, 1);  // beyond the edge x is zero: any weights will do
          }
          codes[t] += GROUPS * A_BYTES, places[t] += GROUPS * E_BYTES, scales[t] += GROUPS * S_BYTES;
        }
        left -= GROUPS;
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
    }
    __syncwarp();
    if (SPLIT > 1) cluster_wait();
    return;
  }

  float sum[SUMS];
  Group ready[2] = {};
#pragma unroll
  for (int j = 0; j < SUMS; ++j) sum[j] = 0.f;

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
  auto start = [&](u64 b, Group& of, float* sum) {
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

  auto multiply = [&](auto tall) {  // with so many sets of 64 rows
    constexpr int TILES = sizeof(tall);
    int stage = team, phase = 0, x_stage = team, x_phase = 0;
    for (int i = team; i < count; i += TEAMS) {
      const int offset = stage * (HEIGHT * W_BYTES);
      auto next = [&](int q) { load(offset + q % TILES * (WARPGROUPS * W_BYTES), q / TILES); };
      barrier_wait(shared_address(&full[stage]), phase);
      next(0);
      // The same in all lanes, and the compiler is told: descriptors are then made where one instruction is enough.
      const u64 tile = full_descriptor(__shfl_sync(0xffffffff, low_word(shared_address(shared) + x_stage * B_BYTES), 0));
#pragma unroll
      for (int q = 0; q < GROUPS * TILES; ++q) {
        const int g = q / TILES, t = q % TILES;  // all rows of a group after each other: they read the same x
        if (!AHEAD && q) next(q);
        convert(offset + t * (WARPGROUPS * W_BYTES), g, ready[q % 2]);
        if (AHEAD && q + 1 < GROUPS * TILES) next(q + 1);
        if (q == 0) barrier_wait(shared_address(&x_full[x_stage]), x_phase);
        start(tile + 2 * g * (B_BOX >> 4), ready[q % 2], sum + t * ACCUMULATORS);
        if (q + 1 == GROUPS * TILES) {
          release(&empty[stage]);  // all of it is in registers
          asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        } else {
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        }
        ready[1 - q % 2].hold();  // in use until now
      }
      ready[1].hold();
      release(&x_empty[x_stage]);
      stage += TEAMS, x_stage += TEAMS;
      if (stage >= STAGES) stage -= STAGES, phase ^= 1;
      if (x_stage >= X_STAGES) x_stage -= X_STAGES, x_phase ^= 1;
    }
    hold(sum);
  };
  if (HEIGHT % WARPGROUPS == 0 || warpgroup < HEIGHT % WARPGROUPS) {
    multiply(Bytes<TALL>());
  } else {
    multiply(Bytes<TALL == 1 ? 1 : TALL - 1>());
  }
#pragma unroll
  for (int j = 0; j < SUMS; ++j) sum[j] *= Scales::LARGER;

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
    if (SPLIT > 1) cluster_wait();
    return;
  }
#pragma unroll
  for (int other = 0; other < TEAMS - 1; ++other)
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; ++j) sum[j] += handed[(other * ACCUMULATORS + j) * CONSUMERS];
#endif
  gather(sum, gathered, shared_address(&sums_sent), place);
#if GATED
  if constexpr (TALL > 1) {  // a thread has rows of the gate and, behind them, the same ones of the matrix beside it
    const int at = place.block * (ROWS / 2) + 64 * warpgroup + 16 * (warp % 4);
    const bool biased = bias && at < n;
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; j += 2) {
      const int row = at + (j % 4 < 2 ? 0 : 8);
      const float of_gate = biased ? from_16_bit(bias[row + lane / 4]) : 0.f;
      const float of_beside = biased ? from_16_bit(bias[n + row + lane / 4]) : 0.f;
      const float* beside = sum + ACCUMULATORS;
      const float first = activate(sum[j] + of_gate) * (beside[j] + of_beside);
      const float second = activate(sum[j + 1] + of_gate) * (beside[j + 1] + of_beside);
      store_eights(y, n, tokens, row, place.first_token + j / 4 * 8, n, pack_two(first, second));
    }
  } else {  // even warpgroups have rows of the gate, odd ones the same rows of the matrix beside it: these hand theirs over
    const int at = place.block * (ROWS / 2) + 64 * (warp / 8) + 16 * (warp % 4);
    float biases[2] = {0.f, 0.f};
    if (bias && at < n) {
      const u16* own = bias + warpgroup % 2 * n + at + lane / 4;
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
    for (int i = 0; i < SHARE; i += 2) {
      const int j = place.rank * SHARE + i, row = at + (j % 4 < 2 ? 0 : 8);
      const float first = activate(sum[i]) * beside[128 * i], second = activate(sum[i + 1]) * beside[128 * (i + 1)];
      store_eights(y, n, tokens, row, place.first_token + j / 4 * 8, n, pack_two(first, second));
    }
  }
#else
  write(sum, place, y, bias, n, tokens, nullptr, nullptr);
#endif
}
