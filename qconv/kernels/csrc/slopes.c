/* The gradient through the derivative of a piecewise quadratic, grad · max(2 - 2|input|, 0), in one pass over memory.
 *
 * A bfloat16 is rounded after the difference and after the product, as torch's operators do it.
 */
#include "slopes.h"
#include "binary.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE float above_zero(float x) { return x < 0 ? 0 : x; } /* NaN stays */

/* The float with these upper bits, and the upper bits of the nearest bfloat16. */
INLINE float widened(uint32_t upper) {
    const uint32_t bits = upper << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
INLINE uint32_t rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest; /* adding could make an infinity of a NaN */
}

#define NAME(x) portable_##x
#define TARGET
#include "slopes_rows.h"

#if defined(__x86_64__)
#define NAME(x) avx512_##x
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#include "slopes_rows.h"

#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2")))
#include "slopes_rows.h"
#endif

static void pass(int64_t start, int64_t stop, void *given) {
    const Slope *slope = given;
#if defined(__x86_64__)
    if (slope->isa == AVX512)
        avx512_pass(slope, start, stop);
    else if (slope->isa == AVX2)
        avx2_pass(slope, start, stop);
    else
#endif
        portable_pass(slope, start, stop);
}

int approx_sign_backward(Slope *slope, ParallelFor parallel_for) {
    if (parallel_for != NULL && slope->count > slope->grain)
        return parallel_for(0, slope->count, slope->grain, pass, slope) != 0;
    pass(0, slope->count, slope);
    return 0;
}
