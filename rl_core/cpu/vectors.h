/* Vectors of 16 or 8 float32 numbers by GCC's and Clang's vector extensions, for any processor.
 *
 * They are as wide as the processor's registers: GCC splits wider ones through memory, ten times slower. */

#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define W 16
#else
#define W 8
#endif
typedef float vf __attribute__((vector_size(4 * W)));
typedef float anywhere __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W)));
#define INLINE static inline __attribute__((always_inline))

INLINE vf load(const float *x) { return *(const anywhere *)x; }

INLINE void store(float *x, vf v) { *(anywhere *)x = v; }

INLINE vf all(float x) { return x - (vf){0}; }

/* a where the mask is set, otherwise b. */
INLINE vf pick(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

#define TO(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)

/* The sum of its numbers, by halving. */
INLINE float total(vf v) {
#if W == 16
    v += TO(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += TO(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += TO(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    v += TO(v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#else
    v += TO(v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += TO(v, 2, 3, 0, 1, 6, 7, 4, 5);
    v += TO(v, 1, 0, 3, 2, 5, 4, 7, 6);
#endif
    return v[0];
}

/* e^x for x <= 0, to about one unit in the last place: 2^n e^r, |r| <= ln(2)/2 (polynomial of Cephes' expf); 0 below
 * -87, the limit of float32; NaN for NaN. */
INLINE vf exp_of_negative(vf x) {
    vi is_none = x <= all(-87.0f);
    x = pick(is_none, all(-87.0f), x);
    vi n = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, vi); /* rounds towards 0, here to nearest because x <= 0 */
    vf whole = __builtin_convertvector(n, vf);
    vf r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
    vf y = all(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return pick(is_none, all(0.0f), y * (vf)((n + 127) << 23));
}

/* 1 / (1 + e^-x). */
INLINE vf sigmoid(vf x) {
    vi is_negative = x < all(0.0f);
    vf power = exp_of_negative(pick(is_negative, x, -x));
    return pick(is_negative, power, all(1.0f)) / (power + 1.0f);
}
