/* Float32 matrix products on processors with AMX, whose tiles multiply bfloat16 and accumulate in float32.
 *
 * A float32 number is the sum of three bfloat16 numbers: high + middle + low, 8 bits of its 24 each. Of the nine products
 * of two such sums the six largest are computed; the rest is below 2^-25 of the result, less than float32's rounding.
 * The result has float32's precision, at about twice the speed of the processor's float32 instructions.
 * Source: Henry, Tang & Heinecke 2019, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
 * computations", arXiv:1904.06376.
 *
 * `bf16_tiles_linear` keeps one part, rounded to nearest even: the product of operands in bfloat16, with float32 sums. Its
 * tiles hold pairs of neighbouring depths, and the sums of 256 depths are added to those before: so a row has the bits of
 * `bf16_tiles.c`, which computes rollouts.
 *
 * Operands are packed before multiplication: "lines" (rows of the left, columns of the right operand) in blocks of 32, and
 * "depth", which is summed over, in blocks of 32. A block has three parts, a part two tiles of 16 lines. A tile holds
 * pairs of depth j and j + 16. The summation order is independent of the number of rows and threads.
 */

#include "matrix.h"
#include "tiles.h"

#ifdef HAS_TILES
#include <string.h>
#ifndef TILE_STAND_IN
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#endif

typedef int32_t packed_t; /* a pair of bfloat16 numbers */

#define BLOCK 32
#define TILE (SIDE * SIDE)    /* dwords */
#define PARTS 3               /* of a float32 number; 1 = it is rounded to bfloat16 */
#define PACKED(parts) (2 * (parts) * TILE) /* dwords of one packed block */
#define DEPTH_BLOCKS 8        /* packed at a time, to stay in the second-level cache */
#define ROW_BLOCKS 8
#define COLUMN_BLOCKS 64

INLINE int64_t blocks_in(int64_t count) { return (count + BLOCK - 1) / BLOCK; }

/* Return 1 if the operating system lets this process use tiles. */
int tiles_ready(void) {
#ifdef TILE_STAND_IN
    return 1;
#else
    enum { ask_for_permission = 0x1023, tile_data = 18 };
    return syscall(SYS_arch_prctl, ask_for_permission, tile_data) == 0;
#endif
}

INLINE void parts_of(__m512 x, __m512i parts[PARTS]) {
    const __m512i half = _mm512_set1_epi32(0x8000), top = _mm512_set1_epi32((int)0xFFFF0000);
    for (int i = 0; i < 2; i++) { /* rounded to nearest; the difference is exact */
        parts[i] = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(x), half), top);
        x = _mm512_sub_ps(x, _mm512_castsi512_ps(parts[i]));
    }
    parts[2] = _mm512_castps_si512(x);
}

/* Round to bfloat16 in the upper half of each dword: to nearest, ties to even; NaN stays NaN. */
INLINE __m512i round_to_even(__m512 x) {
    __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
    __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), last);
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
}

/* The parts of both numbers, those of `low` in the lower halves. */
INLINE void paired(__m512 low, __m512 high, __m512i out[PARTS], const int parts) {
    const __m512i top = _mm512_set1_epi32((int)0xFFFF0000);
    __m512i a[PARTS], b[PARTS];
    if (parts == 1) {
        a[0] = round_to_even(low);
        b[0] = round_to_even(high);
    } else {
        parts_of(low, a);
        parts_of(high, b);
    }
    for (int i = 0; i < parts; i++) out[i] = _mm512_ternarylogic_epi32(_mm512_srli_epi32(a[i], 16), b[i], top, 0xF8);
}

/* Pack one block of at most 32 lines and depth, starting at x. In memory, depth runs along a line, or lines lie side by
 * side (`across`). Each row of the tile holds a line, or (`turned`) a pair of depths. */
INLINE void pack_block(const float *x, int64_t stride, int64_t lines, int64_t depth, const int across,
                       const int turned, packed_t *out, const int parts) {
    int is_whole = lines >= BLOCK && depth >= BLOCK;
    for (int t = 0; t < 2; t++) {
        packed_t *tile = out + t * TILE;
        for (int i = 0; i < SIDE; i++) {
            __m512i found[PARTS];
            __m512 low, high;
            if (across && parts == 1) { /* neighbouring depths */
                const float *at = x + 2 * i * stride + t * SIDE;
                low = some_of(at, 2 * i < depth ? lines - t * SIDE : 0);
                high = some_of(at + stride, 2 * i + 1 < depth ? lines - t * SIDE : 0);
            } else if (across) {
                const float *at = x + i * stride + t * SIDE;
                low = is_whole ? _mm512_loadu_ps(at) : some_of(at, i < depth ? lines - t * SIDE : 0);
                at += SIDE * stride;
                high = is_whole ? _mm512_loadu_ps(at) : some_of(at, i + SIDE < depth ? lines - t * SIDE : 0);
            } else {
                const float *at = x + (t * SIDE + i) * stride;
                low = is_whole ? _mm512_loadu_ps(at) : some_of(at, t * SIDE + i < lines ? depth : 0);
                high = is_whole ? _mm512_loadu_ps(at + SIDE) : some_of(at + SIDE, t * SIDE + i < lines ? depth - SIDE : 0);
            }
            if (!across && parts == 1) {
                const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
                const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
                __m512 first = low;
                low = _mm512_permutex2var_ps(first, even, high);
                high = _mm512_permutex2var_ps(first, odd, high);
            }
            paired(low, high, found, parts);
            for (int part = 0; part < parts; part++) _mm512_store_si512(tile + part * 2 * TILE + i * SIDE, found[part]);
        }
        if (turned)
            for (int part = 0; part < parts; part++) {
                packed_t *rows = tile + part * 2 * TILE;
                __m512i r[SIDE];
                for (int i = 0; i < SIDE; i++) r[i] = _mm512_load_si512(rows + i * SIDE);
                transpose(r);
                for (int i = 0; i < SIDE; i++) _mm512_store_si512(rows + i * SIDE, r[i]);
            }
    }
}

/* Pack lines [first, end) and all of `depth`; blocks of lines are `blocks` depth blocks apart. */
INLINE void pack_lines(const float *x, int64_t stride, int64_t lines, int64_t depth, int across, int is_right,
                       int64_t first, int64_t end, int64_t blocks, packed_t *out, const int parts) {
    for (int64_t line = first; line < end; line++)
        for (int64_t d = 0; d < depth; d += BLOCK) {
            int64_t l = line * BLOCK;
            const float *at = across ? x + d * stride + l : x + l * stride + d;
            packed_t *to = out + (line * blocks + d / BLOCK) * PACKED(parts);
            if (across && is_right) pack_block(at, stride, lines - l, depth - d, 1, 0, to, parts);
            else if (across) pack_block(at, stride, lines - l, depth - d, 1, 1, to, parts);
            else if (is_right) pack_block(at, stride, lines - l, depth - d, 0, 1, to, parts);
            else pack_block(at, stride, lines - l, depth - d, 0, 0, to, parts);
        }
}

#define LEFT(part) _tile_loadd(4, left + (part) * 2 * TILE, 64); _tile_loadd(5, left + ((part) * 2 + 1) * TILE, 64);
#define RIGHT(part) _tile_loadd(6, right + (part) * 2 * TILE, 64); _tile_loadd(7, right + ((part) * 2 + 1) * TILE, 64);
#define ADD_UP _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);

/* Copy up to 32 x 32 numbers of c to memory for four tiles, or back. */
static void copy_part(float *c, int64_t stride, int64_t rows, int64_t columns, float found[4][TILE], int is_back) {
    for (int64_t row = 0; row < least(rows, BLOCK); row++)
        for (int64_t side = 0; side < 2; side++) {
            float *x = found[row / SIDE * 2 + side] + row % SIDE * SIDE, *y = c + row * stride + side * SIDE;
            int64_t count = columns - side * SIDE;
            if (count >= SIDE) _mm512_storeu_ps(is_back ? y : x, _mm512_loadu_ps(is_back ? x : y));
            else if (count > 0) memcpy(is_back ? y : x, is_back ? x : y, (size_t)count * sizeof(float));
        }
}

/* Add four tiles to up to 32 x 32 numbers of c. */
static void add_part(float *c, int64_t stride, int64_t rows, int64_t columns, const float found[4][TILE]) {
    for (int64_t row = 0; row < least(rows, BLOCK); row++)
        for (int64_t side = 0; side < 2; side++) {
            const float *x = found[row / SIDE * 2 + side] + row % SIDE * SIDE;
            float *y = c + row * stride + side * SIDE;
            for (int64_t i = 0; i < least(columns - side * SIDE, SIDE); i++) y[i] += x[i];
        }
}

/* c [rows, columns] (+)= a block of lines of the left operand times one of the right, over `blocks` depth blocks. */
INLINE void multiply_block(const packed_t *left, const packed_t *right, int64_t blocks, float *c, int64_t stride,
                           int64_t rows, int64_t columns, int add, const int parts) {
    int adds_later = add && parts == 1, is_direct = rows >= BLOCK && columns >= BLOCK && !adds_later;
    float found[4][TILE] __attribute__((aligned(64)));
    float *at[4] = {c, c + SIDE, c + SIDE * stride, c + SIDE * stride + SIDE};
    int64_t bytes = stride * (int64_t)sizeof(float);
    if (!is_direct) {
        for (int i = 0; i < 4; i++) at[i] = found[i];
        bytes = SIDE * sizeof(float);
        if (add && !adds_later) copy_part(c, stride, rows, columns, found, 0);
    }
    if (add && !adds_later) {
        _tile_loadd(0, at[0], bytes);
        _tile_loadd(1, at[1], bytes);
        _tile_loadd(2, at[2], bytes);
        _tile_loadd(3, at[3], bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t block = 0; block < blocks; block++, left += PACKED(parts), right += PACKED(parts)) {
        if (parts == 1) {
            LEFT(0) RIGHT(0) ADD_UP
            continue;
        }
        LEFT(0) RIGHT(2) ADD_UP
        RIGHT(1) ADD_UP
        RIGHT(0) ADD_UP
        LEFT(2) ADD_UP
        LEFT(1) ADD_UP
        RIGHT(1) ADD_UP
    }
    _tile_stored(0, at[0], bytes);
    _tile_stored(1, at[1], bytes);
    _tile_stored(2, at[2], bytes);
    _tile_stored(3, at[3], bytes);
    if (adds_later) add_part(c, stride, rows, columns, found);
    else if (!is_direct) copy_part(c, stride, rows, columns, found, 1);
}

/* Return the bytes of scratch memory that `product` needs for this number of threads. */
int64_t amx_gemm_room(int64_t threads) {
    return (COLUMN_BLOCKS + threads * ROW_BLOCKS) * DEPTH_BLOCKS * PACKED(PARTS) * (int64_t)sizeof(packed_t);
}

INLINE void multiply_parts(const float *left, int64_t left_stride, int left_across, const Part *parts, int64_t n_parts,
                           int across, float *c, int64_t c_stride, int64_t rows, int64_t depth, int add, packed_t *room,
                           int threads, const int split) {
    /* Few rows are divided into smaller pieces, to keep every thread busy. */
    int64_t row_blocks = blocks_in(rows), step = least(ROW_BLOCKS, (row_blocks + threads - 1) / threads);
    /* Packing an across left operand costs more; smaller pieces stay in the first-level cache. */
    int64_t most = (left_across ? DEPTH_BLOCKS / 2 : DEPTH_BLOCKS) * BLOCK;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        packed_t *right = room, *own = room + (COLUMN_BLOCKS + omp_get_thread_num() * ROW_BLOCKS) * DEPTH_BLOCKS * PACKED(split);
        configure();
        float *to = c;
        for (int64_t p = 0; p < n_parts; to += parts[p].lines, p++)
            for (int64_t column = 0; column < blocks_in(parts[p].lines); column += COLUMN_BLOCKS) {
                int64_t columns = least(COLUMN_BLOCKS, blocks_in(parts[p].lines) - column);
                int64_t lines = parts[p].lines - column * BLOCK;
                const float *x = parts[p].x + (across ? 1 : parts[p].stride) * column * BLOCK;
                for (int64_t d = 0; d < depth; d += most) {
                    int64_t deep = least(depth - d, most), blocks = blocks_in(deep);
                    const float *from = x + (across ? parts[p].stride : 1) * d;
#pragma omp for schedule(static)
                    for (int64_t j = 0; j < columns; j++)
                        pack_lines(from, parts[p].stride, lines, deep, across, 1, j, j + 1, blocks, right, split);
#pragma omp for schedule(static)
                    for (int64_t i = 0; i < row_blocks; i += step) {
                        int64_t some = least(step, row_blocks - i);
                        const float *a = left + (left_across ? 1 : left_stride) * i * BLOCK + (left_across ? left_stride : 1) * d;
                        pack_lines(a, left_stride, rows - i * BLOCK, deep, left_across, 0, 0, some, blocks, own, split);
                        for (int64_t j = 0; j < columns; j++)
                            for (int64_t row = 0; row < some; row++)
                                multiply_block(own + row * blocks * PACKED(split), right + j * blocks * PACKED(split), blocks,
                                               to + (i + row) * BLOCK * c_stride + (column + j) * BLOCK, c_stride,
                                               rows - (i + row) * BLOCK, lines - j * BLOCK, add || d, split);
                    }
                }
            }
        _tile_release();
    }
}

/* c [rows, all lines of the parts] (+)= left times right; the right operand's columns are the lines of all `parts` in order.
 * An `across` operand has depth as rows in memory: the left is then [depth, rows], a part [depth, lines]. */
void product(const float *left, int64_t left_stride, int left_across, const Part *parts, int64_t n_parts, int across,
             float *c, int64_t c_stride, int64_t rows, int64_t depth, int add, packed_t *room, int threads) {
    multiply_parts(left, left_stride, left_across, parts, n_parts, across, c, c_stride, rows, depth, add, room, threads, PARTS);
}

/* See `product`; both operands are rounded to bfloat16. */
void bf16_tiles_linear(const float *left, int64_t left_stride, int left_across, const Part *parts, int64_t n_parts,
                       int across, float *c, int64_t c_stride, int64_t rows, int64_t depth, int add, packed_t *room,
                       int threads) {
    multiply_parts(left, left_stride, left_across, parts, n_parts, across, c, c_stride, rows, depth, add, room, threads, 1);
}

/* Compute products in order, each as a single call would. */
void products(const Product *all, int64_t count, packed_t *room, int threads) {
    for (int64_t i = 0; i < count; i++) {
        const Product *one = all + i;
        product(one->left, one->left_stride, (int)one->left_across, one->parts, one->n_parts, (int)one->across, one->c,
                one->c_stride, one->rows, one->depth, (int)one->add, room, threads);
    }
}

#else

int tiles_ready(void) { return 0; }

#endif
