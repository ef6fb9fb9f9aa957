/* Declarations that the decoding sources share. */

#include <stdint.h>

#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#define omp_get_num_threads() 1
#endif

/* One of the threads of a parallel region that compute something together, all calling the same functions; or the only
 * member, which computes something other than the other threads. */
typedef struct {
    int number, members;
} Member;

/* Wait for all members. */
static inline void meet(const Member *who) {
    if (who->members > 1) {
#pragma omp barrier
    }
}

/* First of a member's share of `count` items; the share ends where the next member's begins. */
static inline int64_t share_of(int64_t count, int number, const Member *who) { return count * number / who->members; }

typedef struct {
    int64_t tokens, rows;             /* new tokens; the first `rows` of them attend */
    int64_t Q, K, D, length;          /* length: capacity of a slot in tokens */
    const int64_t *slots, *positions; /* of each token */
    const float *cosines, *sines;     /* [length, D]; the sign of the first half of the sines is flipped */
    const float *q_weight, *k_weight; /* [D] of norms, or NULL */
    float q_eps, k_eps, scale;
    float *scores;                    /* scratch [threads, Q / K, length] */
    int64_t threads;
} Step;

void normed(const float *x, int64_t n, int64_t width, float eps, float *out);
void gated_forward(const float *both, int64_t n, int64_t I, float *out, int threads);

/* A member's part of `attend`, with one barrier. */
void attend_part(const Step *s, const float *heads, float *keys, float *values, float *out, const Member *who);

/* A row of `draw`; `room` holds 2 V + 2 W numbers, W <= 16. */
void draw_row(const float *logits, int64_t V, const int64_t *never, int64_t nevers, double drawn, float temperature,
              float *room, int64_t *token,
              float *logprob);

/* A member's part of c [rows, columns] (+)= left times packed weights: `vector_packed_part` or another
 * family's. */
typedef void ProductPart(const float *left, int64_t left_stride, const int8_t *right, float *c, int64_t c_stride,
                         int64_t rows, int64_t columns, int64_t depth, int add, int8_t *room, int member, int members);
