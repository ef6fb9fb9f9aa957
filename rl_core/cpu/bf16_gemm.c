/* Products of few rows with weights packed in advance as bfloat16, half of float32's memory.
 *
 * A panel holds pairs of depths, so that one layout serves all kernels; results are float32:
 *
 *   widened   a shift makes float32 numbers of the weights: the bits of `vector_gemm.c` on weights rounded to bfloat16.
 *             For any processor.
 *   dots      AVX-512 BF16 (`vdpbf16ps`): the left operand is rounded to bfloat16, too, as in training; each product is
 *             exact, sums are float32.
 *   tiles     AMX, in `bf16_tiles.c`; rounded as for dots.
 *
 * A kernel computes any number of rows, because a row's bits must not depend on the rows that share its step.
 */

#include "decode_ops.h"
#include "bf16_dots.h"

#include <time.h>

#define GROUPED 4 /* most panels at a time: a single row has too few sums to hide the latency of an addition */

/* Return the size of packed weights in bytes. */
int64_t bf16_packed_size(int64_t lines, int64_t depth) {
    return blocks_of(lines, PANEL) * PANEL * padded_depth(depth) * (int64_t)sizeof(uint16_t);
}

/* Pack w [lines, depth]: the panels for every 256 of depth. */
void bf16_pack_right(const uint16_t *w, int64_t lines, int64_t depth, int32_t *out, int threads) {
    int64_t columns = blocks_of(lines, PANEL) * PANEL;
    for (int64_t d = 0; d < depth; d += DEEP) {
        int64_t deep = least(depth - d, DEEP), pairs = padded_depth(deep) / 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int64_t j = 0; j < lines; j += PANEL) {
            int32_t *panel = out + d / 2 * columns + j * pairs;
            int64_t n = least(lines - j, PANEL);
            if (n < PANEL || deep < 2 * pairs) memset(panel, 0, (size_t)(pairs * PANEL) * sizeof(int32_t));
            for (int64_t i = 0; i < n; i++) {
                const uint16_t *from = w + (j + i) * depth + d;
                for (int64_t k = 0; k < deep / 2; k++) memcpy(panel + k * PANEL + i, from + 2 * k, sizeof(int32_t));
                if (deep % 2) panel[deep / 2 * PANEL + i] = from[deep - 1];
            }
        }
    }
}

/* Return the scratch bytes of a product for this number of threads; a part needs those of one. */
int64_t bf16_packed_room(int64_t threads) {
    return threads * (ROWS * LINE + DEEP * PANEL) * (int64_t)sizeof(float);
}

/* c [m, panels * PANEL] (+)= a b; panels are `apart`. The left operand is float32, or for dots pairs of bfloat16; its rows
 * are LINE dwords apart. `next` is prefetched as b is read. */
INLINE void multiply_pairs(const float *a, const int32_t *b, int64_t apart, int64_t depth, const int32_t *next, float *c,
                           int64_t stride, int add, const int m, const int panels, const int is_dots) {
    vf sums[TALL][GROUPED * WIDE];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < panels * WIDE; j++) sums[i][j] = all(0.0f);
    for (int64_t k = 0; k < (is_dots ? blocks_of(depth, 2) : depth / 2); k++) {
        vi both[GROUPED * WIDE];
        for (int j = 0; j < panels * WIDE; j++) both[j] = load_words(b + j / WIDE * apart + k * PANEL + j % WIDE * W);
        for (int p = 0; p < panels; p++)
            for (int j = 0; j < PANEL; j += 16) __builtin_prefetch(next + p * apart + k * PANEL + j, 0, 2);
#ifdef HAS_DOTS
        for (int i = 0; is_dots && i < m; i++) {
            vi by = ((const int32_t *)a)[i * LINE + k] - (vi){0};
            for (int j = 0; j < panels * WIDE; j++) sums[i][j] = add_dots(sums[i][j], by, both[j]);
        }
#endif
        for (int i = 0; !is_dots && i < m; i++) {
            vf by = all(a[i * LINE + 2 * k]);
            for (int j = 0; j < panels * WIDE; j++) sums[i][j] += by * earlier_of(both[j]);
        }
        for (int i = 0; !is_dots && i < m; i++) {
            vf by = all(a[i * LINE + 2 * k + 1]);
            for (int j = 0; j < panels * WIDE; j++) sums[i][j] += by * later_of(both[j]);
        }
    }
    for (int i = 0; !is_dots && depth % 2 && i < m; i++) {
        vf by = all(a[i * LINE + depth - 1]);
        for (int j = 0; j < panels * WIDE; j++)
            sums[i][j] += by * earlier_of(load_words(b + j / WIDE * apart + depth / 2 * PANEL + j % WIDE * W));
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < panels * WIDE; j++) {
            float *to = c + i * stride + j * W;
            store(to, add ? load(to) + sums[i][j] : sums[i][j]);
        }
}

INLINE int panels_at_a_time(int64_t m) { return m == 1 ? GROUPED : m == 2 ? 2 : 1; }

#define CASE(m_) \
    case m_: \
        if (panels == 1 || m_ > 2) multiply_pairs(a, b, apart, depth, next, c, stride, add, m_, 1, IS_DOTS); \
        else multiply_pairs(a, b, apart, depth, next, c, stride, add, m_, m_ == 1 ? GROUPED : 2, IS_DOTS); \
        break;
#define IS_DOTS 0
static void multiply_widened(const float *a, const int32_t *b, int64_t apart, int64_t depth, const int32_t *next, float *c,
                             int64_t stride, int add, int64_t m, int panels) {
    switch (m) { CASES_OF_ROWS }
}
#undef IS_DOTS
#ifdef HAS_DOTS
#define IS_DOTS 1
static void multiply_dots(const float *a, const int32_t *b, int64_t apart, int64_t depth, const int32_t *next, float *c,
                          int64_t stride, int add, int64_t m, int panels) {
    switch (m) { CASES_OF_ROWS }
}
#undef IS_DOTS
#endif
#undef CASE

/* Widen a panel: [depth, PANEL] float32. */
static void widen_panel(const int32_t *b, int64_t depth, float *out) {
    for (int64_t k = 0; k < depth; k += 2)
        for (int j = 0; j < PANEL; j += W) {
            vi both = load_words(b + k / 2 * PANEL + j);
            store(out + k * PANEL + j, earlier_of(both));
            if (k + 1 < depth) store(out + (k + 1) * PANEL + j, later_of(both));
        }
}

static void multiply_rows(const float *a, const float *b, int64_t depth, const float *next, float *c, int64_t stride,
                          int add, int64_t m) {
#define CASE(m_) \
    case m_: multiply_tile(a, LINE, 1, b, depth, next, c, stride, add, m_); break;
    switch (m) { CASES_OF_ROWS }
#undef CASE
}

/* c [rows, columns] (+)= copied rows times panels. For many rows, a panel is widened once, to `scratch`. */
static void multiply_panels(const float *a, const int32_t *b, int64_t depth, float *c, int64_t stride, int64_t rows,
                            int64_t columns, int add, float *scratch, const int is_dots) {
    int64_t apart = padded_depth(depth) / 2 * PANEL;
    int is_widened_first = !is_dots && rows > 4 * TALL, grouped = panels_at_a_time(rows), taken;
    for (int64_t column = 0; column < columns; column += taken * PANEL, b += taken * apart) {
        taken = columns - column >= grouped * PANEL ? grouped : 1;
        const int32_t *next = b + taken * apart;
        int64_t n = least(columns - column, taken * PANEL);
        if (is_widened_first) widen_panel(b, depth, scratch);
        for (int64_t row = 0, m; row < rows; row += m) {
            m = rows_of_a_tile(rows - row);
            float *to = c + row * stride + column, part[TALL * PANEL];
            int is_whole = n == taken * PANEL;
            for (int64_t i = 0; !is_whole && add && i < m; i++)
                memcpy(part + i * PANEL, to + i * stride, (size_t)n * sizeof(float));
            float *out = is_whole ? to : part;
            int64_t by = is_whole ? stride : PANEL;
            if (is_widened_first) multiply_rows(a + row * LINE, scratch, depth, (const float *)next, out, by, add, m);
#ifdef HAS_DOTS
            else if (is_dots) multiply_dots(a + row * LINE, b, apart, depth, next, out, by, add, m, taken);
#endif
            else multiply_widened(a + row * LINE, b, apart, depth, next, out, by, add, m, taken);
            for (int64_t i = 0; !is_whole && i < m; i++)
                memcpy(to + i * stride, part + i * PANEL, (size_t)n * sizeof(float));
        }
    }
}

INLINE void multiply_part(const float *left, int64_t left_stride, const int8_t *right, float *c, int64_t c_stride,
                          int64_t rows, int64_t columns, int64_t depth, int add, int8_t *room, int member, int members,
                          const int is_dots) {
    Share s = share_of_product(rows, columns, member, members);
    int64_t padded = blocks_of(columns, PANEL) * PANEL;
    float *copied = (float *)room, *scratch = copied + ROWS * LINE;
    for (int64_t i = s.first_row; i < rows; i += s.stride)
        for (int64_t d = 0; d < depth; d += DEEP) {
            int64_t some = least(rows - i, s.step), deep = least(depth - d, DEEP);
            for (int64_t row = 0; row < some; row++) {
                const float *from = left + (i + row) * left_stride + d;
                if (is_dots) round_row(from, deep, blocks_of(deep, 2) * 2, (uint16_t *)(copied + row * LINE));
                else memcpy(copied + row * LINE, from, (size_t)deep * sizeof(float));
            }
            const int32_t *panels = (const int32_t *)right + d / 2 * padded + s.first * padded_depth(deep) / 2;
            multiply_panels(copied, panels, deep, c + i * c_stride + s.first, c_stride, some, s.end - s.first, add || d,
                            scratch, is_dots);
        }
}

/* See `vector_packed_part`. */
void bf16_widened_part(const float *left, int64_t left_stride, const int8_t *right, float *c, int64_t c_stride,
                       int64_t rows, int64_t columns, int64_t depth, int add, int8_t *room, int member, int members) {
    multiply_part(left, left_stride, right, c, c_stride, rows, columns, depth, add, room, member, members, 0);
}

void bf16_widened_product(const float *left, int64_t left_stride, const int8_t *right, float *c, int64_t c_stride,
                          int64_t rows, int64_t columns, int64_t depth, int add, int8_t *room, int threads) {
    PRODUCT_BY_PARTS(bf16_widened_part)
}

#ifdef HAS_DOTS
int dots_ready(void) { return 1; }

#ifdef __AVX512BF16__
#define CHAINS 12 /* independent sums, more than the latency of an instruction hides */

/* Return the seconds of `steps` instructions in each chain. */
INLINE double time_chains(int64_t steps, const int is_dots) {
    vf sums[CHAINS], by = all(1.0f);
    vi both = (vi)by;
    struct timespec begin, end;
    for (int i = 0; i < CHAINS; i++) sums[i] = all(0.0f);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int64_t k = 0; k < steps; k++)
        for (int i = 0; i < CHAINS; i++) {
            sums[i] = is_dots ? add_dots(sums[i], both, both) : sums[i] + by * by;
            __asm__ volatile("" : "+v"(sums[i]), "+v"(by), "+v"(both));
        }
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
}

/* Return how many times as fast dots multiply as float32's multiply-add: the shortest of several turns of each. An Intel
 * processor whose tiles are switched off has half the speed in dots, an AMD one twice. */
double dots_gain(void) {
    double floats = 1.0, dots = 1.0;
    for (int turn = 0; turn < 16; turn++) {
        double some = time_chains(4000, 0), others = time_chains(4000, 1);
        floats = some < floats ? some : floats;
        dots = others < dots ? others : dots;
    }
    return 2.0 * floats / dots;
}
#else
double dots_gain(void) { return 2.0; } /* of the stand-in, which tests alone use */
#endif

/* See `vector_packed_part`. */
void bf16_dots_part(const float *left, int64_t left_stride, const int8_t *right, float *c, int64_t c_stride, int64_t rows,
                    int64_t columns, int64_t depth, int add, int8_t *room, int member, int members) {
    multiply_part(left, left_stride, right, c, c_stride, rows, columns, depth, add, room, member, members, 1);
}

void bf16_dots_product(const float *left, int64_t left_stride, const int8_t *right, float *c, int64_t c_stride,
                       int64_t rows, int64_t columns, int64_t depth, int add, int8_t *room, int threads) {
    PRODUCT_BY_PARTS(bf16_dots_part)
}
#else
/* Return 1 if products of bfloat16 numbers are instructions of AVX-512. */
int dots_ready(void) { return 0; }
double dots_gain(void) { return 0.0; }
#endif
