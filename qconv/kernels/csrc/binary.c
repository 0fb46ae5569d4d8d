/* Binary convolution on bits: xor and popcount in place of multiplications.
 *
 * A bit is 1 where the value is -1. Activations are packed along the channels: (N, H, W, groups, words) with
 * words = ceil(channels / 64) and zeros in what is left of the last word. Weights are packed for blocks of 8 output
 * channels, so that one vector holds the same word of all 8: (groups, blocks, kh, kw, words, 8).
 *
 * An accumulator is base - 2 * popcount(x ^ w) over all taps. Taps outside of the picture read zero bits, so +1;
 * base holds what has to be taken away again for a padding of 0 or -1, for each class of rows and columns.
 *
 * Every kernel is written once, in binary_rows.h, over the few operations in which instruction sets differ.
 */
#include "binary.h"
#include "sixteen.h"

#include <stdlib.h>
#include <string.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { BLOCK = 8, MOST_PIXELS = 4, MOST_BLOCKS = 4, LARGE_OUTPUT = 1 << 21 };

typedef float Floats8 __attribute__((vector_size(32), aligned(4)));
typedef int32_t Ints8 __attribute__((vector_size(32), aligned(4)));
typedef float Floats16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t Ints16 __attribute__((vector_size(64), aligned(4)));

/* ---- the portable form: one 64-bit word after another ---- */
INLINE int64_t portable_popcount(uint64_t v) {
#if defined(__POPCNT__) || defined(__aarch64__)
    return __builtin_popcountll(v);
#else
    v -= (v >> 1) & 0x5555555555555555u;
    v = (v & 0x3333333333333333u) + ((v >> 2) & 0x3333333333333333u);
    v = (v + (v >> 4)) & 0x0f0f0f0f0f0f0f0fu;
    return (int64_t)((v * 0x0101010101010101u) >> 56);
#endif
}

typedef struct { int64_t lane[BLOCK]; } PortableBlock;
#define NAME(x) portable_##x
#define TARGET
#define Sum PortableBlock
#define WEIGHT const uint64_t *
INLINE void portable_clear(PortableBlock *sum) { memset(sum, 0, sizeof *sum); }
INLINE const uint64_t *portable_load(const uint64_t *w) { return w; }
INLINE void portable_add(PortableBlock *sum, const uint64_t *w, uint64_t x) {
    for (int i = 0; i < BLOCK; i++) sum->lane[i] += portable_popcount(w[i] ^ x);
}
INLINE void portable_flush(PortableBlock *sum) { (void)sum; }
INLINE void portable_store(const PortableBlock *sum, int32_t *out) {
    for (int i = 0; i < BLOCK; i++) out[i] = (int32_t)sum->lane[i];
}
INLINE void portable_store2(const PortableBlock *sums, int32_t *out) {
    portable_store(sums, out);
    portable_store(sums + 1, out + BLOCK);
}
INLINE void portable_stream(float *to, const Floats16 *value) { memcpy(to, value, sizeof *value); }
#define FLUSH_AFTER 0
#include "binary_rows.h"

#if defined(__x86_64__)
/* ---- AVX-512 VPOPCNTDQ ---- */
#define NAME(x) avx512_##x
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vpopcntdq,fma,popcnt")))
#define Sum __m512i
#define WEIGHT __m512i
INLINE TARGET void avx512_clear(__m512i *sum) { *sum = _mm512_setzero_si512(); }
INLINE TARGET __m512i avx512_load(const uint64_t *w) { return _mm512_loadu_si512(w); }
INLINE TARGET void avx512_add(__m512i *sum, __m512i w, uint64_t x) {
    __m512i differ = _mm512_xor_si512(w, _mm512_set1_epi64((long long)x));
    *sum = _mm512_add_epi64(*sum, _mm512_popcnt_epi64(differ));
}
INLINE TARGET void avx512_flush(__m512i *sum) { (void)sum; }
INLINE TARGET void avx512_store(const __m512i *sum, int32_t *out) {
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi64_epi32(*sum));
}
INLINE TARGET void avx512_store2(const __m512i *sums, int32_t *out) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi32(sums[0], even, sums[1]));
}
INLINE TARGET void avx512_stream(float *to, const Floats16 *value) { _mm512_stream_ps(to, *(const __m512 *)value); }
#define FLUSH_AFTER 0
#include "binary_rows.h"

/* ---- AVX2: bits of a byte from a table of its halves; bytes are summed up before they overflow ---- */
typedef struct { __m256i bytes[2], lanes[2]; } Avx2Sum;
typedef struct { __m256i half[2]; } Avx2Weight;
#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2,fma,popcnt")))
#define Sum Avx2Sum
#define WEIGHT Avx2Weight
INLINE TARGET void avx2_clear(Avx2Sum *sum) {
    for (int i = 0; i < 2; i++) sum->bytes[i] = sum->lanes[i] = _mm256_setzero_si256();
}
INLINE TARGET Avx2Weight avx2_load(const uint64_t *w) {
    Avx2Weight found;
    for (int i = 0; i < 2; i++) found.half[i] = _mm256_loadu_si256((const __m256i *)(w + 4 * i));
    return found;
}
INLINE TARGET void avx2_add(Avx2Sum *sum, Avx2Weight w, uint64_t x) {
    const __m256i table = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2, 3, 1, 2,
                                           2, 3, 2, 3, 3, 4);
    const __m256i low = _mm256_set1_epi8(15);
    for (int i = 0; i < 2; i++) {
        __m256i differ = _mm256_xor_si256(w.half[i], _mm256_set1_epi64x((long long)x));
        __m256i first = _mm256_shuffle_epi8(table, _mm256_and_si256(differ, low));
        __m256i second = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(differ, 4), low));
        sum->bytes[i] = _mm256_add_epi8(sum->bytes[i], _mm256_add_epi8(first, second));
    }
}
INLINE TARGET void avx2_flush(Avx2Sum *sum) {
    for (int i = 0; i < 2; i++) {
        sum->lanes[i] = _mm256_add_epi64(sum->lanes[i], _mm256_sad_epu8(sum->bytes[i], _mm256_setzero_si256()));
        sum->bytes[i] = _mm256_setzero_si256();
    }
}
INLINE TARGET void avx2_store(const Avx2Sum *sum, int32_t *out) {
    const __m256i even = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
    for (int i = 0; i < 2; i++) {
        __m256i packed = _mm256_permutevar8x32_epi32(sum->lanes[i], even);
        _mm_storeu_si128((__m128i *)(out + 4 * i), _mm256_castsi256_si128(packed));
    }
}
INLINE TARGET void avx2_store2(const Avx2Sum *sums, int32_t *out) {
    avx2_store(sums, out);
    avx2_store(sums + 1, out + BLOCK);
}
INLINE TARGET void avx2_stream(float *to, const Floats16 *value) {
    _mm256_stream_ps(to, _mm256_loadu_ps((const float *)value));
    _mm256_stream_ps(to + BLOCK, _mm256_loadu_ps((const float *)value + BLOCK));
}
#define FLUSH_AFTER 31
#include "binary_rows.h"
#endif

#if defined(__aarch64__)
/* ---- NEON ---- */
typedef struct { uint8x16_t bytes[4]; uint64x2_t lanes[4]; } NeonSum;
typedef struct { uint8x16_t quarter[4]; } NeonWeight;
#define NAME(x) neon_##x
#define TARGET
#define Sum NeonSum
#define WEIGHT NeonWeight
INLINE void neon_clear(NeonSum *sum) {
    for (int i = 0; i < 4; i++) {
        sum->bytes[i] = vdupq_n_u8(0);
        sum->lanes[i] = vdupq_n_u64(0);
    }
}
INLINE NeonWeight neon_load(const uint64_t *w) {
    NeonWeight found;
    for (int i = 0; i < 4; i++) found.quarter[i] = vreinterpretq_u8_u64(vld1q_u64(w + 2 * i));
    return found;
}
INLINE void neon_add(NeonSum *sum, NeonWeight w, uint64_t x) {
    uint8x16_t both = vreinterpretq_u8_u64(vdupq_n_u64(x));
    for (int i = 0; i < 4; i++) sum->bytes[i] = vaddq_u8(sum->bytes[i], vcntq_u8(veorq_u8(w.quarter[i], both)));
}
INLINE void neon_flush(NeonSum *sum) {
    for (int i = 0; i < 4; i++) {
        sum->lanes[i] = vpadalq_u32(sum->lanes[i], vpaddlq_u16(vpaddlq_u8(sum->bytes[i])));
        sum->bytes[i] = vdupq_n_u8(0);
    }
}
INLINE void neon_store(const NeonSum *sum, int32_t *out) {
    for (int i = 0; i < 4; i++) vst1_s32(out + 2 * i, vreinterpret_s32_u32(vmovn_u64(sum->lanes[i])));
}
INLINE void neon_store2(const NeonSum *sums, int32_t *out) {
    neon_store(sums, out);
    neon_store(sums + 1, out + BLOCK);
}
INLINE void neon_stream(float *to, const Floats16 *value) { memcpy(to, value, sizeof *value); }
#define FLUSH_AFTER 31
#include "binary_rows.h"
#endif

DISPATCH(Conv, conv_rows, neon)

/* Which taps of a kernel lie inside at each place of the output, as classes of equal bits; returns their number. */
static int64_t classify(int64_t size, int64_t kernel, int64_t stride, int64_t dilation, int64_t before, int64_t places,
                        int32_t *kind, uint64_t *masks) {
    int64_t count = 0;
    for (int64_t place = 0; place < places; place++) {
        uint64_t mask = 0;
        for (int64_t tap = 0; tap < kernel; tap++) {
            const int64_t at = place * stride + tap * dilation - before;
            mask |= (uint64_t)(at >= 0 && at < size) << tap;
        }
        int64_t found = 0;
        while (found < count && masks[found] != mask) found++;
        if (found == count) masks[count++] = mask;
        kind[place] = (int32_t)found;
    }
    return count;
}

/* The accumulators of an output without a difference, from which twice the count of differences is taken away. */
static int fill_base(Conv *conv) {
    const int64_t channels = conv->groups * conv->blocks * BLOCK, padded = conv->blocks * BLOCK;
    const int64_t most = conv->out_h > conv->out_w ? conv->out_h : conv->out_w;
    uint64_t *masks = malloc((size_t)(2 * most) * sizeof *masks);
    conv->row_class = malloc((size_t)(conv->out_h + conv->out_w) * sizeof *conv->row_class);
    if (masks == NULL || conv->row_class == NULL) {
        free(masks);
        return 0;
    }
    conv->column_class = conv->row_class + conv->out_h;
    const int64_t rows = classify(conv->height, conv->kernel_h, conv->stride_h, conv->dilation_h, conv->top,
                                  conv->out_h, conv->row_class, masks);
    const int64_t columns = classify(conv->width, conv->kernel_w, conv->stride_w, conv->dilation_w, conv->left,
                                     conv->out_w, conv->column_class, masks + most);
    conv->column_classes = columns;
    conv->base = malloc((size_t)(rows * columns * channels) * sizeof *conv->base);
    if (conv->base != NULL) {
        const int32_t full = (int32_t)(conv->in_channels * conv->kernel_h * conv->kernel_w);
        const int32_t times = 1 - (int32_t)conv->padding_value; /* of +1, which zero bits stand for, too much */
        for (int64_t kind = 0; kind < rows * columns; kind++) {
            int32_t *base = conv->base + kind * channels;
            for (int64_t c = 0; c < channels; c++) base[c] = full;
            for (int64_t i = 0; i < conv->kernel_h && times; i++)
                for (int64_t j = 0; j < conv->kernel_w; j++) {
                    if (masks[kind / columns] >> i & masks[most + kind % columns] >> j & 1) continue;
                    for (int64_t group = 0; group < conv->groups; group++) {
                        const int64_t tap = (group * conv->kernel_h + i) * conv->kernel_w + j;
                        const int32_t *sums = conv->tap_sums + tap * padded;
                        for (int64_t c = 0; c < padded; c++) base[group * padded + c] -= times * sums[c];
                    }
                }
        }
    }
    free(masks);
    return conv->base != NULL;
}

int convolve(Conv *conv, ParallelFor parallel_for) {
    const int64_t channels = conv->groups * conv->out_channels, rows = conv->batch * conv->out_h;
    const int64_t bytes = rows * conv->out_w * channels * (int64_t)sizeof(float);
    conv->past_caches = bytes >= LARGE_OUTPUT && conv->out_channels % (2 * BLOCK) == 0 &&
                        (uintptr_t)conv->output % sizeof(Floats16) == 0;
    conv->failed = !fill_base(conv);
    if (!conv->failed && share_out(parallel_for, rows, conv->grain, conv_rows, conv)) conv->failed = 1;
    free(conv->base);
    free(conv->row_class);
    return conv->failed;
}
