/* The steps between a decoder block's matrix products and after the last, in float32: each in one sweep over memory, or
 * as few as possible.
 *
 * Invariant: a row's result does not depend on the rows beside it, to the last bit.
 *
 * Names: N rows, D numbers in a row, I outputs of a gate, B heads of a token, K head dim, R rotary dim, V logits of a
 * row.
 */

#include "threads.h"
#include "vectors.h"

enum { FEW = 1 << 14 }; /* work for less than this is done before a second thread has started */

/* y = x / sqrt(mean(x^2) + eps) * weight, which may be the same memory */
INLINE void norm_row(const float *x, long D, const float *weight, float eps, float *y) {
    vector sum[4] = {{0}};
    long d = 0;
    for (; d + 4 * LANES <= D; d += 4 * LANES) UNROLL for (int i = 0; i < 4; i++) {
        const vector part = ((const vector *)(x + d))[i];
        sum[i] += part * part;
    }
    const four each = sums(sum[0], sum[1], sum[2], sum[3]);
    float total = (each[0] + each[1]) + (each[2] + each[3]);
    for (; d < D; d++) total += x[d] * x[d];
    const float factor = 1.0f / square_root(total / D + eps);
    for (d = 0; d < D; d++) y[d] = x[d] * factor * weight[d];
}

/* The arguments of one of these steps over N rows; unused ones are 0. */
struct step {
    const float *x, *weight, *cos, *sin;
    float *y;
    int64_t *place;
    long width, heads, rotated, x_stride, y_stride;
    float eps;
    int activation;
};

/* Uses as many threads as there is work for; `numbers` per row. */
static void do_rows(pieces *some, const struct step *step, long N, long numbers, int threads) {
    do_pieces(some, step, N, N * numbers < FEW ? 1 : threads);
}

static void norm_rows(const void *of, long first, long end) {
    const struct step *step = of;
    for (long n = first; n < end; n++)
        norm_row(step->x + n * step->x_stride, step->width, step->weight, step->eps, step->y + n * step->y_stride);
}

/* Rows may be strided. */
void rms_norm(const float *x, long x_stride, long N, long D, const float *weight, float eps, float *y, long y_stride,
              int threads) {
    const struct step step = {
        .x = x, .x_stride = x_stride, .width = D, .weight = weight, .eps = eps, .y = y, .y_stride = y_stride};
    do_rows(norm_rows, &step, N, D, threads);
}

static void norm_heads_of_rows(const void *of, long first, long end) {
    const struct step *step = of;
    const long K = step->width;
    for (long n = first; n < end; n++)
        for (long b = 0; b < step->heads; b++) {
            float *x = step->y + n * step->y_stride + b * K;
            norm_row(x, K, step->weight + b * K, step->eps, x);
        }
}

/* The first B heads of every token, in place, each with its row of weight[B][K]; `stride` numbers to a token. */
void norm_heads(float *x, long N, long B, long K, long stride, const float *weight, float eps, int threads) {
    const struct step step = {.y = x, .y_stride = stride, .heads = B, .width = K, .weight = weight, .eps = eps};
    do_rows(norm_heads_of_rows, &step, N, B * K, threads);
}

/* x / (1 + e^-by) */
INLINE vector opened(vector x, vector by) {
    const vector e = exponential((vector)((integers)by | INT32_MIN)); /* e^-|by| */
    const integers negative = (integers)(by < 0.0f);
    const vector above = (vector)(((integers)e & negative) | ((integers)all(1.0f) & ~negative));
    return x * above / (1.0f + e);
}

enum { SILU, GELU_TANH };

/* 0.5 x (1 + tanh(u)) is x / (1 + e^-2u), so both gates are one formula. */
INLINE vector gate_of(vector x, int activation) {
    if (activation == SILU) return opened(x, x);
    return opened(x, x * (1.5957691216f + 0.0713548162726f * x * x));
}

INLINE void gate_rows(const struct step *step, int activation, long first, long end) {
    const long I = step->width;
    for (long n = first; n < end; n++) {
        const float *gate = step->x + n * 2 * I, *up = gate + I;
        float *y_n = step->y + n * I;
        long i = 0;
        for (; i + LANES <= I; i += LANES)
            *(vector *)(y_n + i) = gate_of(*(const vector *)(gate + i), activation) * *(const vector *)(up + i);
        for (; i < I; i++) y_n[i] = gate_of(all(gate[i]), activation)[0] * up[i];
    }
}

static void gate_rows_of(const void *of, long first, long end) {
    const struct step *step = of;
    if (step->activation == GELU_TANH) gate_rows(step, GELU_TANH, first, end);
    else gate_rows(step, SILU, first, end);
}

/* y[N][I] = activation(gate) * up, which are adjacent in x[N][2 I] */
void gated(const float *x, long N, long I, int activation, float *y, int threads) {
    const struct step step = {.x = x, .width = I, .activation = activation, .y = y};
    do_rows(gate_rows_of, &step, N, 4 * I, threads); /* a number costs as much as four in other steps */
}

static void rotate_rows(const void *of, long first, long end) {
    const struct step *step = of;
    const long B = step->heads, K = step->width, R = step->rotated, half = R / 2;
    for (long n = first; n < end; n++)
        for (long b = 0; b < B; b++) {
            const float *a_in = step->x + n * step->x_stride + b * K, *b_in = a_in + half;
            const float *cos_n = step->cos + n * R, *sin_n = step->sin + n * R;
            float *restrict y_b = step->y + (n * B + b) * K;
            for (long k = 0; k < half; k++) y_b[k] = a_in[k] * cos_n[k] - b_in[k] * sin_n[k];
            for (long k = 0; k < half; k++) y_b[half + k] = b_in[k] * cos_n[half + k] + a_in[k] * sin_n[half + k];
            for (long k = R; k < K; k++) y_b[k] = a_in[k];
        }
}

/* Rotate the halves a, b of the first R numbers of every head: a cos - b sin, b cos + a sin; the others are copied. x
 * has `stride` numbers per token, y[N][B][K] is contiguous, cos and sin are [N][R]. */
void rotate(const float *x, long N, long B, long K, long R, long stride, const float *cos, const float *sin, float *y,
            int threads) {
    const struct step step = {
        .x = x, .x_stride = stride, .heads = B, .width = K, .rotated = R, .cos = cos, .sin = sin, .y = y};
    do_rows(rotate_rows, &step, N, B * K, threads);
}

INLINE vector larger(vector a, vector b) {
    const integers above = (integers)(a > b);
    return (vector)(((integers)a & above) | ((integers)b & ~above));
}

/* The largest of some numbers; NaN is skipped. */
INLINE float largest_of(const float *x, long count) {
    vector most[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
    long i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        UNROLL for (int k = 0; k < 4; k++) most[k] = larger(((const vector *)(x + i))[k], most[k]);
    const vector both = larger(larger(most[0], most[1]), larger(most[2], most[3]));
    float largest = both[0];
    for (int k = 1; k < LANES; k++) largest = both[k] > largest ? both[k] : largest;
    for (; i < count; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

static void find_most_likely(const void *of, long first, long end) {
    enum { PART = 1024 }; /* numbers per step: searching all of them one by one would dominate */
    const struct step *step = of;
    const long V = step->width;
    for (long n = first; n < end; n++) {
        const float *x_n = step->x + n * V;
        float largest = -INFINITY;
        long v = 0;
        for (long part = 0; part < V; part += PART) {
            const float most = largest_of(x_n + part, part + PART < V ? PART : V - part);
            if (most > largest) largest = most, v = part;
        }
        for (; v + 1 < V && x_n[v] != largest; v++) {}
        step->place[n] = v;
        if (!step->y) continue;
        double weight = 0;
        for (v = 0; v + 2 * LANES <= V;) { /* short sums: a long one rounds away what comes late */
            const long end = v + 1024 < V ? v + 1024 : V;
            vector sum[2] = {{0}};
            for (; v + 2 * LANES <= end; v += 2 * LANES)
                UNROLL for (int i = 0; i < 2; i++) sum[i] += exponential(((const vector *)(x_n + v))[i] - largest);
            const vector total = sum[0] + sum[1];
            for (int i = 0; i < LANES; i++) weight += total[i];
        }
        for (; v < V; v++) weight += exponential(all(x_n[v] - largest))[0];
        step->y[n] = (float)(1.0 / weight);
    }
}

/* The index of the largest of each row of x[N][V], the first of equals, and, unless `chance` is null, its softmax. */
void most_likely(const float *x, long N, long V, int64_t *place, float *chance, int threads) {
    const struct step step = {.x = x, .width = V, .place = place, .y = chance};
    do_rows(find_most_likely, &step, N, V, threads);
}
