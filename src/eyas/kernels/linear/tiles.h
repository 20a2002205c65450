/* Halved panels times rows of float32 by the matrix unit of newer x86 processors (AMX), as exact as by vectors.
 *
 * The unit multiplies tiles of bfloat16 and adds up in float32, sixteen times as fast as vectors do. Weights of halved
 * panels are bfloat16 already. A float32 of x is the sum of three bfloat16, which hold its 24 bits by eight, so three
 * products with the same weights are the float32 product; nothing is rounded but sums. (The unit takes parts below the
 * least normal float32 for zero, so inputs lose bits from 1e-30 downwards.)
 *
 *     x tiles[group of 16 rows][step of 32 inputs][part][row][input]      made anew for every call, by `split`
 *
 * Invariant: an element of y is the same to the last bit whatever rows are beside it: its sum runs over steps, and
 * over parts within a step, in one accumulator, however many rows a tile has.
 *
 * Names: M rows of x and y, K inputs, steps = K / 32 rounded up.
 */

#include <stdlib.h>

#include "amx.h"

/* A tile has TILE_ROWS rows of STEP inputs each; of weights, as many pairs of inputs. */
enum {
    PARTS = 3,                     /* bfloat16 that make a float32 */
    TILE = TILE_ROWS * STEP,       /* numbers in a tile */
    STEP_BYTES = STEP * PANEL * 2, /* of a panel */
    AHEAD = 2 * STEP_BYTES,        /* weights fetched before they are needed */
    SPLIT_BYTES = 1 << 20,         /* of x, split: they stay in the second-level cache for all panels */
};

typedef uint32_t bits __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef uint16_t upper __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(sizeof(uint16_t)), may_alias));

/* 0, 1: sums for both halves of a panel; 2, 3, 4: the parts of x; 6, 7: weights */
static void set_rows(long rows) {
    struct tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.rows[tile] = tile < 5 ? rows : TILE_ROWS;
        shapes.row_bytes[tile] = STEP * sizeof(uint16_t);
    }
    shape_tiles(&shapes);
}

/* Some neighbouring inputs of a row: the upper 16 bits, then those of the remainder, then those of its remainder. */
static inline void split_vector(vector x, uint16_t *part) {
    for (int p = 0; p < PARTS; p++) {
        const bits top = (bits)x & 0xffff0000u;
        *(upper *)(part + p * TILE) = __builtin_convertvector(top >> 16, upper);
        x -= (vector)top;
    }
}

/* Rows of x as tiles, and panels times them. */
struct tiled {
    const float *x, *bias;
    const char *panels;
    uint16_t *tiles;
    float *y;
    long M, K, N, steps;
};

/* Inputs missing from the last step are zeros. */
static void split_rows(const void *of, long first, long end) {
    const struct tiled *tiled = of;
    const long K = tiled->K, steps = tiled->steps;
    for (long m = first; m < end; m++)
        for (long s = 0; s < steps; s++) {
            const float *from = tiled->x + m * K + s * STEP;
            float rest[STEP] = {0};
            if (K - s * STEP < STEP) from = memcpy(rest, from, (K - s * STEP) * sizeof(float));
            uint16_t *to = tiled->tiles + ((m / TILE_ROWS * steps + s) * PARTS * TILE_ROWS + m % TILE_ROWS) * STEP;
            for (int k = 0; k < STEP; k += LANES) split_vector(*(const vector *)(from + k), to + k);
        }
}

/* y[:M, :columns] = bias + x[:M] times one panel. */
static void tiled_panel(const uint16_t *tiles, long M, long steps, const char *w, const float *bias, long columns,
                        float *y, long y_stride) {
    float sums[TILE_ROWS * PANEL];
    for (long m = 0; m < M; m += TILE_ROWS) {
        const long rows = smaller(TILE_ROWS, M - m);
        const uint16_t *x = tiles + m * steps * PARTS * STEP;
        if (m == 0 || rows < TILE_ROWS) set_rows(rows);
        _tile_zero(0);
        _tile_zero(1);
        for (long s = 0; s < steps; s++, x += PARTS * TILE) {
            const char *w_s = w + s * STEP_BYTES;
            if (m == 0)
                for (int i = 0; i < STEP_BYTES; i += 64) _mm_prefetch(w_s + AHEAD + i, _MM_HINT_T0);
            /* All that is loaded comes first: between products, loads would wait for them. */
            _tile_loadd(6, w_s, 4 * PANEL);
            _tile_loadd(7, w_s + 4 * LANES, 4 * PANEL);
            _tile_loadd(2, x, 2 * STEP);
            _tile_loadd(3, x + TILE, 2 * STEP);
            _tile_loadd(4, x + 2 * TILE, 2 * STEP);
            _tile_dpbf16ps(0, 2, 6);
            _tile_dpbf16ps(1, 2, 7);
            _tile_dpbf16ps(0, 3, 6);
            _tile_dpbf16ps(1, 3, 7);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        float *y_m = y + m * y_stride;
        const int direct = columns == PANEL && !bias;
        _tile_stored(0, direct ? y_m : sums, 4 * (direct ? y_stride : PANEL));
        _tile_stored(1, (direct ? y_m : sums) + LANES, 4 * (direct ? y_stride : PANEL));
        for (long r = 0; !direct && r < rows; r++)
            for (long c = 0; c < columns; c++) y_m[r * y_stride + c] = (bias ? bias[c] : 0.0f) + sums[r * PANEL + c];
    }
}

static void tiled_panels(const void *of, long first, long end) {
    const struct tiled *tiled = of;
    const long N = tiled->N;
    for (long p = first; p < end; p++) {
        const long n = p * PANEL;
        tiled_panel(tiled->tiles, tiled->M, tiled->steps, tiled->panels + p * tiled->steps * STEP_BYTES,
                    tiled->bias ? tiled->bias + n : 0, smaller(PANEL, N - n), tiled->y + n, N);
    }
    _tile_release();
}

/* packed_linear for halved panels; returns 0, with nothing done, if there is no memory to split x into. */
static int tiled_linear(const float *x, long M, long K, const char *panels, const float *bias, long N, float *y,
                        int threads) {
    static _Thread_local uint16_t *memory; /* one per caller: to allocate it anew costs more than a small product */
    static _Thread_local size_t size;
    const long steps = (K + STEP - 1) / STEP, group = steps * PARTS * TILE * (long)sizeof(uint16_t);
    const long most = TILE_ROWS * (SPLIT_BYTES > group ? SPLIT_BYTES / group : 1);
    const size_t needed = (smaller(M, most) + TILE_ROWS - 1) / TILE_ROWS * group;
    if (needed > size) {
        free(memory);
        size = 0;
        memory = aligned_alloc(64, needed);
        if (!memory) return 0;
        size = needed;
    }
    for (long m = 0; m < M; m += most) {
        const struct tiled tiled = {.x = x + m * K, .bias = bias, .panels = panels, .tiles = memory, .y = y + m * N,
                                    .M = smaller(most, M - m), .K = K, .N = N, .steps = steps};
        do_pieces(split_rows, &tiled, tiled.M, tiled.M * K < 1 << 14 ? 1 : threads);
        do_pieces(tiled_panels, &tiled, (N + PANEL - 1) / PANEL, threads);
    }
    return 1;
}
