/* Declarations that the matrix products share. */

#include <stdint.h>

/* Some lines of the right operand of a product; `stride` is the distance of its rows in memory. */
typedef struct {
    const float *x;
    int64_t stride, lines;
} Part;

/* The arguments of one of several products in a call. */
typedef struct {
    const float *left;
    int64_t left_stride, left_across;
    const Part *parts;
    int64_t n_parts, across;
    float *c;
    int64_t c_stride, rows, depth, add;
} Product;
