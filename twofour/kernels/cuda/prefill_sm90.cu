// y[tokens, n] = x[tokens, k] · Wᵀ (+ bias) for many tokens, W packed 2:4, 16 bit, on Hopper (sm_90a).
//
// Many tokens means that the time is the multiplications', so everything serves to keep the tensor cores fed:
// * A block owns 64·WARPGROUPS rows of W × TOKENS tokens; each warpgroup multiplies 64 rows with all TOKENS. W
//   comes from the checkpoint's own row-major layout, as in decode_sm90.cu.
// * A cluster of CLUSTER blocks has the same tokens and neighbouring rows: each fetches its part of the tokens'
//   tile and the copy engine hands it to all of them, so x leaves the cache once a cluster, not once a block.
// * Three rings of buffers: values of W in tiles of 128 columns, positions of 256 (32 bytes a row, what the memory
//   gives at once), x, the largest, in finer pieces of 64.
// * Two products of 32 columns stay in flight per warpgroup while the next two are issued; the positions of the
//   next tile of W are fetched under the products of this one.
// * Blocks stay (one a multiprocessor) and take tile after tile: while a tile's sums are rounded the first stages of the
//   next one arrive, and they leave by the copy engine while its products run.
//
// Compiled per configuration: TOKENS, WARPGROUPS, CLUSTER, A_STAGES, B_STAGES, E_STAGES, LEAVING, GATED (see decode_sm90.cu),
// ORDERED and FP16 or bf16; WGMMA(…) is generated, tiles_sm90.cuh and positions_sm90.cuh come first. n must be a multiple of 8,
// k of 128.

constexpr int A_BYTES = ROWS * 128;               // 64 values, that is 128 columns, of each row
constexpr int E_BYTES = ROWS * 32;                // positions of 256 columns
constexpr int B_STAGE = TOKENS * 128;             // 64 columns of x
constexpr int B_PART = B_STAGE / CLUSTER;         // what one block of the cluster fetches

static_assert(B_STAGES > 3, "a tile begins while one is still in use for sums of the one before");

// Two warpgroups have the more registers if the copying warp comes with three that do nothing: see prefill8_sm90.cu.
constexpr bool LENDS = WARPGROUPS < 3;
constexpr int THREADS = CONSUMERS + (LENDS ? 128 : 32);

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
prefill(const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap positions,
        const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap y, const u16* __restrict__ bias, int n, int tokens,
        const Work work, const Parts parts) {
  extern __shared__ char unaligned[];
  // By the same amount in every block of a cluster, which write into each other's shared memory.
  char* shared = unaligned + ((1024 - (shared_address(unaligned) & 1023)) & 1023);
  const u32 a_ring = shared_address(shared), b_ring = a_ring + A_STAGES * A_BYTES;
  const u32 e_ring = b_ring + B_STAGES * B_STAGE;  // last: it is the one that need not be aligned to 1024
  const char* e_tiles = shared + A_STAGES * A_BYTES + B_STAGES * B_STAGE;
  __shared__ alignas(8) u64 a_full[A_STAGES], a_empty[A_STAGES], b_full[B_STAGES], b_empty[B_STAGES];
  __shared__ alignas(8) u64 e_full[E_STAGES], e_empty[E_STAGES];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % CLUSTER, clusters = gridDim.x / CLUSTER, pieces = work.pieces();

  if (warp == 4 * WARPGROUPS && elected()) {
    prefetch_map(&values);
    prefetch_map(&positions);
    prefetch_map(&x);
    prefetch_map(&y);
    for (int s = 0; s < A_STAGES; ++s) {
      barrier_init(shared_address(&a_full[s]), 1);
      barrier_init(shared_address(&a_empty[s]), WARPGROUPS);
    }
    for (int s = 0; s < E_STAGES; ++s) {
      barrier_init(shared_address(&e_full[s]), 1);
      barrier_init(shared_address(&e_empty[s]), WARPGROUPS);
    }
    for (int s = 0; s < B_STAGES; ++s) {
      barrier_init(shared_address(&b_full[s]), 1);
      barrier_init(shared_address(&b_empty[s]), WARPGROUPS * CLUSTER);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  begin_together();

  if (warp >= 4 * WARPGROUPS) {  // the copying warp, and those that come with it
    if (LENDS) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (warp == 4 * WARPGROUPS && elected()) {
      u64 policy;
      asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(policy));
      Ring<A_STAGES> a;  // the buffers to be filled next
      Ring<B_STAGES> b;
      Ring<E_STAGES> e;
      auto copy_rows = [&](u32 to, const TensorMap* map, int column, int rows, u32 barrier) {
#if GATED
        copy_pairs(to, map, column, rows * (ROWS / 16), barrier, policy);
#else
        copy_tile(to, map, column, rows * ROWS, barrier, policy);
#endif
      };
      auto copy_weights = [&](int rows, int step) {
        if (step % 2 == 0) {
          const u32 barrier = shared_address(&e_full[e.stage]);
          barrier_wait(shared_address(&e_empty[e.stage]), e.phase ^ 1);  // the first round passes at once
          barrier_expect(barrier, E_BYTES);
          copy_positions(e_ring + e.stage * E_BYTES, &positions, step * 128, rows, barrier, policy);
          e.advance();
        }
        const u32 barrier = shared_address(&a_full[a.stage]);
        barrier_wait(shared_address(&a_empty[a.stage]), a.phase ^ 1);
        barrier_expect(barrier, A_BYTES);
        copy_rows(a_ring + a.stage * A_BYTES, &values, step * 64, rows, barrier);
        a.advance();
      };
      auto copy_x = [&](int token, int half_step) {
        const u32 barrier = shared_address(&b_full[b.stage]), to = b_ring + b.stage * B_STAGE + rank * B_PART;
        barrier_wait(shared_address(&b_empty[b.stage]), b.phase ^ 1);
        barrier_expect(barrier, B_STAGE);
        if (CLUSTER > 1)
          copy_tile_to(to, &x, half_step * 64, token + rank * (TOKENS / CLUSTER), barrier, policy,
                       (u16)((1 << CLUSTER) - 1));
        else
          copy_tile(to, &x, half_step * 64, token, barrier, policy);
        b.advance();
      };
      bool waited = false;
      for (int number = blockIdx.x / CLUSTER; number < pieces; number += clusters) {
        const Piece piece(number, work, rank);
        const int end = piece.first + piece.steps;
        int fetched = piece.first;
        if (!waited) {  // W does not depend on the kernel before this one, x may be its work
          while (fetched < min(piece.first + A_STAGES, end)) copy_weights(piece.at.rows, fetched++);
          asm volatile("griddepcontrol.wait;" ::: "memory");
          waited = true;
        }
        for (int step = piece.first; step < end; ++step) {
          if (step >= fetched) copy_weights(piece.at.rows, step);
          copy_x(piece.at.token, 2 * step);
          copy_x(piece.at.token, 2 * step + 1);
        }
      }
      wait_for_all(b, b_empty);
    }
    return;
  }

  if (LENDS) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
  const int group = warp / 4;
  float sum[ACCUMULATORS];
  u32 even[2] = {}, odd[2] = {};  // positions, see decode_sm90.cu: two sets that take turns
  Ring<A_STAGES> a;               // the tiles to be multiplied next
  Ring<B_STAGES> b;
  Ring<E_STAGES> e;
  const u32 a_first = low_word(a_ring + group * 64 * 128), b_first = low_word(b_ring);

  auto hold = [&]() {  // the compiler must not move sums across the products that it cannot see writing them
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; ++j) asm volatile("" : "+f"(sum[j])::"memory");
  };
  auto wait_a = [&]() { barrier_wait(shared_address(&a_full[a.stage]), a.phase); };
  auto wait_b = [&]() { barrier_wait(shared_address(&b_full[b.stage]), b.phase); };
  // Of the first or second 128 columns of a tile of positions.
  auto fetch_positions = [&](int second, u32(&places)[2]) {
    barrier_wait(shared_address(&e_full[e.stage]), e.phase);
#pragma unroll
    for (int j = 0; j < 2; ++j) places[j] = places_of(e_tiles + e.stage * E_BYTES, 128 * second + 64 * j);
  };
  auto release = [&](u64* empty) {
    if (threadIdx.x % 128 == 0) barrier_arrive(shared_address(empty));
  };
  auto release_b = [&](int stage) { release_in_cluster(shared_address(&b_empty[stage])); };
  // 128 columns, the first or second of a tile of positions, in two halves of two products each. Whatever the
  // next half needs is waited for and worked out while this one and the one before run, so that between the
  // end of the one before and the issue of the next there is nothing to do.
  auto multiply = [&](int second, bool first, bool last, u32(&places)[2], u32(&next)[2]) {
    const u32 a_low = a_first + a.stage * (A_BYTES >> 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 b_low = b_first + b.stage * (B_STAGE >> 4);
      hold();
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      WGMMA(sum, full_descriptor(a_low + 4 * half), full_descriptor(b_low), places[half], 0);
      WGMMA(sum, full_descriptor(a_low + 4 * half + 2), full_descriptor(b_low + 4), places[half], 1);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      const int b_before = b.before(), a_before = a.before(), e_before = e.before();
      b.advance();
      if (half) {
        a.advance();
        if (second) e.advance();
        if (!last) {
          fetch_positions(!second, next);
          wait_a();
          wait_b();
        }
      } else {
        wait_b();
      }
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      hold();
      // Everything before this half is done: its tiles may be filled again, its positions be overwritten.
      asm volatile("" : "+r"(next[0]), "+r"(next[1]), "+r"(places[0]), "+r"(places[1])::"memory");
      if (half || !first) release_b(b_before);
      if (!half && !first) {
        release(&a_empty[a_before]);
        if (!second) release(&e_empty[e_before]);
      }
    }
  };

  int leaving = -1;  // the tile of x in whose place sums are on their way
  if (bias != nullptr) asm volatile("griddepcontrol.wait;" ::: "memory");  // it may be the work of the kernel before
  Piece following(blockIdx.x / CLUSTER, work, rank);
  for (int number = blockIdx.x / CLUSTER; number < pieces; number += clusters) {
    const Piece piece = AHEAD ? following : Piece(number, work, rank);
    const int steps = piece.steps;
    Outgoing out;
    if (AHEAD) out.ask(piece.at, bias, nullptr, n);
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; ++j) sum[j] = 0.f;
    fetch_positions(0, even);
    wait_a();
    wait_b();
    for (int step = 0; step < steps; step += 2) {
      multiply(0, step == 0, step + 1 == steps, even, odd);
      if (step == 0) {  // what takes long, under the first products
        if (leaving >= 0) release_when_read(shared_address(&b_empty[leaving]));
        leaving = -1;
        if (AHEAD && number + clusters < pieces) following = Piece(number + clusters, work, rank);
      }
      if (step + 1 < steps) multiply(1, false, step + 2 == steps, odd, even);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    hold();
    asm volatile("" : "+r"(even[0]), "+r"(even[1]), "+r"(odd[0]), "+r"(odd[1])::"memory");
    if (steps % 2) e.advance();  // the second half of its positions is beyond the edge
    release(&a_empty[a.before()]);
    release(&e_empty[e.before()]);

    if (CUTS && piece.cut >= 0) {
      if (piece.part < work.parts - 1) {
        release_b(b.before());
        parts.leave(sum, work, piece, rank);
        continue;
      }
      parts.add(sum, work, piece, rank);
    }
    if (!AHEAD) out.ask(piece.at, bias, nullptr, n);
    leaving = b.before();
    out.write(sum, nullptr, b_ring + leaving * B_STAGE, &y);
  }
  if (leaving >= 0) release_when_read(shared_address(&b_empty[leaving]));
}
