// y[tokens, n] = x[tokens, k] · Wᵀ (+ bias) for few tokens, W packed 2:4 in 4 bits with a scale for 128 columns of a row,
// x 16 bit, on Hopper (sm_90a).
//
// As in decode_sm90.cu the time is to be the time to read W once: the copy engine brings codes and positions as they are
// stored, clusters share columns, the next kernel may start early. But 3 bits a weight arrive five times as fast
// as 16, so what is done per weight must be little:
// * Codes become 16-bit numbers in registers, exactly, and wgmma takes its sparse operand A from there; x it reads from
//   shared memory once for 64 rows. A scale never touches a weight (that would round): it multiplies the sum of the
//   products of its 128 columns, in float32, on the way to the total.
// * Of the 16 chunks of 8 columns that a group has, a product takes four, and with q = lane % 4 a lane gives it the half
//   q%2 of its chunks q/2 and q/2 + 2. The sum does not mind which chunks meet in a product, so they are picked such that
//   a lane finds its codes in 16 bytes side by side: with a chunk's number in W as bits (half, h, e, i), lanes with
//   q/2 = 0 have the chunks of half 0, the others those of half 1, and product 2i + h takes chunk (half, h, e, i) in its
//   place 2e + half. x is put down in this order: its number is (i, h, e, half), that is, two bits change places.
//   Of positions a lane wants the bytes 2q and 2q + 1 of either half then.
// * Two sets of registers take turns: while the products of one group run, the next one's numbers are made.
//
// Compiled per configuration: TOKENS (8…64, more are several tiles), WARPGROUPS, SPLIT, STAGES, GATED and FP16 or bf16; sm90.cuh,
// few_sm90.cuh and numbers.cuh come first, WGMMA(…) is generated. Any n, any k that is a multiple of 128.
// Columns beyond k are zeros; tokens beyond the last are whatever was in memory: they only reach outputs that
// are not written.

constexpr int STEP = 256;                          // columns of a tile, two groups
constexpr int X_WARPS = (TOKENS + 15) / 16;        // that copy; the first of them also has the copy engine
constexpr int A_PITCH = STEP / 4, E_PITCH = STEP / 8;  // bytes of a row: codes, positions
constexpr int B_BOX = TOKENS * 128;                // 64 columns of x
constexpr int B_BYTES = B_BOX * (STEP / 64);
constexpr int A_BYTES = ROWS * A_PITCH, E_BYTES = ROWS * E_PITCH;
constexpr int STAGE_BYTES = B_BYTES + A_BYTES + E_BYTES;
constexpr int COMING = STAGES < 6 ? STAGES - 1 : 5;    // tiles of x that are asked for before the first must be there

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

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(CONSUMERS + 32 * X_WARPS, 1)
decode4(const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap positions, const u8* __restrict__ x,
        u16* __restrict__ y, const u16* __restrict__ bias, int n, int tokens, int steps, int blocks, int tiles,
        int grouped, const u16* __restrict__ scale, int k) {
  extern __shared__ char unaligned[];
  // By the same amount in every block of a cluster, which address each other's shared memory.
  char* shared = unaligned + ((1024 - (shared_address(unaligned) & 1023)) & 1023);
  float* gathered = (float*)(shared + STAGES * STAGE_BYTES);  // [SPLIT][SHARE][CONSUMERS]
  __shared__ alignas(8) u64 full[STAGES], empty[STAGES];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Place place(steps, blocks, tiles, grouped);
  const int count = place.count;

  if (threadIdx.x == CONSUMERS) {
    prefetch_map(&values);
    prefetch_map(&positions);
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(shared_address(&full[s]), 1 + 32 * X_WARPS);
      barrier_init(shared_address(&empty[s]), WARPGROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  if (SPLIT > 1) cluster_arrive();

  if (warp >= 4 * WARPGROUPS) {  // the copying warps
    const int copier = threadIdx.x - CONSUMERS;
    u64 once;  // weights pass through the cache once
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(once));
    auto copy_weights = [&](int i) {
      if (copier) return;
      const int step = place.first + i;
      const u32 barrier = shared_address(&full[i % STAGES]), tile = shared_address(shared) + i % STAGES * STAGE_BYTES;
      barrier_expect(barrier, A_BYTES + E_BYTES);
      copy_rows(tile + B_BYTES, &values, step * A_PITCH, place.block, barrier, once);
      copy_rows(tile + B_BYTES + A_BYTES, &positions, step * E_PITCH, place.block, barrier, once);
    };
    // A lane has one chunk of 8 columns: the same of every X_WARPS-th token.
    const int from = (lane & ~9) | (lane & 1) << 3 | (lane >> 3 & 1);
    const u8* here = x + ((u64)place.first_token * k + place.first * STEP + 8 * from) * 2;
    const int tokens_here = min(TOKENS, tokens - place.first_token);
    auto copy_x = [&](int i) {
      const int column = (place.first + i) * STEP + 8 * from;
      const int there = column < k ? 16 : 0;  // the rest of the 16 bytes is zeros
      const u8* source = there ? here + (u64)i * (2 * STEP) : x;
      const u32 tile = shared_address(shared) + i % STAGES * STAGE_BYTES + lane / 8 * B_BOX;
#pragma unroll
      for (int j = 0; j < TOKENS / X_WARPS; ++j) {
        const int token = j * X_WARPS + copier / 32;
        if (token < tokens_here)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(tile + token * 128 + ((lane ^ token) & 7) * 16),
                       "l"(source + (u64)(u32)token * (u32)(there ? 2 * k : 0)), "r"(there)
                       : "memory");
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    };
    // What was not copied by the copy engine must be made known to wgmma, which reads by the same way as that one does,
    // when it has arrived; and before that some more is asked for.
    auto arrived = [&](int i) {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      barrier_arrive(shared_address(&full[i % STAGES]));
    };
    const int ahead = min(STAGES, count);
    for (int i = 0; i < ahead; ++i) copy_weights(i);
    asm volatile("griddepcontrol.wait;" ::: "memory");  // x is the work of the kernel before
    for (int i = 0; i < count; ++i) {
      if (i >= STAGES) {
        barrier_wait(shared_address(&empty[i % STAGES]), (i / STAGES + 1) & 1);
        copy_weights(i);
      }
      copy_x(i);
      if (i >= COMING) {
        asm volatile("cp.async.wait_group %0;" ::"n"(COMING) : "memory");
        arrived(i - COMING);
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    for (int i = max(0, count - COMING); i < count; ++i) arrived(i);
    if (SPLIT > 1) {  // the cluster's barriers count every thread
      __syncwarp();
      cluster_wait();
      cluster_arrive();
    }
    return;
  }

  const int row = 64 * (warp / 4) + 16 * (warp % 4) + lane / 4;  // this thread's rows of the block: this one and the 8th after
  const u32 odd = lane % 2;
  // Scales of both rows, of the two groups of a step. Rows beyond the last have those of the last.
#if GATED
  const int last = n - 1, at = min(place.block * (ROWS / 2) + 32 * (warp / 4) + 8 * (warp % 4) + lane / 4, last);
  const int rows[2] = {at, n + at};
#else
  const int at = place.block * ROWS + row;
  const int rows[2] = {min(at, n - 1), min(at + 8, n - 1)};
#endif
  const int groups = k / 128;
  const u16* up = scale + (u64)(u32)rows[0] * groups + 2 * place.first;
  const u16* low = scale + (u64)(u32)rows[1] * groups + 2 * place.first;
  u16 coming[2][2];
  auto load_scales = [&](bool both) {  // the second group may be beyond the last
    coming[0][0] = __ldg(up);
    coming[0][1] = __ldg(low);
    coming[1][0] = __ldg(up + both);
    coming[1][1] = __ldg(low + both);
    up += 2, low += 2;
  };

  float sum[ACCUMULATORS], part_0[ACCUMULATORS], part_1[ACCUMULATORS], scales_0[2] = {}, scales_1[2] = {};
  Group group_0 = {}, group_1 = {};
#pragma unroll
  for (int j = 0; j < ACCUMULATORS; ++j) sum[j] = part_0[j] = part_1[j] = 0.f;

  // Start the products of group g of a tile.
  auto start = [&](const char* tile, int g, Group& mine, float(&to)[ACCUMULATORS]) {
    const char* codes = tile + B_BYTES + row * A_PITCH + 32 * g + lane / 2 % 2 * 16;
    const uint4 up_codes = *(const uint4*)codes, low_codes = *(const uint4*)(codes + 8 * A_PITCH);
    const char* e = tile + B_BYTES + A_BYTES + row * E_PITCH + 16 * g + 2 * (lane % 4);
    const u32 up_places = *(const u16*)e | (u32) * (const u16*)(e + 8) << 16;
    const u32 low_places = *(const u16*)(e + 8 * E_PITCH) | (u32) * (const u16*)(e + 8 * E_PITCH + 8) << 16;
    const u32 up_words[4] = {up_codes.x, up_codes.y, up_codes.z, up_codes.w};
    const u32 low_words[4] = {low_codes.x, low_codes.y, low_codes.z, low_codes.w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mine.places[i] = __byte_perm(up_places, low_places, i ? 0x7531 : 0x6420);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        u32* weights = mine.weights[2 * i + h];
        weights[0] = four_bit_numbers(up_words[2 * h], i, odd);
        weights[1] = four_bit_numbers(low_words[2 * h], i, odd);
        weights[2] = four_bit_numbers(up_words[2 * h + 1], i, odd);
        weights[3] = four_bit_numbers(low_words[2 * h + 1], i, odd);
      }
    }
    const u32 b = low_word(shared_address(tile)) + 2 * g * (B_BOX >> 4);
    mine.hold();
    hold(to);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    WGMMA(to, mine.weights[0], full_descriptor(b), mine.places[0], 0, 0);
    WGMMA(to, mine.weights[1], full_descriptor(b + 4), mine.places[0], 1, 1);
    WGMMA(to, mine.weights[2], full_descriptor(b + (B_BOX >> 4)), mine.places[1], 0, 1);
    WGMMA(to, mine.weights[3], full_descriptor(b + (B_BOX >> 4) + 4), mine.places[1], 1, 1);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  };
  auto add = [&](float(&part)[ACCUMULATORS], const float(&scales)[2]) {
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; ++j) sum[j] = fmaf(part[j], scales[j % 4 / 2], sum[j]);
  };

  if (count) load_scales(2 * place.first + 1 < groups);
  for (int i = 0; i < count; ++i) {
    barrier_wait(shared_address(&full[i % STAGES]), (i / STAGES) & 1);
    const char* tile = shared + i % STAGES * STAGE_BYTES;
    start(tile, 0, group_0, part_0);
    start(tile, 1, group_1, part_1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scales_0[r] = from_16_bit(coming[0][r]);
      scales_1[r] = from_16_bit(coming[1][r]);
    }
    if (i + 1 < count) load_scales(2 * (place.first + i + 1) + 1 < groups);
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    group_0.hold();
    hold(part_0);
    add(part_0, scales_0);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    group_1.hold();
    hold(part_1);
    if (threadIdx.x % 128 == 0) barrier_arrive(shared_address(&empty[i % STAGES]));
    add(part_1, scales_1);
  }

  finish(sum, gathered, place, y, bias, n, tokens, nullptr, nullptr);
}
