/* Panels of the products by vectors, which `vector_gemm.c` and `bf16_gemm.c` share.
 *
 * A panel holds PANEL columns of the right operand, depth by depth, at most DEEP at a time. Rows of the left operand are
 * copied before multiplication. A result's summation order is that of depth, independent of the number of rows.
 */

#include <stdint.h>
#include <string.h>

#include "counts.h"
#include "vectors.h"

#ifdef __AVX512F__ /* as many sums as there are registers */
#define TALL 12
#define WIDE 2
#else
#define TALL 6
#define WIDE 2
#endif
#define PANEL (WIDE * W)       /* columns */
#define DEEP 256               /* depth at a time */
#define LINE (DEEP + 16)       /* length of a copied row: rows a power of two apart would collide in the cache */
#define ROWS (16 * TALL)        /* most rows that a thread copies at a time */

/* Rows of a piece: every member gets the same number of pieces, of nearly the same size. */
INLINE int64_t rows_of_a_piece(int64_t rows, int64_t members) {
    int64_t pieces = blocks_of(blocks_of(rows, ROWS), members) * members;
    return blocks_of(blocks_of(rows, TALL), pieces) * TALL;
}

/* Rows of the next tile, if `left` rows are left: tiles of nearly the same height, because low ones wait for their sums. */
INLINE int64_t rows_of_a_tile(int64_t left) { return blocks_of(left, blocks_of(left, TALL)); }

/* A member's part of a product of few rows with packed weights. Members divide the rows, or columns if rows are too few;
 * then each member copies all rows. */
typedef struct {
    int64_t first_row, step, stride; /* pieces of `step` rows from `first_row` on, `stride` apart */
    int64_t first, end;              /* columns, whole panels but for the last */
} Share;

INLINE Share share_of_product(int64_t rows, int64_t columns, int member, int members) {
    int by_rows = rows >= 4 * TALL * members;
    int64_t panels = blocks_of(columns, PANEL), step = by_rows ? rows_of_a_piece(rows, members) : ROWS;
    if (by_rows) return (Share){member * step, step, members * step, 0, columns};
    return (Share){0, step, step, panels * member / members * PANEL,
                   least(columns, panels * (member + 1) / members * PANEL)};
}

/* c [m, PANEL] (+)= a b; a has strides for rows and depths, b is a panel. `next` is prefetched. */
INLINE void multiply_tile(const float *a, const int64_t by_row, const int64_t by_depth, const float *b, int64_t depth,
                          const float *next, float *c, int64_t stride, int add, const int m) {
    vf sums[TALL][WIDE];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < WIDE; j++) sums[i][j] = all(0.0f);
    for (int64_t k = 0; k < depth; k++) {
        vf row[WIDE];
        for (int j = 0; j < WIDE; j++) row[j] = load(b + k * PANEL + j * W);
        for (int j = 0; j < PANEL; j += 16) __builtin_prefetch(next + k * PANEL + j, 0, 2);
        for (int i = 0; i < m; i++) {
            vf by = all(a[i * by_row + k * by_depth]);
            for (int j = 0; j < WIDE; j++) sums[i][j] += by * row[j];
        }
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < WIDE; j++) {
            float *to = c + i * stride + j * W;
            store(to, add ? load(to) + sums[i][j] : sums[i][j]);
        }
}

#if TALL > 6
#define CASES_OF_ROWS CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#else
#define CASES_OF_ROWS CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif
