/* Causal self-attention of rows of any length, forward and backward, on a CPU in float32.
 *
 * N tokens lie end to end; a row is a list of token numbers, and rows with a common prefix list the same tokens. A row
 * computes outputs only for its last, unshared tokens (its prefix belongs to another row) and attends to all of its tokens.
 * D head size, a multiple of 16; Q query heads, K key and value heads; E = (Q + 2 K) D. The summation order is independent
 * of the number of threads.
 */

#include "vectors.h"

#include <math.h>
#include <stdlib.h>

#define TALL 6   /* rows of a product's tile */
#ifdef __AVX512F__
#define WIDE 4   /* vectors per row: as many sums as there are registers */
#else
#define WIDE 2
#endif
#define ASKED 48 /* queries processed at a time */
#define MASKED (-1e30f)

typedef struct {
    int64_t tokens, rows, Q, K, D, longest; /* longest row */
    const int64_t *starts, *named, *first;  /* [rows + 1] offsets in `named`; token numbers; each row's first unshared token */
    const float *cosines, *sines;           /* [N, D] */
    float scale;
    int threads;
} Attention;

/* c (+)= a b for a tile of a product: c [m][n vectors], a[row][k * step], b [depth][.]. */
INLINE void tile(const float *const *a, int64_t step, const float *b, int64_t stride, int64_t depth, float *const *c,
                 int64_t at, int add, const int m, const int n) {
    vf sums[TALL][WIDE];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) sums[i][j] = add ? load(c[i] + at + j * W) : all(0.0f);
    for (int64_t k = 0; k < depth; k++) {
        vf row[WIDE];
        for (int j = 0; j < n; j++) row[j] = load(b + k * stride + at + j * W);
        for (int i = 0; i < m; i++) {
            vf by = all(a[i][k * step]);
            for (int j = 0; j < n; j++) sums[i][j] += by * row[j];
        }
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) store(c[i] + at + j * W, sums[i][j]);
}

/* The same for m <= TALL rows of any width that is a multiple of 16. */
static void product_rows(const float *const *a, int64_t step, const float *b, int64_t stride, int64_t depth,
                         float *const *c, int64_t width, int add, int m) {
    int64_t at = 0;
#define ROWS(m_) \
    if (m == m_) { \
        for (; at + WIDE * W <= width; at += WIDE * W) tile(a, step, b, stride, depth, c, at, add, m_, WIDE); \
        for (; at < width; at += W) tile(a, step, b, stride, depth, c, at, add, m_, 1); \
    }
    ROWS(6) ROWS(5) ROWS(4) ROWS(3) ROWS(2) ROWS(1)
#undef ROWS
}

/* Rotate x to its position, or back (`sign` -1), and multiply by `scale`. */
INLINE void turn(const float *x, const float *cosines, const float *sines, float sign, float scale, int64_t D,
                 float *out) {
    int64_t half = D / 2;
    for (int64_t d = 0; d < half; d++) {
        float low = x[d], high = x[d + half];
        out[d] = (low * cosines[d] - sign * high * sines[d]) * scale;
        out[d + half] = (high * cosines[d + half] + sign * low * sines[d + half]) * scale;
    }
}

/* Rotate queries (scaled) and keys of all tokens; copy values: [N, E]. */
static void turn_all(const Attention *s, const float *heads, float *turned) {
    int64_t D = s->D, E = (s->Q + 2 * s->K) * D;
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1)
    for (int64_t n = 0; n < s->tokens; n++) {
        const float *from = heads + n * E, *cosines = s->cosines + n * D, *sines = s->sines + n * D;
        float *to = turned + n * E;
        for (int64_t h = 0; h < s->Q; h++) turn(from + h * D, cosines, sines, 1.0f, s->scale, D, to + h * D);
        for (int64_t h = s->Q; h < s->Q + s->K; h++) turn(from + h * D, cosines, sines, 1.0f, 1.0f, D, to + h * D);
        memcpy(to + (s->Q + s->K) * D, from + (s->Q + s->K) * D, (size_t)(s->K * D) * sizeof(float));
    }
}

INLINE int64_t padded(int64_t n) { return (n + W - 1) / W * W; }

/* Gather [length, D] from tokens and transpose it to [D, padded length]; padding is 0. */
static void transposed(const float *x, const int64_t *named, int64_t length, int64_t E, int64_t D, float *out) {
    int64_t width = padded(length);
    for (int64_t first = 0; first < width; first += W)
        for (int64_t d = 0; d < D; d += W) {
            float block[W][W];
            for (int i = 0; i < W; i++)
                store(block[i], first + i < length ? load(x + named[first + i] * E + d) : all(0.0f));
            for (int j = 0; j < W; j++)
                for (int i = 0; i < W; i++) out[(d + j) * width + first + i] = block[i][j];
        }
}

static void gathered(const float *x, const int64_t *named, int64_t length, int64_t E, int64_t D, float *out) {
    for (int64_t i = 0; i < length; i++) memcpy(out + i * D, x + named[i] * E, (size_t)D * sizeof(float));
}

/* Scores of a row's queries begin..end - 1 against the keys that they attend to, MASKED elsewhere: [.][width]. */
static void scores_of(const float *turned, const int64_t *named, int64_t begin, int64_t end, int64_t E, int64_t D,
                      const float *keys, int64_t width, float *scores) {
    for (int64_t i = begin; i < end; i += TALL) {
        int m = (int)(end - i < TALL ? end - i : TALL);
        const float *a[TALL];
        float *c[TALL];
        for (int j = 0; j < m; j++) a[j] = turned + named[i + j] * E, c[j] = scores + (i + j - begin) * width;
        product_rows(a, 1, keys, width, D, c, padded(i + m), 0, m);
        for (int j = 0; j < m; j++)
            for (int64_t t = i + j + 1; t < padded(end); t++) c[j][t] = MASKED;
    }
}

/* heads [N, E] -> rotated heads [N, E], out [N, Q D], and the logarithm of each softmax's denominator [N, Q]. */
void attention_forward(const Attention *s, const float *heads, float *turned, float *out, float *logs) {
    int64_t Q = s->Q, D = s->D, E = (Q + 2 * s->K) * D, group = Q / s->K, most = padded(s->longest);
    turn_all(s, heads, turned);
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    {
        float *keys = aligned_alloc(64, (size_t)(2 * D + ASKED) * (size_t)most * sizeof(float));
        float *values = keys + D * most, *scores = values + D * most;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < s->rows * s->K; task++) {
            int64_t row = task / s->K, k = task % s->K, length = s->starts[row + 1] - s->starts[row];
            const int64_t *named = s->named + s->starts[row];
            int64_t width = padded(length);
            if (s->first[row] == length) continue;
            transposed(turned + (Q + k) * D, named, length, E, D, keys);
            gathered(turned + (Q + s->K + k) * D, named, length, E, D, values);
            for (int64_t h = k * group; h < (k + 1) * group; h++)
                for (int64_t begin = s->first[row]; begin < length; begin += ASKED) {
                    int64_t end = begin + ASKED < length ? begin + ASKED : length;
                    scores_of(turned + h * D, named, begin, end, E, D, keys, width, scores);
                    for (int64_t i = begin; i < end; i += TALL) {
                        int m = (int)(end - i < TALL ? end - i : TALL);
                        const float *a[TALL];
                        float *c[TALL], shares[TALL];
                        for (int j = 0; j < m; j++) {
                            float *x = scores + (i + j - begin) * width, largest = MASKED;
                            vf high = all(MASKED), sums = {0};
                            for (int64_t t = 0; t < padded(i + m); t += W) high = pick(load(x + t) > high, load(x + t), high);
                            for (int v = 0; v < W; v++) largest = high[v] > largest || high[v] != high[v] ? high[v] : largest;
                            for (int64_t t = 0; t < padded(i + m); t += W) {
                                vf power = exp_of_negative(load(x + t) - largest);
                                store(x + t, power);
                                sums += power;
                            }
                            float sum = total(sums);
                            shares[j] = 1.0f / sum;
                            logs[named[i + j] * Q + h] = largest + logf(sum);
                            a[j] = x, c[j] = out + named[i + j] * Q * D + h * D;
                        }
                        product_rows(a, 1, values, D, i + m, c, D, 0, m);
                        for (int j = 0; j < m; j++)
                            for (int64_t d = 0; d < D; d += W) store(c[j] + d, load(c[j] + d) * shares[j]);
                    }
                }
        }
        free(keys);
    }
}

/* Compute the gradient of heads [N, E] from that of the result [N, Q D]. `places` (with offsets `ends` [N + 1]) are each
 * token's positions in `named`; `room` is scratch memory [length of named, 2 K D]. */
void attention_backward(const Attention *s, const float *turned, const float *out, const float *logs, const float *grad,
                        const int64_t *ends, const int64_t *places, float *room, float *grad_heads) {
    int64_t Q = s->Q, K = s->K, D = s->D, E = (Q + 2 * K) * D, group = Q / K, most = padded(s->longest);
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    {
        float *keys_t = aligned_alloc(64, (size_t)(5 * D * most + 2 * ASKED * most + 2 * ASKED * D) * sizeof(float));
        float *values_t = keys_t + D * most, *keys = values_t + D * most;
        float *grad_keys = keys + D * most, *grad_values = grad_keys + D * most;
        float *powers = grad_values + D * most, *slopes = powers + ASKED * most;
        float *asked = slopes + ASKED * most, *given = asked + ASKED * D;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < s->rows * K; task++) {
            int64_t row = task / K, k = task % K, length = s->starts[row + 1] - s->starts[row], width = padded(length);
            const int64_t *named = s->named + s->starts[row];
            memset(grad_keys, 0, (size_t)(2 * D * most) * sizeof(float));
            if (s->first[row] < length) {
                transposed(turned + (Q + k) * D, named, length, E, D, keys_t);
                transposed(turned + (Q + K + k) * D, named, length, E, D, values_t);
                gathered(turned + (Q + k) * D, named, length, E, D, keys);
            }
            for (int64_t h = k * group; h < (k + 1) * group; h++)
                for (int64_t begin = s->first[row]; begin < length; begin += ASKED) {
                    int64_t end = begin + ASKED < length ? begin + ASKED : length;
                    gathered(turned + h * D, named + begin, end - begin, E, D, asked);
                    gathered(grad + h * D, named + begin, end - begin, Q * D, D, given);
                    scores_of(turned + h * D, named, begin, end, E, D, keys_t, width, powers);
                    for (int64_t i = begin; i < end; i += TALL) {
                        int m = (int)(end - i < TALL ? end - i : TALL);
                        const float *a[TALL];
                        float *c[TALL];
                        for (int j = 0; j < m; j++) a[j] = given + (i + j - begin) * D, c[j] = slopes + (i + j - begin) * width;
                        product_rows(a, 1, values_t, width, D, c, padded(i + m), 0, m);
                        for (int j = 0; j < m; j++) {
                            float *p = powers + (i + j - begin) * width, log = logs[named[i + j] * Q + h];
                            const float *made = out + named[i + j] * Q * D + h * D;
                            vf dots = {0};
                            for (int64_t d = 0; d < D; d += W) dots += load(a[j] + d) * load(made + d);
                            float dot = total(dots);
                            for (int64_t t = 0; t < padded(i + m); t += W) {
                                vf x = load(p + t) - log; /* may be above 0 by rounding */
                                vf power = exp_of_negative(pick(x > all(0.0f), all(0.0f), x));
                                store(p + t, power);
                                store(c[j] + t, power * (load(c[j] + t) - dot));
                            }
                            for (int64_t t = padded(i + m); t < padded(i + m + TALL) && t < width; t += W)
                                store(p + t, all(0.0f)), store(c[j] + t, all(0.0f)); /* read by the next tiles of keys */
                        }
                        const float *slope[TALL];
                        for (int j = 0; j < m; j++)
                            slope[j] = c[j], c[j] = grad_heads + named[i + j] * E + h * D;
                        product_rows(slope, 1, keys, D, i + m, c, D, 0, m);
                    }
                    for (int64_t t = 0; t < end; t += TALL) { /* queries before t do not attend to it */
                        int m = (int)(end - t < TALL ? end - t : TALL);
                        int64_t from = t > begin ? (t - begin) / TALL * TALL : 0;
                        const float *a[TALL];
                        float *c[TALL];
                        for (int j = 0; j < m; j++) a[j] = slopes + from * width + t + j, c[j] = grad_keys + (t + j) * D;
                        product_rows(a, width, asked + from * D, D, end - begin - from, c, D, 1, m);
                        for (int j = 0; j < m; j++) a[j] = powers + from * width + t + j, c[j] = grad_values + (t + j) * D;
                        product_rows(a, width, given + from * D, D, end - begin - from, c, D, 1, m);
                    }
                }
            for (int64_t t = 0; t < length; t++) {
                float *to = room + ((s->starts[row] + t) * 2 * K + k) * D;
                memcpy(to, grad_keys + t * D, (size_t)D * sizeof(float));
                memcpy(to + K * D, grad_values + t * D, (size_t)D * sizeof(float));
            }
        }
        free(keys_t);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < s->tokens; n++) {
            float *to = grad_heads + n * E, *side = to + Q * D;
            const float *cosines = s->cosines + n * D, *sines = s->sines + n * D;
            for (int64_t i = 0; i < 2 * K * D; i += W) {
                vf sum = all(0.0f);
                for (int64_t place = ends[n]; place < ends[n + 1]; place++) sum += load(room + places[place] * 2 * K * D + i);
                store(side + i, sum);
            }
            float kept[256];
            for (int64_t h = 0; h < Q + K; h++) {
                memcpy(kept, to + h * D, (size_t)D * sizeof(float));
                turn(kept, cosines, sines, -1.0f, h < Q ? s->scale : 1.0f, D, to + h * D);
            }
        }
    }
}
