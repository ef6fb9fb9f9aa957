/* The matrix-tile intrinsics (AMX) by plain AVX-512, for processors that have AVX-512 but no tiles: the code that uses them is
 * compiled with `-include` of this file and runs slowly, with the same integers. Each thread has its own tiles. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define syscall(...) 0 /* the system is not asked for permission */

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) ((void)(config))
#define _tile_release() ((void)0)
#define _tile_zero(to) memset(stand_in + (to), 0, 1024)
#define _tile_loadd(to, from, stride) stand_in_load(to, (const char *)(from), stride)
#define _tile_stored(from, to, stride) stand_in_store(from, (char *)(to), stride)
#define _tile_dpbssd(to, left, right) stand_in_bytes(to, left, right)
#define _tile_dpbf16ps(to, left, right) stand_in_halves(to, left, right)

static _Thread_local union {
    int8_t bytes[1024];
    uint16_t halves[512];
    int32_t integers[256];
    float floats[256];
} stand_in[8];

static inline void stand_in_load(int to, const char *from, int64_t stride) {
    for (int row = 0; row < 16; row++) memcpy(stand_in[to].bytes + row * 64, from + row * stride, 64);
}

static inline void stand_in_store(int from, char *to, int64_t stride) {
    for (int row = 0; row < 16; row++) memcpy(to + row * stride, stand_in[from].bytes + row * 64, 64);
}

/* to [16, 16] += left [16, 64] times right [64, 16], whose groups of four along depth lie beside each other: bytes 0 and 2
 * of each group and bytes 1 and 3, as pairs of 16-bit numbers. */
static inline void stand_in_bytes(int to, int left, int right) {
    __m512i even[16], odd[16];
    for (int group = 0; group < 16; group++) {
        __m512i bytes = _mm512_loadu_si512(stand_in[right].bytes + group * 64);
        even[group] = _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8), odd[group] = _mm512_srai_epi16(bytes, 8);
    }
    for (int row = 0; row < 16; row++) {
        const int8_t *x = stand_in[left].bytes + row * 64;
        __m512i sum = _mm512_loadu_si512(stand_in[to].integers + row * 16);
        for (int group = 0; group < 16; group++, x += 4) {
            __m512i first = _mm512_set1_epi32((uint16_t)x[0] | (uint32_t)x[2] << 16);
            __m512i second = _mm512_set1_epi32((uint16_t)x[1] | (uint32_t)x[3] << 16);
            sum = _mm512_add_epi32(sum, _mm512_madd_epi16(even[group], first));
            sum = _mm512_add_epi32(sum, _mm512_madd_epi16(odd[group], second));
        }
        _mm512_storeu_si512(stand_in[to].integers + row * 16, sum);
    }
}

static inline float stand_in_float(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline void stand_in_halves(int to, int left, int right) {
    for (int row = 0; row < 16; row++)
        for (int depth = 0; depth < 32; depth++)
            for (int column = 0; column < 16; column++)
                stand_in[to].floats[row * 16 + column] +=
                    stand_in_float(stand_in[left].halves[row * 32 + depth]) *
                    stand_in_float(stand_in[right].halves[depth / 2 * 32 + column * 2 + depth % 2]);
}
