/* Declarations that the decoding sources share. */

#include <stdint.h>

typedef struct {
    int64_t tokens, rows;            /* new tokens; the first `rows` of them attend */
    int64_t Q, K, D, length;         /* length: tokens that a slot has room for */
    const int64_t *slots, *positions; /* of each token */
    const float *cosines, *sines;    /* [length, D]; the first half of the sines with its sign turned */
    const float *q_weight, *k_weight; /* [D] of norms, or NULL */
    float q_eps, k_eps, scale;
    float *scores;                   /* room for [threads, Q / K, length] */
    int64_t threads;
} Step;

void normed(const float *x, int64_t n, int64_t width, float eps, float *out);
void gated_forward(const float *both, int64_t n, int64_t I, float *out, int threads);
void attend(const Step *s, const float *heads, float *keys, float *values, float *out);

/* c [rows, columns] (+)= left times packed weights: `product_packed` or `vector_product_packed`. */
typedef void Product(const float *left, int64_t left_stride, const int8_t *right, float *c, int64_t c_stride,
                     int64_t rows, int64_t columns, int64_t depth, int add, int8_t *room, int threads);
