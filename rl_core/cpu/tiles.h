/* Tile helpers that the matrix products share (AMX, AVX-512). */

#include <stdint.h>

#include "counts.h"

#ifdef TILE_STAND_IN /* file of a portable replacement for the intrinsics, in tests */
#define HAS_TILES
#include TILE_STAND_IN
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512F__) && defined(__linux__)
#define HAS_TILES
#include <immintrin.h>
#endif

#ifdef HAS_TILES

#define INLINE static inline __attribute__((always_inline))
#define SIDE 16

INLINE void transpose(__m512i r[SIDE]) {
    __m512i t[SIDE];
    for (int i = 0; i < SIDE; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < SIDE; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

INLINE __m512 some_of(const float *x, int64_t count) {
    if (count >= SIDE) return _mm512_loadu_ps(x);
    return count <= 0 ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), x);
}

/* All eight tiles: 16 rows of 64 bytes. */
static inline void configure(void) {
    struct {
        uint8_t palette, start, zero[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((packed)) tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) tiles.bytes[i] = 64, tiles.rows[i] = SIDE;
    _tile_loadconfig(&tiles);
}

#endif
