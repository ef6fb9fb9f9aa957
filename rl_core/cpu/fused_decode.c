/* Whole decoding steps in one call, by products with packed weights: embedding, layers, logits, sampling.
 *
 * N new tokens, the first `count` of which get logits; H hidden, E = (Q + 2 K) D, I width of the MLP, V vocabulary.
 * Norms' weights are multiplied into the packed weights that follow them, or, since bfloat16 would round their product,
 * into the activations.
 *
 * Slots may have their own low-rank adapters, whose products are added row by row: a slot's numbers do not depend on the
 * adapters of others.
 *
 * Slots that sample can take several tokens in a step: drafts of their next tokens are computed as further rows, and
 * those that the sampler draws as well are taken (speculative decoding, arXiv:2211.17192, with an n-gram table as the
 * draft model). A row's numbers do not depend on other rows, so the same tokens are drawn as without drafts.
 *
 * Everything is one parallel region, because waiting between regions would cost more than small steps take. Threads
 * divide the rows, and each takes its rows through several steps by itself, so that no thread waits for another while
 * other programs run. If rows are few, or reading the weights takes longest, they divide each product's columns instead,
 * with a barrier after it.
 */

#include <math.h>
#include <string.h>

#include "decode_ops.h"
#include "vectors.h"

/* An adapter's update of one product, R rows in total: out[begin .. end) += (x . down) up for each row. */
typedef struct {
    int64_t rows;
    const float *down;         /* [R, inputs], norms' weights multiplied in where they are in the packed weights */
    const float *up;           /* end - begin numbers per row, consecutive; scale multiplied in */
    const int64_t *columns;    /* [R, 2]: begin and end among the outputs */
} LowRank;

typedef struct {
    const int8_t *heads, *out, *gate_up, *down;
    const float *heads_bias, *out_bias, *gate_up_bias, *down_bias; /* or NULL */
    const float *q_weight, *k_weight;                              /* or NULL */
    const float *input_weight, *mlp_weight; /* of the norms, or NULL: multiplied into the packed weights */
    float *keys, *values;
    float q_eps, k_eps, input_eps, mlp_eps, scale;
} DecodeLayer;

typedef struct {
    int64_t layers, H, I, V;
    const DecodeLayer *layer;
    const float *embedding;         /* [V, H] */
    const uint16_t *bf16_embedding; /* in bfloat16; used instead if it is not NULL */
    const int8_t *head;
    const float *head_bias, *head_weight; /* or NULL; the weight is that of the last norm */
    float head_eps;
    ProductPart *product;
    int64_t copies;    /* scratch bytes per member */
    int64_t least_own; /* fewest rows that a thread takes through a step by itself */
    const LowRank *adapters;   /* [adapters, 4 layers + 1]: heads, out, gate_up, down of each layer, then the head */
    const int64_t *adapter_of; /* [slots], below 0 = none; NULL = no slot has one */
} DecodeModel;

/* The state of sampled sequences, [slots] each. */
typedef struct {
    int64_t *tokens, *positions; /* of the newest token */
    const int64_t *limits;       /* longest lengths */
    int64_t *sampled, *acted;    /* tokens sampled in total, and in this turn */
    const double *uniforms;      /* [slots, most]: number `sampled` decides the next token */
    int64_t *chosen;             /* [slots, most]: tokens of this turn */
    double *logprobs;            /* [slots, most]: their log-probabilities */
    int64_t most;
    const uint8_t *is_end;       /* [V] */
    const float *temperatures;    /* [slots] */
    const int64_t *never;         /* tokens that are not drawn, in ascending order */
    int64_t nevers;
} Sampling;

/* x [n, H] = the embedding of some tokens. */
static void embed_tokens(const DecodeModel *m, const int64_t *tokens, int64_t n, float *x) {
    for (; n--; tokens++, x += m->H) {
        if (!m->bf16_embedding) {
            memcpy(x, m->embedding + *tokens * m->H, (size_t)m->H * sizeof(float));
            continue;
        }
        for (int64_t i = 0; i < m->H; i++) {
            uint32_t bits = (uint32_t)m->bf16_embedding[*tokens * m->H + i] << 16;
            memcpy(x + i, &bits, sizeof(bits));
        }
    }
}

/* `normed`, times the norm's weight if there is one. */
static void normed_by(const float *weight, const float *x, int64_t n, int64_t width, float eps, float *out) {
    normed(x, n, width, eps, out);
    for (int64_t row = 0; weight && row < n; row++)
        for (int64_t i = 0; i < width; i++) out[row * width + i] *= weight[i];
}

static inline void add_bias(const float *bias, int64_t columns, int64_t first, int64_t end, int is_first, float *out) {
    for (int64_t row = first; bias && row < end; row++)
        for (int64_t i = 0; i < columns; i++) out[row * columns + i] = (is_first ? 0.0f : out[row * columns + i]) + bias[i];
}

/* Add the adapters' updates of product number `place` to rows first .. end of `out`. */
static void adapt(const DecodeModel *m, const Step *s, int64_t place, const float *x, int64_t inputs, float *out,
                  int64_t outputs, int64_t first, int64_t end) {
    int64_t even = inputs - inputs % W;
    for (int64_t n = first; m->adapter_of && n < end; n++) {
        int64_t number = m->adapter_of[s->slots[n]];
        if (number < 0) continue;
        const LowRank *a = m->adapters + number * (4 * m->layers + 1) + place;
        const float *from = x + n * inputs, *down = a->down, *up = a->up;
        for (int64_t r = 0; r < a->rows; r++, down += inputs) {
            vf sums = {0};
            for (int64_t i = 0; i < even; i += W) sums += load(from + i) * load(down + i);
            float low = total(sums);
            for (int64_t i = even; i < inputs; i++) low += from[i] * down[i];
            float *to = out + n * outputs + a->columns[2 * r];
            int64_t width = a->columns[2 * r + 1] - a->columns[2 * r];
            for (int64_t i = 0; i < width; i++) to[i] += low * up[i];
            up += width;
        }
    }
}

static int64_t numbers_of_row(const DecodeModel *m, const Step *s) {
    return 2 * m->H + 2 * s->Q * s->D + 2 * s->K * s->D + 3 * m->I;
}

/* logits [count, V], computed by all members of `who`; `room` holds N (2 H + E + Q D + 3 I) numbers. */
static void decode(const DecodeModel *m, Step *s, const int64_t *tokens, int64_t count, float *room, int8_t *copies,
                   float *logits, const Member *who) {
    int64_t N = s->tokens, H = m->H, I = m->I, QD = s->Q * s->D, E = QD + 2 * s->K * s->D;
    int64_t rows = N, first = share_of(N, who->number, who), end = share_of(N, who->number + 1, who);
    float *x = room, *normal = x + N * H, *heads = normal + N * H, *attended = heads + N * E;
    float *both = attended + N * QD, *active = both + N * 2 * I;
#define MULTIPLY(from, inputs, weight, to, outputs, add) \
    m->product(from, inputs, weight, to, outputs, rows, outputs, inputs, add, copies, who->number, who->members)
    embed_tokens(m, tokens + first, end - first, x + first * H);
    for (int64_t number = 0; number < m->layers; number++) {
        const DecodeLayer *l = m->layer + number;
        normed_by(l->input_weight, x + first * H, end - first, H, l->input_eps, normal + first * H);
        add_bias(l->heads_bias, E, first, end, 1, heads);
        meet(who);
        MULTIPLY(normal, H, l->heads, heads, E, l->heads_bias != NULL);
        meet(who);
        adapt(m, s, 4 * number, normal, H, heads, E, first, end);
        if (number + 1 == m->layers) { /* after the last attention only the newest tokens matter */
            rows = count, first = share_of(rows, who->number, who), end = share_of(rows, who->number + 1, who);
        }
        s->rows = rows, s->scale = l->scale;
        s->q_weight = l->q_weight, s->k_weight = l->k_weight, s->q_eps = l->q_eps, s->k_eps = l->k_eps;
        attend_part(s, heads, l->keys, l->values, attended, who);
        add_bias(l->out_bias, H, first, end, 0, x);
        meet(who);
        MULTIPLY(attended, QD, l->out, x, H, 1);
        meet(who);
        adapt(m, s, 4 * number + 1, attended, QD, x, H, first, end);
        normed_by(l->mlp_weight, x + first * H, end - first, H, l->mlp_eps, normal + first * H);
        add_bias(l->gate_up_bias, 2 * I, first, end, 1, both);
        meet(who);
        MULTIPLY(normal, H, l->gate_up, both, 2 * I, l->gate_up_bias != NULL);
        meet(who);
        adapt(m, s, 4 * number + 2, normal, H, both, 2 * I, first, end);
        gated_forward(both + first * 2 * I, end - first, I, active + first * I, 1);
        add_bias(l->down_bias, H, first, end, 0, x);
        meet(who);
        MULTIPLY(active, I, l->down, x, H, 1);
        meet(who);
        adapt(m, s, 4 * number + 3, active, I, x, H, first, end);
    }
    normed_by(m->head_weight, x + first * H, end - first, H, m->head_eps, normal + first * H);
    add_bias(m->head_bias, m->V, first, end, 1, logits);
    meet(who);
    MULTIPLY(normal, H, m->head, logits, m->V, m->head_bias != NULL);
    if (m->adapter_of) {
        meet(who);
        adapt(m, s, 4 * m->layers, normal, H, logits, m->V, first, end);
    }
#undef MULTIPLY
}

static inline int takes_own_rows(const DecodeModel *m, int64_t rows, int members) {
    return rows >= m->least_own * members;
}

/* logits [count, V] of the first `count` new tokens, the newest of their slots; the other new tokens precede them. */
void decode_step(const DecodeModel *m, const Step *s, const int64_t *tokens, int64_t count, float *room, int8_t *copies,
                 float *logits) {
#pragma omp parallel num_threads((int)s->threads) if (s->threads > 1)
    {
        Member who = {omp_get_thread_num(), omp_get_num_threads()};
        Step own = *s;
        decode(m, &own, tokens, count, room, copies + who.number * m->copies, logits, &who);
    }
}

/* Sample the next token of slot `n`; return 1 if its turn is over or its log-probability is not finite. */
static int take_token(const DecodeModel *m, const Sampling *a, int64_t n, const float *logits, float *room) {
    int64_t token, at = n * a->most;
    float logprob;
    draw_row(logits, m->V, a->never, a->nevers, a->uniforms[at + a->sampled[n]], a->temperatures[n], room, &token,
             &logprob);
    a->chosen[at + a->acted[n]] = a->tokens[n] = token;
    a->logprobs[at + a->acted[n]] = logprob;
    a->positions[n]++;
    a->sampled[n]++;
    a->acted[n]++;
    return a->is_end[token] || a->positions[n] + 1 >= a->limits[n] || !isfinite(logprob);
}

/* Sample `steps` tokens for each of the first s->tokens slots, fewer if a turn ends earlier; threads with their own rows
 * meet only at the end. Scratch: `room` as for `decode`, `drawing` 2 V + 32 numbers per thread, `lists` 3 times the slots
 * per thread, `is_over` one per slot. */
void decode_steps(const DecodeModel *m, const Step *s, const Sampling *a, int64_t steps, float *room, int8_t *copies,
                  float *logits, float *drawing, int64_t *lists, uint8_t *is_over) {
    int64_t count = s->tokens;
#pragma omp parallel num_threads((int)s->threads) if (s->threads > 1)
    {
        Member who = {omp_get_thread_num(), omp_get_num_threads()};
        int8_t *copied = copies + who.number * m->copies;
        float *drawn = drawing + who.number * (2 * m->V + 32);
        int64_t *slots = lists + who.number * 3 * count, *tokens = slots + count, *positions = tokens + count;
        int64_t first = 0, rows = count;
        Step own = *s;
        own.slots = slots, own.positions = positions;
        if (takes_own_rows(m, count, who.members)) {
            first = share_of(count, who.number, &who), rows = share_of(count, who.number + 1, &who) - first;
            own.scores += who.number * (s->Q / s->K) * s->length;
            who = (Member){0, 1};
        }
        for (int64_t i = 0; i < rows; i++) slots[i] = first + i;
        for (int64_t step = 0; step < steps && rows; step++) {
            float *found = logits + first * m->V;
            for (int64_t i = 0; i < rows; i++) tokens[i] = a->tokens[slots[i]], positions[i] = a->positions[slots[i]];
            own.tokens = own.rows = rows;
            decode(m, &own, tokens, rows, room + first * numbers_of_row(m, s), copied, found, &who);
            meet(&who);
            for (int64_t i = share_of(rows, who.number, &who); i < share_of(rows, who.number + 1, &who); i++)
                is_over[slots[i]] = (uint8_t)take_token(m, a, slots[i], found + i * m->V, drawn);
            meet(&who);
            int64_t left = 0;
            for (int64_t i = 0; i < rows; i++)
                if (!is_over[slots[i]]) slots[left++] = slots[i];
            rows = left;
        }
    }
}

enum { DRAFT_ENTRIES = 1 << 16, STREAKS = 4 };

/* The token that last followed three tokens. `streak` counts how often in a row it did, from 0 to STREAKS - 1. */
typedef struct {
    int32_t next, streak; /* next: the token + 1, 0 = none */
} DraftEntry;

/* Draft tokens of all slots of a run, by the hash of the three tokens before. */
typedef struct {
    DraftEntry *entries;  /* [DRAFT_ENTRIES] */
    const int64_t *read;  /* [slots, 3]: the last tokens of the text that each slot read before its turn; below 0 = none */
    float *shares;        /* [STREAKS]: share of drafts that were right, by streak */
    int64_t *counts;      /* [2]: drafts computed, drafts taken */
    int64_t most_rows;    /* of a step */
    int64_t free_rows;    /* rows that take as long to multiply as their weights take to read */
} Drafts;

static DraftEntry *find_entry(const Drafts *d, int64_t first, int64_t second, int64_t third) {
    uint64_t hash = (uint64_t)first * 0x9E3779B97F4A7C15u + (uint64_t)second * 0xC2B2AE3D27D4EB4Fu;
    hash = (hash ^ hash >> 29) + (uint64_t)third * 0x165667B19E3779F9u;
    return d->entries + (hash * 0x9E3779B97F4A7C15u >> 48);
}

/* Remember that `token` followed an entry's three tokens. */
static void learn_token(const Drafts *d, DraftEntry *entry, int64_t token) {
    int is_right = entry->next == token + 1;
    if (entry->next) d->shares[entry->streak] += ((float)is_right - d->shares[entry->streak]) / 64.0f;
    if (is_right) {
        if (entry->streak + 1 < STREAKS) entry->streak++;
    } else {
        *entry = (DraftEntry){(int32_t)token + 1, 0};
    }
}

/* Remember which tokens follow which in a text of `count` tokens. */
void learn_text(const Drafts *d, const int64_t *tokens, int64_t count) {
    for (int64_t i = 3; i < count; i++) {
        DraftEntry *entry = find_entry(d, tokens[i - 3], tokens[i - 2], tokens[i - 1]);
        if (entry->next != tokens[i] + 1) *entry = (DraftEntry){(int32_t)tokens[i] + 1, 0};
    }
}

/* The token that is number `back` from the end of what a slot has read and sampled, 1 = the newest. */
static int64_t token_from_end(const Sampling *a, const Drafts *d, int64_t slot, int64_t back) {
    int64_t acted = a->acted[slot];
    return acted >= back ? a->chosen[slot * a->most + acted - back] : d->read[3 * slot + 3 - (back - acted)];
}

/* Rows of one step: for each active slot its newest token and then its drafts. */
typedef struct {
    int64_t *active, *starts, *taken;     /* slots; their first rows, and the end of the last; tokens they took */
    int64_t *slots, *tokens, *positions;  /* of each row */
} DraftRows;

/* Fill the rows of a step. A draft is worth a row if it is likely enough to be right: with R rows, a row more takes 1 / (R +
 * free_rows) of the step's time, and a right draft saves 1 / R of it. */
static void fill_rows(const Sampling *a, const Drafts *d, int64_t active, DraftRows *r) {
    int64_t rows = 0, total = active;
    for (int64_t i = 0; i < active; i++) {
        int64_t slot = r->active[i], position = a->positions[slot];
        int64_t first = token_from_end(a, d, slot, 3), second = token_from_end(a, d, slot, 2), third = a->tokens[slot];
        float likely = 1.0f;
        r->starts[i] = rows;
        r->slots[rows] = slot, r->tokens[rows] = third, r->positions[rows++] = position;
        while (total < d->most_rows && position + 2 < a->limits[slot] && first >= 0) {
            const DraftEntry *entry = find_entry(d, first, second, third);
            if (!entry->next) break;
            likely *= d->shares[entry->streak];
            if (likely * (float)(total + d->free_rows) <= (float)total) break;
            first = second, second = third, third = entry->next - 1, total++;
            r->slots[rows] = slot, r->tokens[rows] = third, r->positions[rows++] = ++position;
        }
    }
    r->starts[active] = rows;
    d->counts[0] += rows - active;
}

/* `decode_steps` for models whose weights are read from memory in each step, with drafts. A slot takes at least one token in
 * each step. `lists` holds 6 max(slots, most_rows) + 1 numbers, `room` and `logits` as many rows. */
void decode_drafted_steps(const DecodeModel *m, const Step *s, const Sampling *a, const Drafts *d, int64_t steps,
                          float *room, int8_t *copies, float *logits, float *drawing, int64_t *lists, uint8_t *is_over) {
    int64_t active = s->tokens, size = active > d->most_rows ? active : d->most_rows;
    DraftRows r = {lists, lists + size, lists + 2 * size + 1, lists + 3 * size + 1, lists + 4 * size + 1,
                   lists + 5 * size + 1};
    for (int64_t i = 0; i < active; i++) r.active[i] = i;
    fill_rows(a, d, active, &r);
#pragma omp parallel num_threads((int)s->threads) if (s->threads > 1)
    {
        Member who = {omp_get_thread_num(), omp_get_num_threads()};
        float *drawn = drawing + who.number * (2 * m->V + 32);
        Step own = *s;
        own.slots = r.slots, own.positions = r.positions;
        for (int64_t step = 0; step < steps && active; step++) {
            own.tokens = own.rows = r.starts[active];
            decode(m, &own, r.tokens, own.rows, room, copies + who.number * m->copies, logits, &who);
            meet(&who);
            for (int64_t i = share_of(active, who.number, &who); i < share_of(active, who.number + 1, &who); i++) {
                int64_t row = r.starts[i], slot = r.active[i];
                do is_over[i] = (uint8_t)take_token(m, a, slot, logits + row * m->V, drawn), row++;
                while (!is_over[i] && row < r.starts[i + 1] && a->tokens[slot] == r.tokens[row]);
                r.taken[i] = row - r.starts[i];
            }
            meet(&who);
            if (!who.number) {
                int64_t left = 0;
                for (int64_t i = 0; i < active; i++) {
                    int64_t slot = r.active[i];
                    for (int64_t back = r.taken[i]; back > 0; back--)
                        if (token_from_end(a, d, slot, back + 3) >= 0)
                            learn_token(d, find_entry(d, token_from_end(a, d, slot, back + 3),
                                                      token_from_end(a, d, slot, back + 2),
                                                      token_from_end(a, d, slot, back + 1)),
                                        token_from_end(a, d, slot, back));
                    d->counts[1] += r.taken[i] - 1;
                    if (!is_over[i]) r.active[left++] = slot;
                }
                active = left;
                if (active) fill_rows(a, d, active, &r);
            }
            meet(&who);
        }
    }
}
