// y[tokens, n] = x[tokens, k] · Wᵀ (+ bias) for few tokens, W packed 2:4 in 8 or 4 bits, x 16 bit, from sm_80 on.
//
// As in mma_sm80.cu the time is to be the time to read W once, and the ring of tiles in shared memory, the teams,
// the early start and the order of the sums are as there. What is new is that a tile holds codes, which become
// 16-bit numbers in registers, on their way to mma.sp.m16n8k32:
// * Every code is exactly a bf16 and exactly an fp16, so nothing is rounded. A scale never touches a weight (that
//   would round): that of a row multiplies the finished sum; those of GROUP columns multiply the sum of the
//   products of these columns, in float32, on the way to the total.
// * A chunk is 8 columns: a byte of positions, 4 bytes of 8-bit codes or 2 of 4-bit codes, 16 bytes of x. One
//   instruction takes four of them. With q = lane % 4, a lane gives it the group q%2 of its chunks q/2 and
//   q/2 + 2. The sum does not mind which chunks of a tile meet in an instruction, so they are picked such that a
//   lane finds its codes, and its positions, side by side. Of a unit of 64 columns (8 chunks, two products):
//
//        product 0: chunks 0 4 1 5        lanes with q/2 = 0 read the chunks 0 … 3,
//        product 1: chunks 2 6 3 7        those with q/2 = 1 the chunks 4 … 7,
//
//   but where 32 columns have a scale of their own: chunks 0 2 1 3, then 4 6 5 7.
// * From sm_90 on, SPLIT blocks (a cluster) may share the columns of a row block, as K_WARPS teams of a block do,
//   and add up through each other's shared memory: x is read for n / ROWS row blocks, so large ones are better.
//
// Compiled per configuration: TOKENS (8…64, more are several tiles), ROW_TILES, ROW_WARPS, K_WARPS, STEP (128, 256 or
// 512), STAGES, SPLIT, CODES (4: int4, 8: int8, 88: e4m3), GROUP (0: a scale a row) and FP16 or bf16; common.cuh and
// sm80.cuh come first. Any n, any k that is a multiple of 32. Columns beyond k are zeros in x and the codes; positions
// there, and rows beyond n, are those of other places, because the instruction wants every position to be a valid
// one. Tokens beyond the last are whatever was in memory: they only reach outputs that are not written.

constexpr int ROWS = 16 * ROW_TILES * ROW_WARPS;  // of W per block
constexpr int TEAM = 32 * ROW_WARPS;              // threads that share a tile
constexpr int THREADS = TEAM * K_WARPS;
constexpr int TEAMS = K_WARPS * SPLIT;            // that share the columns of a row block
constexpr int WIDE = STEP < 256 ? STEP : 256;     // columns of a tile that a warp takes at a time: they are
constexpr int UNITS = WIDE / 64;                  // so many units, of two products each
constexpr bool FOUR = CODES == 4;
constexpr int A_PITCH = FOUR ? STEP / 4 : STEP / 2;  // bytes of a row of a tile: codes,
constexpr int E_PITCH = STEP / 8;                    // positions,
constexpr int X_PITCH = 2 * STEP + 16;               // columns of x, each row beginning in other banks,
constexpr int GROUPS = GROUP ? STEP / GROUP : 0;     // scales,
constexpr int Z_PITCH = 4 * GROUPS;                  // with room for one more, if they begin amid a word
constexpr int A_BYTES = ROWS * A_PITCH;
constexpr int X_BYTES = TOKENS * X_PITCH;
constexpr int E_BYTES = ROWS * E_PITCH;
constexpr int STAGE_BYTES = A_BYTES + X_BYTES + E_BYTES + ROWS * Z_PITCH;
constexpr int SPAN = GROUP ? GROUP : WIDE;        // columns whose products are added up without a scale
constexpr int SUM_PITCH = ROWS + 4;               // floats; the 4 lanes of a quad then write to other banks
constexpr int RUN = 256 / WIDE;                   // tiles that a team takes one after another
constexpr int BAND = 8;                           // row blocks that pass together over the tiles of tokens

// Copies that complete later. Codes pass by the first cache; of what else is small, other tiles want what is beside.
__device__ __forceinline__ void copy_codes(u32 to, const u8* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "l"(policy) : "memory");
}
template <int BYTES>
__device__ __forceinline__ void copy(u32 to, const void* from, int there = BYTES) {  // zeros after `there` bytes
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(there)
               : "memory");
}
__device__ __forceinline__ void team_wait(int team) {
  if (ROW_WARPS == 1) __syncwarp();
  else if (K_WARPS == 1) __syncthreads();
  else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM) : "memory");
}
__device__ __forceinline__ void block_wait() {  // for the block, or for the cluster
#if SPLIT > 1
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}
// Two floats of a block of the cluster, at the place that they would have here.
__device__ __forceinline__ float2 sums_of(int rank, const float* here) {
#if SPLIT > 1
  float2 out;
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(rank));
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(out.x), "=f"(out.y) : "r"(there) : "memory");
  return out;
#else
  return *(const float2*)here;
#endif
}

template <int WORDS>
__device__ __forceinline__ void load_words(u32 (&to)[WORDS], const char* from) {
  if constexpr (WORDS == 2) {
    const uint2 both = *(const uint2*)from;
    to[0] = both.x, to[1] = both.y;
  } else {
    const uint4 all = *(const uint4*)from;
    to[0] = all.x, to[1] = all.y, to[2] = all.z, to[3] = all.w;
  }
}
// The two codes of a group as 16-bit numbers. `word` has the chunk: with 4 bits the low or the high half of it
// (`upper`), with 8 bits all of it. `odd`, 0 or 1, is which group of the chunk.
//
// int8: fp16 takes code + 128 into 1024. bf16 has 7 bits behind the first, so the lower 7 go into 128, and the
// upper one makes 256 of the 128 that are taken off again.
// e4m3: its exponent and fraction are moved to where those of the 16-bit number are. Only the bias is another,
// which a power of two makes good.
__device__ __forceinline__ u32 numbers(u32 word, int upper, u32 odd) {
#if CODES == 4
  return four_bit_numbers(word, 2 * upper + odd);
#elif CODES == 8
#if FP16
  return two(__byte_perm(word, 0x64646464, 0x0202 * odd + 0x4140) ^ 0x00800080, 0x3C003C00, 0xE480E480);
#else
  const u32 apart = __byte_perm(word, 0x43434343, 0x0202 * odd + 0x4140);
  return two(apart & 0xFF80FF80, 0xBF80BF80, apart & 0xFF7FFF7F);
#endif
#else
  const u32 apart = __byte_perm(word, 0, 0x2020 * odd + 0x1404), sign = apart & 0x80008000;
#if FP16
  return two(and_or(apart >> 1, 0x3F803F80, sign), 0x5C005C00, 0x80008000);
#else
  return two(and_or(apart >> 4, 0x07F007F0, sign), 0x7B807B80, 0x80008000);
#endif
#endif
}

// Where a 16-byte piece of a row of codes is kept. With 4 bits the 8 rows of a quarter of a product read the same
// piece of each, with 8 bits 4 rows read the same two: in either case 8 different groups of banks.
__device__ __forceinline__ int a_piece(int row, int piece) {
  if (FOUR) return piece ^ (STEP == 512 ? row & 7 : STEP == 256 ? row >> 1 & 3 : row >> 2 & 1);
  return piece ^ (STEP == 128 ? row >> 1 & 1 : row & 3) << 1;
}

#if SPLIT > 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1)
product(const u8* __restrict__ x, const u8* __restrict__ codes, const u8* __restrict__ positions,
        const u16* __restrict__ scale, const u16* __restrict__ bias, u16* __restrict__ y, int n, int k, int tokens,
        int blocks, int tiles) {
  extern __shared__ __align__(128) char shared[];
  __shared__ __align__(16) u16 row_scale[ROWS], row_bias[ROWS];  // fetched early, as they are wanted at the very end
  const int lane = threadIdx.x % 32, team = threadIdx.x / TEAM, member = threadIdx.x % TEAM;
  const int rank = blockIdx.x % SPLIT, place = rank * K_WARPS + team;
  // A band of row blocks meets one tile of tokens after another, so that what is read twice is in the cache.
  const int unit = blockIdx.x / SPLIT, band = unit / (BAND * tiles) * BAND, width = min(BAND, blocks - band);
  const int first_row = (band + unit % (BAND * tiles) % width) * ROWS, last = n - 1 - first_row;
  const int first_token = unit % (BAND * tiles) / width * TOKENS, tokens_here = tokens - first_token;
  // Tiles of this team, and its i-th: whole rounds of a run for each team, then what is left, perhaps nothing.
  const int steps = (k + STEP - 1) / STEP, rounds = steps / (RUN * TEAMS);
  const int count = rounds * RUN + max(0, min(RUN, steps - (rounds * TEAMS + place) * RUN));
  auto column_of = [&](int i) { return ((i / RUN * TEAMS + place) * RUN + i % RUN) * STEP; };
  // Tiles are full and what is copied begins at multiples of its size, also the scales.
  const bool whole = k % (GROUP && STEP < 256 ? 256 : STEP) == 0;
  const int groups = GROUP ? (k + SPAN - 1) / SPAN : 1;
  const u32 row_codes = FOUR ? k / 4 : k / 2, row_positions = k / 8;  // bytes
  const u32 ring = shared_address(shared) + team * STAGES * STAGE_BYTES;

  codes += (u64)first_row * row_codes;
  positions += (u64)first_row * row_positions;
  scale += (u64)first_row * groups;
  x += (u64)first_token * k * 2;
  const u64 once = read_once();

  auto copy_weight_tile = [&](int i, int slot) {
    const int column = column_of(i);
    const u32 a = ring + slot * STAGE_BYTES, e = a + A_BYTES + X_BYTES, z = e + E_BYTES;
    if (whole) {  // a thread copies the same 16 bytes of every few rows
      constexpr int PIECES = A_PITCH / 16, E_PIECES = E_PITCH / 16;
      const int piece = member % PIECES;
      const u8* from = codes + (FOUR ? column / 4 : column / 2) + 16 * piece;
#pragma unroll
      for (int j = 0; j < ROWS * PIECES / TEAM; ++j) {
        const int row = j * (TEAM / PIECES) + member / PIECES;
        copy_codes(a + row * A_PITCH + 16 * a_piece(row, piece), from + (u64)(u32)min(row, last) * row_codes, once);
      }
      const int e_piece = member % E_PIECES;
#pragma unroll
      for (int j = 0; j < (ROWS * E_PIECES + TEAM - 1) / TEAM; ++j) {
        const int row = j * (TEAM / E_PIECES) + member / E_PIECES;
        if (ROWS * E_PIECES % TEAM == 0 || row < ROWS)
          copy<16>(e + row * E_PITCH + 16 * e_piece,
                   positions + column / 8 + 16 * e_piece + (u64)(u32)min(row, last) * row_positions);
      }
    } else {  // in pieces of 32 columns: rows begin anywhere, and the last tile is not full
      constexpr int PIECES = STEP / 32, BYTES = FOUR ? 8 : 16;
      const int piece = member % PIECES, at = column / 32 + piece;
      const bool there = 32 * at < k;
#pragma unroll 1
      for (int row = member / PIECES; row < ROWS; row += TEAM / PIECES) {
        const u64 in = (u32)min(row, last);
        const u32 to = a + row * A_PITCH + 16 * a_piece(row, BYTES * piece / 16) + BYTES * piece % 16;
        copy<BYTES>(to, codes + in * row_codes + (there ? BYTES * at : 0), there ? BYTES : 0);
        copy<4>(e + row * E_PITCH + 4 * piece, positions + in * row_positions + (there ? 4 * at : 0));
      }
    }
    if constexpr (GROUP != 0) {
      const int first = column / SPAN;
      if (whole) {
        constexpr int BYTES = GROUPS == 1 ? 4 : GROUPS < 8 ? 2 * GROUPS : 16, PIECES = GROUPS < 8 ? 1 : GROUPS / 8;
        const u16* from = scale + (GROUPS == 1 ? first & ~1 : first) + member % PIECES * 8;
#pragma unroll
        for (int j = 0; j < (ROWS * PIECES + TEAM - 1) / TEAM; ++j) {
          const int row = j * (TEAM / PIECES) + member / PIECES;
          if (ROWS * PIECES % TEAM == 0 || row < ROWS)
            copy<BYTES>(z + row * Z_PITCH + member % PIECES * 16, from + (u64)(u32)min(row, last) * groups);
        }
      } else {  // the words that hold them: the first may be the second half of its word
        constexpr int WORDS = GROUPS / 2 + 1;
        const u32 all = (u32)(last + 1) * groups;
#pragma unroll 1
        for (int piece = member; piece < ROWS * WORDS; piece += TEAM) {
          const int row = piece / WORDS, word = piece % WORDS;
          const u32 at = ((u32)min(row, last) * groups + first) / 2 * 2 + 2 * word;
          const int there = at < all ? min(4, (int)(2 * (all - at))) : 0;
          copy<4>(z + row * Z_PITCH + 4 * word, scale + (there ? at : 0), there);
        }
      }
    }
  };
  auto copy_x_tile = [&](int i, int slot) {
    const int column = column_of(i);
    constexpr int CHUNKS = STEP / 8, AT_ONCE = TEAM < CHUNKS ? TEAM : CHUNKS;  // of a token, that the team copies
#pragma unroll
    for (int part = 0; part < CHUNKS; part += AT_ONCE) {
      const int chunk = part + member % AT_ONCE;
      const bool there = whole || column + 8 * chunk < k;
      const u8* from = x + (u64)(u32)(member / AT_ONCE) * (u32)(2 * k) + (there ? 2 * column + 16 * chunk : 0);
      const u32 to = ring + slot * STAGE_BYTES + A_BYTES + 16 * chunk;
#pragma unroll
      for (int token = member / AT_ONCE; token < TOKENS; token += TEAM / AT_ONCE) {
        if (token < tokens_here) copy<16>(to + token * X_PITCH, from, there ? 16 : 0);
        from += (u32)(2 * k) * (TEAM / AT_ONCE);
      }
    }
  };

  next_may_start();
  for (int i = threadIdx.x; i < ROWS / 2; i += THREADS) {  // two rows; zeros beyond the last
    const int there = 2 * max(0, min(2, last + 1 - 2 * i)), from = there ? 2 * i : 0;
    if (!GROUP) copy<4>(shared_address(row_scale + 2 * i), scale + from, there);
    if (bias) copy<4>(shared_address(row_bias + 2 * i), bias + first_row + from, there);
  }
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

  const int row = 16 * ROW_TILES * (member / 32);  // the warp's first of the block's rows
  const u32 half = lane / 2 % 2, odd = lane % 2;   // which chunks of a unit this lane has, and which group of them
  const int in_row = row + lane / 4;               // its rows: this, and 8 further on, of each row tile
  // Lanes 8i … 8i+7 point at chunk i of a product, which is one of these eight; the next product's is 2 (or 4) on.
  const int pointed = GROUP == 32 ? lane / 8 % 2 * 2 + lane / 16 : lane / 8 % 2 * 4 + lane / 16;
  constexpr int NEXT = GROUP == 32 ? 4 : 2;

  // All products of WIDE columns. With selector s the lanes 2s and 2s+1 of a quad give the positions of a product, the
  // even one those of its first two chunks, rows lane/4 (low half of the word) and lane/4 + 8 (high half): the first
  // pair of lanes serves the first half of the units, the second pair the others.
  auto multiply = [&](int slot, int column, int section) {
    const char* a = shared + (team * STAGES + slot) * STAGE_BYTES;
    const u32 b = ring + slot * STAGE_BYTES + A_BYTES + lane % 8 * X_PITCH + 2 * WIDE * section;
    const char* e = a + A_BYTES + X_BYTES + in_row * E_PITCH + (2 * section + half) * (WIDE / 16);
    const int piece = section * (FOUR ? WIDE / 64 : WIDE / 32);  // the first of a row
    u32 places[ROW_TILES][UNITS];  // of product j of the u-th unit that the lane serves: 2u + j
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      u32 up[UNITS], low[UNITS];
      load_words(up, e + 16 * m * E_PITCH);
      load_words(low, e + (16 * m + 8) * E_PITCH);
#pragma unroll
      for (int u = 0; u < UNITS; u += 2) {
        const u32 pick = 0x1111 * odd + (GROUP == 32 ? 0x6420 : 0x6240);
        const u32 above = __byte_perm(up[u], up[u + 1], pick), below = __byte_perm(low[u], low[u + 1], pick);
        places[m][u] = __byte_perm(above, below, 0x5410);
        places[m][u + 1] = __byte_perm(above, below, 0x7632);
      }
    }
#pragma unroll
    for (int span = 0; span < WIDE / SPAN; ++span) {
      float part[ROW_TILES][TOKENS / 8][4];
      float(&into)[ROW_TILES][TOKENS / 8][4] = GROUP ? part : sum;
      if constexpr (GROUP != 0) {
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
          for (int t = 0; t < TOKENS / 8; ++t)
#pragma unroll
            for (int c = 0; c < 4; ++c) part[m][t][c] = 0.f;
      }
      u32 words[ROW_TILES][2][FOUR ? 2 : 4];  // of the unit, of both rows
#pragma unroll
      for (int p = span * (SPAN / 32); p < (span + 1) * (SPAN / 32); ++p) {
        const int u = p / 2, j = p % 2;
        if (GROUP == 32) {
#pragma unroll
          for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int at = in_row + 16 * m + 8 * h;
              words[m][h][j] = *(const u32*)(a + at * A_PITCH + 16 * a_piece(in_row, piece + u) + 8 * j + 4 * half);
            }
        } else if (j == 0) {
#pragma unroll
          for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int at = in_row + 16 * m + 8 * h;
              const int in = FOUR ? 16 * a_piece(in_row, piece + u) + 8 * half
                                  : 16 * a_piece(in_row, piece + 2 * u + half);
              load_words(words[m][h], a + at * A_PITCH + in);
            }
        }
        u32 weights[ROW_TILES][4];
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            weights[m][h] = numbers(words[m][h][FOUR ? j : 2 * j], 0, odd);
            weights[m][2 + h] = numbers(words[m][h][FOUR ? j : 2 * j + 1], 1, odd);
          }
#pragma unroll
        for (int t = 0; t < TOKENS / 8; ++t) {
          u32 columns[4];
          load_matrices(columns, b + 8 * t * X_PITCH + 128 * u + 16 * (pointed + NEXT * j));
#pragma unroll
          for (int m = 0; m < ROW_TILES; ++m) {
            const u32 where = places[m][2 * (u % (UNITS / 2)) + j];
            if (u < UNITS / 2) multiply_add<0>(into[m][t], weights[m], columns, where);
            else multiply_add<1>(into[m][t], weights[m], columns, where);
          }
        }
      }
      if constexpr (GROUP != 0) {
        const u32 amid = ((u32)in_row * groups + column / SPAN) % 2;  // the same for all rows of the lane
        const u16* z = (const u16*)(a + A_BYTES + X_BYTES + E_BYTES + in_row * Z_PITCH) + amid +
                       section * (WIDE / SPAN) + span;
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
          const float up = from_16_bit(z[16 * m * Z_PITCH / 2]), low = from_16_bit(z[(16 * m + 8) * Z_PITCH / 2]);
#pragma unroll
          for (int t = 0; t < TOKENS / 8; ++t)
#pragma unroll
            for (int c = 0; c < 4; ++c) sum[m][t][c] = fmaf(part[m][t][c], c < 2 ? up : low, sum[m][t][c]);
        }
      }
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
#pragma unroll 1
    for (int section = 0; section < STEP / WIDE; ++section) multiply(slot, column_of(i), section);
    free = slot;
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
  copies_wait<0>();  // a team without tiles has not waited for its scales and bias
  __syncthreads();   // no tile is needed any more: their memory is for the sums now

  float* sums = (float*)shared;  // [K_WARPS][TOKENS][SUM_PITCH]
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int t = 0; t < TOKENS / 8; ++t)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        sums[(team * TOKENS + 8 * t + 2 * (lane % 4) + c % 2) * SUM_PITCH + row + 16 * m + lane / 4 + c / 2 * 8] =
            sum[m][t][c];
  block_wait();
  for (int i = rank * THREADS + threadIdx.x; i < TOKENS * ROWS / 2; i += THREADS * SPLIT) {  // two rows of a token
    const int token = i / (ROWS / 2), at = 2 * (i % (ROWS / 2)), to = first_row + at;
    if (token >= tokens_here || at > last) continue;
    float low = 0.f, high = 0.f;
#pragma unroll
    for (int w = 0; w < TEAMS; ++w) {
      const float2 part = sums_of(w / K_WARPS, &sums[(w % K_WARPS * TOKENS + token) * SUM_PITCH + at]);
      low += part.x;
      high += part.y;
    }
    if (!GROUP) {
      low *= from_16_bit(row_scale[at]);
      high *= from_16_bit(row_scale[at + 1]);
    }
    if (bias) {
      low += from_16_bit(row_bias[at]);
      high += from_16_bit(row_bias[at + 1]);
    }
    u16* out = y + (u64)(first_token + token) * n + to;
    if (n % 2 == 0) {
      *(u32*)out = to_16_bit(low) | (u32)to_16_bit(high) << 16;
    } else {
      out[0] = to_16_bit(low);
      if (at < last) out[1] = to_16_bit(high);
    }
  }
#if SPLIT > 1
  block_wait();  // nobody's memory goes away while another still reads it
#endif
}
