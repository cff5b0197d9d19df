// Positions of 16-bit weights: from memory to shared memory, and from there to the words that wgmma.sp takes. After the
// file that says ROWS, the rows of a block. COLUMNS is how many columns of them are copied at a time.
//
// A word serves two steps of 32 columns: lanes 0 and 1 of a quad the first, 2 and 3 the second; a lane has 16 columns, of
// `row` (the low half) and of `row` + 8 (the high one), with GATED of a row of the gate and of the one beside.
//
// They lie in one of two orders. As in a checkpoint: row by row, four bits a group. Or, with ORDERED, as cuSPARSELt wants them,
// so that one set serves both. 64 rows × 32 columns are then 256 bytes, [rows / 16][rows % 8][8 bytes], and byte 2i + b of the
// eight has group 4b + i of row r in its low half, of row r + 8 in its high one. After these come the next 32 columns, and
// after all columns the next 64 rows.

#if !ORDERED

constexpr int E_PITCH = COLUMNS / 8;  // bytes of a row
__device__ __forceinline__ void copy_positions(u32 to, const TensorMap* map, int column, int block, u32 barrier,
                                               u64 policy) {
#if GATED
  copy_pairs(to, map, column / 8, block * (ROWS / 16), barrier, policy);
#else
  copy_tile(to, map, column / 8, block * ROWS, barrier, policy);
#endif
}
// The word for columns `column` to `column` + 63 of those that were copied.
__device__ __forceinline__ u32 places_of(const char* tile, int column) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const char* at = tile + (16 * warp + lane / 4) * E_PITCH + column / 8 + 2 * (lane % 4);
  return *(const u16*)at | (u32) * (const u16*)(at + 8 * E_PITCH) << 16;
}

#else

// Of a block's rows (with GATED, of its rows of the gate): 32 of them are half of a piece of 256 bytes.
constexpr int HALVES = ROWS / (GATED ? 64 : 32) > 1 ? 2 : 1, PIECES = ROWS / (GATED ? 64 : 32) / HALVES;
static_assert(ROWS == (GATED ? 64 : 32) * HALVES * PIECES, "a box has whole pieces, or one half");
constexpr int E_STEP = 128 * HALVES;                          // bytes of 32 columns of such a piece
constexpr int E_MATRIX = PIECES * (COLUMNS / 32) * E_STEP;    // of the gate, then of the one beside

__device__ __forceinline__ void copy_positions(u32 to, const TensorMap* map, int column, int block, u32 barrier,
                                               u64 policy) {
  const int first = block * HALVES * PIECES;
  copy_box(to, map, HALVES == 1 ? first % 2 : 0, column / 32, first / 2, barrier, policy);
}
// Bytes of the lane's 16 columns: row r's groups in the low halves, row r + 8's in the high ones.
__device__ __forceinline__ u32 bytes_of(const char* at) {
  const uint2 all = *(const uint2*)at;
  return __byte_perm(all.x, all.y, threadIdx.x % 2 ? 0x7531 : 0x6420);
}
// Low halves of four bytes, side by side in bytes 0 and 2.
__device__ __forceinline__ u32 side_by_side(u32 bytes) {
  const u32 low = bytes & 0x0F0F0F0F;
  return low | low >> 4;
}
__device__ __forceinline__ u32 places_of(const char* tile, int column) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int step = column / 32 + lane % 4 / 2;
#if GATED
  const int row = 8 * warp + lane / 4, half = row / 32 % HALVES, piece = row / 32 / HALVES;
  const char* at = tile + (piece * (COLUMNS / 32) + step) * E_STEP + half * 128 + row % 32 / 16 * 64 + row % 8 * 8;
  const int high = row / 8 % 2 * 4;
  return __byte_perm(side_by_side(bytes_of(at) >> high), side_by_side(bytes_of(at + E_MATRIX) >> high), 0x6420);
#else
  const char* at = tile + (warp / 4 * (COLUMNS / 32) + step) * E_STEP + warp % 4 * 64 + lane / 4 * 8;
  const u32 bytes = bytes_of(at);
  return __byte_perm(side_by_side(bytes), side_by_side(bytes >> 4), 0x6420);
#endif
}

#endif
