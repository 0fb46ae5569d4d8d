/* Rounding to levels, and the gradients of numbers and step through it: each in one pass over memory.
 *
 * Adding ROUNDS leaves no bits for a fraction: it rounds to the nearest whole number, half to even, which is then in the
 * low bits, of negative numbers too.
 */
#include "levels.h"
#include "binary.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define ROUNDS 12582912.0f /* 1.5 * 2^23 */

INLINE float clamped(float x, float low, float high) { /* NaN stays */
    const float raised = x < low ? low : x;
    return raised > high ? high : raised;
}

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

#define NAME(x) portable_##x
#define TARGET
#include "levels_rows.h"

#if defined(__x86_64__)
#define NAME(x) avx512_##x
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#include "levels_rows.h"

#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2")))
#include "levels_rows.h"
#endif

static void pass(int64_t start, int64_t stop, void *given) {
    const Levels *of = given;
#if defined(__x86_64__)
    if (of->isa == AVX512)
        avx512_pass(of, start, stop);
    else if (of->isa == AVX2)
        avx2_pass(of, start, stop);
    else
#endif
        portable_pass(of, start, stop);
}

int levels(Levels *of, ParallelFor parallel_for) {
    const int64_t count = of->rows * of->length;
    if (parallel_for != NULL && count > of->grain) return parallel_for(0, count, of->grain, pass, of) != 0;
    pass(0, count, of);
    return 0;
}
