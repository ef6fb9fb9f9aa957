/* Dot products of pairs of bfloat16 numbers (AVX-512 BF16), where the processor has them. */

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "bf16_panels.h"

#ifdef __AVX512BF16__
#define HAS_DOTS
INLINE vf add_dots(vf sums, vi a, vi b) {
    return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}
#elif defined(DOTS_STAND_IN) /* in tests: what the instruction computes, but for denormal numbers (Intel's manual) */
#define HAS_DOTS
INLINE vf add_dots(vf sums, vi a, vi b) {
    sums += later_of(a) * later_of(b);
    return sums + earlier_of(a) * earlier_of(b);
}
#endif
