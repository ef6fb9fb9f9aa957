/* Float32 products of few rows with weights packed in advance, on processors with AMX, whose tiles multiply 8-bit
 * integers twice as fast as bfloat16 (Ozaki scheme on integer units).
 *
 * Numbers become fixed-point, as sums of 8-bit digits from -128 to 127: three for a line of the weights (24 bits below
 * its largest number), four for a row of the left operand. Of the twelve products of two such sums nine are computed,
 * each exactly; the rest is below 2^-32 of the largest. The error is therefore that of rounding the weights to 2^-24 of
 * the largest in their line, and outliers of the left operand do not increase it. A packed weight takes three quarters of
 * float32's memory, which decides the speed if weights are read from main memory. Columns with weights too large for
 * their lines are stored in float32 after the tiles, and multiplied in float32 (`packed_gemm.py` selects them).
 * Source: Ootomo, Ozaki & Yokota 2024, "DGEMM on integer matrix multiplication unit", IJHPCA 38(4), arXiv:2306.11975.
 *
 * "Lines" (rows of the left, columns of the right one) come in blocks of 16, "depth", which is summed over, in blocks of
 * 64: one tile per digit. Integer sums are exact in any order; at most 4,096 of depth are summed before conversion to
 * float32, in the order of depth, independent of the number of rows and threads.
 */

#include "decode_ops.h"
#include "tiles.h"

#ifdef HAS_TILES
#include <math.h>

#define DEEP 64                         /* depth of a tile */
#define TILE 1024                       /* bytes */
#define LEFT_DIGITS 4
#define RIGHT_DIGITS 3
#define MOST_BLOCKS 64                  /* depth blocks at a time */
#define KEPT 192                        /* blocks of the left operand that a thread packs at a time: 768 KiB */
#define GROUP (96 * TILE)               /* bytes of the right operand that all of these are multiplied by before the next */
#define LARGEST 8355600.0f              /* of three digits, less than 127 2^16 + 127 2^8 + 127 */
#define SMALLEST 1e-29f                 /* a row or line without a larger number loses bits */

INLINE int64_t blocks_in(int64_t count, int64_t size) { return (count + size - 1) / size; }

/* The largest absolute value of x [n]; NaN if one is not finite. */
INLINE float largest_of(const float *x, int64_t n) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += SIDE)
        most = _mm512_max_epi32(most, _mm512_castps_si512(_mm512_abs_ps(some_of(x + i, n - i))));
    int32_t bits = _mm512_reduce_max_epi32(most); /* the bits of NaN are larger than those of infinity */
    return bits < 0x7F800000 ? _mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32(bits))) : NAN;
}

/* Convert 64 numbers times `by` to integers; digits are `TILE` apart, the largest first. */
INLINE void split(const float *x, int64_t count, float by, const int digits, int8_t *out) {
    for (int64_t i = 0; i < DEEP; i += SIDE) {
        __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(some_of(x + i, count - i), _mm512_set1_ps(by)));
        for (int digit = digits - 1; digit >= 0; digit--) {
            _mm_store_si128((__m128i *)(out + digit * TILE + i), _mm512_cvtepi32_epi8(whole));
            whole = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
        }
    }
}

/* Split up to 16 rows of x into digits; `scales` gets the values of their first digits, powers of two, without rounding. */
static void split_left(const float *x, int64_t stride, int64_t rows, int64_t depth, int8_t *out, float scales[SIDE]) {
    int64_t blocks = blocks_in(depth, DEEP);
    for (int64_t row = 0; row < SIDE; row++) {
        const float *from = x + row * stride;
        int64_t n = row < rows ? depth : 0;
        float largest = largest_of(from, n);
        int power = 0;
        frexpf(largest > SMALLEST ? largest : SMALLEST, &power); /* largest < 2^power */
        scales[row] = isnan(largest) ? NAN : ldexpf(1.0f, power - 6);
        float by = ldexpf(1.0f, 30 - power);
        for (int64_t block = 0; block < blocks; block++)
            split(from + block * DEEP, n - block * DEEP, by, LEFT_DIGITS, out + block * LEFT_DIGITS * TILE + row * DEEP);
    }
}

/* Return the size of packed weights in bytes. */
int64_t int8_packed_size(int64_t lines, int64_t depth) {
    int64_t columns = blocks_in(lines, SIDE), chunks = blocks_in(depth, MOST_BLOCKS * DEEP);
    return columns * (blocks_in(depth, DEEP) * RIGHT_DIGITS * TILE + chunks * SIDE * (int64_t)sizeof(float));
}

/* Pack w [lines, depth]: for every 4,096 of depth, the values of each line's first digits, then the tiles. */
void int8_pack_right(const float *w, int64_t lines, int64_t depth, int8_t *out, int threads) {
    int64_t columns = blocks_in(lines, SIDE);
    for (int64_t d = 0; d < depth; d += MOST_BLOCKS * DEEP) {
        int64_t n = least(depth - d, MOST_BLOCKS * DEEP), blocks = blocks_in(n, DEEP);
        float *scales = (float *)out;
        out += columns * SIDE * (int64_t)sizeof(float);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int64_t column = 0; column < columns; column++) {
            int8_t *tiles = out + column * blocks * RIGHT_DIGITS * TILE;
            for (int64_t i = 0; i < SIDE; i++) {
                int64_t line = column * SIDE + i, some = line < lines ? n : 0;
                const float *from = w + line * depth + d;
                float largest = largest_of(from, some);
                if (largest < SMALLEST) largest = SMALLEST;
                scales[line] = largest / (LARGEST / 65536.0f);
                float by = LARGEST / largest;
                for (int64_t block = 0; block < blocks; block++)
                    split(from + block * DEEP, some - block * DEEP, by, RIGHT_DIGITS,
                          tiles + block * RIGHT_DIGITS * TILE + i * DEEP);
            }
            for (int64_t tile = 0; tile < blocks * RIGHT_DIGITS; tile++) { /* groups of four depths are adjacent */
                __m512i r[SIDE], *rows = (__m512i *)(tiles + tile * TILE);
                for (int i = 0; i < SIDE; i++) r[i] = _mm512_load_si512(rows + i);
                transpose(r);
                for (int i = 0; i < SIDE; i++) _mm512_store_si512(rows + i, r[i]);
            }
        }
        out += columns * blocks * RIGHT_DIGITS * TILE;
    }
}

#define LEFT(digit) _tile_loadd(7, left + (digit) * TILE, DEEP);
#define ASK { for (int i_ = 0; i_ < streams; i_++) _mm_prefetch(next + i_ * apart, _MM_HINT_T1); next += 64; }

/* Sums of the products of digits whose indices add up to 0, 1, 2 and 3.
 *
 * Meanwhile the next data is prefetched, in several streams `apart`: a single stream would arrive one cache line at a time,
 * because the processor's own prefetcher, which works by page, starts too late. */
INLINE void multiply_digits(const int8_t *left, const int8_t *right, int64_t blocks, int32_t found[4][SIDE * SIDE],
                            const int8_t *next, int64_t apart, const int streams) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t block = 0; block < blocks; block++, left += LEFT_DIGITS * TILE, right += RIGHT_DIGITS * TILE) {
        _tile_loadd(4, right, DEEP);
        _tile_loadd(5, right + TILE, DEEP);
        _tile_loadd(6, right + 2 * TILE, DEEP);
        LEFT(0)
        ASK _tile_dpbssd(0, 7, 4);
        ASK _tile_dpbssd(1, 7, 5);
        ASK _tile_dpbssd(2, 7, 6);
        LEFT(1)
        ASK _tile_dpbssd(3, 7, 6);
        ASK _tile_dpbssd(1, 7, 4);
        ASK _tile_dpbssd(2, 7, 5);
        LEFT(2)
        ASK _tile_dpbssd(3, 7, 5);
        ASK _tile_dpbssd(2, 7, 4);
        LEFT(3)
        _tile_dpbssd(3, 7, 4);
    }
    _tile_stored(0, found[0], DEEP);
    _tile_stored(1, found[1], DEEP);
    _tile_stored(2, found[2], DEEP);
    _tile_stored(3, found[3], DEEP);
}

INLINE void multiply_asking(const int8_t *left, const int8_t *right, int64_t blocks, int32_t found[4][SIDE * SIDE],
                            const int8_t *next, int64_t apart, int streams) {
    if (streams == 6) multiply_digits(left, right, blocks, found, next, apart, 6);
    else if (streams == 3) multiply_digits(left, right, blocks, found, next, apart, 3);
    else if (streams == 2) multiply_digits(left, right, blocks, found, next, apart, 2);
    else if (streams == 1) multiply_digits(left, right, blocks, found, next, apart, 1);
    else multiply_digits(left, right, blocks, found, next, apart, 0);
}

/* c [rows, columns] (+)= the sums, at most 16 x 16. */
INLINE void add_up(int32_t found[4][SIDE * SIDE], const float *left_scales, const float *right_scales, float *c,
                   int64_t stride, int64_t rows, int64_t columns, int add) {
    const __m512 smaller = _mm512_set1_ps(1.0f / 256.0f), scale = _mm512_loadu_ps(right_scales);
    __mmask16 some = columns >= SIDE ? 0xFFFF : (__mmask16)((1u << columns) - 1);
    for (int64_t row = 0; row < least(rows, SIDE); row++) {
        __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(found[3] + row * SIDE));
        for (int order = 2; order >= 0; order--)
            sum = _mm512_fmadd_ps(sum, smaller, _mm512_cvtepi32_ps(_mm512_load_si512(found[order] + row * SIDE)));
        sum = _mm512_mul_ps(_mm512_mul_ps(sum, scale), _mm512_set1_ps(left_scales[row]));
        float *to = c + row * stride;
        if (add) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(some, to));
        _mm512_mask_storeu_ps(to, some, sum);
    }
}

/* c += the left operand's outlying columns times their float32 weights. Stored: their number, their indices, and for each
 * a weight for every line, in blocks of 16. */
static void add_floats(const float *left, int64_t left_stride, const int8_t *kept, float *c, int64_t c_stride,
                       int64_t rows, int64_t first, int64_t end, int64_t columns) {
    int64_t count = *(const int64_t *)kept, width = blocks_in(columns, SIDE) * SIDE;
    const int64_t *which = (const int64_t *)kept + 1;
    const float *weights = (const float *)(kept + blocks_in((count + 1) * 8, 64) * 64);
    for (int64_t row = 0; count && row < rows; row++, left += left_stride, c += c_stride)
        for (int64_t i = first * SIDE; i < least(end * SIDE, columns); i += SIDE) {
            __mmask16 some = columns - i >= SIDE ? 0xFFFF : (__mmask16)((1u << (columns - i)) - 1);
            __m512 sum = _mm512_maskz_loadu_ps(some, c + i);
            for (int64_t k = 0; k < count; k++)
                sum = _mm512_fmadd_ps(_mm512_set1_ps(left[which[k]]), _mm512_loadu_ps(weights + k * width + i), sum);
            _mm512_mask_storeu_ps(c + i, some, sum);
        }
}

/* Return the scratch bytes of `int8_product_packed` for this number of threads; `int8_packed_part` needs those of one. */
int64_t int8_packed_room(int64_t threads) {
    return threads * KEPT * (LEFT_DIGITS * TILE + SIDE * (int64_t)sizeof(float));
}

/* See `vector_packed_part`. */
void int8_packed_part(const float *left, int64_t left_stride, const int8_t *right, float *c, int64_t c_stride, int64_t rows,
                 int64_t columns, int64_t depth, int add, int8_t *room, int member, int members) {
    int64_t row_blocks = blocks_in(rows, SIDE), column_blocks = blocks_in(columns, SIDE);
    /* Members divide the rows, or columns if rows are too few; then each member splits all rows. */
    int by_rows = row_blocks >= 4 * members;
    /* The same number of row blocks for every part of depth, because a member may add only to its own results. */
    int64_t some = least(KEPT / blocks_in(least(depth, MOST_BLOCKS * DEEP), DEEP),
                         by_rows ? (row_blocks + members - 1) / members : row_blocks);
    int64_t turn = by_rows ? member : 0, turns = by_rows ? members : 1;
    int64_t first = by_rows ? 0 : column_blocks * member / members;
    int64_t end = by_rows ? column_blocks : column_blocks * (member + 1) / members;
    int8_t *tiles = room;
    float *left_scales = (float *)(room + KEPT * LEFT_DIGITS * TILE);
    const int8_t *packed = right;
    int32_t found[4][SIDE * SIDE] __attribute__((aligned(64)));
    configure();
    for (int64_t d = 0; d < depth; d += MOST_BLOCKS * DEEP) {
        int64_t deep = least(depth - d, MOST_BLOCKS * DEEP), blocks = blocks_in(deep, DEEP);
        int64_t left_size = blocks * LEFT_DIGITS * TILE, right_size = blocks * RIGHT_DIGITS * TILE;
        int64_t group = GROUP > right_size ? GROUP / right_size : 1;
        const float *scales = (const float *)packed;
        packed += column_blocks * SIDE * (int64_t)sizeof(float);
        for (int64_t i = turn * some; i < row_blocks; i += turns * some) {
            int64_t here = least(some, row_blocks - i);
            for (int64_t row = 0; row < here; row++)
                split_left(left + (i + row) * SIDE * left_stride + d, left_stride, rows - (i + row) * SIDE, deep,
                           tiles + row * left_size, left_scales + row * SIDE);
            for (int64_t j = first; j < end; j += group) {
                int64_t wide = least(group, end - j);
                const int8_t *from = packed + j * right_size, *next = from + wide * right_size;
                int64_t part = wide * right_size / 6; /* distance in bytes between streams of the next group */
                int has_next = members == 1 || j + group < end; /* the next data follows the last group */
                int share = !has_next ? 0 : here == 1 ? 6 : here == 2 ? 3 : here < 6 ? 2 : 1;
                for (int64_t row = 0; row < here; row++)
                    for (int64_t k = 0; k < wide; k++) {
                        multiply_asking(tiles + row * left_size, from + k * right_size, blocks, found,
                                        next + row * share * part + k * right_size / 6, part,
                                        row * share < 6 ? share : 0);
                        add_up(found, left_scales + row * SIDE, scales + (j + k) * SIDE,
                               c + (i + row) * SIDE * c_stride + (j + k) * SIDE, c_stride, rows - (i + row) * SIDE,
                               columns - (j + k) * SIDE, add || d);
                    }
            }
        }
        packed += column_blocks * right_size;
    }
    for (int64_t i = turn * some; i < row_blocks; i += turns * some)
        add_floats(left + i * SIDE * left_stride, left_stride, packed, c + i * SIDE * c_stride, c_stride,
                   least(some * SIDE, rows - i * SIDE), first, end, columns);
    _tile_release();
}

/* c [rows, columns] (+)= left [rows, depth] times packed weights. */
void int8_product_packed(const float *left, int64_t left_stride, const int8_t *right, float *c, int64_t c_stride,
                    int64_t rows, int64_t columns, int64_t depth, int add, int8_t *room, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int own = omp_get_thread_num();
        int8_packed_part(left, left_stride, right, c, c_stride, rows, columns, depth, add, room + own * int8_packed_room(1), own,
                    omp_get_num_threads());
    }
}

#endif
