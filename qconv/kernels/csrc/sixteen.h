/* The signs of 16 floats as bits, by each instruction set. */
#pragma once
#include "kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

INLINE uint64_t portable_sixteen(const float *x) {
    uint64_t bits = 0;
    for (int i = 0; i < 16; i++) bits |= (uint64_t)(x[i] < 0) << i;
    return bits;
}

#if defined(__x86_64__)
INLINE __attribute__((target("avx512f"))) uint64_t avx512_sixteen(const float *x) {
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(x), _mm512_setzero_ps(), _CMP_LT_OQ);
}
INLINE __attribute__((target("avx2"))) uint64_t avx2_sixteen(const float *x) {
    const __m256 zero = _mm256_setzero_ps();
    unsigned low = (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x), zero, _CMP_LT_OQ));
    unsigned high = (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + 8), zero, _CMP_LT_OQ));
    return low | high << 8;
}
#elif defined(__aarch64__)
INLINE uint64_t neon_sixteen(const float *x) { return portable_sixteen(x); }
#endif
