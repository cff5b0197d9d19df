// y[tokens, n] = x[tokens, k] · Wᵀ (+ bias) for few tokens, W packed 2:4, 16 bit, on every GPU from sm_80 on.
//
// The time is to be the time to read W once, so as many bytes of W as possible are always on their way:
// * W is read as the checkpoint has it (values [n, k/2], positions [n, k/8]), 16 bytes a thread, with cp.async
//   into shared memory; STAGES tiles of STEP columns are in flight. Nothing is repacked.
// * A block owns 16·ROW_TILES·ROW_WARPS rows. K_WARPS teams of ROW_WARPS warps share its columns: team t takes
//   the runs t, t + K_WARPS, … of 256 columns (of which a row has 32 bytes of positions, what a cache reads at
//   least). It has a ring of tiles of its own, so that teams never wait for each other before the end; a team
//   of one warp waits for nothing but its copies.
// * W is the sparse operand A of mma.sp.m16n8k32 and 8 tokens are its N. ldmatrix gives both operands in the
//   instruction's order, from rows whose 16-byte chunks are swizzled so that it finds no bank conflicts.
// * The sums of the teams are added through shared memory in a fixed order: no result depends on timing.
// * On sm_90 and later the next kernel of the stream may start while this one ends. W does not depend on the
//   kernel before, so its first tiles are asked for before that one has finished; x is read after that.
//
// Compiled per configuration: TOKENS (8…64, more are several tiles), ROW_TILES, ROW_WARPS, K_WARPS, STEP (64
// or 128), STAGES and FP16 or bf16; common.cuh and sm80.cuh come first. Any n, any k that is a multiple of 32.
// Columns beyond k are filled with zeros in x and the values; positions there, and rows beyond n, are those of
// other places, because the instruction wants every position to be a valid one. Outputs beyond n or tokens are
// not written.

constexpr int ROWS = 16 * ROW_TILES * ROW_WARPS;  // of W per block
constexpr int TEAM = 32 * ROW_WARPS;              // threads that share a tile
constexpr int THREADS = TEAM * K_WARPS;
constexpr int UNITS = STEP / 64;                  // words of positions a lane has for its two rows of a tile
constexpr int A_PITCH = STEP;                     // bytes of a row: STEP / 2 values,
constexpr int E_PITCH = STEP / 8;                 // STEP / 4 positions of 4 bits,
constexpr int X_PITCH = 2 * STEP;                 // STEP columns of x
constexpr int A_BYTES = ROWS * A_PITCH;
constexpr int E_BYTES = ROWS * E_PITCH;
constexpr int X_BYTES = TOKENS * X_PITCH;
constexpr int STAGE_BYTES = A_BYTES + X_BYTES + E_BYTES;
constexpr int SUM_PITCH = ROWS + 4;               // floats; the 4 lanes of a quad then write to other banks
constexpr int RUN = 256 / STEP;                   // tiles that a team takes one after another
constexpr int BAND = 8;                           // row blocks that pass together over the tiles of tokens

// Copies that complete later. Values pass by the first cache; of x other blocks, and of the positions the next
// tiles, want what is beside them.
__device__ __forceinline__ void copy_values(u32 to, const u8* from, bool there, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0), "l"(policy) : "memory");
}
__device__ __forceinline__ void copy_x(u32 to, const u8* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_positions(u32 to, const u8* from, u64 policy) {  // of a row of a tile
  asm volatile("cp.async.ca.shared.global.L2::cache_hint.L2::128B [%0], [%1], %2, %3;" ::"r"(to), "l"(from),
               "n"(STEP / 8), "l"(policy) : "memory");
}
__device__ __forceinline__ void copy_4(u32 to, const u8* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void team_wait(int team) {
  if (ROW_WARPS == 1) __syncwarp();
  else if (K_WARPS == 1) __syncthreads();
  else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM) : "memory");
}

template <int VALUE>
struct Selector { static constexpr int value = VALUE; };

// Where the 16-byte chunk of a row is kept: 8 rows that follow each other have it in 8 different bank groups.
__device__ __forceinline__ int a_chunk(int row, int chunk) {
  return STEP == 128 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);  // two rows of 64 bytes fill the banks
}
__device__ __forceinline__ int x_chunk(int token, int chunk) { return chunk ^ (token & 7); }

extern "C" __global__ void __launch_bounds__(THREADS, 1)
product(const u8* __restrict__ x, const u8* __restrict__ values, const u8* __restrict__ positions,
        const u16* __restrict__ bias, u16* __restrict__ y, int n, int k, int tokens, int blocks, int tiles) {
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x % 32, team = threadIdx.x / TEAM, member = threadIdx.x % TEAM;
  // A band of row blocks meets one tile of tokens after another, so that what is read twice is in the cache.
  const int unit = blockIdx.x, band = unit / (BAND * tiles) * BAND, width = min(BAND, blocks - band);
  const int first_row = (band + unit % (BAND * tiles) % width) * ROWS, last = n - 1 - first_row;
  const int first_token = unit % (BAND * tiles) / width * TOKENS, tokens_here = tokens - first_token;
  // Tiles of this team, and its i-th: whole rounds of a run for each team, then what is left, perhaps nothing.
  const int steps = (k + STEP - 1) / STEP, rounds = steps / (RUN * K_WARPS);
  const int count = rounds * RUN + max(0, min(RUN, steps - (rounds * K_WARPS + team) * RUN));
  auto column_of = [&](int i) { return ((i / RUN * K_WARPS + team) * RUN + i % RUN) * STEP; };
  const bool whole = k % STEP == 0;
  const u32 ring = shared_address(shared) + team * STAGES * STAGE_BYTES;

  values += (u64)first_row * k;
  positions += (u64)first_row * (k / 8);
  x += (u64)first_token * k * 2;
  const u64 once = read_once();

  // A thread copies the same 16-byte chunk of every few rows.
  auto copy_weight_tile = [&](int i, int slot) {
    const int column = column_of(i);
    const u32 a = ring + slot * STAGE_BYTES, e = a + A_BYTES + X_BYTES;
    constexpr int CHUNKS = A_PITCH / 16;
    const int chunk = member % CHUNKS;
    const u8* from = values + column + 16 * chunk;
#pragma unroll
    for (int j = 0; j < ROWS * CHUNKS / TEAM; ++j) {
      const int row = j * (TEAM / CHUNKS) + member / CHUNKS;
      copy_values(a + row * A_PITCH + 16 * a_chunk(row, chunk), from + (u32)min(row, last) * (u32)k,
                  column + 16 * chunk < k, once);
    }
    if (whole) {
#pragma unroll
      for (int j = 0; j < (ROWS + TEAM - 1) / TEAM; ++j) {
        const int row = j * TEAM + member;
        if (ROWS % TEAM == 0 || row < ROWS)
          copy_positions(e + row * E_PITCH, positions + column / 8 + (u32)min(row, last) * (u32)(k / 8), once);
      }
    } else {  // rows begin at multiples of 4 bytes only, and the last tile is not full
      constexpr int PIECES = E_PITCH / 4;
      const int piece = member % PIECES, there = column + 32 * piece < k ? column / 8 + 4 * piece : 0;
#pragma unroll 1
      for (int row = member / PIECES; row < ROWS; row += TEAM / PIECES)
        copy_4(e + row * E_PITCH + 4 * piece, positions + there + (u32)min(row, last) * (u32)(k / 8));
    }
  };
  auto copy_x_tile = [&](int i, int slot) {
    const int column = column_of(i);
    const u32 to = ring + slot * STAGE_BYTES + A_BYTES;
    constexpr int CHUNKS = X_PITCH / 16;
    const int chunk = member % CHUNKS;
    const u8* from = x + 2 * column + 16 * chunk;
#pragma unroll
    for (int j = 0; j < (TOKENS * CHUNKS + TEAM - 1) / TEAM; ++j) {
      const int token = j * (TEAM / CHUNKS) + member / CHUNKS;
      const bool there = token < tokens_here && column + 8 * chunk < k;
      if (TOKENS * CHUNKS % TEAM == 0 || token < TOKENS)
        copy_x(to + token * X_PITCH + 16 * x_chunk(token, chunk), there ? from + (u32)(2 * token) * (u32)k : x,
               there);
    }
  };

  next_may_start();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i)
    if (i < count) copy_weight_tile(i, i);
  kernel_before_has_ended();  // x may be its work
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < count) copy_x_tile(i, i);
    copies_end();
  }

  float sum[ROW_TILES][TOKENS / 8][4];
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int t = 0; t < TOKENS / 8; ++t)
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[m][t][c] = 0.f;

  // The instruction takes 32 columns. With selector s the lanes 2s and 2s+1 of a quad give their positions, each
  // for 16 of them, rows lane/4 (low half of the word) and lane/4 + 8 (high half). So that a lane finds its
  // positions side by side, the columns of a tile are taken in another order, which the sum does not mind: the
  // lane l%4 of a quad has UNITS runs of 16 columns, and product (s, u) is run u of the lanes 2s and 2s+1.
  const int row = 16 * ROW_TILES * (member / 32);  // the warp's first of the block's rows
  const u32 a_row = (row + lane % 16) * A_PITCH, e_row = (row + lane / 4) * E_PITCH + lane % 4 * (E_PITCH / 4);
  auto multiply = [&](int slot) {
    const u32 a = ring + slot * STAGE_BYTES, b = a + A_BYTES;
    const char* e = shared + (team * STAGES + slot) * STAGE_BYTES + A_BYTES + X_BYTES + e_row;
    u32 places[ROW_TILES][UNITS];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      const char *upper = e + 16 * m * E_PITCH, *lower = upper + 8 * E_PITCH;
      if (UNITS == 1) {
        places[m][0] = *(const u16*)upper | (u32) * (const u16*)lower << 16;
      } else {
        const u32 up = *(const u32*)upper, low = *(const u32*)lower;
        places[m][0] = __byte_perm(up, low, 0x5410);
        places[m][UNITS - 1] = __byte_perm(up, low, 0x7632);
      }
    }
    auto run = [&](auto selector, int u) {
      const int here = (2 * selector.value + lane / 16) * UNITS + u;  // which 16 columns this lane points at
      u32 columns[TOKENS / 8][4];
#pragma unroll
      for (int t = 0; t < TOKENS / 8; ++t)
        load_matrices(columns[t], b + (8 * t + lane % 8) * X_PITCH + 16 * x_chunk(lane, 2 * here + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
        u32 weights[4];
        load_matrices(weights, a + a_row + 16 * m * A_PITCH + 16 * a_chunk(lane, here));
#pragma unroll
        for (int t = 0; t < TOKENS / 8; ++t)
          multiply_add<selector.value>(sum[m][t], weights, columns[t], places[m][u]);
      }
    };
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      run(Selector<0>(), u);
      run(Selector<1>(), u);
    }
  };

  // A tile is multiplied when its copies are done for the whole team; the slot of the tile before is then free.
  for (int i = 0, slot = 0, free = STAGES - 1; i < count; ++i) {
    copies_wait<STAGES - 2>();
    team_wait(team);
    if (i + STAGES - 1 < count) {
      copy_weight_tile(i + STAGES - 1, free);
      copy_x_tile(i + STAGES - 1, free);
    }
    copies_end();  // also when empty: the count of those pending stays the same
    multiply(slot);
    free = slot;
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
  __syncthreads();  // no tile is needed any more: their memory is for the sums now

  float* sums = (float*)shared;  // [K_WARPS][TOKENS][SUM_PITCH]
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int t = 0; t < TOKENS / 8; ++t)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        sums[(team * TOKENS + 8 * t + 2 * (lane % 4) + c % 2) * SUM_PITCH + row + 16 * m + lane / 4 + c / 2 * 8] =
            sum[m][t][c];
  __syncthreads();
  for (int i = threadIdx.x; i < TOKENS * ROWS / 2; i += THREADS) {  // two rows of a token
    const int token = i / (ROWS / 2), at = 2 * (i % (ROWS / 2)), to = first_row + at;
    if (token >= tokens_here || at > last) continue;
    float low = 0.f, high = 0.f;
#pragma unroll
    for (int w = 0; w < K_WARPS; ++w) {
      const float2 part = *(const float2*)&sums[(w * TOKENS + token) * SUM_PITCH + at];
      low += part.x;
      high += part.y;
    }
    if (bias) {
      low += from_16_bit(bias[to]);
      if (at < last) high += from_16_bit(bias[to + 1]);
    }
    u16* out = y + (u64)(first_token + token) * n + to;
    if (n % 2 == 0) {
      *(u32*)out = to_16_bit(low) | (u32)to_16_bit(high) << 16;
    } else {
      out[0] = to_16_bit(low);
      if (at < last) out[1] = to_16_bit(high);
    }
  }
}
