/* Signs, where gradients pass, and codes of few bits, as bits: packed from floats and unpacked to them.
 *
 * A word of 64 bits holds those of neighbouring channels of a pixel. Where the channels are adjacent in memory, a
 * comparison of a vector gives its bits. Where the pixels are (planes), a lane belongs to a pixel and collects a bit
 * from each plane, so that nothing has to be transposed.
 *
 * bits_rows.h and bits_planes.h hold the kernels; here is what instruction sets differ in: loads and stores of `count`
 * lanes, of 4, 2 (the upper half of a float) and 1 bytes, the bits of comparisons, and a clamp.
 */
#include "bits.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { STRIP = 512, WORD = 64, EIGHTS = 128, VECTORS = 8 };

/* The bits of 8 codes, one in each byte, put side by side; and back. */
typedef struct { int shift[3]; uint64_t mask[4]; } Squeeze;
static Squeeze squeeze_of(int64_t bits) {
    const uint64_t one = (1u << bits) - 1, two = (1u << 2 * bits) - 1, four = ((uint64_t)1 << 4 * bits) - 1;
    const uint64_t eight = bits == 8 ? ~(uint64_t)0 : ((uint64_t)1 << 8 * bits) - 1;
    return (Squeeze){{(int)(8 - bits), (int)(16 - 2 * bits), (int)(32 - 4 * bits)},
                     {one * 0x0101010101010101u, two * 0x0001000100010001u, four * 0x0000000100000001u, eight}};
}

/* ---- the portable form ---- */
#define LOOPS(name)                                                                                                   \
    INLINE name##_Ints name##_words(const uint32_t *from, int count) {                                                \
        name##_Ints x = {0};                                                                                          \
        if (count == 4)                                                                                               \
            memcpy(&x, from, sizeof x);                                                                               \
        else                                                                                                          \
            for (int i = 0; i < count; i++) x[i] = (int32_t)from[i];                                                  \
        return x;                                                                                                     \
    }                                                                                                                 \
    INLINE name##_Ints name##_halves(const uint16_t *from, int count) {                                               \
        name##_Ints x = {0};                                                                                          \
        for (int i = 0; i < count; i++) x[i] = (int32_t)((uint32_t)from[i] << 16);                                    \
        return x;                                                                                                     \
    }                                                                                                                 \
    INLINE name##_Ints name##_bytes(const uint8_t *from, int count) {                                                 \
        name##_Ints x = {0};                                                                                          \
        for (int i = 0; i < count; i++) x[i] = from[i];                                                               \
        return x;                                                                                                     \
    }                                                                                                                 \
    INLINE void name##_to_words(uint32_t *to, name##_Ints x, int count) {                                             \
        if (count == 4)                                                                                               \
            memcpy(to, &x, sizeof x);                                                                                 \
        else                                                                                                          \
            for (int i = 0; i < count; i++) to[i] = (uint32_t)x[i];                                                   \
    }                                                                                                                 \
    INLINE void name##_to_halves(uint16_t *to, name##_Ints x, int count) {                                            \
        for (int i = 0; i < count; i++) to[i] = (uint16_t)((uint32_t)x[i] >> 16);                                     \
    }                                                                                                                 \
    INLINE void name##_to_bytes(uint8_t *to, name##_Ints x, int count) {                                              \
        for (int i = 0; i < count; i++) to[i] = (uint8_t)x[i];                                                        \
    }

/* The bits of comparisons, from `bits`; a clamp in which NaN stays, and a zero that equals a bound. */
#define COMPARED(name, target)                                                                                        \
    INLINE target uint32_t name##_negative(name##_Ints x) { return name##_bits((name##_Ints)((name##_Floats)x < 0)); } \
    INLINE target uint32_t name##_stopped(name##_Ints x, float low, float high) {                                     \
        const name##_Floats f = (name##_Floats)x;                                                                     \
        return name##_bits((name##_Ints)(f <= low) | (name##_Ints)(f >= high));                                       \
    }
#define SELECTED(name)                                                                                                \
    INLINE name##_Ints name##_clamped(name##_Ints x, float low, float high) {                                         \
        const name##_Ints under = (name##_Ints)((name##_Floats)x < low);                                              \
        x = ((name##_Ints)(low - (name##_Floats){0}) & under) | (x & ~under);                                         \
        const name##_Ints over = (name##_Ints)((name##_Floats)x > high);                                              \
        return ((name##_Ints)(high - (name##_Floats){0}) & over) | (x & ~over);                                       \
    }

#define NAME(x) portable_##x
#define TARGET
#define PLACES {1, 2, 4, 8}
typedef int32_t portable_Ints __attribute__((vector_size(16)));
typedef float portable_Floats __attribute__((vector_size(16)));
LOOPS(portable)
INLINE uint32_t portable_bits(portable_Ints is) {
    is &= (portable_Ints)PLACES;
    return (uint32_t)(is[0] | is[1] | is[2] | is[3]);
}
COMPARED(portable, )
SELECTED(portable)
#include "bits_rows.h"
#include "bits_planes.h"

#if defined(__x86_64__)
/* ---- AVX-512 ---- */
#define NAME(x) avx512_##x
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,popcnt")))
#define PLACES {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768}
#define SOME ((uint16_t)((1u << count) - 1))
typedef int32_t avx512_Ints __attribute__((vector_size(64)));
typedef float avx512_Floats __attribute__((vector_size(64)));
INLINE TARGET avx512_Ints avx512_words(const uint32_t *from, int count) {
    return (avx512_Ints)(count == 16 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi32(SOME, from));
}
INLINE TARGET avx512_Ints avx512_halves(const uint16_t *from, int count) {
    __m256i x = count == 16 ? _mm256_loadu_si256((const __m256i *)from) : _mm256_maskz_loadu_epi16(SOME, from);
    return (avx512_Ints)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
}
INLINE TARGET avx512_Ints avx512_bytes(const uint8_t *from, int count) {
    __m128i x = count == 16 ? _mm_loadu_si128((const __m128i *)from) : _mm_maskz_loadu_epi8(SOME, from);
    return (avx512_Ints)_mm512_cvtepu8_epi32(x);
}
INLINE TARGET void avx512_to_words(uint32_t *to, avx512_Ints x, int count) {
    if (count == 16)
        _mm512_storeu_si512(to, (__m512i)x);
    else
        _mm512_mask_storeu_epi32(to, SOME, (__m512i)x);
}
INLINE TARGET void avx512_to_halves(uint16_t *to, avx512_Ints x, int count) {
    __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)x, 16));
    if (count == 16)
        _mm256_storeu_si256((__m256i *)to, halves);
    else
        _mm256_mask_storeu_epi16(to, SOME, halves);
}
INLINE TARGET void avx512_to_bytes(uint8_t *to, avx512_Ints x, int count) {
    __m128i bytes = _mm512_cvtepi32_epi8((__m512i)x);
    if (count == 16)
        _mm_storeu_si128((__m128i *)to, bytes);
    else
        _mm_mask_storeu_epi8(to, SOME, bytes);
}
INLINE TARGET uint32_t avx512_negative(avx512_Ints x) {
    return _mm512_cmp_ps_mask((__m512)x, _mm512_setzero_ps(), _CMP_LT_OQ);
}
INLINE TARGET uint32_t avx512_stopped(avx512_Ints x, float low, float high) {
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(low), _CMP_LE_OQ) |
           _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(high), _CMP_GE_OQ);
}
/* The second operand is returned where one is NaN, and of equal ones. */
INLINE TARGET avx512_Ints avx512_clamped(avx512_Ints x, float low, float high) {
    return (avx512_Ints)_mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), (__m512)x));
}
#include "bits_rows.h"
#include "bits_planes.h"
#undef SOME

/* ---- AVX2: what is less than a vector goes through memory ---- */
#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2,popcnt")))
#define PLACES {1, 2, 4, 8, 16, 32, 64, 128}
typedef int32_t avx2_Ints __attribute__((vector_size(32)));
typedef float avx2_Floats __attribute__((vector_size(32)));
#define SOME_OF(type)                                                                                                 \
    type some[8] = {0};                                                                                               \
    if (count < 8) {                                                                                                  \
        for (int i = 0; i < count; i++) some[i] = from[i];                                                            \
        from = some;                                                                                                  \
    }
INLINE TARGET avx2_Ints avx2_words(const uint32_t *from, int count) {
    SOME_OF(uint32_t)
    return (avx2_Ints)_mm256_loadu_si256((const __m256i *)from);
}
INLINE TARGET avx2_Ints avx2_halves(const uint16_t *from, int count) {
    SOME_OF(uint16_t)
    return (avx2_Ints)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
}
INLINE TARGET avx2_Ints avx2_bytes(const uint8_t *from, int count) {
    SOME_OF(uint8_t)
    return (avx2_Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
}
#undef SOME_OF
INLINE TARGET void avx2_to_words(uint32_t *to, avx2_Ints x, int count) {
    if (count == 8)
        _mm256_storeu_si256((__m256i *)to, (__m256i)x);
    else
        for (int i = 0; i < count; i++) to[i] = (uint32_t)x[i];
}
INLINE TARGET __m128i avx2_narrow(__m256i x) { /* to 16 bits, which all of them have */
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}
INLINE TARGET void avx2_to_halves(uint16_t *to, avx2_Ints x, int count) {
    if (count == 8)
        _mm_storeu_si128((__m128i *)to, avx2_narrow(_mm256_srli_epi32((__m256i)x, 16)));
    else
        for (int i = 0; i < count; i++) to[i] = (uint16_t)((uint32_t)x[i] >> 16);
}
INLINE TARGET void avx2_to_bytes(uint8_t *to, avx2_Ints x, int count) {
    if (count == 8) {
        __m128i halves = avx2_narrow((__m256i)(x & 255));
        _mm_storel_epi64((__m128i *)to, _mm_packus_epi16(halves, halves));
    } else {
        for (int i = 0; i < count; i++) to[i] = (uint8_t)x[i];
    }
}
INLINE TARGET uint32_t avx2_bits(avx2_Ints is) { return (uint32_t)_mm256_movemask_ps((__m256)is); }
COMPARED(avx2, TARGET)
INLINE TARGET avx2_Ints avx2_clamped(avx2_Ints x, float low, float high) {
    return (avx2_Ints)_mm256_min_ps(_mm256_set1_ps(high), _mm256_max_ps(_mm256_set1_ps(low), (__m256)x));
}
#include "bits_rows.h"
#include "bits_planes.h"
#endif

#if defined(__aarch64__)
/* ---- NEON ---- */
#define NAME(x) neon_##x
#define TARGET
#define PLACES {1, 2, 4, 8}
typedef int32_t neon_Ints __attribute__((vector_size(16)));
typedef float neon_Floats __attribute__((vector_size(16)));
LOOPS(neon)
INLINE uint32_t neon_bits(neon_Ints is) { return vaddvq_u32((uint32x4_t)(is & (neon_Ints)PLACES)); }
COMPARED(neon, )
SELECTED(neon)
#include "bits_rows.h"
#include "bits_planes.h"
#endif

DISPATCH(Pass, share, neon)

int pass_over(Pass *pass, ParallelFor parallel_for) {
    const int64_t per_word = WORD / pass->bits, rows = pass->batch * pass->pixels;
    const int is_code = pass->operation == PACK_CODES || pass->operation == UNPACK_CODES;
    pass->words = (pass->channels + per_word - 1) / per_word;
    pass->row_bytes = is_code ? (pass->channels * pass->bits + 7) / 8 : pass->groups * pass->words * 8;
    pass->strips = (pass->pixels + STRIP - 1) / STRIP;
    const int64_t parts = pass->channels_last ? rows : pass->batch * pass->groups * pass->words * pass->strips;
    const int64_t least = pass->grain / (rows * pass->groups * pass->channels / parts + 1) + 1;
    return share_out(parallel_for, parts, least, share, pass);
}
