/* y = x W^T + bias in float32 for few rows of x, as fast as W can be read from memory.
 *
 * Decoding one token reads every weight once and does little with it; verifying a handful of draft tokens does a
 * handful of times as much with the same bytes. A general matrix product rearranges W on every call to suit its inner
 * loop, which for few rows costs more than the product. Here W is rearranged once, when the model is loaded:
 *
 *     panels[p][k][c] = W[p * PANEL + c][k]        PANEL neighbouring outputs, all their weights for one input together
 *
 * so the inner loop reads W sequentially and uses every value for up to ROWS rows of x. Outputs missing from the last
 * panel are zeros.
 *
 * A weight may take two bytes if bfloat16 holds it exactly, as with any weight trained in bfloat16: a float32 is its
 * bfloat16 followed by zeros, so nothing is lost. Half as many bytes take half the time for a single row. From three
 * rows on, arithmetic takes longer than reading unless vectors are wide, and unpacking is arithmetic too.
 *
 *     panels[p][k / 2][c] = W[p * PANEL + c][k] below, W[p * PANEL + c][k + 1] above: 32 bits, for k = 0, 2, 4, ...
 *
 * with zeros after K up to a multiple of STEP. The matrix unit of newer x86 processors has the same layout (tiles.h),
 * and multiplies halved panels if there is one.
 *
 * Invariant: an element of y is the same to the last bit whatever the number of rows and threads. It is the sum over
 * chunks of DEPTH inputs, each added up in order in a register of its own; tiles, stripes and threads only choose which
 * elements are computed together. (Chunks also keep rounding errors small: a chunk's sum starts from zero.)
 *
 * Vectors are GCC's and Clang's own, so one source serves NEON, SSE, AVX2 and AVX-512: compile for the machine at hand.
 *
 * Names: M rows of x and y, N outputs, K inputs.
 */

#include "../threads.h"

#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 12 }; /* 24 of 32 registers hold sums */
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 6 }; /* 12 of 16 */
#elif defined(__aarch64__)
enum { LANES = 4, ROWS = 8 }; /* 16 of 32; 8 more hold x */
#else
enum { LANES = 4, ROWS = 6 };
#endif

enum {
    PANEL = 2 * LANES,  /* outputs in a panel: two vectors hide the latency of the additions of a single row */
    DEPTH = 128,        /* inputs in a chunk: its part of a panel stays in the first-level cache for all tiles */
    STRIPE = 8 * ROWS,  /* rows per sweep over W: they stay in the second-level cache for all panels */
    LINE = 16,          /* floats in a cache line */
    STEP = 32,          /* halved panels have a multiple of this many inputs */
};

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef unsigned pairs __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

/* Four neighbouring inputs of a row. ARM multiplies by one lane of a register, so they are loaded at once; x86
 * spreads a float over a register while loading it, so they are left in memory. */
#if defined(__aarch64__)
typedef vector four;
static inline four read_four(const float *x) { return *(const vector *)x; }
#else
typedef const float *four;
static inline four read_four(const float *x) { return x; }
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

static long smaller(long a, long b) { return a < b ? a : b; }

/* The two vectors of a panel at one input. */
INLINE void read_weights(const int halved, const char *w, long k, vector *low, vector *high) {
    if (halved) {
        const pairs *both = (const pairs *)w + k / 2 * 2;
        *low = k % 2 ? (vector)(both[0] & 0xffff0000u) : (vector)(both[0] << 16);
        *high = k % 2 ? (vector)(both[1] & 0xffff0000u) : (vector)(both[1] << 16);
    } else {
        *low = ((const vector *)w)[2 * k];
        *high = ((const vector *)w)[2 * k + 1];
    }
}

/* y[r][c] = before[r][c] + sum over k < depth of x[r][k] * w[k][c] for one tile: up to ROWS rows, one chunk of a panel.
 * The sums stay in registers, since `rows` is a constant at every call. `ahead` prefetches the next chunk. */
INLINE void multiply(const int rows, const int halved, const int ahead, const float *x, long K, const char *w, long depth,
                     const float *before, long before_stride, float *y, long y_stride) {
    vector w_low, w_high;
    vector low[ROWS], high[ROWS];
    UNROLL for (int r = 0; r < rows; r++) low[r] = high[r] = (vector){0};
    long k = 0;
    for (; k + 4 <= depth; k += 4) {
        if (ahead)
            UNROLL for (int i = 0; i < 4 * PANEL; i += LINE)
                __builtin_prefetch((const float *)w + (DEPTH + k) * PANEL + i);
        four x_k[ROWS];
        UNROLL for (int r = 0; r < rows; r++) x_k[r] = read_four(x + r * K + k);
        UNROLL for (int j = 0; j < 4; j++) {
            read_weights(halved, w, k + j, &w_low, &w_high);
            UNROLL for (int r = 0; r < rows; r++) {
                low[r] += w_low * x_k[r][j];
                high[r] += w_high * x_k[r][j];
            }
        }
    }
    for (; k < depth; k++) {
        read_weights(halved, w, k, &w_low, &w_high);
        UNROLL for (int r = 0; r < rows; r++) {
            low[r] += w_low * x[r * K + k];
            high[r] += w_high * x[r * K + k];
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        const vector *before_r = (const vector *)(before + r * before_stride);
        vector *y_r = (vector *)(y + r * y_stride);
        y_r[0] = before_r[0] + low[r];
        y_r[1] = before_r[1] + high[r];
    }
}

/* One tile; its number of rows becomes a constant. */
INLINE void tile(const int halved, const int ahead, long rows, const float *x, long K, const char *w, long depth, const float *before,
                 long before_stride, float *y, long y_stride) {
    switch (rows) {
#define CASE(n) case n: multiply(n, halved, ahead, x, K, w, depth, before, before_stride, y, y_stride); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if defined(__AVX512F__) || defined(__aarch64__)
        CASE(7) CASE(8)
#endif
#if defined(__AVX512F__)
        CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

/* y[:M, :PANEL] = bias + x[:M] times one panel. */
INLINE void panel(const int halved, const float *x, long M, long K, const char *w, const float *bias, float *y,
                  long y_stride) {
    const long tiles = (M + ROWS - 1) / ROWS;
    float whole[DEPTH * PANEL];
    for (long k = 0; k < K; k += DEPTH) {
        const long depth = smaller(DEPTH, K - k);
        const char *w_k = w + k * PANEL * (halved ? 2 : 4);
        const int unpacked = halved && tiles > 1; /* once for all tiles */
        if (unpacked) {
            vector *pair = (vector *)whole;
            for (long i = 0; i < depth; i++) {
                __builtin_prefetch(w_k + (DEPTH + i) * PANEL * 2);
                read_weights(1, w_k, i, pair + 2 * i, pair + 2 * i + 1);
            }
            w_k = (const char *)whole;
        }
        for (long t = 0; t < tiles; t++) { /* as even as possible: 9 rows are 5 + 4, not 8 + 1 */
            const long first = M * t / tiles, rows = M * (t + 1) / tiles - first;
            const float *x_t = x + first * K + k;
            float *y_t = y + first * y_stride;
            const float *before = k > 0 ? y_t : bias;
            const long before_stride = k > 0 ? y_stride : 0;
            if (halved && !unpacked)
                tile(1, 0, rows, x_t, K, w_k, depth, before, before_stride, y_t, y_stride);
            else if (halved || tiles == 1) /* a single tile is no slower than memory, which needs no prefetch then */
                tile(0, 0, rows, x_t, K, w_k, depth, before, before_stride, y_t, y_stride);
            else
                tile(0, 1, rows, x_t, K, w_k, depth, before, before_stride, y_t, y_stride);
        }
    }
}

typedef void panel_product(const float *, long, long, const char *, const float *, float *, long);

static void whole_panel(const float *x, long M, long K, const char *w, const float *bias, float *y, long y_stride) {
    panel(0, x, M, K, w, bias, y, y_stride);
}

static void halved_panel(const float *x, long M, long K, const char *w, const float *bias, float *y, long y_stride) {
    panel(1, x, M, K, w, bias, y, y_stride);
}

/* Likewise if only the first `columns` of y and bias exist: through a buffer that has all of them. */
static void narrow_panel(panel_product *product, const float *x, long M, long K, const char *w, const float *bias,
                         long columns, float *y, long y_stride) {
    float wide_bias[PANEL] = {0}, wide_y[STRIPE * PANEL];
    memcpy(wide_bias, bias, columns * sizeof(float));
    product(x, M, K, w, wide_bias, wide_y, PANEL);
    for (long m = 0; m < M; m++) memcpy(y + m * y_stride, wide_y + m * PANEL, columns * sizeof(float));
}

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#include "tiles.h"
#else
static int has_tiles(void) { return 0; }
static int tiled_linear(const float *x, long M, long K, const char *panels, const float *bias, long N, float *y,
                        int threads) {
    return 0;
}
#endif

/* The number of outputs in a panel, for packing. */
int panel_width(void) { return PANEL; }

/* Whether halved panels go to a matrix unit. */
int uses_tiles(void) { return has_tiles(); }

/* Whether halved panels are no slower than whole ones for any number of rows: with wide registers, unpacking costs
 * little compared to the reads it saves. */
int halving_pays(void) { return LANES == 16; }

/* Some rows times a matrix. */
struct linear {
    const float *x, *bias;
    const char *panels;
    float *y;
    panel_product *product;
    long M, K, N, size; /* size: bytes of an output's weights */
};

static void multiply_panels(const void *of, long first, long end) {
    static const float zeros[PANEL];
    const struct linear *linear = of;
    const long K = linear->K, N = linear->N, M = linear->M;
    for (long p = first; p < end; p++) {
        const long n = p * PANEL;
        const float *bias_n = linear->bias ? linear->bias + n : zeros;
        const char *w = linear->panels + n * linear->size;
        if (N - n >= PANEL)
            linear->product(linear->x, M, K, w, bias_n, linear->y + n, N);
        else
            narrow_panel(linear->product, linear->x, M, K, w, bias_n, N - n, linear->y + n, N);
    }
}

/* y[M][N] = x[M][K] W[N][K]^T + bias[N]; `bias` may be null, rows are contiguous, K > 0. */
void packed_linear(const float *x, long M, long K, const char *panels, int halved, const float *bias, long N, float *y,
                   int threads) {
    if (halved && has_tiles() && tiled_linear(x, M, K, panels, bias, N, y, threads)) return;
    const long size = halved ? (K + STEP - 1) / STEP * STEP * 2 : K * 4;
    for (long m = 0; m < M; m += STRIPE) {
        const struct linear linear = {.x = x + m * K, .bias = bias, .panels = panels, .y = y + m * N,
                                      .product = halved ? halved_panel : whole_panel,
                                      .M = smaller(STRIPE, M - m), .K = K, .N = N, .size = size};
        do_pieces(multiply_panels, &linear, (N + PANEL - 1) / PANEL, threads);
    }
}
