/* Products of low-rank adapters, each over its own tokens: out += scale (x A^T) B^T, and its gradients.
 *
 * A product with few columns leaves most of a panel of `vector_gemm.c` empty, and packing its operands costs as much as
 * multiplying them. Here nothing is packed. If the rank is the number of columns, vectors run along the depth, and 16 sums
 * at a time are reduced within them; otherwise vectors run along the columns of the wide operand. The summation order
 * depends on the depth alone, not on other rows, other adapters or threads. */

#include "vectors.h"

#ifdef _OPENMP
#include <omp.h>
#endif

/* One adapter's update of one layer, in fields of 8 bytes; pointers are addresses. */
typedef struct {
    int64_t start, count;      /* tokens */
    int64_t column, width;     /* output columns of the layer */
    int64_t rank, low_stride;  /* `low_stride`: row length of low and grad_low */
    float *down, *up;          /* A [rank, inputs], B [width, rank] */
    float *up_across;          /* B^T [rank, width], written by the forward pass */
    float *down_beside;        /* copy of A, stacked with the other updates of its tokens; from backward */
    float *low, *grad_low;     /* [count, rank]: scale x A^T; scale grad B */
    float *grad_down, *grad_up; /* shaped like A and B */
    double scale;
    int64_t first;             /* 1 = the first update of its tokens */
} Update;

#define PIECE 48 /* tokens at a time, so that new results stay in the first-level cache */
#define BLOCK 512 /* columns at a time */
#define TALL 6
#define WIDE 4

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The sums of W vectors as the lanes of one. */
INLINE vf totals(vf *v) {
#define BOTH(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#if W == 16
    for (int i = 0; i < 8; i++) {
        vf a = v[2 * i], b = v[2 * i + 1];
        v[i] = BOTH(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
               BOTH(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
    for (int i = 0; i < 4; i++) {
        vf a = v[2 * i], b = v[2 * i + 1];
        v[i] = BOTH(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               BOTH(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    for (int i = 0; i < 2; i++) {
        vf a = v[2 * i], b = v[2 * i + 1];
        v[i] = BOTH(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               BOTH(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    return BOTH(v[0], v[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           BOTH(v[0], v[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#else
    for (int i = 0; i < 4; i++) {
        vf a = v[2 * i], b = v[2 * i + 1];
        v[i] = BOTH(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + BOTH(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 2; i++) {
        vf a = v[2 * i], b = v[2 * i + 1];
        v[i] = BOTH(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + BOTH(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    return BOTH(v[0], v[1], 0, 1, 2, 3, 8, 9, 10, 11) + BOTH(v[0], v[1], 4, 5, 6, 7, 12, 13, 14, 15);
#endif
}

#define ROWS (W / 4) /* of a tile of W sums */

/* The first numbers of a vector, then zeros. */
INLINE vf some(const float *x, int64_t count) {
    float part[W] = {0};
    memcpy(part, x, (size_t)count * sizeof(float));
    return load(part);
}

/* c [rows, columns] = scale a b^T; both operands are contiguous along the depth. */
static void multiply_along(const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t depth, float *c,
                           int64_t c_stride, int64_t rows, int64_t columns, float scale) {
    for (int64_t j = 0; j < columns; j += 4)
        for (int64_t i = 0; i < rows; i += ROWS) {
            const float *left[ROWS], *right[4]; /* past the end, the last one again */
            for (int n = 0; n < ROWS; n++) left[n] = a + least(i + n, rows - 1) * a_stride;
            for (int n = 0; n < 4; n++) right[n] = b + least(j + n, columns - 1) * b_stride;
            vf sums[W];
            for (int n = 0; n < W; n++) sums[n] = all(0.0f);
            int64_t k = 0;
            for (; k + W <= depth; k += W) {
                vf row[4];
                for (int n = 0; n < 4; n++) row[n] = load(right[n] + k);
                for (int m = 0; m < ROWS; m++) {
                    vf by = load(left[m] + k);
                    for (int n = 0; n < 4; n++) sums[4 * m + n] += by * row[n];
                }
            }
            if (k < depth) {
                vf row[4];
                for (int n = 0; n < 4; n++) row[n] = some(right[n] + k, depth - k);
                for (int m = 0; m < ROWS; m++) {
                    vf by = some(left[m] + k, depth - k);
                    for (int n = 0; n < 4; n++) sums[4 * m + n] += by * row[n];
                }
            }
            float found[W];
            store(found, totals(sums) * scale);
            for (int m = 0; m < least(ROWS, rows - i); m++)
                memcpy(c + (i + m) * c_stride + j, found + 4 * m, (size_t)least(4, columns - j) * sizeof(float));
        }
}

/* c [m, n vectors] (+)= a b; a has strides for rows and depths, b has contiguous rows. */
INLINE void multiply_tile(const float *a, int64_t by_row, int64_t by_depth, const float *b, int64_t b_stride, int64_t depth,
                          float *c, int64_t c_stride, int add, const int m, const int n) {
    vf sums[TALL][WIDE];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) sums[i][j] = add ? load(c + i * c_stride + j * W) : all(0.0f);
    for (int64_t k = 0; k < depth; k++) {
        vf row[WIDE];
        for (int j = 0; j < n; j++) row[j] = load(b + k * b_stride + j * W);
        for (int i = 0; i < m; i++) {
            vf by = all(a[i * by_row + k * by_depth]);
            for (int j = 0; j < n; j++) sums[i][j] += by * row[j];
        }
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) store(c + i * c_stride + j * W, sums[i][j]);
}

#define CASE(m_) \
    case m_: \
        multiply_tile(a, by_row, by_depth, b, b_stride, depth, c, c_stride, add, m_, n); \
        break;

INLINE void multiply_rows(const float *a, int64_t by_row, int64_t by_depth, const float *b, int64_t b_stride, int64_t depth,
                          float *c, int64_t c_stride, int add, int64_t m, const int n) {
    switch (m) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
    }
}

/* c [rows, columns] (+)= a b; columns are contiguous. */
static void multiply_wide(const float *a, int64_t by_row, int64_t by_depth, const float *b, int64_t b_stride, int64_t depth,
                          float *c, int64_t c_stride, int add, int64_t rows, int64_t columns) {
    for (int64_t j = 0; j < columns;) {
        int64_t left = columns - j;
        for (int64_t i = 0; i < rows; i += TALL) {
            int64_t m = least(rows - i, TALL);
            const float *from = a + i * by_row;
            float *to = c + i * c_stride + j;
            if (left >= WIDE * W)
                multiply_rows(from, by_row, by_depth, b + j, b_stride, depth, to, c_stride, add, m, WIDE);
            else if (left >= W)
                multiply_rows(from, by_row, by_depth, b + j, b_stride, depth, to, c_stride, add, m, 1);
            else
                for (int64_t r = 0; r < m; r++) { /* less than a vector */
                    vf sum = add ? some(to + r * c_stride, left) : all(0.0f);
                    for (int64_t k = 0; k < depth; k++)
                        sum += all(from[r * by_row + k * by_depth]) * some(b + k * b_stride + j, left);
                    memcpy(to + r * c_stride, &sum, (size_t)left * sizeof(float));
                }
        }
        j += left >= WIDE * W ? WIDE * W : left >= W ? W : left;
    }
}

/* out [columns, rows] = x^T, with a row stride. */
static void turn(const float *x, int64_t x_stride, int64_t rows, int64_t columns, float *out, int64_t out_stride) {
    for (int64_t i = 0; i < rows; i += 16)
        for (int64_t j = 0; j < columns; j++)
            for (int64_t n = i; n < least(i + 16, rows); n++) out[j * out_stride + n] = x[n * x_stride + j];
}

/* Pieces of work are assigned to the threads in turn: `MINE` is true for the next piece in exactly one thread. */
#ifdef _OPENMP
#define DEAL int64_t turn_ = omp_get_thread_num(), members_ = omp_get_num_threads()
#define PARALLEL(threads) _Pragma("omp parallel num_threads(threads) if (threads > 1)")
#define MEET _Pragma("omp barrier")
#define OWN omp_get_thread_num()
#else
#define DEAL int64_t turn_ = 0, members_ = 1
#define PARALLEL(threads)
#define MEET
#define OWN 0
#endif
#define MINE (turn_-- == 0 ? (turn_ = members_ - 1, 1) : 0)

/* Updates of the same tokens are consecutive. */
void low_rank_forward(const Update *all_of, int64_t count, const float *x, int64_t x_stride, int64_t inputs, float *out,
                      int64_t out_stride, int threads) {
    PARALLEL(threads) {
        DEAL;
        for (const Update *one = all_of; one < all_of + count; one++)
            if (MINE) turn(one->up, one->rank, one->width, one->rank, one->up_across, one->width);
        MEET
        for (const Update *one = all_of; one < all_of + count; one++)
            for (int64_t i = 0; i < one->count; i += PIECE) {
                if (!MINE) continue;
                int64_t rows = least(PIECE, one->count - i);
                float *low = one->low + i * one->low_stride;
                multiply_along(x + (one->start + i) * x_stride, x_stride, one->down, inputs, inputs, low, one->low_stride, rows,
                               one->rank, (float)one->scale);
                multiply_wide(low, one->low_stride, 1, one->up_across, one->width, one->rank,
                              out + (one->start + i) * out_stride + one->column, out_stride, 1, rows, one->width);
            }
    }
}

/* Compute the gradients of all factors and, unless its pointer is NULL, add that of x. `room`: scratch memory of
 * `room_size` numbers per thread, see `low_rank_room`. */
void low_rank_backward(const Update *all_of, int64_t count, const float *grad, int64_t grad_stride, const float *x,
                       int64_t x_stride, int64_t inputs, float *grad_x, int64_t grad_x_stride, float *room, int64_t room_size,
                       int threads) {
    const Update *end = all_of + count;
    PARALLEL(threads) {
        DEAL;
        float *own = room + OWN * room_size;
        for (const Update *one = all_of; grad_x && one < end; one++)
            if (one->down_beside != one->down && MINE)
                memcpy(one->down_beside, one->down, (size_t)(one->rank * inputs) * sizeof(float));
        for (const Update *one = all_of; one < end; one++)
            for (int64_t i = 0; i < one->count; i += PIECE)
                if (MINE)
                    multiply_along(grad + (one->start + i) * grad_stride + one->column, grad_stride, one->up_across, one->width,
                                   one->width, one->grad_low + i * one->low_stride, one->low_stride,
                                   least(PIECE, one->count - i), one->rank, (float)one->scale);
        MEET
        for (const Update *one = all_of; one < end; one++) {
            for (int64_t j = 0; j < one->width; j += BLOCK) {
                if (!MINE) continue;
                int64_t columns = least(BLOCK, one->width - j);
                multiply_wide(one->low, 1, one->low_stride, grad + one->start * grad_stride + one->column + j, grad_stride,
                              one->count, own, BLOCK, 0, one->rank, columns);
                turn(own, BLOCK, one->rank, columns, one->grad_up + j * one->rank, one->rank);
            }
            for (int64_t j = 0; j < inputs; j += BLOCK)
                if (MINE)
                    multiply_wide(one->grad_low, 1, one->low_stride, x + one->start * x_stride + j, x_stride, one->count,
                                  one->grad_down + j, inputs, 0, one->rank, least(BLOCK, inputs - j));
        }
        for (const Update *one = all_of; grad_x && one < end; one++)
            for (int64_t i = 0; one->first && i < one->count; i += PIECE)
                if (MINE)
                    multiply_wide(one->grad_low + i * one->low_stride, one->low_stride, 1, one->down_beside, inputs,
                                  one->low_stride, grad_x + (one->start + i) * grad_x_stride, grad_x_stride, 1,
                                  least(PIECE, one->count - i), inputs);
    }
}

/* Return the numbers of scratch memory per thread for this rank. */
int64_t low_rank_room(int64_t rank) { return BLOCK * rank; }
