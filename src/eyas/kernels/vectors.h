/* Vectors of float32 and lane-wise functions.
 *
 * They are GCC's and Clang's own, so one source serves NEON, SSE and AVX: compile for the machine at hand.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__aarch64__)
#include <arm_neon.h>
enum { LANES = 4 };
#elif defined(__AVX__)
#include <immintrin.h>
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef int32_t integers __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef float four __attribute__((vector_size(4 * sizeof(float)), aligned(sizeof(float)), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

INLINE vector all(float x) { return (vector){0} + x; }

/* a0 + a1, a2 + a3, b0 + b1, b2 + b3 */
INLINE four pairs(four a, four b) {
#if defined(__aarch64__)
    return (four)vpaddq_f32((float32x4_t)a, (float32x4_t)b);
#elif defined(__AVX__)
    return (four)_mm_hadd_ps((__m128)a, (__m128)b);
#else
    return (four){a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]};
#endif
}

INLINE four folded(vector x) {
#if defined(__AVX__)
    return (four)_mm256_castps256_ps128((__m256)x) + (four)_mm256_extractf128_ps((__m256)x, 1);
#else
    return (four)x;
#endif
}

/* The sum over the lanes of each of four vectors. */
INLINE four sums(vector a, vector b, vector c, vector d) {
    return pairs(pairs(folded(a), folded(b)), pairs(folded(c), folded(d)));
}

/* e^x for x <= 0, to about one unit of the last place; 0 below the normal numbers, and for -inf. */
INLINE vector exponential(vector x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: added, it leaves the nearest integer in the lowest bits */
    const vector shifted = x * 1.44269504f + magic, n = shifted - magic;
    const vector r = x - n * 0.693359375f - n * -2.12194440e-4f; /* ln 2 in two parts */
    vector p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const integers scaled = (integers)p + ((integers)shifted << 23);
    return (vector)(scaled & ~(integers)(x < -87.0f)); /* NaN stays NaN */
}

/* Without the library call that sets errno. */
INLINE float square_root(float x) {
#if defined(__aarch64__)
    return vget_lane_f32(vsqrt_f32(vdup_n_f32(x)), 0);
#elif defined(__AVX__)
    return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
#else
    return __builtin_sqrtf(x);
#endif
}
