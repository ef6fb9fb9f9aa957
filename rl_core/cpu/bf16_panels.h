/* Layout of weights packed as bfloat16, which `bf16_gemm.c` and `bf16_tiles.c` share.
 *
 * For every 256 of depth, panels of PANEL columns; in a panel, for every pair of depths, one dword per column: the earlier
 * depth in its lower half. Depth is padded by zeros to a multiple of 32, the depth of a tile.
 */

#include "panels.h"

#define TILE_DEPTH 32

typedef vi words_anywhere __attribute__((aligned(4), may_alias));

INLINE int64_t padded_depth(int64_t depth) { return blocks_of(depth, TILE_DEPTH) * TILE_DEPTH; }

INLINE vi load_words(const int32_t *x) { return *(const words_anywhere *)x; }

/* The numbers of the earlier and of the later depth as float32. */
INLINE vf earlier_of(vi both) { return (vf)(both << 16); }
INLINE vf later_of(vi both) { return (vf)(both & (int32_t)0xFFFF0000); }

/* Round to bfloat16: to nearest, ties to even; NaN stays NaN. Zeros follow up to `padded` numbers. */
INLINE void round_row(const float *x, int64_t depth, int64_t padded, uint16_t *out) {
    for (int64_t i = 0; i < depth; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof(bits));
        uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        out[i] = (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? bits >> 16 | 0x40 : rounded);
    }
    for (int64_t i = depth; i < padded; i++) out[i] = 0;
}

/* The body of a product by all threads, of one of the `ProductPart` functions. */
#define PRODUCT_BY_PARTS(part) \
    _Pragma("omp parallel num_threads(threads) if (threads > 1)") { \
        int own = omp_get_thread_num(); \
        part(left, left_stride, right, c, c_stride, rows, columns, depth, add, room + own * bf16_packed_room(1), own, \
             omp_get_num_threads()); \
    }

int64_t bf16_packed_room(int64_t threads);
