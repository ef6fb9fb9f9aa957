/* RMS norms and SwiGLU gates for training on a CPU in float32, forward and backward, one pass over memory each. Sums over
 * tokens are computed in blocks, in an order independent of the number of threads.
 *
 * N tokens, H hidden, I width of the MLP.
 */

#include "vectors.h"

#include <math.h>

#define SUMMED 64 /* tokens of a block that are summed together */

/* sum = x + added (if there is any), out = sum / rms(sum) * weight; scale [n] = 1 / rms. H is a multiple of 16. */
void norm_forward(const float *x, const float *added, const float *weight, float eps, int64_t n, int64_t H, float *sum,
                  float *out, float *scale, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < n; row++) {
        const float *from = x + row * H;
        float *to = out + row * H;
        vf squares = {0};
        if (added) {
            float *both = sum + row * H;
            for (int64_t i = 0; i < H; i += W) {
                vf v = load(from + i) + load(added + row * H + i);
                store(both + i, v);
                squares += v * v;
            }
            from = both;
        } else {
            for (int64_t i = 0; i < H; i += W) squares += load(from + i) * load(from + i);
        }
        float by = scale[row] = 1.0f / sqrtf(total(squares) / (float)H + eps);
        for (int64_t i = 0; i < H; i += W) store(to + i, load(from + i) * by * load(weight + i));
    }
}

/* With r = 1 / rms(x), g the gradient of the result: grad_x = r (w g - x r^2 mean(w g x)) + the gradient that bypassed
 * the norm (`beside`, or NULL); the weight's gradient, sum of g x r, in blocks of tokens [ceil(n / 64), H], or NULL. */
void norm_backward(const float *grad, const float *beside, const float *x, const float *scale, const float *weight,
                   int64_t n, int64_t H, float *grad_x, float *grad_weights, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t block = 0; block < n; block += SUMMED) {
        float *sums = grad_weights ? grad_weights + block / SUMMED * H : 0;
        if (sums) memset(sums, 0, (size_t)H * sizeof(float));
        for (int64_t row = block; row < n && row < block + SUMMED; row++) {
            const float *g = grad + row * H, *v = x + row * H;
            float r = scale[row];
            vf dots = {0};
            for (int64_t i = 0; i < H; i += W) {
                vf gx = load(g + i) * load(v + i);
                dots += gx * load(weight + i);
                if (sums) store(sums + i, load(sums + i) + gx * r);
            }
            float by = total(dots) / (float)H * r * r;
            for (int64_t i = 0; i < H; i += W) {
                vf found = (load(g + i) * load(weight + i) - load(v + i) * by) * r;
                store(grad_x + row * H + i, beside ? found + load(beside + row * H + i) : found);
            }
        }
    }
}

/* silu(gate) * up; gate and up are side by side in each row of `both` [n, 2 I], I of any size. */
void gated_forward(const float *both, int64_t n, int64_t I, float *out, int threads) {
    int64_t even = I - I % W;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < n; row++) {
        const float *gate = both + row * 2 * I, *up = gate + I;
        float *to = out + row * I;
        for (int64_t i = 0; i < even; i += W) {
            vf x = load(gate + i);
            store(to + i, x * sigmoid(x) * load(up + i));
        }
        for (int64_t i = even; i < I; i++) to[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
}

/* Compute the gradient of `both` [n, 2 I]; I is a multiple of 16. */
void gated_backward(const float *both, const float *grad, int64_t n, int64_t I, float *grad_both, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < n; row++)
        for (int64_t i = 0; i < I; i += W) {
            const float *at = both + row * 2 * I + i;
            float *to = grad_both + row * 2 * I + i;
            vf x = load(at), share = sigmoid(x), g = load(grad + row * I + i);
            store(to, g * load(at + I) * share * (1.0f + x * (1.0f - share)));
            store(to + I, g * x * share);
        }
}
