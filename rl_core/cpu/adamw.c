/* AdamW over the parameters of several runs, each with its own settings, in one pass over memory.
 *
 * Results equal those of torch's fused AdamW and of its vector norm (one thread): the same operations in the same order,
 * with the same ones fused. `APART` keeps the compiler from fusing others. */

#include "vectors.h"

#include <math.h>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

#define LANES 8 /* as in torch's kernels, which compute a tensor's last numbers one by one */
#define APART(x) __asm__("" : "+x"(x))

/* One parameter, in fields of 8 bytes; pointers are addresses. */
typedef struct {
    float *parameter, *gradient, *mean, *square, *step;
    int64_t size, run;
} Row;

/* Settings of a run. `scale`: factor of its gradient. */
typedef struct {
    double learning_rate, beta1, beta2, eps, decay, scale;
} Settings;

typedef struct {
    float keep, towards, back, beta2, share, root, eps, size, scale;
    int is_small; /* 1 = the mean moves less than half way to the gradient */
} Factors;

static Factors factors_of(const Settings *s, double step) {
    double first = 1 - pow(s->beta1, step), root = sqrt(1 - pow(s->beta2, step));
    float towards = (float)(1 - s->beta1);
    return (Factors){(float)(1 - s->learning_rate * s->decay), towards, towards - 1, (float)s->beta2, (float)(1 - s->beta2),
                     (float)root, (float)s->eps, -(float)(s->learning_rate / first), (float)s->scale, towards < 0.5f};
}

static void step_row(const Row *row, Factors f) {
    int64_t i = 0;
    for (; i + LANES <= row->size; i += LANES) {
        __m256 p = _mm256_loadu_ps(row->parameter + i), g = _mm256_loadu_ps(row->gradient + i);
        __m256 m = _mm256_loadu_ps(row->mean + i), v = _mm256_loadu_ps(row->square + i);
        g *= f.scale;
        APART(g);
        p *= f.keep;
        APART(p);
        __m256 way = g - m;
        m = f.is_small ? _mm256_fmadd_ps(_mm256_set1_ps(f.towards), way, m) : _mm256_fmadd_ps(_mm256_set1_ps(f.back), way, g);
        __m256 kept = v * f.beta2, share = g * f.share;
        APART(kept);
        APART(share);
        v = _mm256_fmadd_ps(share, g, kept);
        __m256 root = _mm256_sqrt_ps(v) / f.root, size = m * f.size;
        APART(root);
        APART(size);
        p += size / (root + f.eps);
        _mm256_storeu_ps(row->parameter + i, p);
        _mm256_storeu_ps(row->mean + i, m);
        _mm256_storeu_ps(row->square + i, v);
    }
    for (; i < row->size; i++) {
        float p = row->parameter[i] * f.keep, g = row->gradient[i] * f.scale, m = row->mean[i];
        APART(p);
        APART(g);
        float way = g - m, share = f.share * g;
        APART(way);
        APART(share);
        m = f.is_small ? fmaf(f.towards, way, m) : fmaf(f.back, way, g);
        share *= g;
        APART(share);
        float v = fmaf(row->square[i], f.beta2, share), root = sqrtf(v) / f.root, size = f.size * m;
        APART(root);
        APART(size);
        row->parameter[i] = p + size / (root + f.eps);
        row->mean[i] = m;
        row->square[i] = v;
    }
}

/* Make one step of every row and increment its step count. */
void adamw_step(const Row *rows, int64_t count, const Settings *settings, int threads) {
#ifdef _OPENMP
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
#endif
    for (int64_t n = 0; n < count; n++) {
        *rows[n].step += 1;
        step_row(rows + n, factors_of(settings + rows[n].run, *rows[n].step));
    }
}

static float norm_of(const float *x, int64_t size) {
    if (size == 1) return fabsf(*x); /* as in torch: avoids squares that underflow or overflow */
    __m256 sums = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        __m256 square = _mm256_loadu_ps(x + i);
        square *= square;
        APART(square);
        sums += square;
    }
    float parts[LANES], sum;
    _mm256_storeu_ps(parts, sums);
    sum = parts[0];
    for (int n = 1; n < LANES; n++) sum += parts[n];
    if (i + LANES / 2 <= size) /* torch squares these four together and the rest one by one */
        for (int n = 0; n < LANES / 2; n++, i++) {
            float square = x[i] * x[i];
            APART(square);
            sum += square;
        }
    for (; i < size; i++) sum = fmaf(x[i], x[i], sum);
    return sqrtf(sum);
}

/* Compute the norm of each row's gradient, and of each run's from the norms of its consecutive rows. */
void gradient_norms(const Row *rows, int64_t count, float *norms, float *of_runs, int64_t runs, int threads) {
#ifdef _OPENMP
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
#endif
    for (int64_t n = 0; n < count; n++) norms[n] = norm_of(rows[n].gradient, rows[n].size);
    for (int64_t run = 0, begin = 0; run < runs; run++) {
        int64_t end = begin;
        while (end < count && rows[end].run == run) end++;
        of_runs[run] = norm_of(norms + begin, end - begin);
        begin = end;
    }
}

int adamw_ready(void) { return 1; }

#else

int adamw_ready(void) { return 0; }

#endif
