/* What stands between the matrix products of a decoder block and behind the last of them, in float32: each in one sweep
 * over memory, or as few as it takes.
 *
 * Invariant: a row's result does not depend on the rows beside it, to the last bit.
 *
 * Names: N rows, D numbers in a row, I outputs of a gate, B heads of a token, K numbers of a head, R of them rotated,
 * V logits of a row.
 */

#include "vectors.h"

enum { FEW = 1 << 14 }; /* numbers that one thread is through with before a second one has begun */

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

/* Rows lie in memory with a stride of their own. */
void rms_norm(const float *x, long x_stride, long N, long D, const float *weight, float eps, float *y, long y_stride,
              int threads) {
#pragma omp parallel for num_threads(N * D < FEW ? 1 : threads) schedule(static)
    for (long n = 0; n < N; n++) norm_row(x + n * x_stride, D, weight, eps, y + n * y_stride);
}

/* The first B heads of every token, in place, each with its row of weight[B][K]; `stride` numbers to a token. */
void norm_heads(float *x, long N, long B, long K, long stride, const float *weight, float eps, int threads) {
#pragma omp parallel for num_threads(N * B * K < FEW ? 1 : threads) schedule(static)
    for (long n = 0; n < N; n++)
        for (long b = 0; b < B; b++) norm_row(x + n * stride + b * K, K, weight + b * K, eps, x + n * stride + b * K);
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

INLINE void gate_rows(const float *x, long N, long I, int activation, float *y, int threads) {
#pragma omp parallel for num_threads(N * I < FEW ? 1 : threads) schedule(static)
    for (long n = 0; n < N; n++) {
        const float *gate = x + n * 2 * I, *up = gate + I;
        float *y_n = y + n * I;
        long i = 0;
        for (; i + LANES <= I; i += LANES)
            *(vector *)(y_n + i) = gate_of(*(const vector *)(gate + i), activation) * *(const vector *)(up + i);
        for (; i < I; i++) y_n[i] = gate_of(all(gate[i]), activation)[0] * up[i];
    }
}

/* y[N][I] = activation(gate) * up, which lie side by side in x[N][2 I] */
void gated(const float *x, long N, long I, int activation, float *y, int threads) {
    if (activation == GELU_TANH) gate_rows(x, N, I, GELU_TANH, y, threads);
    else gate_rows(x, N, I, SILU, y, threads);
}

/* Turn the halves a, b of the first R numbers of every head: a cos - b sin, b cos + a sin; the others stay. x lies in
 * memory with `stride` numbers to a token, y[N][B][K] densely, cos and sin are [N][R]. */
void rotate(const float *x, long N, long B, long K, long R, long stride, const float *cos, const float *sin, float *y,
            int threads) {
    const long half = R / 2;
#pragma omp parallel for num_threads(N * B * K < FEW ? 1 : threads) schedule(static)
    for (long n = 0; n < N; n++)
        for (long b = 0; b < B; b++) {
            const float *a_in = x + n * stride + b * K, *b_in = a_in + half, *cos_n = cos + n * R, *sin_n = sin + n * R;
            float *restrict y_b = y + (n * B + b) * K;
            for (long k = 0; k < half; k++) y_b[k] = a_in[k] * cos_n[k] - b_in[k] * sin_n[k];
            for (long k = 0; k < half; k++) y_b[half + k] = b_in[k] * cos_n[half + k] + a_in[k] * sin_n[half + k];
            for (long k = R; k < K; k++) y_b[k] = a_in[k];
        }
}

INLINE vector larger(vector a, vector b) {
    const integers above = (integers)(a > b);
    return (vector)(((integers)a & above) | ((integers)b & ~above));
}

/* The place of the largest of each row of x[N][V], the first of equals, and, unless `chance` is null, the softmax there. */
void most_likely(const float *x, long N, long V, int64_t *place, float *chance, int threads) {
#pragma omp parallel for num_threads(N * V < FEW ? 1 : threads) schedule(static)
    for (long n = 0; n < N; n++) {
        const float *x_n = x + n * V;
        vector most[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
        long v = 0;
        for (; v + 4 * LANES <= V; v += 4 * LANES)
            UNROLL for (int i = 0; i < 4; i++) most[i] = larger(((const vector *)(x_n + v))[i], most[i]);
        const vector both = larger(larger(most[0], most[1]), larger(most[2], most[3]));
        float largest = both[0];
        for (int i = 1; i < LANES; i++) largest = both[i] > largest ? both[i] : largest;
        for (; v < V; v++) largest = x_n[v] > largest ? x_n[v] : largest;
        for (v = 0; v + 1 < V && x_n[v] != largest; v++) {}
        place[n] = v;
        if (!chance) continue;
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
        chance[n] = (float)(1.0 / weight);
    }
}
