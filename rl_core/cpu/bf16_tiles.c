/* Products of few rows with weights packed as bfloat16 (`bf16_gemm.c`) by matrix tiles, on processors with AMX.
 *
 * The left operand is rounded to bfloat16, as in training. Each product is exact; sums are float32: those of even and of
 * odd depths of a tile apart, then added to the tiles before. Depth is summed in order, 256 at a time, independent of the
 * number of rows and threads.
 */

#include "tiles.h"

#ifdef HAS_TILES
#include "decode_ops.h"
#include "bf16_panels.h"

#define DWORDS (TILE_DEPTH / 2)      /* of a row of a tile */
#define BLOCKS (PANEL / SIDE)        /* column blocks of a panel */
#define BYTES (LINE * 4)             /* from one copied row to the next */

/* Address of a column block's pairs of depths, which are PANEL dwords apart. */
INLINE const int32_t *block_of(const int32_t *panels, int64_t block, int64_t depth) {
    return panels + block / BLOCKS * (padded_depth(depth) / 2 * PANEL) + block % BLOCKS * SIDE;
}

/* c [rows, columns] (+)= the sums of a tile. */
INLINE void add_tile(const float *found, float *c, int64_t stride, int64_t rows, int64_t columns, int add) {
    for (int64_t i = 0; i < least(rows, SIDE); i++)
        for (int64_t j = 0; j < least(columns, SIDE); j++)
            c[i * stride + j] = (add ? c[i * stride + j] : 0.0f) + found[i * SIDE + j];
}

/* c [rows, columns] (+)= up to 32 copied rows times two column blocks; `next` is prefetched. */
static void multiply_blocks(const int32_t *a, const int32_t *b, const int32_t *b_right, const int32_t *next, int64_t depth,
                            float *c, int64_t stride, int64_t rows, int64_t columns, int add) {
    float found[4][SIDE * SIDE] __attribute__((aligned(64)));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < padded_depth(depth) / 2; k += DWORDS) {
        _tile_loadd(6, b + k * PANEL, PANEL * 4);
        _tile_loadd(7, b_right + k * PANEL, PANEL * 4);
        for (int i = 0; i < 2 * SIDE; i++) _mm_prefetch((const char *)(next + k * PANEL + i * SIDE), _MM_HINT_T1);
        _tile_loadd(4, a + k, BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (rows > SIDE) {
            _tile_loadd(5, a + SIDE * LINE + k, BYTES);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, found[0], SIDE * 4);
    _tile_stored(1, found[1], SIDE * 4);
    _tile_stored(2, found[2], SIDE * 4);
    _tile_stored(3, found[3], SIDE * 4);
    for (int64_t i = 0; i < 4; i++) {
        int64_t row = i / 2 * SIDE, column = i % 2 * SIDE;
        add_tile(found[i], c + row * stride + column, stride, rows - row, columns - column, add);
    }
}

/* See `vector_packed_part`. */
void bf16_tiles_part(const float *left, int64_t left_stride, const int8_t *right, float *c, int64_t c_stride, int64_t rows,
                     int64_t columns, int64_t depth, int add, int8_t *room, int member, int members) {
    Share s = share_of_product(rows, columns, member, members);
    int64_t padded = blocks_of(columns, PANEL) * PANEL;
    int32_t *copied = (int32_t *)room;
    configure();
    for (int64_t i = s.first_row; i < rows; i += s.stride)
        for (int64_t d = 0; d < depth; d += DEEP) {
            int64_t some = least(rows - i, s.step), deep = least(depth - d, DEEP), width = s.end - s.first;
            for (int64_t row = 0; row < some; row++)
                round_row(left + (i + row) * left_stride + d, deep, padded_depth(deep), (uint16_t *)(copied + row * LINE));
            for (int64_t row = some; row % (2 * SIDE); row++) /* rows of a tile without numbers */
                memset(copied + row * LINE, 0, (size_t)padded_depth(deep) * sizeof(uint16_t));
            const int32_t *panels = (const int32_t *)right + d / 2 * padded + s.first * padded_depth(deep) / 2;
            for (int64_t j = 0; j < blocks_of(width, SIDE); j += 2) {
                /* a panel without a second block repeats the first, whose results are not stored */
                int64_t second = least(j + 1, blocks_of(width, PANEL) * BLOCKS - 1);
                const int32_t *b = block_of(panels, j, deep), *b_right = block_of(panels, second, deep);
                for (int64_t row = 0; row < some; row += 2 * SIDE)
                    multiply_blocks(copied + row * LINE, b, b_right, block_of(panels, j + 2, deep), deep,
                                    c + (i + row) * c_stride + s.first + j * SIDE, c_stride, some - row, width - j * SIDE,
                                    add || d);
            }
        }
    _tile_release();
}

void bf16_tiles_product(const float *left, int64_t left_stride, const int8_t *right, float *c, int64_t c_stride,
                        int64_t rows, int64_t columns, int64_t depth, int add, int8_t *room, int threads) {
    PRODUCT_BY_PARTS(bf16_tiles_part)
}

#endif
