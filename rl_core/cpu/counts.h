/* Arithmetic of counts that the compiled sources share. */

#ifndef COUNTS
#define COUNTS
#include <stdint.h>

static inline __attribute__((always_inline)) int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Blocks of `size` that hold `count`. */
static inline __attribute__((always_inline)) int64_t blocks_of(int64_t count, int64_t size) {
    return (count + size - 1) / size;
}

#endif
