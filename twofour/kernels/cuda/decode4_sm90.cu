// y[tokens, n] = x[tokens, k] · Wᵀ (+ bias) for few tokens, W packed 2:4 in 4 bits with a scale for 128 columns of a row,
// x 16 bit, on Hopper (sm_90a).
//
// As in decode_sm90.cu the time is to be the time to read W once: the copy engine brings codes and positions as they are
// stored, clusters share columns, the next kernel may start early. But 3 bits a weight arrive five times as fast
// as 16, so what is done per weight must be little:
// * Codes become 16-bit numbers in registers, exactly, and wgmma takes its sparse operand A from there; x it reads from
//   shared memory once for 64 rows. A scale never touches a weight (that would round): it multiplies the sum of the
//   products of its 128 columns, in float32, on the way to the total.
// * A word has the codes of 16 columns, and with q = lane % 4 a lane wants byte q of every word of its two rows: its group
//   of four columns. So all lanes of a quad read the same words, many at a time.
// * Two sets of registers take turns: while the products of one group run, the next one's numbers are made.
//
// Compiled per configuration: TOKENS (8…64, more are several tiles), WARPGROUPS, SPLIT, STEP (256 or 512), STAGES, GATED and
// FP16 or bf16; sm90.cuh, few_sm90.cuh and numbers.cuh come first, WGMMA(…) is generated. Any n, any k that is a multiple of
// 128. What lies beyond the edges of W and x is filled with zeros by the copy engine.

constexpr int GROUPS = STEP / 128;                     // of a tile
constexpr int A_PITCH = STEP / 4, E_PITCH = STEP / 8;  // bytes of a row: codes, positions
constexpr int B_BOX = TOKENS * 128;                    // 64 columns of x
constexpr int B_BYTES = B_BOX * (STEP / 64);
constexpr int A_BYTES = ROWS * A_PITCH, E_BYTES = ROWS * E_PITCH;
constexpr int STAGE_BYTES = B_BYTES + A_BYTES + E_BYTES;

// Where the copy engine puts a 16-byte piece of a row, of codes and of positions, so that the rows which are read together
// lie in different banks (8 rows further it is the same).
__device__ __forceinline__ int a_piece(int row, int piece) {
  return STEP == 512 ? piece ^ (row & 7) : piece ^ (row >> 1 & 3);
}
__device__ __forceinline__ int e_piece(int row, int piece) {
  return STEP == 512 ? piece ^ (row >> 1 & 3) : piece ^ (row >> 2 & 1);
}

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

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(CONSUMERS + 32, 1)
decode4(const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap positions,
        const __grid_constant__ TensorMap x, u16* __restrict__ y, const u16* __restrict__ bias, int n, int tokens,
        int steps, int blocks, int tiles, int grouped, const u16* __restrict__ scale, int k) {
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
    prefetch_map(&x);
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(shared_address(&full[s]), 1);
      barrier_init(shared_address(&empty[s]), WARPGROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  if (SPLIT > 1) cluster_arrive();

  if (warp == 4 * WARPGROUPS) {  // the copying warp
    if (lane == 0) {
      u64 once, often;  // weights pass through the cache once; x is wanted again by every block
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(once));
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(often));
      auto copy_weights = [&](int i) {
        const int step = place.first + i;
        const u32 barrier = shared_address(&full[i % STAGES]), tile = shared_address(shared) + i % STAGES * STAGE_BYTES;
        barrier_expect(barrier, STAGE_BYTES);
        copy_rows(tile + B_BYTES, &values, step * A_PITCH, place.block, barrier, once);
        copy_rows(tile + B_BYTES + A_BYTES, &positions, step * E_PITCH, place.block, barrier, once);
      };
      auto copy_x = [&](int i) {
        const int column = (place.first + i) * STEP;
        const u32 barrier = shared_address(&full[i % STAGES]), tile = shared_address(shared) + i % STAGES * STAGE_BYTES;
#pragma unroll
        for (int j = 0; j < STEP / 64; ++j)
          copy_tile(tile + j * B_BOX, &x, column + 64 * j, place.first_token, barrier, often);
      };
      const int ahead = min(STAGES, count);
      for (int i = 0; i < ahead; ++i) copy_weights(i);
      asm volatile("griddepcontrol.wait;" ::: "memory");  // x is the work of the kernel before
      for (int i = 0; i < ahead; ++i) copy_x(i);
      for (int i = ahead; i < count; ++i) {
        barrier_wait(shared_address(&empty[i % STAGES]), (i / STAGES + 1) & 1);
        copy_weights(i);
        copy_x(i);
      }
    }
    if (SPLIT > 1) {  // the cluster's barriers count every thread
      __syncwarp();
      cluster_wait();
      cluster_arrive();
    }
    return;
  }

  const int row = 64 * (warp / 4) + 16 * (warp % 4) + lane / 4;  // this thread's rows: this one and the 8th after
  const u32 own = lane % 4;
  // Scales of both rows, of the groups of a step. Rows beyond the last have those of the last.
#if GATED
  const int at = min(place.block * (ROWS / 2) + 32 * (warp / 4) + 8 * (warp % 4) + lane / 4, n - 1);
  const int rows[2] = {at, n + at};
#else
  const int at = place.block * ROWS + row;
  const int rows[2] = {min(at, n - 1), min(at + 8, n - 1)};
#endif
  const int groups = k / 128;
  const u16* up = scale + (u64)(u32)rows[0] * groups + GROUPS * place.first;
  const u16* low = scale + (u64)(u32)rows[1] * groups + GROUPS * place.first;
  // Those of a tile are read at once where tiles are whole; otherwise one by one, and none beyond the last.
  const bool whole = groups % GROUPS == 0 && (u64)scale % (2 * GROUPS) == 0;
  u32 coming[2][GROUPS / 2];
  auto load_scales = [&](int last) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const u16* from = side ? low : up;
      u32(&to)[GROUPS / 2] = coming[side];
      if (whole) {
        if constexpr (GROUPS == 4) {
          const uint2 both = __ldg((const uint2*)from);
          to[0] = both.x, to[1] = both.y;
        } else {
          to[0] = __ldg((const u32*)from);
        }
      } else {
#pragma unroll
        for (int g = 0; g < GROUPS; g += 2)
          to[g / 2] = __ldg(from + min(g, last)) | (u32)__ldg(from + min(g + 1, last)) << 16;
      }
    }
    up += GROUPS, low += GROUPS;
  };

  float sum[ACCUMULATORS], part_0[ACCUMULATORS], part_1[ACCUMULATORS];
  Group group_0 = {}, group_1 = {};
#pragma unroll
  for (int j = 0; j < ACCUMULATORS; ++j) sum[j] = part_0[j] = part_1[j] = 0.f;

  // Start the products of group g of a tile.
  auto start = [&](const char* tile, int g, Group& mine, float(&to)[ACCUMULATORS]) {
    const char* codes = tile + B_BYTES + row * A_PITCH;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 64 columns: 16 bytes of codes, two products
      const char* here = codes + 16 * a_piece(row, 2 * g + half);
      const uint4 above = *(const uint4*)here, below = *(const uint4*)(here + 8 * A_PITCH);
      u32(&first)[4] = mine.weights[2 * half], (&second)[4] = mine.weights[2 * half + 1];
      first[0] = four_bit_numbers(above.x, own);
      first[1] = four_bit_numbers(below.x, own);
      first[2] = four_bit_numbers(above.y, own);
      first[3] = four_bit_numbers(below.y, own);
      second[0] = four_bit_numbers(above.z, own);
      second[1] = four_bit_numbers(below.z, own);
      second[2] = four_bit_numbers(above.w, own);
      second[3] = four_bit_numbers(below.w, own);
      // A word of positions serves both products, lanes 0 and 1 of a quad the first, 2 and 3 the second: see decode_sm90.cu.
      const char* e = tile + B_BYTES + A_BYTES + row * E_PITCH + 16 * e_piece(row, g) + 8 * half + 2 * own;
      mine.places[half] = *(const u16*)e | (u32) * (const u16*)(e + 8 * E_PITCH) << 16;
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

  if (count) load_scales(groups - 1 - GROUPS * place.first);
  for (int i = 0; i < count; ++i) {
    float scales[GROUPS][2];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      scales[g][0] = from_16_bit((u16)(coming[0][g / 2] >> 16 * (g % 2)));
      scales[g][1] = from_16_bit((u16)(coming[1][g / 2] >> 16 * (g % 2)));
    }
    if (i + 1 < count) load_scales(groups - 1 - GROUPS * (place.first + i + 1));
    barrier_wait(shared_address(&full[i % STAGES]), (i / STAGES) & 1);
    const char* tile = shared + i % STAGES * STAGE_BYTES;
    start(tile, 0, group_0, part_0);
#pragma unroll
    for (int g = 1; g <= GROUPS; ++g) {  // the next one's numbers are made, then the one before is added
      if (g == GROUPS) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      else if (g % 2) start(tile, g, group_1, part_1);
      else start(tile, g, group_0, part_0);
      if (g < GROUPS) asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
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
    if (threadIdx.x % 128 == 0) barrier_arrive(shared_address(&empty[i % STAGES]));
  }

  finish(sum, gathered, place, y, bias, n, tokens, nullptr, nullptr);
}
