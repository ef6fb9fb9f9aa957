/* Float32 matrix products by vectors, for any processor: of a linear layer in training, and of few rows with weights
 * packed in advance.
 *
 * Both operands are copied before multiplication: the right one as panels of some columns, depth by depth; the left one as
 * rows (or, if depth runs along its rows in memory, as groups of rows depth by depth). Depth is divided into blocks of 256;
 * the summation order is independent of the number of rows and threads. Blocking after Goto & van de Geijn 2008, "Anatomy
 * of high-performance matrix multiplication", ACM TOMS 34(3).
 */

#include "matrix.h"
#include "panels.h"

#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#define omp_get_num_threads() 1
#endif

#define PANELS (1024 / PANEL)  /* copied at a time */

/* Numbers in a vector. */
int vector_numbers(void) { return W; }

/* Return 1 if vectors are those of AVX2 or larger. */
int vectors_ready(void) {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
    return 1;
#else
    return 0;
#endif
}

static void multiply_rows(const float *a, int across, const float *b, int64_t depth, float *c, int64_t stride, int add,
                          int64_t m) {
#define CASE(m_) \
    case m_: \
        if (across) multiply_tile(a, 1, TALL, b, depth, b + depth * PANEL, c, stride, add, m_); \
        else multiply_tile(a, LINE, 1, b, depth, b + depth * PANEL, c, stride, add, m_); \
        break;
    switch (m) { CASES_OF_ROWS }
#undef CASE
}

/* c [rows, columns] (+)= copied rows times panels. */
static void multiply_panels(const float *a, int across, const float *panels, int64_t depth, float *c, int64_t stride,
                            int64_t rows, int64_t columns, int add) {
    for (int64_t column = 0; column < columns; column += PANEL, panels += depth * PANEL)
        for (int64_t row = 0, m; row < rows; row += m) {
            const float *from = a + row * (across ? DEEP : LINE);
            float *to = c + row * stride + column, part[TALL * PANEL];
            int64_t n = least(columns - column, PANEL);
            m = across ? least(rows - row, TALL) : rows_of_a_tile(rows - row);
            if (n == PANEL) {
                multiply_rows(from, across, panels, depth, to, stride, add, m);
                continue;
            }
            for (int64_t i = 0; add && i < m; i++) memcpy(part + i * PANEL, to + i * stride, (size_t)n * sizeof(float));
            multiply_rows(from, across, panels, depth, part, PANEL, add, m);
            for (int64_t i = 0; i < m; i++) memcpy(to + i * stride, part + i * PANEL, (size_t)n * sizeof(float));
        }
}

/* Copy rows of the left operand, starting at x. */
static void copy_left(const float *x, int64_t stride, int across, int64_t rows, int64_t depth, float *out) {
    if (!across) {
        for (int64_t i = 0; i < rows; i++) memcpy(out + i * LINE, x + i * stride, (size_t)depth * sizeof(float));
        return;
    }
    for (int64_t row = 0; row < rows; row += TALL, out += TALL * DEEP)
        if (rows - row >= TALL)
            for (int64_t k = 0; k < depth; k++) memcpy(out + k * TALL, x + k * stride + row, TALL * sizeof(float));
        else
            for (int64_t k = 0; k < depth; k++)
                memcpy(out + k * TALL, x + k * stride + row, (size_t)(rows - row) * sizeof(float));
}

/* Copy one panel of at most PANEL columns; padding is 0. */
static void copy_panel(const float *x, int64_t stride, int across, int64_t columns, int64_t depth, float *out) {
    int64_t n = least(columns, PANEL);
    if (n < PANEL) memset(out, 0, (size_t)(depth * PANEL) * sizeof(float));
    if (across && n == PANEL)
        for (int64_t k = 0; k < depth; k++) memcpy(out + k * PANEL, x + k * stride, PANEL * sizeof(float));
    else if (across)
        for (int64_t k = 0; k < depth; k++) memcpy(out + k * PANEL, x + k * stride, (size_t)n * sizeof(float));
    else
        for (int64_t i = 0; i < n; i++)
            for (int64_t k = 0; k < depth; k++) out[k * PANEL + i] = x[i * stride + k];
}

/* Return the scratch bytes of `vector_product` for this number of threads. */
int64_t vector_gemm_room(int64_t threads) {
    return threads * (PANELS * PANEL * DEEP + ROWS * LINE) * (int64_t)sizeof(float);
}

/* See `product` in amx_gemm.c. */
void vector_product(const float *left, int64_t left_stride, int left_across, const Part *parts, int64_t n_parts,
                    int across, float *c, int64_t c_stride, int64_t rows, int64_t depth, int add, float *room,
                    int threads) {
    int64_t step = rows_of_a_piece(rows, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *own = room + PANELS * PANEL * DEEP + omp_get_thread_num() * ROWS * LINE, *to = c;
        for (int64_t p = 0; p < n_parts; to += parts[p].lines, p++)
            for (int64_t column = 0; column < parts[p].lines; column += PANELS * PANEL) {
                int64_t columns = least(parts[p].lines - column, PANELS * PANEL);
                for (int64_t d = 0; d < depth; d += DEEP) {
                    int64_t deep = least(depth - d, DEEP);
                    const float *right = parts[p].x + (across ? d * parts[p].stride + column : column * parts[p].stride + d);
#pragma omp for schedule(static)
                    for (int64_t j = 0; j < columns; j += PANEL)
                        copy_panel(right + j * (across ? 1 : parts[p].stride), parts[p].stride, across, columns - j, deep,
                                   room + j * deep);
#pragma omp for schedule(static)
                    for (int64_t i = 0; i < rows; i += step) {
                        int64_t some = least(rows - i, step);
                        const float *from = left + (left_across ? d * left_stride + i : i * left_stride + d);
                        copy_left(from, left_stride, left_across, some, deep, own);
                        multiply_panels(own, left_across, room, deep, to + i * c_stride + column, c_stride, some, columns,
                                        add || d);
                    }
                }
            }
    }
}

/* Few rows with packed weights. */

/* Return the size of packed weights in bytes. */
int64_t vector_packed_size(int64_t lines, int64_t depth) {
    return blocks_of(lines, PANEL) * PANEL * depth * (int64_t)sizeof(float);
}

/* Pack w [lines, depth]: the panels for every 256 of depth. */
void vector_pack_right(const float *w, int64_t lines, int64_t depth, float *out, int threads) {
    int64_t padded = blocks_of(lines, PANEL) * PANEL;
    for (int64_t d = 0; d < depth; d += DEEP)
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int64_t j = 0; j < lines; j += PANEL)
            copy_panel(w + j * depth + d, depth, 0, lines - j, least(depth - d, DEEP),
                       out + d * padded + j * least(depth - d, DEEP));
}

/* Return the scratch bytes of `vector_product_packed` for this number of threads; `vector_packed_part` needs those of one. */
int64_t vector_packed_room(int64_t threads) { return threads * ROWS * LINE * (int64_t)sizeof(float); }

/* A member's part of c [rows, columns] (+)= left [rows, depth] times packed weights. */
void vector_packed_part(const float *left, int64_t left_stride, const int8_t *right, float *c, int64_t c_stride,
                        int64_t rows, int64_t columns, int64_t depth, int add, int8_t *room, int member, int members) {
    Share s = share_of_product(rows, columns, member, members);
    int64_t padded = blocks_of(columns, PANEL) * PANEL;
    float *copied = (float *)room;
    for (int64_t i = s.first_row; i < rows; i += s.stride)
        for (int64_t d = 0; d < depth; d += DEEP) {
            int64_t some = least(rows - i, s.step), deep = least(depth - d, DEEP);
            copy_left(left + i * left_stride + d, left_stride, 0, some, deep, copied);
            multiply_panels(copied, 0, (const float *)right + d * padded + s.first * deep, deep,
                            c + i * c_stride + s.first, c_stride, some, s.end - s.first, add || d);
        }
}

void vector_product_packed(const float *left, int64_t left_stride, const int8_t *right, float *c, int64_t c_stride,
                           int64_t rows, int64_t columns, int64_t depth, int add, int8_t *room, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int own = omp_get_thread_num();
        vector_packed_part(left, left_stride, right, c, c_stride, rows, columns, depth, add,
                           room + own * vector_packed_room(1), own, omp_get_num_threads());
    }
}
