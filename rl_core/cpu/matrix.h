/* Declarations that the matrix products share. */

#include <stdint.h>

/* Some lines of the right operand of a product; `stride` is that of its rows in memory. */
typedef struct {
    const float *x;
    int64_t stride, lines;
} Part;
