/* A whole decoding step in one call, by products with packed weights: embedding, layers, logits.
 *
 * N new tokens, the first `count` of which are asked for logits; H hidden, E = (Q + 2 K) D, I width of the MLP, V
 * vocabulary. Norms' weights are multiplied into the packed weights after them.
 */

#include <string.h>

#include "decode_ops.h"

typedef struct {
    const int8_t *heads, *out, *gate_up, *down;
    const float *heads_bias, *out_bias, *gate_up_bias, *down_bias; /* or NULL */
    const float *q_weight, *k_weight;                              /* or NULL */
    float *keys, *values;
    float q_eps, k_eps, input_eps, mlp_eps, scale;
} DecodeLayer;

typedef struct {
    int64_t layers, H, I, V;
    const DecodeLayer *layer;
    const float *embedding; /* [V, H] */
    const int8_t *head;
    const float *head_bias;
    float head_eps;
    Product *product;
} DecodeModel;

static void multiply(Product *product, const float *x, int64_t inputs, const int8_t *weight, const float *bias,
                     float *out, int64_t outputs, int64_t rows, int add, int8_t *copies, int threads) {
    product(x, inputs, weight, out, outputs, rows, outputs, inputs, add, copies, threads);
    for (int64_t row = 0; bias && row < rows; row++)
        for (int64_t i = 0; i < outputs; i++) out[row * outputs + i] += bias[i];
}

/* logits [count, V]; room for N (2 H + E + Q D + 3 I) numbers. */
void decode_step(const DecodeModel *m, Step *s, const int64_t *tokens, int64_t count, float *room, int8_t *copies,
                 float *logits) {
    int64_t N = s->tokens, H = m->H, I = m->I, QD = s->Q * s->D, E = QD + 2 * s->K * s->D;
    int threads = (int)s->threads;
    float *x = room, *normal = x + N * H, *heads = normal + N * H, *attended = heads + N * E;
    float *both = attended + N * QD, *active = both + N * 2 * I;
    for (int64_t n = 0; n < N; n++) memcpy(x + n * H, m->embedding + tokens[n] * H, (size_t)H * sizeof(float));
    for (int64_t number = 0; number < m->layers; number++) {
        const DecodeLayer *l = m->layer + number;
        normed(x, N, H, l->input_eps, normal);
        multiply(m->product, normal, H, l->heads, l->heads_bias, heads, E, N, 0, copies, threads);
        int64_t rows = s->rows = number + 1 < m->layers ? N : count; /* in the end only the newest tokens matter */
        s->q_weight = l->q_weight, s->k_weight = l->k_weight, s->q_eps = l->q_eps, s->k_eps = l->k_eps;
        s->scale = l->scale;
        attend(s, heads, l->keys, l->values, attended);
        multiply(m->product, attended, QD, l->out, l->out_bias, x, H, rows, 1, copies, threads);
        normed(x, rows, H, l->mlp_eps, normal);
        multiply(m->product, normal, H, l->gate_up, l->gate_up_bias, both, 2 * I, rows, 0, copies, threads);
        gated_forward(both, rows, I, active, threads);
        multiply(m->product, active, I, l->down, l->down_bias, x, H, rows, 1, copies, threads);
    }
    normed(x, count, H, m->head_eps, normal);
    multiply(m->product, normal, H, m->head, m->head_bias, logits, m->V, count, 0, copies, threads);
}
