/* Matrix products of a linear layer in training whose float32 operands are rounded to bfloat16, by the dot products of
 * AVX-512 BF16; sums and results are float32.
 *
 * Operands are rounded as they are copied for the product, so that weights and states need no second copy in memory. The
 * right one becomes panels of some columns, the left one rows (or groups of rows, if depth runs along its rows in memory);
 * a dword holds a pair of depths. Depth is divided into blocks of 256; each is summed from zero, in order, and added to
 * the blocks before. So a row has the bits of `bf16_gemm.c`, which computes rollouts, whatever rows and threads share its
 * product.
 */

#include "matrix.h"

#include "bf16_dots.h"

#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#endif

#define PANELS (1024 / PANEL)  /* copied at a time */
#define PAIRS (DEEP / 2)
#define APART (PAIRS + 16)     /* dwords from one copied row to the next */

#ifdef HAS_DOTS

/* Round to bfloat16 in the upper half of each dword: to nearest, ties to even; NaN stays NaN. */
INLINE vi round_up_half(vf x) {
    vi bits = (vi)x, last = (vi)((bits >> 16) & 1);
    vi rounded = bits + 0x7FFF + last, is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    return (((bits | 0x400000) & is_nan) | (rounded & ~is_nan)) & (int32_t)0xFFFF0000;
}

/* Pairs of an earlier and a later depth. */
INLINE vi pair(vf earlier, vf later) {
    return (vi)((((vi)round_up_half(earlier)) >> 16) & 0xFFFF) | round_up_half(later);
}

/* Copy `count` columns of two rows as pairs; `later` = NULL is a row of zeros. */
INLINE void pair_rows(const float *earlier, const float *later, int64_t count, int32_t *out) {
    int64_t i = 0;
    for (; i + W <= count; i += W) {
        vi both = pair(load(earlier + i), later ? load(later + i) : all(0.0f));
        memcpy(out + i, &both, sizeof(both));
    }
    for (; i < count; i++) {
        uint16_t low, high = 0;
        round_row(earlier + i, 1, 1, &low);
        if (later) round_row(later + i, 1, 1, &high);
        out[i] = (int32_t)((uint32_t)high << 16 | low);
    }
}

/* Copy rows of the left operand, starting at x. */
static void copy_left(const float *x, int64_t stride, int across, int64_t rows, int64_t depth, int32_t *out) {
    if (!across) {
        for (int64_t i = 0; i < rows; i++)
            round_row(x + i * stride, depth, 2 * blocks_of(depth, 2), (uint16_t *)(out + i * APART));
        return;
    }
    for (int64_t row = 0; row < rows; row += TALL, out += TALL * PAIRS)
        for (int64_t k = 0; k < depth; k += 2) {
            const float *from = x + k * stride + row;
            pair_rows(from, k + 1 < depth ? from + stride : NULL, least(rows - row, TALL), out + k / 2 * TALL);
        }
}

/* Copy one panel of at most PANEL columns; padding is 0. */
static void copy_panel(const float *x, int64_t stride, int across, int64_t columns, int64_t depth, int32_t *out) {
    int64_t n = least(columns, PANEL), pairs = blocks_of(depth, 2);
    if (n < PANEL) memset(out, 0, (size_t)(pairs * PANEL) * sizeof(int32_t));
    if (across) {
        for (int64_t k = 0; k < depth; k += 2)
            pair_rows(x + k * stride, k + 1 < depth ? x + (k + 1) * stride : NULL, n, out + k / 2 * PANEL);
        return;
    }
    int32_t row[PAIRS];
    for (int64_t i = 0; i < n; i++) {
        round_row(x + i * stride, depth, 2 * pairs, (uint16_t *)row);
        for (int64_t k = 0; k < pairs; k++) out[k * PANEL + i] = row[k];
    }
}

/* c [m, PANEL] (+)= a b; a has strides for rows and pairs of depths, b is a panel. */
INLINE void multiply_dots(const int32_t *a, const int64_t by_row, const int64_t by_pair, const int32_t *b, int64_t pairs,
                          float *c, int64_t stride, int add, const int m) {
    vf sums[TALL][WIDE];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < WIDE; j++) sums[i][j] = all(0.0f);
    for (int64_t k = 0; k < pairs; k++) {
        vi both[WIDE];
        for (int j = 0; j < WIDE; j++) both[j] = load_words(b + k * PANEL + j * W);
        for (int i = 0; i < m; i++) {
            vi by = a[i * by_row + k * by_pair] - (vi){0};
            for (int j = 0; j < WIDE; j++) sums[i][j] = add_dots(sums[i][j], by, both[j]);
        }
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < WIDE; j++) {
            float *to = c + i * stride + j * W;
            store(to, add ? load(to) + sums[i][j] : sums[i][j]);
        }
}

static void multiply_rows(const int32_t *a, int across, const int32_t *b, int64_t pairs, float *c, int64_t stride, int add,
                          int64_t m) {
#define CASE(m_) \
    case m_: \
        if (across) multiply_dots(a, 1, TALL, b, pairs, c, stride, add, m_); \
        else multiply_dots(a, APART, 1, b, pairs, c, stride, add, m_); \
        break;
    switch (m) { CASES_OF_ROWS }
#undef CASE
}

/* c [rows, columns] (+)= copied rows times panels. */
static void multiply_panels(const int32_t *a, int across, const int32_t *panels, int64_t pairs, float *c, int64_t stride,
                            int64_t rows, int64_t columns, int add) {
    for (int64_t column = 0; column < columns; column += PANEL, panels += pairs * PANEL)
        for (int64_t row = 0, m; row < rows; row += m) {
            const int32_t *from = a + row * (across ? PAIRS : APART);
            float *to = c + row * stride + column, part[TALL * PANEL];
            int64_t n = least(columns - column, PANEL);
            m = across ? least(rows - row, TALL) : rows_of_a_tile(rows - row);
            if (n == PANEL) {
                multiply_rows(from, across, panels, pairs, to, stride, add, m);
                continue;
            }
            for (int64_t i = 0; add && i < m; i++) memcpy(part + i * PANEL, to + i * stride, (size_t)n * sizeof(float));
            multiply_rows(from, across, panels, pairs, part, PANEL, add, m);
            for (int64_t i = 0; i < m; i++) memcpy(to + i * stride, part + i * PANEL, (size_t)n * sizeof(float));
        }
}

/* Return the scratch bytes of `bf16_dots_linear` for this number of threads. */
int64_t bf16_linear_room(int64_t threads) {
    return (PANELS * PANEL * PAIRS + threads * ROWS * APART) * (int64_t)sizeof(int32_t);
}

/* See `product` in amx_gemm.c. */
void bf16_dots_linear(const float *left, int64_t left_stride, int left_across, const Part *parts, int64_t n_parts, int across,
                  float *c, int64_t c_stride, int64_t rows, int64_t depth, int add, int32_t *room, int threads) {
    int64_t step = rows_of_a_piece(rows, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int32_t *own = room + PANELS * PANEL * PAIRS + omp_get_thread_num() * ROWS * APART;
        float *to = c;
        for (int64_t p = 0; p < n_parts; to += parts[p].lines, p++)
            for (int64_t column = 0; column < parts[p].lines; column += PANELS * PANEL) {
                int64_t columns = least(parts[p].lines - column, PANELS * PANEL);
                for (int64_t d = 0; d < depth; d += DEEP) {
                    int64_t deep = least(depth - d, DEEP), pairs = blocks_of(deep, 2);
                    const float *right = parts[p].x + (across ? d * parts[p].stride + column : column * parts[p].stride + d);
#pragma omp for schedule(static)
                    for (int64_t j = 0; j < columns; j += PANEL)
                        copy_panel(right + j * (across ? 1 : parts[p].stride), parts[p].stride, across, columns - j, deep,
                                   room + j * pairs);
#pragma omp for schedule(static)
                    for (int64_t i = 0; i < rows; i += step) {
                        int64_t some = least(rows - i, step);
                        const float *from = left + (left_across ? d * left_stride + i : i * left_stride + d);
                        copy_left(from, left_stride, left_across, some, deep, own);
                        multiply_panels(own, left_across, room, pairs, to + i * c_stride + column, c_stride, some, columns,
                                        add || d);
                    }
                }
            }
    }
}

#endif
