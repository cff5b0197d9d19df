// y[tokens, n] = x[tokens, k] · Wᵀ (+ bias) for many tokens, W packed 2:4, both of 8 bits, on Hopper (sm_90a).
//
// The plan is prefill_sm90.cu's: blocks that stay and take tile after tile, a cluster whose blocks share the tokens' tile,
// one copying warp. What differs: values and x of 128 columns make up one stage, and there is one ring of them. Positions
// of 512 columns, 64 bytes a row, have a ring of their own. And sums leave by the copy engine, from where the last x of
// their tile was, while the next tile's products run.
//
// Products of 8 bits are so short that copies and products take about the same time, and neither hides anything else: the
// wait for a stage and for its positions must lie under products that run (benchmarks/LOG.md: a tenth of the time and more).
//
// Every sum is multiplied by the scales of its row and of its token before the bias is added.
//
// Compiled per configuration: TOKENS, AT_ONCE (tokens of one instruction), WARPGROUPS, CLUSTER, STAGES, E_STAGES, LEAVING, GATED
// (see decode_sm90.cu), CODES (1 e4m3, 2 int8) and FP16 or bf16, the type of y; WGMMA(…) is generated, tiles_sm90.cuh comes
// first. n must be a multiple of 8, k of 128.

constexpr int A_BYTES = ROWS * 64;                // 64 values, that is 128 columns, of each row
constexpr int B_BYTES = TOKENS * 128;             // 128 columns of x
constexpr int B_PART = B_BYTES / CLUSTER;         // what one block of the cluster fetches
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int E_STEPS = COLUMNS / 128;            // for which positions come together
constexpr int E_PITCH = COLUMNS / 8;              // bytes of a row's
constexpr int E_BYTES = ROWS * E_PITCH;

// Those who multiply need more registers than an equal share of them. So the copying warp comes with three that do nothing,
// a whole warpgroup, which hands over what it has: three times 168 become 224, 224 and 56, or four times 128 three times 160
// and 32. With four an instruction may still not have more sums than 128 registers have room for: two share the tokens.
constexpr int THREADS = CONSUMERS + 128, REGISTERS = WARPGROUPS > 2 ? 160 : 224, LEFT = WARPGROUPS > 2 ? 32 : 56;

static_assert(STAGES > 2, "a tile begins while a stage is still in use for sums of the one before");

// A shared-memory matrix of 64-byte rows under the 64-byte swizzle: 8 rows are 512 bytes.
__device__ __forceinline__ u64 descriptor_64(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(512 >> 4) << 32 | (u64)2 << 62;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
prefill8(const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap positions,
         const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap y, const u16* __restrict__ bias, int n, int tokens,
         const Work work, const Parts parts, const u16* __restrict__ row_scale, const float* token_scale) {
  extern __shared__ char unaligned[];
  // By the same amount in every block of a cluster, which write into each other's shared memory.
  char* shared = unaligned + ((1024 - (shared_address(unaligned) & 1023)) & 1023);
  const u32 ring = shared_address(shared);  // of stages: x, values
  const u32 e_ring = ring + STAGES * STAGE_BYTES;
  const char* e_tiles = shared + STAGES * STAGE_BYTES;
  __shared__ alignas(8) u64 full[STAGES], empty[STAGES], e_full[E_STAGES], e_empty[E_STAGES];
  __shared__ alignas(8) float token_scales[WARPGROUPS][TOKENS];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % CLUSTER, clusters = gridDim.x / CLUSTER, pieces = work.pieces();

  if (warp == 4 * WARPGROUPS && elected()) {
    prefetch_map(&values);
    prefetch_map(&positions);
    prefetch_map(&x);
    prefetch_map(&y);
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(shared_address(&full[s]), 1);
      barrier_init(shared_address(&empty[s]), WARPGROUPS * CLUSTER);
    }
    for (int s = 0; s < E_STAGES; ++s) {
      barrier_init(shared_address(&e_full[s]), 1);
      barrier_init(shared_address(&e_empty[s]), WARPGROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  begin_together();

  if (warp >= 4 * WARPGROUPS) {  // the copying warp, and those that come with it
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LEFT));
    if (warp == 4 * WARPGROUPS && elected()) {
      u64 policy, often;  // x is wanted again by every set of rows, W only if not all its tiles have their turn at once
      if (work.grouped * work.tiles <= clusters)
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
      else
        asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(policy));
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(often));
      auto copy_rows = [&](u32 to, const TensorMap* map, int column, int rows, u32 barrier) {
#if GATED
        copy_pairs(to, map, column, rows * (ROWS / 16), barrier, policy);
#else
        copy_tile(to, map, column, rows * ROWS, barrier, policy);
#endif
      };
      Ring<E_STAGES> e;  // the buffer of positions to be filled next
      auto copy_weights = [&](int stage, int rows, int step) {
        if (step % E_STEPS == 0) {
          const u32 barrier = shared_address(&e_full[e.stage]);
          barrier_wait(shared_address(&e_empty[e.stage]), e.phase ^ 1);  // the first round passes at once
          barrier_expect(barrier, E_BYTES);
          copy_rows(e_ring + e.stage * E_BYTES, &positions, step / E_STEPS * E_PITCH, rows, barrier);
          e.advance();
        }
        const u32 barrier = shared_address(&full[stage]);
        barrier_expect(barrier, STAGE_BYTES);
        copy_rows(ring + stage * STAGE_BYTES + B_BYTES, &values, step * 64, rows, barrier);
      };
      auto copy_x = [&](int stage, int token, int step) {
        const u32 barrier = shared_address(&full[stage]), to = ring + stage * STAGE_BYTES + rank * B_PART;
        if (CLUSTER > 1)
          copy_tile_to(to, &x, step * 128, token + rank * (TOKENS / CLUSTER), barrier, often,
                       (u16)((1 << CLUSTER) - 1));
        else
          copy_tile(to, &x, step * 128, token, barrier, often);
      };
      Ring<STAGES> next;  // the stage to be filled
      for (int number = blockIdx.x / CLUSTER; number < pieces; number += clusters) {
        const Piece piece(number, work, rank);
        const int end = piece.first + piece.steps;
        int fetched = piece.first;
        if (number == blockIdx.x / CLUSTER) {  // W does not depend on the kernel before this one, x may be its work
          const int ahead = min(min(STAGES, E_STEPS * E_STAGES), piece.steps);  // for which there are buffers
          for (int stage = 0; stage < ahead; ++stage) copy_weights(stage, piece.at.rows, fetched++);
          asm volatile("griddepcontrol.wait;" ::: "memory");
        }
        for (int step = piece.first; step < end; ++step) {
          if (step >= fetched) {
            barrier_wait(shared_address(&empty[next.stage]), next.phase ^ 1);  // the first round passes at once
            copy_weights(next.stage, piece.at.rows, step);
          }
          copy_x(next.stage, piece.at.token, step);
          next.advance();
        }
      }
      wait_for_all(next, empty);
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
  const int group = warp / 4;
  Sum sum[ACCUMULATORS];
  u32 places_0[2] = {}, places_1[2] = {}, places_2[2] = {};  // positions, see decode_sm90.cu: sets that take turns
  Ring<STAGES> now;  // the stage to be multiplied
  const u32 b_first = low_word(ring), a_first = (u32)descriptor_64(ring + B_BYTES + group * 64 * 64);
  // Every lane has the positions of 32 of the 64 columns of each product, in one row: even lanes in the upper of
  // the two rows of their sums, odd ones in the lower.
  const int row = 16 * warp + lane / 4 + lane % 2 * 8;
  const char* e_first = e_tiles + row * E_PITCH + lane / 2 % 2 * 4;
  const int turned = row * E_PITCH / 128 % E_STEPS;  // the copy engine lets 16 bytes change places, lest banks clash
  Ring<E_STAGES> e, e_done;         // positions to be fetched next, and not needed any more next

  auto hold = [&]() {  // the compiler must not move sums across the products that it cannot see writing them
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; ++j) HOLD(sum[j]);
  };
  auto release = [&](int stage) { release_in_cluster(shared_address(&empty[stage])); };
  auto a_descriptor = [](u32 low) {
    u64 out;
    asm("mov.b64 %0, {%1, %2};" : "=l"(out) : "r"(low), "r"((u32)(descriptor_64(0) >> 32)));
    return out;
  };
  auto release_positions = [&]() {
    if (threadIdx.x % 128 == 0) barrier_arrive(shared_address(&e_empty[e_done.stage]));
    e_done.advance();
  };
  auto fetch = [&](int step, u32(&places)[2]) {  // of the stage that is next
    if (step % E_STEPS == 0) barrier_wait(shared_address(&e_full[e.stage]), e.phase);
    const char* at = e_first + e.stage * E_BYTES + 16 * (step % E_STEPS ^ turned);
    places[0] = *(const u32*)at;
    places[1] = *(const u32*)(at + 8);
    if (step % E_STEPS == E_STEPS - 1) e.advance();
    barrier_wait(shared_address(&full[now.stage]), now.phase);
  };
  // 128 columns, as two products. When those before have ended their stage is free at once; then, while these run, the next
  // stage is waited for and its positions are fetched. Three sets of positions: of the products before, of these, and of
  // the next.
  auto multiply = [&](int step, int steps, u32(&before)[2], u32(&places)[2], u32(&next)[2]) {
    const u32 a = a_first + now.stage * (STAGE_BYTES >> 4), b = b_first + now.stage * (STAGE_BYTES >> 4);
    hold();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int part = 0; part < TOKENS; part += AT_ONCE)
        WGMMA(sum + part / 2, a_descriptor(a + 2 * j), full_descriptor(b + 4 * j + 8 * part), places[j], 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    const int done = now.before();
    now.advance();
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    hold();
    asm volatile("" : "+r"(before[0]), "+r"(before[1]), "+r"(places[0]), "+r"(places[1])::"memory");
    if (step) {
      release(done);
      if (step % E_STEPS == 0) release_positions();
    }
    if (step + 1 < steps) fetch(step + 1, next);
  };

  // Scales of a tile's tokens are asked for at its beginning, each by one thread. When its first products run they are put where
  // all threads of the warpgroup find them.
  constexpr int EACH = (TOKENS + 127) / 128;
  const int member = threadIdx.x % 128;
  int leaving = -1;  // the stage from which sums are on their way
  asm volatile("griddepcontrol.wait;" ::: "memory");  // they are the work of the kernel before
  Piece following(blockIdx.x / CLUSTER, work, rank);
  for (int number = blockIdx.x / CLUSTER; number < pieces; number += clusters) {
    const Piece piece = AHEAD ? following : Piece(number, work, rank);
    const Unit& at = piece.at;
    const int steps = piece.steps;
    float coming[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int token = member + 128 * j;
      coming[j] = token < TOKENS && at.token + token < tokens ? load_fresh(token_scale + at.token + token) : 1.f;
    }
    Outgoing out;
    if (AHEAD) out.ask(at, bias, row_scale, n);
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; ++j) sum[j] = 0;
    fetch(0, places_0);
    for (int step = 0; step < steps; step += 3) {
      multiply(step, steps, places_2, places_0, places_1);
      if (step == 0) {  // what takes long, under the first products
        if (leaving >= 0) release_when_read(shared_address(&empty[leaving]));
        leaving = -1;
        if (AHEAD && number + clusters < pieces) following = Piece(number + clusters, work, rank);
#pragma unroll
        for (int j = 0; j < EACH; ++j)
          if (member + 128 * j < TOKENS) token_scales[group][member + 128 * j] = coming[j];
      }
      if (step + 1 < steps) multiply(step + 1, steps, places_0, places_1, places_2);
      if (step + 2 < steps) multiply(step + 2, steps, places_1, places_2, places_0);
    }
    if (steps % E_STEPS) e.advance();  // the rest of its positions is beyond the edge
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    hold();
    asm volatile("" : "+r"(places_0[0]), "+r"(places_0[1]), "+r"(places_1[0]), "+r"(places_1[1])::"memory");
    asm volatile("" : "+r"(places_2[0]), "+r"(places_2[1])::"memory");
    release_positions();
    if (CUTS && piece.cut >= 0) {
      if (piece.part < work.parts - 1) {
        release(now.before());
        parts.leave(sum, work, piece, rank);
        continue;
      }
      parts.add(sum, work, piece, rank);
    }
    if (!AHEAD) out.ask(at, bias, row_scale, n);
    leaving = now.before();
    out.write(sum, token_scales[group], ring + leaving * STAGE_BYTES, &y);
  }
  if (leaving >= 0) release_when_read(shared_address(&empty[leaving]));
}
