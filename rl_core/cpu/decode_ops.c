/* Operations of a decoding step between its matrix products, on a CPU in float32: norms, rotary embedding, attention,
 * sampling.
 *
 * torch would run about twenty small kernels per layer for them, each with a pass over memory and call overhead.
 * The summation order is fixed, so that results are reproducible.
 *
 * N new tokens, each in a slot; D head size, a multiple of 16; Q query heads, K key and value heads.
 */

#include <math.h>

#include "decode_ops.h"
#include "vectors.h"

#define OF_TWO(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

/* The totals of W vectors as the lanes of one: pairs of vectors are folded until one is left. */
INLINE vf totals(vf *v) {
#if W == 16
    for (int i = 0; i < 8; i++)
        v[i] = OF_TWO(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               OF_TWO(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        v[i] = OF_TWO(v[i], v[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               OF_TWO(v[i], v[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        v[i] = OF_TWO(v[i], v[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               OF_TWO(v[i], v[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return OF_TWO(v[0], v[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           OF_TWO(v[0], v[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#else
    for (int i = 0; i < 4; i++)
        v[i] = OF_TWO(v[i], v[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) + OF_TWO(v[i], v[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 2; i++)
        v[i] = OF_TWO(v[i], v[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) + OF_TWO(v[i], v[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    return OF_TWO(v[0], v[1], 0, 8, 2, 10, 4, 12, 6, 14) + OF_TWO(v[0], v[1], 1, 9, 3, 11, 5, 13, 7, 15);
#endif
}

/* x / rms(x), each row of x [n, width]. */
void normed(const float *x, int64_t n, int64_t width, float eps, float *out) {
    int64_t even = width - width % W;
    for (int64_t row = 0; row < n; row++, x += width, out += width) {
        vf squares = {0};
        for (int64_t i = 0; i < even; i += W) squares += load(x + i) * load(x + i);
        float sum = total(squares);
        for (int64_t i = even; i < width; i++) sum += x[i] * x[i];
        float scale = 1.0f / sqrtf(sum / (float)width + eps);
        for (int64_t i = 0; i < even; i += W) store(out + i, load(x + i) * scale);
        for (int64_t i = even; i < width; i++) out[i] = x[i] * scale;
    }
}

/* One head of one token: normalised if there is a weight, rotated to its position, times `scale`. */
INLINE void turned(const float *x, const float *weight, float eps, const float *cosines, const float *sines, float scale,
                   int D, float *out) {
    float normal[256];
    if (weight) {
        vf squares = {0};
        for (int d = 0; d < D; d += W) squares += load(x + d) * load(x + d);
        float by = 1.0f / sqrtf(total(squares) / (float)D + eps);
        for (int d = 0; d < D; d += W) store(normal + d, load(x + d) * by * load(weight + d));
        x = normal;
    }
    int half = D / 2;
    for (int d = 0; d < D; d++) out[d] = (x[d] * cosines[d] + x[d < half ? d + half : d - half] * sines[d]) * scale;
}

/* Average values [seen, D] by the scores of some heads, divided by their totals. `next` is read afterwards (prefetch). */
INLINE void weighted(const float *scores, int64_t length, const float *value, int64_t seen, const float *sum, float *out,
                     const float *next, const int D, const int heads) {
    vf found[256 / W] = {{0}};
    for (int64_t t = 0; t < seen; t++) {
        for (int i = 0; i < D / W; i++) __builtin_prefetch(next + (i * seen + t) * W, 0, 3);
        for (int g = 0; g < heads; g++)
            for (int d = 0; d < D; d += W) found[(g * D + d) / W] += scores[g * length + t] * load(value + t * D + d);
    }
    for (int g = 0; g < heads; g++)
        for (int d = 0; d < D; d += W) store(out + g * D + d, found[(g * D + d) / W] / sum[g]);
}

INLINE void attend_sized(const Step *s, const float *heads, float *keys, float *values, float *out,
                         const Member *who, const int D, const int group) {
    int64_t width = (s->Q + 2 * s->K) * D;
    const int side = D <= 64 && group % 4 == 0 ? 4 : D <= 128 && group % 2 == 0 ? 2 : 1;
    for (int64_t token = share_of(s->tokens, who->number, who), end = share_of(s->tokens, who->number + 1, who);
         token < end; token++) { /* all tokens first: tokens of one slot attend to each other */
        const float *head = heads + token * width + s->Q * D;
        int64_t position = s->positions[token];
        for (int64_t k = 0; k < s->K; k++) {
            int64_t place = ((s->slots[token] * s->K + k) * s->length + position) * D;
            turned(head + k * D, s->k_weight, s->k_eps, s->cosines + position * D, s->sines + position * D, 1.0f, D,
                   keys + place);
            memcpy(values + place, head + (s->K + k) * D, D * sizeof(float));
        }
    }
    meet(who);
    float *scores = s->scores + who->number * group * s->length;
    for (int64_t token = share_of(s->rows, who->number, who), end = share_of(s->rows, who->number + 1, who);
         token < end; token++) {
        int64_t position = s->positions[token], seen = position + 1;
        for (int64_t k = 0; k < s->K; k++) {
            float query[8 * 256];
            for (int g = 0; g < group; g++)
                turned(heads + token * width + (k * group + g) * D, s->q_weight, s->q_eps, s->cosines + position * D,
                       s->sines + position * D, s->scale, D, query + g * D);
            int64_t place = (s->slots[token] * s->K + k) * s->length * D;
            const float *key = keys + place, *value = values + place;
            int64_t first = 0;
            for (; first + W <= seen; first += W)
                for (int g = 0; g < group; g++) {
                    vf sums[W] = {{0}};
                    for (int d = 0; d < D; d += W) {
                        vf part = load(query + g * D + d);
                        for (int i = 0; i < W; i++) sums[i] += part * load(key + (first + i) * D + d);
                    }
                    store(scores + g * s->length + first, totals(sums));
                    for (int i = g * W / group; i < (g + 1) * W / group; i++) /* prefetch the values */
                        for (int d = 0; d < D / W; d++) __builtin_prefetch(value + (d * seen + first + i) * W, 0, 3);
                }
            for (; first < seen; first++)
                for (int g = 0; g < group; g++) {
                    vf sum = {0};
                    for (int d = 0; d < D; d += W) sum += load(query + g * D + d) * load(key + first * D + d);
                    scores[g * s->length + first] = total(sum);
                }
            float sum[8];
            for (int g = 0; g < group; g++) {
                float *score = scores + g * s->length, last[W], largest = score[0];
                vf most = all(largest), sums = {0};
                int64_t t = 0;
                for (; t + W <= seen; t += W) most = pick(load(score + t) > most, load(score + t), most);
                for (int i = 0; i < W; i++) last[i] = t + i < seen ? score[t + i] : largest;
                most = pick(load(last) > most, load(last), most);
                for (int i = 0; i < W; i++) largest = most[i] > largest ? most[i] : largest;
                for (t = 0; t + W <= seen; t += W) {
                    vf power = exp_of_negative(load(score + t) - largest);
                    store(score + t, power);
                    sums += power;
                }
                store(last, exp_of_negative(load(last) - largest));
                sum[g] = total(sums);
                for (int i = 0; t + i < seen; i++) sum[g] += score[t + i] = last[i];
            }
            float *to = out + token * s->Q * D + k * group * D;
            const float *next = k + 1 < s->K || token + 1 == end ? key + s->length * D
                                                                    : keys + s->slots[token + 1] * s->K * s->length * D;
            for (int from = 0; from < group; from += side) /* as many heads at a time as registers allow */
                weighted(scores + from * s->length, s->length, value, seen, sum + from, to + from * D, next, D,
                         group - from < side ? group - from : side);
        }
    }
}

void attend_part(const Step *s, const float *heads, float *keys, float *values, float *out, const Member *who) {
    int group = (int)(s->Q / s->K);
#define CASE(d, g) \
    if (s->D == d && group == g) { attend_sized(s, heads, keys, values, out, who, d, g); return; }
    CASE(64, 1) CASE(64, 2) CASE(64, 4) CASE(128, 1) CASE(128, 2) CASE(128, 4) CASE(128, 8) CASE(32, 1) CASE(32, 2)
#undef CASE
    attend_sized(s, heads, keys, values, out, who, (int)s->D, group);
}

/* Rotate heads, write the new keys and values into their slots, attend: `heads` [tokens, (Q + 2 K) D] -> [rows, Q D].
 * `keys` and `values` are [slots, K, length, D]. At most 8 query heads share a key head; D <= 256. */
void attend(const Step *s, const float *heads, float *keys, float *values, float *out) {
#pragma omp parallel num_threads((int)s->threads) if (s->threads > 1)
    {
        Member who = {omp_get_thread_num(), omp_get_num_threads()};
        attend_part(s, heads, keys, values, out, &who);
    }
}

/* Compute e^((x - largest) by) of a row and its total in double precision; `blocks` gets the totals of every W numbers. */
INLINE double powers_of(const float *x, int64_t V, float largest, float by, float *powers, float *blocks) {
    double sum = 0.0;
    for (int64_t v = 0; v < V; v += W) {
        float last[W];
        for (int i = 0; v + W > V && i < W; i++) last[i] = v + i < V ? x[v + i] : -INFINITY;
        vf power = exp_of_negative((load(v + W > V ? last : x + v) - largest) * by);
        store(powers + v, power);
        sum += blocks[v / W] = total(power);
    }
    return sum;
}

/* Take the `never` tokens out of a row's powers and of the totals of their blocks; return the total of the others. */
static double without(const int64_t *never, int64_t nevers, int64_t V, float *powers, float *blocks) {
    double sum = 0.0;
    for (int64_t i = 0; i < nevers; i++) powers[never[i]] = 0.0f;
    for (int64_t i = 0; i < nevers; i++) blocks[never[i] / W] = total(load(powers + never[i] / W * W));
    for (int64_t block = 0; block * W < V; block++) sum += blocks[block];
    return sum;
}

/* Return the first of the most likely tokens that are not among the `never` ones, which are in ascending order. */
static int64_t best_without(const float *logits, int64_t V, const int64_t *never, int64_t nevers) {
    int64_t best = -1, next = 0;
    for (int64_t v = 0; v < V; v++) {
        if (next < nevers && never[next] == v) { next++; continue; }
        if (best < 0 || logits[v] > logits[best]) best = v;
    }
    return best < 0 ? 0 : best;
}

/* Draw one token by inverting the cumulative distribution softmax(logits / temperature) without the `never` tokens, with
 * its log-probability among all. `drawn` in [0, 1); temperature 0 = the first of the most likely tokens, with its
 * log-probability at temperature 1. */
void draw_row(const float *logits, int64_t V, const int64_t *never, int64_t nevers, double drawn, float temperature,
              float *room, int64_t *token, float *logprob) {
    float *powers = room, *blocks = room + V + W, by = temperature == 0.0f ? 1.0f : 1.0f / temperature;
    int64_t even = V - V % W, chosen = 0;
    float largest = -INFINITY;
    vf most = all(-INFINITY);
    for (int64_t v = 0; v < even; v += W) most = pick(load(logits + v) > most, load(logits + v), most);
    for (int i = 0; i < W; i++) largest = most[i] > largest ? most[i] : largest;
    for (int64_t v = even; v < V; v++) largest = logits[v] > largest ? logits[v] : largest;
    double sum = powers_of(logits, V, largest, by, powers, blocks);
    if (temperature == 0.0f && nevers) {
        chosen = best_without(logits, V, never, nevers);
    } else if (temperature == 0.0f) {
        while (chosen + 1 < V && logits[chosen] != largest) chosen++; /* NaN equals nothing */
    } else {
        double level = drawn * (nevers ? without(never, nevers, V, powers, blocks) : sum), passed = 0.0;
        int64_t block = 0, v;
        for (; (block + 1) * W < V && passed + blocks[block] <= level; block++) passed += blocks[block];
        for (v = block * W; v < V && v < (block + 1) * W; v++) {
            passed += powers[v];
            if (powers[v] > 0.0f && passed > level) break;
        }
        /* A remainder from rounding at the end of a block goes to the last possible token before it. */
        for (chosen = v < V && v < (block + 1) * W ? v : v - 1; chosen > 0 && !(powers[chosen] > 0.0f);) chosen--;
    }
    *token = chosen;
    *logprob = (float)((double)(logits[chosen] - largest) * by - log(sum));
}

/* `draw_row` for logits [n, V] and `drawn` [n]; `room` is scratch memory for each thread. */
void draw(const float *logits, int64_t n, int64_t V, const int64_t *never, int64_t nevers, const double *drawn,
          float temperature, float *room, int64_t *tokens, float *logprobs, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < n; row++)
        draw_row(logits + row * V, V, never, nevers, drawn[row], temperature,
                 room + omp_get_thread_num() * 2 * (V + W), tokens + row, logprobs + row);
}
