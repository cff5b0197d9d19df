// y[tokens, n] = x[tokens, k] · Wᵀ (+ bias) for few tokens, W packed 2:4, of 16 or 8 bits, on Hopper (sm_90a).
//
// Few tokens means that the time is the time to read W once, so everything serves that stream:
// * W is read in the checkpoint's own row-major layout (values [n, k/2], positions [n, k/8], but see
//   positions_sm90.cuh) by the tensor copy engine, which swizzles the tiles into shared memory as wgmma reads them.
// * One warp only issues copies, STAGES tiles ahead; WARPGROUPS × 128 threads multiply (64 rows each).
// * W is wgmma's sparse operand A, the tokens are its N: one instruction is 64 rows × TOKENS × 32 columns.
// * A cluster of SPLIT blocks shares the columns of one row block and adds up its parts through distributed
//   shared memory, in a fixed order: the result does not depend on timing.
// * The next kernel of the stream may start while this one ends ("programmatic dependent launch"): W does
//   not depend on the kernel before, so its first tiles are asked for before that one has finished.
//
// With GATED, W is two matrices, a gate and the one beside it, and y = activate(x · gateᵀ) * (x · besideᵀ): their
// rows come into shared memory in turns, eight of each, so that a thread has both sums of an output.
//
// With CODES, W and x are codes of 8 bits (1 e4m3, 2 int8), and every sum is multiplied by the scales of its row and of its
// token. Counted in bytes all is the same then, with twice the columns, but for the positions.
//
// Compiled per configuration: TOKENS (8…256), WARPGROUPS, SPLIT, STAGES, STEP, GATED, CODES, ORDERED and FP16 or bf16; WGMMA(…)
// is generated, positions_sm90.cuh comes first. Tiles beyond the edges of W and x are filled with zeros by the copy engine, so any n, and any k
// that is a multiple of 128, works; outputs beyond n or tokens are not written.

constexpr int WIDE = CODES ? 128 : 64;            // elements in 128 bytes, a row of a tile in shared memory
constexpr int A_BOX = ROWS * 128;                 // WIDE values of each row, that is twice as many columns
constexpr int A_BYTES = A_BOX * (STEP / (2 * WIDE));
constexpr int B_BOX = TOKENS * 128;               // WIDE columns of x
constexpr int B_BYTES = B_BOX * (STEP / WIDE);
constexpr int PLACES = STEP / 64;                 // words of positions a thread has of a tile
constexpr int E_BYTES = ROWS * (STEP / 8);        // positions
constexpr int STAGE_BYTES = A_BYTES + B_BYTES + E_BYTES;
constexpr int PENDING = STAGES > 2;               // with two stages, waiting would leave only one to be filled

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(CONSUMERS + 32, 1)
decode(const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap positions,
       const __grid_constant__ TensorMap x, u16* __restrict__ y, const u16* __restrict__ bias, int n,
       int tokens, int steps, int blocks, int tiles, int grouped, const u16* __restrict__ row_scale,
       const float* token_scale) {
  extern __shared__ char unaligned[];
  // By the same amount in every block of a cluster, which address each other's shared memory.
  char* shared = unaligned + ((1024 - (shared_address(unaligned) & 1023)) & 1023);
  Sum* gathered = (Sum*)(shared + STAGES * STAGE_BYTES);
  float* token_scales = (float*)(gathered + (SPLIT > 1 ? ROWS * TOKENS : 0));  // [TOKENS], with CODES
  __shared__ alignas(8) u64 full[STAGES], empty[STAGES], sums_sent;

  const int warp = threadIdx.x / 32;
  const Place place(steps, blocks, tiles, grouped);
  const int block = place.block, first_token = place.first_token, first = place.first, count = place.count;

  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (warp == 4 * WARPGROUPS) {  // the copying warp sets up the barriers, and does not wait for the others
    if (elected()) {
      prefetch_map(&values);
      prefetch_map(&positions);
      prefetch_map(&x);
      for (int s = 0; s < STAGES; ++s) {
        barrier_init(shared_address(&full[s]), 1);
        barrier_init(shared_address(&empty[s]), WARPGROUPS);
      }
      if (SPLIT > 1) expect_sums(shared_address(&sums_sent));
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("bar.arrive 0, %0;" ::"n"(CONSUMERS + 32) : "memory");
  } else {
    asm volatile("bar.sync 0, %0;" ::"n"(CONSUMERS + 32) : "memory");
  }
  if (SPLIT > 1) cluster_arrive();

  if (warp == 4 * WARPGROUPS) {
    if (elected()) {
      u64 once, often;  // weights pass through the cache once; x is wanted again by every block
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(once));
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(often));
      auto copy_weights = [&](int i) {
        const int s = i % STAGES, step = first + i;
        const u32 barrier = shared_address(&full[s]), tile = shared_address(shared) + s * STAGE_BYTES;
        barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
        for (int j = 0; j < STEP / (2 * WIDE); ++j)
          copy_rows(tile + j * A_BOX, &values, step * (STEP / 2) + WIDE * j, block, barrier, once);
        copy_positions(tile + A_BYTES + B_BYTES, &positions, step * STEP, block, barrier, once);
      };
      auto copy_x = [&](int i) {
        const int s = i % STAGES, step = first + i;
        const u32 barrier = shared_address(&full[s]), tile = shared_address(shared) + s * STAGE_BYTES + A_BYTES;
#pragma unroll
        for (int j = 0; j < STEP / WIDE; ++j)
          copy_tile(tile + j * B_BOX, &x, step * STEP + WIDE * j, first_token, barrier, often);
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
    __syncwarp();
    if (SPLIT > 1) cluster_wait();
    return;
  }

#if CODES
  fetch_scales(token_scales, token_scale + first_token, tokens - first_token);
#endif
  const int group = warp / 4;
  Sum sum[ACCUMULATORS];
#pragma unroll
  for (int j = 0; j < ACCUMULATORS; ++j) sum[j] = 0;

  // Of 16 bits, a word of positions serves two steps of 32 columns (positions_sm90.cuh).
  // Of 8 bits, a word serves one step of 64 columns: even lanes have the upper of their two rows, odd ones the lower,
  // lanes 0 and 1 of a quad the first 32 columns, 2 and 3 the others.
  // wgmma reads these registers when it runs, not when it is issued: two sets take turns, and each is held
  // (the empty asm below) until the products that read it are done.
  u32 even[PLACES] = {}, odd[PLACES] = {};
  auto hold = [&]() {
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; ++j) HOLD(sum[j]);
  };
  auto multiply = [&](int i, u32(&places)[PLACES], u32(&before)[PLACES]) {
    const int s = i % STAGES;
    barrier_wait(shared_address(&full[s]), (i / STAGES) & 1);
    const char* tile = shared + s * STAGE_BYTES;
#if CODES
    const int lane = threadIdx.x % 32, row = 16 * warp + lane / 4 + lane % 2 * 8;
    const char* e = tile + A_BYTES + B_BYTES + row * E_PITCH + lane / 2 % 2 * 4;
#pragma unroll
    for (int j = 0; j < PLACES; ++j) places[j] = *(const u32*)(e + 8 * j);
#else
#pragma unroll
    for (int j = 0; j < PLACES; ++j) places[j] = places_of(tile + A_BYTES + B_BYTES, 64 * j);
#endif
    const u64 a = descriptor(shared_address(tile) + group * 64 * 128);
    const u64 b = descriptor(shared_address(tile) + A_BYTES);
    hold();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    // A product takes 32 bytes of A and 64 bytes of x; descriptors count in units of 16 bytes.
#pragma unroll
    for (int j = 0; j < STEP / WIDE; ++j) {
      const u64 a_here = a + (j / 2) * (A_BOX >> 4) + 4 * (j % 2), b_here = b + j * (B_BOX >> 4);
#if CODES
      WGMMA(sum, a_here, b_here, places[2 * j], 0);
      WGMMA(sum, a_here + 2, b_here + 4, places[2 * j + 1], 0);
#else
      WGMMA(sum, a_here, b_here, places[j], 0);
      WGMMA(sum, a_here + 2, b_here + 4, places[j], 1);
#endif
    }
    // One tile's products stay in flight while the next tile is prepared; those of the tile before are done.
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    hold();
#pragma unroll
    for (int j = 0; j < PLACES; ++j) asm volatile("" : "+r"(before[j]), "+r"(places[j])::"memory");
    if (i >= PENDING && threadIdx.x % 128 == 0) barrier_arrive(shared_address(&empty[(i - PENDING) % STAGES]));
  };
  for (int i = 0; i + 1 < count; i += 2) {
    multiply(i, even, odd);
    multiply(i + 1, odd, even);
  }
  if (count % 2) multiply(count - 1, even, odd);  // in the loop, the compiler would not let products stay in flight
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  hold();
#pragma unroll
  for (int j = 0; j < PLACES; ++j) asm volatile("" : "+r"(even[j]), "+r"(odd[j])::"memory");

  static_assert(!GATED || SHARE % 4 == 0, "a block finishes both sums of an output");
  gather(sum, gathered, shared_address(&sums_sent), place);
  write(sum, place, y, bias, n, tokens, row_scale, token_scales);
}
