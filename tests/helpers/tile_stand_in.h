/* Portable stand-in for the intrinsics of AVX-512 and AMX that rl_core/cpu uses, so that every machine can run that
 * code: slow, the same numbers but for the hardware's treatment of denormal ones. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float __m512 __attribute__((vector_size(64)));
typedef int32_t __m512i __attribute__((vector_size(64), may_alias));
typedef int8_t __m128i __attribute__((vector_size(16), may_alias));
typedef uint16_t __mmask16;

#define STAND_IN static inline __attribute__((always_inline, unused))
#define APART static __attribute__((noinline, unused)) /* compiled once, not wherever it is called */
#define EACH for (int i = 0; i < 16; i++)

STAND_IN __m512 _mm512_set1_ps(float x) { return x - (__m512){0}; }
STAND_IN __m512i _mm512_set1_epi32(int x) { return x + (__m512i){0}; }
STAND_IN __m512 _mm512_setzero_ps(void) { return (__m512){0}; }
STAND_IN __m512i _mm512_setzero_si512(void) { return (__m512i){0}; }
STAND_IN __m512 _mm512_castsi512_ps(__m512i x) { return (__m512)x; }
STAND_IN __m512i _mm512_castps_si512(__m512 x) { return (__m512i)x; }
STAND_IN __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
STAND_IN __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
STAND_IN __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
STAND_IN __m512 _mm512_abs_ps(__m512 x) { return (__m512)((__m512i)x & 0x7FFFFFFF); }
STAND_IN float _mm512_cvtss_f32(__m512 x) { return x[0]; }
STAND_IN __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
typedef uint32_t wrapping __attribute__((vector_size(64)));
STAND_IN __m512i _mm512_add_epi32(__m512i a, __m512i b) { return (__m512i)((wrapping)a + (wrapping)b); }
STAND_IN __m512i _mm512_srai_epi32(__m512i x, int by) { return x >> by; }
STAND_IN __m512i _mm512_srli_epi32(__m512i x, int by) { EACH x[i] = (int32_t)((uint32_t)x[i] >> by); return x; }
STAND_IN __m512i _mm512_max_epi32(__m512i a, __m512i b) { EACH a[i] = a[i] > b[i] ? a[i] : b[i]; return a; }
STAND_IN int _mm512_reduce_max_epi32(__m512i x) { int m = x[0]; EACH m = x[i] > m ? x[i] : m; return m; }
STAND_IN __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) { EACH c[i] = fmaf(a[i], b[i], c[i]); return c; }
STAND_IN __m512 _mm512_cvtepi32_ps(__m512i x) { return __builtin_convertvector(x, __m512); }
/* To the nearest; what does not fit becomes the smallest number. */
STAND_IN __m512i _mm512_cvtps_epi32(__m512 x) {
    __m512i out;
    EACH out[i] = fabsf(x[i]) < 2147483648.0f ? (int32_t)lrintf(x[i]) : INT32_MIN;
    return out;
}
STAND_IN __m128i _mm512_cvtepi32_epi8(__m512i x) { __m128i out; EACH out[i] = (int8_t)x[i]; return out; }
STAND_IN void _mm_store_si128(__m128i *to, __m128i x) { *to = x; }
STAND_IN __m512 _mm512_loadu_ps(const void *x) { __m512 out; memcpy(&out, x, 64); return out; }
STAND_IN void _mm512_storeu_ps(void *to, __m512 x) { memcpy(to, &x, 64); }
STAND_IN __m512i _mm512_load_si512(const void *x) { __m512i out; memcpy(&out, x, 64); return out; }
STAND_IN void _mm512_store_si512(void *to, __m512i x) { memcpy(to, &x, 64); }
STAND_IN __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float *x) {
    __m512 out;
    EACH out[i] = mask >> i & 1 ? x[i] : 0.0f;
    return out;
}
STAND_IN void _mm512_mask_storeu_ps(float *to, __mmask16 mask, __m512 x) { EACH if (mask >> i & 1) to[i] = x[i]; }
#define _CMP_UNORD_Q 3 /* the only comparison in use: one of both is NaN */
STAND_IN __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int which) {
    __mmask16 mask = 0;
    (void)which;
    EACH mask |= (__mmask16)((a[i] != a[i] || b[i] != b[i]) << i);
    return mask;
}
STAND_IN __m512i _mm512_mask_or_epi32(__m512i from, __mmask16 mask, __m512i a, __m512i b) {
    EACH if (mask >> i & 1) from[i] = a[i] | b[i];
    return from;
}
#define _mm512_set_epi32(p, o, n, m, l, k, j, i, h, g, f, e, d, c, b, a) \
    ((__m512i){a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p})
STAND_IN __m512 _mm512_permutex2var_ps(__m512 a, __m512i which, __m512 b) {
    __m512 out;
    EACH out[i] = which[i] < 16 ? a[which[i]] : b[which[i] - 16];
    return out;
}
/* 0xF8: a | (b & c), the only table in use. */
#define _mm512_ternarylogic_epi32(a, b, c, table) ((a) | ((b) & (c)))
APART __m512i unpacked(__m512i a, __m512i b, int size, int high) { /* size: dwords, within each quarter */
    __m512i out;
    EACH {
        int part = i % 4 / size;
        out[i] = (part % 2 ? b : a)[i / 4 * 4 + high * 2 + (size == 1 ? part / 2 : i % 2)];
    }
    return out;
}
#define _mm512_unpacklo_epi32(a, b) unpacked(a, b, 1, 0)
#define _mm512_unpackhi_epi32(a, b) unpacked(a, b, 1, 1)
#define _mm512_unpacklo_epi64(a, b) unpacked(a, b, 2, 0)
#define _mm512_unpackhi_epi64(a, b) unpacked(a, b, 2, 1)
APART __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int which) {
    __m512i out;
    EACH out[i] = (i < 8 ? a : b)[(which >> i / 4 * 2 & 3) * 4 + i % 4];
    return out;
}
#define _MM_HINT_T1 0
#define _mm_prefetch(place, hint) ((void)(place))

static __thread uint8_t tiles_of_thread[8][16][64];

#define _tile_loadconfig(config) ((void)(config))
#define _tile_release() ((void)0)
#define _tile_zero(t) memset(tiles_of_thread[t], 0, 1024)
APART void _tile_loadd(int t, const void *x, int64_t stride) {
    EACH memcpy(tiles_of_thread[t][i], (const uint8_t *)x + i * stride, 64);
}
APART void _tile_stored(int t, void *x, int64_t stride) {
    EACH memcpy((uint8_t *)x + i * stride, tiles_of_thread[t][i], 64);
}
typedef int32_t sums_of_integers __attribute__((vector_size(64)));
typedef uint32_t bits_of_pairs __attribute__((vector_size(64)));

/* Sums over even and odd depths begin at 0, and go to what is there in the end (Intel's manual of TDPBF16PS). */
APART void _tile_dpbf16ps(int to, int left, int right) {
    __m512 rights[2][16];
    for (int k = 0; k < 16; k++) {
        bits_of_pairs pairs;
        memcpy(&pairs, tiles_of_thread[right][k], 64);
        rights[0][k] = (__m512)(pairs << 16);
        rights[1][k] = (__m512)(pairs & 0xFFFF0000u);
    }
    for (int m = 0; m < 16; m++) {
        bits_of_pairs pairs;
        memcpy(&pairs, tiles_of_thread[left][m], 64);
        __m512 lefts[2] = {(__m512)(pairs << 16), (__m512)(pairs & 0xFFFF0000u)}, sums[2] = {{0}, {0}}, before;
        for (int k = 0; k < 16; k++)
            for (int part = 0; part < 2; part++) sums[part] += lefts[part][k] * rights[part][k];
        memcpy(&before, tiles_of_thread[to][m], 64);
        before += sums[0] + sums[1];
        memcpy(tiles_of_thread[to][m], &before, 64);
    }
}

APART void _tile_dpbssd(int to, int left, int right) {
    sums_of_integers rights[64];
    for (int k = 0; k < 64; k++) EACH rights[k][i] = (int8_t)tiles_of_thread[right][k / 4][4 * i + k % 4];
    for (int m = 0; m < 16; m++) {
        sums_of_integers sums;
        memcpy(&sums, tiles_of_thread[to][m], 64);
        for (int k = 0; k < 64; k++) sums += (int8_t)tiles_of_thread[left][m][k] * rights[k];
        memcpy(tiles_of_thread[to][m], &sums, 64);
    }
}
