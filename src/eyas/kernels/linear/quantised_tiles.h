/* Panels times groups of sixteen rows by the matrix unit of newer x86 processors (AMX), to the same bits as by vectors.
 *
 * The unit multiplies bytes several times as fast as vectors do. What it adds up are the integers of one scale, a block
 * or half of one, which are exact; they go through memory and are scaled there as everywhere else. So it takes many
 * rows to pay: weights are unpacked first, to signed bytes whatever their format.
 *
 * Rows that are multiplied here are quantised into groups, as tiles have them; the same place for a group as for its
 * rows by themselves:
 *
 *     x q[group][block][row][input], scale and sum [group][block][row]
 *
 * Names: a unit is what one scale covers; M rows, B blocks.
 */

#include "amx.h"

enum {
    SLOTS = 4,       /* products of units in flight; each has a tile and memory of its own */
    UNITS_AHEAD = 2, /* units multiplied before the sums of one are needed */
    FEWEST = 32,     /* rows: with fewer, vectors are as fast and do not lower the clock */
};

/* 0 to 3: sums; 4, 5: x; 6, 7: weights */
static void shape_for(long inputs) {
    struct tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.rows[tile] = tile < 6 ? TILE_ROWS : inputs / 4;
        shapes.row_bytes[tile] = tile == 4 || tile == 5 ? inputs : TILE_ROW_BYTES;
    }
    shape_tiles(&shapes);
}

/* Sums of a unit for a group of rows, [row][output]. */
INLINE void tile_product(long slot, const int8_t *x, const uint8_t *w, int32_t *sums) {
#define MULTIPLY(sum, x_tile, w_tile)             \
    _tile_zero(sum);                              \
    _tile_loadd(w_tile, w, TILE_ROW_BYTES);       \
    _tile_loadd(x_tile, x, BLOCK);                \
    _tile_dpbssd(sum, x_tile, w_tile);            \
    _tile_stored(sum, sums, TILE_ROW_BYTES)
    switch (slot) { /* an instruction names its tiles */
        case 0: MULTIPLY(0, 4, 6); break;
        case 1: MULTIPLY(1, 5, 7); break;
        case 2: MULTIPLY(2, 4, 6); break;
        case 3: MULTIPLY(3, 5, 7); break;
    }
#undef MULTIPLY
}

/* Weights of one block as signed bytes. */
INLINE void unpack_signed(const int format, const bytes *q, bytes *to) {
    if (format & FOUR_BITS) {
        const uint8_t zero = format & MINIMA ? 0 : 8;
        UNROLL for (int j = 0; j < 4; j++) to[j] = (q[j] & 15) - zero, to[4 + j] = (q[j] >> 4) - zero;
    } else {
        UNROLL for (int j = 0; j < 8; j++) to[j] = q[j] ^ 128;
    }
}

/* sums[:M][:PANEL] += rows m to m + M, which are whole groups, times one panel. */
INLINE void tiled(const int format, const struct rows *rows, long m, long M, const uint8_t *w, float *sums) {
    const long B = rows->blocks, size = block_bytes(format), head = head_bytes(format);
    const long parts = scales_in(format), inputs = BLOCK / parts;
    _Alignas(64) uint8_t unpacked[CHUNK * BLOCK * PANEL];
    _Alignas(64) int32_t products[SLOTS][TILE_ROWS * PANEL];
    for (long b = 0; b < B; b += CHUNK) {
        const long blocks = smaller(CHUNK, B - b), units = blocks * parts;
        const uint8_t *w_b = w + b * size;
        for (long i = 0; i < blocks; i++) {
            fetch_ahead(w_b + i * size, size);
            unpack_signed(format, (const bytes *)(w_b + i * size + head), (bytes *)(unpacked + i * BLOCK * PANEL));
        }
        finish_writes(unpacked);
        for (long g = 0; g < M; g += TILE_ROWS) {
            const long at = (m + g) * B + b * TILE_ROWS;
            const int8_t *x = rows->q + at * BLOCK;
            const float *x_scale = rows->scale + at, *x_sum = rows->sum + at;
            vector total[TILE_ROWS], *sums_g = (vector *)(sums + g * PANEL);
            UNROLL for (int r = 0; r < TILE_ROWS; r++) total[r] = sums_g[r];
            for (long u = -UNITS_AHEAD; u < units; u++) {
                const long next = u + UNITS_AHEAD, slot = next % SLOTS;
                if (next < units)
                    tile_product(slot, x + next / parts * TILE_ROWS * BLOCK + next % parts * inputs,
                                 unpacked + next * inputs * PANEL, products[slot]);
                if (u < 0) continue;
                const long i = u / parts;
                const vector scale = read_halves(w_b + i * size + 2 * (u % parts) * PANEL);
                const integers *product = (const integers *)products[u % SLOTS];
                UNROLL for (int r = 0; r < TILE_ROWS; r++) {
                    const vector share = __builtin_convertvector(product[r], vector) * scale;
                    total[r] = MULTIPLY_ADD(total[r], share, x_scale[i * TILE_ROWS + r]);
                }
                if (format & MINIMA) {
                    const vector minimum = read_halves(w_b + i * size + 2 * parts * PANEL);
                    UNROLL for (int r = 0; r < TILE_ROWS; r++)
                        total[r] = MULTIPLY_ADD(total[r], minimum, x_sum[i * TILE_ROWS + r]);
                }
            }
            UNROLL for (int r = 0; r < TILE_ROWS; r++) sums_g[r] = total[r];
        }
    }
}

/* The same for any format; `shaped` is what the thread's tiles are shaped for. */
static void tiled_panel(int format, const struct rows *rows, long m, long M, const uint8_t *w, float *sums, long *shaped) {
    const long inputs = BLOCK / scales_in(format);
    if (*shaped != inputs) shape_for(*shaped = inputs);
    switch (format) {
#define CASE(f) case f: tiled(f, rows, m, M, w, sums); break;
        CASE(0) CASE(FOUR_BITS) CASE(MINIMA) CASE(FOUR_BITS | MINIMA) CASE(SCALES_OF_HALVES)
#undef CASE
    }
}

static int tiles_wanted = 1;
void use_tiles(int wanted) { tiles_wanted = wanted; }
int uses_tiles(void) { return tiles_wanted && has_tiles(); }

/* How many of M rows are multiplied in groups: the first ones. */
static long grouped_rows(long M) { return M >= FEWEST && uses_tiles() ? M / TILE_ROWS * TILE_ROWS : 0; }
static void release_tiles(void) { _tile_release(); }
