/* y = x W^T + bias over weights of 4 or 8 bits, by integer products, for any number of rows.
 *
 * Weights come in blocks of BLOCK neighbouring inputs of an output. A block has a scale, or one for each half of it,
 * and may have a minimum:
 *
 *     W[n][k] = scale[n][k / BLOCK] * (q[n][k] - zero) + minimum[n][k / BLOCK]
 *
 * Rows of x are quantised the same way, to 8 bits with a scale for every block. So a block's share of a sum is a
 * product of integers, exact whatever its order, times two scales; and what the minimum adds is it times the sum of the
 * block.
 *
 * Weights lie in panels of PANEL outputs, block behind block: scales, minima (half precision), then
 *
 *     8 bits: q[k / 4][output][k % 4]                  four neighbouring inputs are what one instruction adds up
 *     4 bits: the same for k < 16, with input k + 16 in the upper four bits; signed without a minimum, but for VNNI
 *
 * so they are read from front to back, once for ROWS rows. Where there are more rows, four bits are unpacked once for
 * all of them, but for AVX-512, whose vectors unpack them sooner than they read them again. Many rows go to the matrix
 * unit where there is one, in groups of sixteen (quantised_tiles.h).
 *
 * Invariant: an element of y is the same to the last bit whatever the number of rows beside it and the number of
 * threads: from the bias on, shares of blocks are added in their order, one by one. Integer sums are the same on every
 * processor; shares are rounded once or twice, by whether a processor multiplies and adds at once. So on one processor
 * all forms below give the same bits.
 *
 * Names: M rows of x and y, N outputs, K inputs, B blocks.
 */

#include "../threads.h"

#include <string.h>

#if defined(PORTABLE) || defined(NEON) || defined(VNNI) || defined(AVX2)
/* chosen by tests */
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define NEON
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define VNNI
#if defined(__AMX_INT8__) && defined(__linux__)
#define AMX
#endif
#elif defined(__AVX2__) && defined(__F16C__)
#define AVX2
#else
#define PORTABLE
#endif

#if defined(NEON)
#include <arm_neon.h>
#define USES "NEON dot products"
enum { LANES = 4, PANEL = 8, ROWS = 4, UNSIGNED = 0, UNPACKS = 1 }; /* of 32 registers, 16 hold sums and 8 hold x */
#elif defined(VNNI)
#include <immintrin.h>
#define USES "AVX-512 VNNI"
enum { LANES = 16, PANEL = 16, ROWS = 8, UNSIGNED = 1, UNPACKS = 0 };
#elif defined(AVX2)
#include <immintrin.h>
#define USES "AVX2"
enum { LANES = 8, PANEL = 8, ROWS = 4, UNSIGNED = 0, UNPACKS = 1 };
#else
#define USES "plain C"
enum { LANES = 4, PANEL = 8, ROWS = 2, UNSIGNED = 0, UNPACKS = 1 }; /* more would take long to compile */
#endif

enum {
    BLOCK = 32,
    HALF = BLOCK / 2,
    VECTORS = PANEL / LANES,
    STRIPE = 16 * ROWS, /* rows per sweep over W: they stay in the second-level cache for all panels */
    CHUNK = 16,         /* blocks unpacked at a time: they stay in the first-level cache for all rows */
    FEW = 1 << 13,      /* quantising fewer numbers is done before a second thread has started */
    LINE = 64,          /* bytes in a cache line */
    AHEAD = 8192,       /* bytes of weights to prefetch: the CPU's own prefetch stops at a page */
};

/* The flags of a format; quantised_linear.py has the same. */
enum { FOUR_BITS = 1, MINIMA = 2, SCALES_OF_HALVES = 4 };

typedef float vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint8_t bytes __attribute__((vector_size(LANES * 4), aligned(1), may_alias));

/* 1.5 * 2^23: an integer that is added to its bits is what the number then lies above it. Sums of blocks begin with
 * them, and are below 2^22; that is cheaper than a conversion. A number 2^4 times smaller divides them by 16 beside. */
#define MAGIC 12582912.0f
#define MAGIC_OF_16THS 786432.0f
enum { MAGIC_BITS = 0x4b400000, MAGIC_BITS_OF_16THS = 0x49400000 };

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

static long smaller(long a, long b) { return a < b ? a : b; }

/* HALF inputs of a row; ARM multiplies by one lane of a register, x86 spreads four bytes while loading them. */
#if defined(NEON)
typedef int8x16_t inputs;
INLINE inputs read_inputs(const int8_t *x) { return vld1q_s8(x); }
#else
typedef const int8_t *inputs;
INLINE inputs read_inputs(const int8_t *x) { return x; }
#endif

#if defined(NEON)
#define DOT(sum, w, x, j) ((integers)vdotq_laneq_s32((int32x4_t)(sum), (int8x16_t)(w), x, j))
#elif defined(VNNI)
INLINE __m512i spread(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}
#define DOT(sum, w, x, j) ((integers)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(w), spread((x) + 4 * (j))))
#elif defined(AVX2)
/* Sums of two neighbours fit into 16 bits: of 128 * 127 at most. */
INLINE __m256i dot(__m256i w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(_mm256_set1_epi32(four), w));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#define DOT(sum, w, x, j) ((sum) + (integers)dot((__m256i)(w), (x) + 4 * (j)))
#else
typedef int8_t small __attribute__((vector_size(LANES * 4)));
typedef int16_t wide __attribute__((vector_size(LANES * 8)));
typedef int32_t wider __attribute__((vector_size(LANES * 8)));
typedef int64_t widest __attribute__((vector_size(LANES * 8)));

/* Neighbours are added where they lie, twice; the lower of two is shifted up and down for its sign. */
INLINE integers dot(bytes w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    const small spread = (small)((integers){0} + four);
    const wider products = (wider)(__builtin_convertvector((small)w, wide) * __builtin_convertvector(spread, wide));
    const widest pairs = (widest)((products << 16 >> 16) + (products >> 16));
    return __builtin_convertvector((pairs << 32 >> 32) + (pairs >> 32), integers);
}
#define DOT(sum, w, x, j) ((sum) + dot(w, (x) + 4 * (j)))
#endif

static float widened(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t bits = sign | ((rest << 13) + 0x38000000);
    if (rest >= 0x7c00) bits = sign | (rest << 13) | 0x7f800000; /* infinite, or NaN */
    float x;
    if (rest < 0x400) { /* below the normal numbers */
        x = (float)rest * 0x1p-24f;
        return sign ? -x : x;
    }
    memcpy(&x, &bits, 4);
    return x;
}

INLINE vector read_halves(const uint8_t *from) {
#if defined(NEON)
    return (vector)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
#elif defined(VNNI)
    return (vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(AVX2)
    return (vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    uint16_t halves[LANES];
    vector x;
    memcpy(halves, from, sizeof halves);
    UNROLL for (int i = 0; i < LANES; i++) x[i] = widened(halves[i]);
    return x;
#endif
}

/* Rows of x, quantised. */
struct rows {
    int8_t *q;      /* [M][B * BLOCK] */
    float *scale;   /* [M][B] */
    float *sum;     /* [M][B]: of the block, scaled */
    int32_t *halves; /* [M][B][2]: sums of q */
    long blocks;
};

/* Four bits without a minimum are signed where bytes are, and then used where they lie highest in a byte: 16 times. */
INLINE int is_signed(int format) { return format == FOUR_BITS && !UNSIGNED; }
INLINE bytes lower(bytes both, int format) {
    if (is_signed(format)) return both << 4;
    return both & 15;
}
INLINE bytes upper(bytes both, int format) {
    if (is_signed(format)) return both & 0xf0;
    return both >> 4;
}
INLINE float first_number(int format) { return is_signed(format) ? MAGIC_OF_16THS : MAGIC; }

/* What sums of blocks begin with. ARM loads it each time: that is free beside products, to move it is not. */
#if defined(NEON)
static const int32_t FIRST[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
static const int32_t FIRST_OF_16THS[4] = {MAGIC_BITS_OF_16THS, MAGIC_BITS_OF_16THS, MAGIC_BITS_OF_16THS, MAGIC_BITS_OF_16THS};
INLINE integers first_sum(int format) {
    integers sum;
    if (is_signed(format))
        __asm__ volatile("ldr %q0, %1" : "=w"(sum) : "m"(FIRST_OF_16THS));
    else
        __asm__ volatile("ldr %q0, %1" : "=w"(sum) : "m"(FIRST));
    return sum;
}
#else
INLINE integers first_sum(int format) { return (integers){0} + (is_signed(format) ? MAGIC_BITS_OF_16THS : MAGIC_BITS); }
#endif

/* total + a * x, rounded once where the processor can; ARM multiplies by a lane, which spares spreading x. */
#if defined(NEON)
INLINE float32x2_t read_number(const float *x) {
    float32x2_t number;
    __asm__("ldr %s0, %1" : "=w"(number) : "m"(*x));
    return number;
}
#define MULTIPLY_ADD(total, a, x) ((vector)vfmaq_lane_f32((float32x4_t)(total), (float32x4_t)(a), x, 0))
#else
INLINE float read_number(const float *x) { return *x; }
#define MULTIPLY_ADD(total, a, x) ((total) + (a) * (x))
#endif

static long blocks_of(long K) { return (K + BLOCK - 1) / BLOCK; }
static long scales_in(int format) { return format & SCALES_OF_HALVES ? 2 : 1; }
static long zero_of(int format) {
    if (!UNSIGNED || format == (FOUR_BITS | MINIMA)) return 0;
    return format & FOUR_BITS ? 8 : 128;
}

/* Bytes of a panel's block before the weights, and with them. */
static long head_bytes(int format) { return PANEL * 2 * (scales_in(format) + (format & MINIMA ? 1 : 0)); }
static long block_bytes(int format) { return head_bytes(format) + PANEL * (format & FOUR_BITS ? HALF : BLOCK); }

/* Prefetch a block that will be needed soon. */
INLINE void fetch_ahead(const uint8_t *w, const long size) {
#if defined(__x86_64__)
    UNROLL for (long i = 0; i < size; i += LINE) __builtin_prefetch(w + AHEAD + i, 0, 2); /* second-level cache */
#endif
}

/* The largest of BLOCK numbers, whatever their signs. Positive floats are ordered like their bits, and what is no
 * number is above them all: then so is the scale, and all that comes of it. */
INLINE float largest_of(const float *x) {
    int32_t largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float most;
    memcpy(&most, &largest, 4);
    return most;
}

/* BLOCK numbers times `inverse`, to the nearest integer, of two to the even one; the sums of both halves. */
INLINE void round_block(const float *x, float inverse, int8_t *q, int32_t *halves) {
#if defined(NEON)
    UNROLL for (int half = 0; half < 2; half++) {
        int32x4_t four[4];
        UNROLL for (int i = 0; i < 4; i++) { /* the bits below MAGIC; a conversion takes four times as long */
            float32x4_t scaled = vmulq_n_f32(vld1q_f32(x + half * HALF + 4 * i), inverse);
            __asm__("" : "+w"(scaled)); /* rounded here, too, as everywhere else */
            four[i] = vreinterpretq_s32_f32(vaddq_f32(scaled, vdupq_n_f32(MAGIC)));
        }
        const int16x8_t low = vuzp1q_s16(vreinterpretq_s16_s32(four[0]), vreinterpretq_s16_s32(four[1]));
        const int16x8_t high = vuzp1q_s16(vreinterpretq_s16_s32(four[2]), vreinterpretq_s16_s32(four[3]));
        const int8x16_t all = vuzp1q_s8(vreinterpretq_s8_s16(low), vreinterpretq_s8_s16(high));
        vst1q_s8(q + half * HALF, all);
        halves[half] = vaddvq_s32(vdotq_s32(vdupq_n_s32(0), all, vdupq_n_s8(1)));
    }
#else
    for (int i = 0; i < BLOCK; i++) q[i] = (int8_t)(int32_t)__builtin_rintf(x[i] * inverse);
    halves[0] = halves[1] = 0;
    for (int i = 0; i < HALF; i++) halves[0] += q[i];
    for (int i = HALF; i < BLOCK; i++) halves[1] += q[i];
#endif
}

/* One row; its blocks are every `step`th from `first` on. All scales first: the other blocks would wait for their
 * own. */
INLINE void quantise_blocks(const float *x, long K, const struct rows *rows, long first, const long step) {
    const long B = rows->blocks, whole = K / BLOCK;
    float padded[BLOCK] = {0};
    float *scale = rows->scale + first, *sum = rows->sum + first;
    if (whole < B) memcpy(padded, x + whole * BLOCK, (K - whole * BLOCK) * sizeof(float));
    for (long b = 0; b < B; b++) scale[b * step] = largest_of(b < whole ? x + b * BLOCK : padded);
    for (long b = 0; b < B; b++) sum[b * step] = scale[b * step] > 0x1p-120f ? 127.0f / scale[b * step] : 0.0f;
    for (long b = 0; b < B; b++) {
        const long at = first + b * step;
        int32_t *halves = rows->halves + 2 * at;
        round_block(b < whole ? x + b * BLOCK : padded, sum[b * step], rows->q + at * BLOCK, halves);
        scale[b * step] /= 127.0f;
        sum[b * step] = scale[b * step] * (float)(halves[0] + halves[1]);
    }
}

/* sums[r][c] += the shares of blocks `first` to `last` of a panel, for one tile: up to ROWS rows from `m` on.
 * The sums stay in registers, for `count` and `format` are constants at every call. `w` begins with block `first`; its
 * four bits lie in `unpacked`, a byte each, unless that is null.
 * Multiplications of floats stand together: between integer products each of them costs a Neoverse as much as two. */
INLINE void multiply(const int count, const int format, const int is_unpacked, const struct rows *rows, long m, long first,
                     long last, const uint8_t *w, const uint8_t *unpacked, float *sums) {
    const long B = rows->blocks, size = block_bytes(format), head = head_bytes(format);
    const int nibbles = (format & FOUR_BITS) && !is_unpacked, split = format & SCALES_OF_HALVES;
    const int32_t zero = (int32_t)zero_of(format);
    const int8_t *x_q = rows->q + (m * B + first) * BLOCK;
    const float *x_scale = rows->scale + m * B + first, *x_sum = rows->sum + m * B + first;
    const int32_t *x_halves = rows->halves + (m * B + first) * 2;
    vector total[ROWS][VECTORS];
    UNROLL for (int r = 0; r < count; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) total[r][v] = ((const vector *)(sums + r * PANEL))[v];
#define EACH UNROLL for (int v = 0; v < VECTORS; v++) UNROLL for (int r = 0; r < count; r++)
    for (long b = first; b < last; b++, w += size, x_q += BLOCK, x_scale++, x_sum++, x_halves += 2) {
        const uint8_t *q = is_unpacked ? unpacked + (b - first) * BLOCK * PANEL : w + head;
        if (!is_unpacked) fetch_ahead(w, size);
        inputs x[2][ROWS];
        UNROLL for (int r = 0; r < count; r++)
            UNROLL for (int half = 0; half < 2; half++) x[half][r] = read_inputs(x_q + r * B * BLOCK + half * HALF);
        integers sum[ROWS][VECTORS];
        vector share[ROWS][VECTORS];
#define START(half)                                                                                                  \
    EACH {                                                                                                           \
        const int32_t *halves = x_halves + r * B * 2;                                                                \
        sum[r][v] = first_sum(format);                                                                               \
        if (zero) sum[r][v] -= zero * (split ? halves[half] : halves[0] + halves[1]);                                \
    }
#define QUAD(half, j)                                                                                                \
    UNROLL for (int v = 0; v < VECTORS; v++) {                                                                       \
        const bytes four = ((const bytes *)q)[(4 * half + (j)) * VECTORS + v];                                       \
        UNROLL for (int r = 0; r < count; r++) sum[r][v] = DOT(sum[r][v], four, x[half][r], j);                      \
    }
#define TWO_QUADS(v, j)                                                                                              \
    {                                                                                                                \
        const bytes both = ((const bytes *)q)[(j) * VECTORS + v], low = lower(both, format);                         \
        UNROLL for (int r = 0; r < count; r++) sum[r][v] = DOT(sum[r][v], low, x[0][r], j);                          \
        const bytes high = upper(both, format);                                                                      \
        UNROLL for (int r = 0; r < count; r++) sum[r][v] = DOT(sum[r][v], high, x[1][r], j);                         \
    }
#define SCALE(half)                                                                                                  \
    EACH share[r][v] = (vector)sum[r][v] - first_number(format);                                                     \
    UNROLL for (int v = 0; v < VECTORS; v++) {                                                                       \
        const vector scale = read_halves(w + 2 * ((split ? half : 0) * PANEL + v * LANES));                          \
        UNROLL for (int r = 0; r < count; r++) share[r][v] *= scale;                                                 \
    }                                                                                                                \
    EACH total[r][v] = MULTIPLY_ADD(total[r][v], share[r][v], read_number(x_scale + r * B));

        START(0)
        if (nibbles) {
            UNROLL for (int v = 0; v < VECTORS; v++) { TWO_QUADS(v, 0) TWO_QUADS(v, 1) TWO_QUADS(v, 2) TWO_QUADS(v, 3) }
        } else {
            QUAD(0, 0) QUAD(0, 1) QUAD(0, 2) QUAD(0, 3)
            if (split) {
                SCALE(0)
                START(1)
            }
            QUAD(1, 0) QUAD(1, 1) QUAD(1, 2) QUAD(1, 3)
        }
        SCALE(1)
        if (format & MINIMA)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const vector minimum = read_halves(w + 2 * (scales_in(format) * PANEL + v * LANES));
                UNROLL for (int r = 0; r < count; r++)
                    total[r][v] = MULTIPLY_ADD(total[r][v], minimum, read_number(x_sum + r * B));
            }
#undef START
#undef QUAD
#undef TWO_QUADS
#undef SCALE
    }
#undef EACH
    UNROLL for (int r = 0; r < count; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) ((vector *)(sums + r * PANEL))[v] = total[r][v];
}

/* One tile; its number of rows becomes a constant. */
INLINE void tile(long count, const int format, const int is_unpacked, const struct rows *rows, long m, long first, long last,
                 const uint8_t *w, const uint8_t *unpacked, float *sums) {
    switch (count) {
#define CASE(n) case n: multiply(n, format, is_unpacked, rows, m, first, last, w, unpacked, sums); break;
        CASE(1) CASE(2)
#if !defined(PORTABLE)
        CASE(3) CASE(4)
#endif
#if defined(VNNI)
        CASE(5) CASE(6) CASE(7) CASE(8)
#endif
#undef CASE
    }
}

/* sums[:M][:PANEL] += rows m to m + M times one panel. */
INLINE void panel(const int format, const struct rows *rows, long m, long M, const uint8_t *w, float *sums) {
    const long B = rows->blocks, tiles = (M + ROWS - 1) / ROWS, size = block_bytes(format), head = head_bytes(format);
    const int unpacks = UNPACKS && (format & FOUR_BITS) && tiles > 1;
    uint8_t unpacked[CHUNK * BLOCK * PANEL];
    const long chunk = tiles > 1 ? CHUNK : B;
    for (long b = 0; b < B; b += chunk) {
        const long end = smaller(b + chunk, B);
        const uint8_t *w_b = w + b * size;
        if (unpacks)
            for (long i = b; i < end; i++) {
                const bytes *q = (const bytes *)(w + i * size + head);
                bytes *low = (bytes *)(unpacked + (i - b) * BLOCK * PANEL), *high = low + 4 * VECTORS;
                fetch_ahead(w + i * size, size);
                UNROLL for (int j = 0; j < 4 * VECTORS; j++) low[j] = lower(q[j], format), high[j] = upper(q[j], format);
            }
        for (long t = 0; t < tiles; t++) { /* as even as possible */
            const long from = M * t / tiles, count = M * (t + 1) / tiles - from;
            if (unpacks)
                tile(count, format, 1, rows, m + from, b, end, w_b, unpacked, sums + from * PANEL);
            else
                tile(count, format, 0, rows, m + from, b, end, w_b, 0, sums + from * PANEL);
        }
    }
}

typedef void panel_product(const struct rows *, long, long, const uint8_t *, float *);

#define PRODUCT(name, format)                                                                                \
    static void name(const struct rows *rows, long m, long M, const uint8_t *w, float *sums) {               \
        panel(format, rows, m, M, w, sums);                                                                  \
    }
PRODUCT(eight, 0)
PRODUCT(four, FOUR_BITS)
PRODUCT(eight_with_minima, MINIMA)
PRODUCT(four_with_minima, FOUR_BITS | MINIMA)
PRODUCT(eight_by_halves, SCALES_OF_HALVES)

static panel_product *const PRODUCTS[] = {
    [0] = eight,
    [FOUR_BITS] = four,
    [MINIMA] = eight_with_minima,
    [FOUR_BITS | MINIMA] = four_with_minima,
    [SCALES_OF_HALVES] = eight_by_halves,
};

#if defined(AMX)
#include "quantised_tiles.h"
#else
enum { TILE_ROWS = 1 };
void use_tiles(int wanted) {}
int uses_tiles(void) { return 0; }
static long grouped_rows(long M) { return 0; }
static void tiled_panel(int format, const struct rows *rows, long m, long M, const uint8_t *w, float *sums, long *shaped) {}
static void release_tiles(void) {}
#endif

/* Row m; the first `grouped` rows lie in groups. */
static void quantise_row(const float *x, long K, const struct rows *rows, long m, long grouped) {
    const long B = rows->blocks;
    if (m < grouped)
        quantise_blocks(x, K, rows, m / TILE_ROWS * TILE_ROWS * B + m % TILE_ROWS, TILE_ROWS);
    else
        quantise_blocks(x, K, rows, m * B, 1);
}

/* Some outputs of a product: a matrix alone, or one of several with the same x. Python has the same struct. */
struct part {
    const uint8_t *panels;
    const float *bias; /* null: none */
    int64_t format, outputs;
};

int panel_width(void) { return PANEL; }
int unsigned_bytes(void) { return UNSIGNED; }
const char *uses(void) {
#if defined(AMX)
    if (!has_tiles()) return USES " (the system does not permit AMX)";
    return tiles_wanted ? USES ", and AMX int8 from 32 rows on" : USES " (AMX int8 is off)";
#else
    return USES;
#endif
}

/* Bytes of workspace for every row. */
long workspace_bytes(long K) { return blocks_of(K) * (BLOCK + 4 * sizeof(float)); }

/* Some rows times parts. */
struct linear {
    const float *x;
    const struct part *parts;
    float *y;
    struct rows rows;
    long K, y_stride, grouped; /* the first `grouped` rows lie in groups */
    long m, M;                 /* of a sweep over the panels: its first row, and how many it has */
};

static void quantise_rows(const void *of, long first, long end) {
    const struct linear *linear = of;
    for (long m = first; m < end; m++) quantise_row(linear->x + m * linear->K, linear->K, &linear->rows, m, linear->grouped);
}

static void multiply_panels(const void *of, long first, long end) {
    const struct linear *linear = of;
    const long B = linear->rows.blocks, M = linear->M, m = linear->m;
    const long by_tiles = m < linear->grouped ? smaller(M, linear->grouped - m) : 0;
    long shaped = 0;
    for (long p = first; p < end; p++) {
        long at = p, column = 0;
        const struct part *part = linear->parts;
        for (long own; at >= (own = (part->outputs + PANEL - 1) / PANEL); at -= own) column += part++->outputs;
        const long n = at * PANEL, columns = smaller(PANEL, part->outputs - n);
        float sums[STRIPE * PANEL], bias[PANEL] = {0};
        if (part->bias) memcpy(bias, part->bias + n, columns * sizeof(float));
        for (long i = 0; i < M; i++) memcpy(sums + i * PANEL, bias, sizeof bias);
        const uint8_t *w = part->panels + at * B * block_bytes((int)part->format);
        if (by_tiles) tiled_panel((int)part->format, &linear->rows, m, by_tiles, w, sums, &shaped);
        if (by_tiles < M)
            PRODUCTS[part->format](&linear->rows, m + by_tiles, M - by_tiles, w, sums + by_tiles * PANEL);
        const long stride = linear->y_stride;
        float *y = linear->y + m * stride + column + n;
        if (columns == PANEL) /* a constant: no call */
            for (long i = 0; i < M; i++) memcpy(y + i * stride, sums + i * PANEL, PANEL * sizeof(float));
        else
            for (long i = 0; i < M; i++) memcpy(y + i * stride, sums + i * PANEL, columns * sizeof(float));
    }
    if (shaped) release_tiles();
}

/* y[:, :N] = x W^T + bias; rows of y are `y_stride` apart, those of x contiguous. */
void quantised_linear(const float *x, long M, long K, const struct part *parts, long part_count, float *y, long y_stride,
                      void *workspace, int threads) {
    const long B = blocks_of(K);
    struct linear linear = {.x = x, .parts = parts, .y = y, .K = K, .y_stride = y_stride, .grouped = grouped_rows(M)};
    linear.rows = (struct rows){.blocks = B, .scale = workspace};
    linear.rows.sum = linear.rows.scale + M * B;
    linear.rows.halves = (int32_t *)(linear.rows.sum + M * B);
    linear.rows.q = (int8_t *)(linear.rows.halves + M * B * 2);
    long panels = 0;
    for (long i = 0; i < part_count; i++) panels += (parts[i].outputs + PANEL - 1) / PANEL;
    do_pieces(quantise_rows, &linear, M, M * K < FEW ? 1 : threads);
    for (linear.m = 0; linear.m < M; linear.m += STRIPE) {
        linear.M = smaller(STRIPE, M - linear.m);
        do_pieces(multiply_panels, &linear, panels, threads);
    }
}

/* y[i] = W[ids[i]], as floats. */
void dequantised_rows(const struct part *part, long K, const int64_t *ids, long count, float *y) {
    const int format = (int)part->format;
    const long B = blocks_of(K), size = block_bytes(format), head = head_bytes(format);
    const int32_t zero = (int32_t)zero_of(format);
    for (long i = 0; i < count; i++, y += K) {
        const long c = ids[i] % PANEL;
        const uint8_t *w = part->panels + ids[i] / PANEL * B * size;
        for (long b = 0; b < B; b++, w += size) {
            uint16_t halves[3] = {0};
            for (long s = 0; s < head / (2 * PANEL); s++) memcpy(halves + s, w + 2 * (s * PANEL + c), 2);
            const float minimum = format & MINIMA ? widened(halves[scales_in(format)]) : 0.0f;
            const long end = smaller(BLOCK, K - b * BLOCK);
            for (long k = 0, next; k < end; k = next) { /* a half: of one scale, and of one part of every byte */
                const float scale = widened(halves[format & SCALES_OF_HALVES ? k / HALF : 0]);
                next = smaller(k + HALF, end);
                for (long i = k; i < next; i++) {
                    const long within = format & FOUR_BITS ? i - k : i;
                    const uint8_t byte = w[head + within / 4 * 4 * PANEL + c * 4 + i % 4];
                    const int32_t nibble = k < HALF ? byte & 15 : byte >> 4;
                    const int32_t q = !(format & FOUR_BITS) ? (UNSIGNED ? byte : (int8_t)byte)
                                      : is_signed(format) ? (nibble ^ 8) - 8
                                                          : nibble;
                    y[b * BLOCK + i] = scale * (float)(q - zero) + minimum;
                }
            }
        }
    }
}
