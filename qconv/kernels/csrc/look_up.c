/* The gradients of a binary convolution by table look-up, in float32.
 *
 * Of each product one factor is +-1, so FOLD factors g of the other side have 2^FOLD sums +-g0 +-g1 +- ..., half of which
 * are the negated other half. A table holds the ENTRIES = 2^(FOLD - 1) sums in which the last sign is +; one permute looks
 * up as many of them as a vector has lanes, and one multiply-add by the last sign adds LANES * FOLD products.
 *
 * A code, one byte, is what is looked up: bit j is the sign of factor j times that of the last, bit 7 that of the last.
 * For grad_input the factors are channels of grad_output, and the codes those of the weight. For grad_weight they are the
 * same pixel of FOLD pictures, so that no geometry parts them, and the codes those of the input.
 *
 * Both gradients are written once, in look_up_rows.h, over the few operations in which instruction sets differ.
 */
#include "look_up.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define CEIL(a, b) (((a) + (b) - 1) / (b))

enum { BLOCK = 8, FIRST_CACHE = 24 << 10 };

/* Steps that follow each other in memory: of each, a block of codes and some tables. */
typedef struct {
    const uint8_t *codes;
    const float *tables;
    int64_t count;
} Run;

/* Where tables go, one after another: `run` of them with a step, then the next ones further on. */
typedef struct {
    float *at;
    int64_t step, run, next, done;
} Places;

INLINE float *next_place(Places *places) {
    float *at = places->at;
    places->at += places->step;
    if (++places->done == places->run) {
        places->at += places->next - places->run * places->step;
        places->done = 0;
    }
    return at;
}

static void *allocate(int64_t bytes) { return aligned_alloc(64, (size_t)CEIL(bytes, 64) * 64); }

#if defined(__x86_64__)
/* ---- AVX-512: 16 entries of 5 factors ---- */
#define NAME(x) avx512_##x
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#define LANES 16
#define ENTRIES 16
#define FOLD 5
#define ROWS 12
#define VECTORS 2
#define Floats __m512
#define Table __m512
typedef struct { __m512i entry; __m512 sign; } Avx512Choice;
#define Choice Avx512Choice
INLINE TARGET __m512 avx512_zero(void) { return _mm512_setzero_ps(); }
INLINE TARGET __m512 avx512_load(const float *x) { return _mm512_loadu_ps(x); }
INLINE TARGET void avx512_store(float *to, __m512 x) { _mm512_storeu_ps(to, x); }
INLINE TARGET __m512 avx512_table(const float *x) { return _mm512_load_ps(x); }
INLINE TARGET Avx512Choice avx512_choose(const uint8_t *code) {
    const __m512i x = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)code));
    const __m512i one = _mm512_castps_si512(_mm512_set1_ps(1)), top = _mm512_set1_epi32(INT32_MIN);
    return (Avx512Choice){x, _mm512_castsi512_ps(_mm512_ternarylogic_epi32(x, top, one, 0xEA))}; /* x & top | one */
}
INLINE TARGET __m512 avx512_add(__m512 sum, __m512 table, Avx512Choice choice) {
    return _mm512_fmadd_ps(_mm512_permutexvar_ps(choice.entry, table), choice.sign, sum);
}
INLINE TARGET __m512 avx512_some(const float *x, int64_t count) { /* the first lanes; the others are 0 */
    const unsigned lanes = count >= 16 ? 16 : count < 0 ? 0 : (unsigned)count;
    return _mm512_maskz_loadu_ps((__mmask16)((1u << lanes) - 1), x);
}
INLINE TARGET __m512 avx512_keep(__m512 x, unsigned bits) { return _mm512_maskz_mov_ps((__mmask16)bits, x); }
INLINE TARGET void avx512_encode(const uint64_t words[5], uint8_t bytes[64]) {
    __m512i code = _mm512_maskz_set1_epi8(words[4], -128);
    for (int j = 0; j < 4; j++)
        code = _mm512_mask_add_epi8(code, words[j] ^ words[4], code, _mm512_set1_epi8((char)(1 << j)));
    _mm512_storeu_si512(bytes, code);
}
INLINE TARGET void avx512_tables(const float *const x[5], int64_t count, Places to) {
    const __m512 third = _mm512_mask_blend_ps(0xF0F0, _mm512_set1_ps(1), _mm512_set1_ps(-1));
    const __m512 fourth = _mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(1), _mm512_set1_ps(-1));
    for (int64_t start = 0; start < count; start += 16) {
        const int lanes = count - start < 16 ? (int)(count - start) : 16;
        const __m512 a = avx512_some(x[0] + start, lanes), b = avx512_some(x[1] + start, lanes);
        const __m512 last = avx512_some(x[4] + start, lanes);
        const __m512 sum = _mm512_add_ps(a, b), difference = _mm512_sub_ps(b, a);
        const __m512 e0 = _mm512_add_ps(last, sum), e1 = _mm512_add_ps(last, difference);
        const __m512 e2 = _mm512_sub_ps(last, difference), e3 = _mm512_sub_ps(last, sum);
        const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(e0, e1)), low23 = _mm512_castps_pd(_mm512_unpacklo_ps(e2, e3));
        const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(e0, e1)), high23 = _mm512_castps_pd(_mm512_unpackhi_ps(e2, e3));
        _Alignas(64) double four[4][8]; /* lane 4 i + j of the entries is at [j][2 i] */
        _mm512_store_pd(four[0], _mm512_unpacklo_pd(low01, low23));
        _mm512_store_pd(four[1], _mm512_unpackhi_pd(low01, low23));
        _mm512_store_pd(four[2], _mm512_unpacklo_pd(high01, high23));
        _mm512_store_pd(four[3], _mm512_unpackhi_pd(high01, high23));
        for (int i = 0; i < lanes; i++) {
            __m512 table = _mm512_broadcast_f32x4(_mm_load_ps((const float *)&four[i % 4][i / 4 * 2]));
            table = _mm512_fmadd_ps(_mm512_set1_ps(x[2][start + i]), third, table);
            _mm512_store_ps(next_place(&to), _mm512_fmadd_ps(_mm512_set1_ps(x[3][start + i]), fourth, table));
        }
    }
}
#include "look_up_rows.h"

#endif

/* ---- the codes of 8 entries of 4 factors ---- */
INLINE uint64_t bits_of_bytes(uint64_t byte) { /* bit i in byte i */
    const uint64_t spread = (byte & 255) * 0x0101010101010101u & 0x8040201008040201u;
    return (spread + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
}
INLINE void encode4(const uint64_t words[4], uint8_t bytes[64]) {
    for (int i = 0; i < 64; i += 8) {
        uint64_t code = bits_of_bytes(words[3] >> i) << 7;
        for (int j = 0; j < 3; j++) code |= bits_of_bytes((words[j] ^ words[3]) >> i) << j;
        memcpy(bytes + i, &code, sizeof code);
    }
}

#if defined(__x86_64__)
/* ---- AVX2 ---- */
#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define ENTRIES 8
#define FOLD 4
#define ROWS 12
#define VECTORS 1
#define Floats __m256
#define Table __m256
typedef struct { __m256i entry; __m256 sign; } Avx2Choice;
#define Choice Avx2Choice
INLINE TARGET __m256 avx2_zero(void) { return _mm256_setzero_ps(); }
INLINE TARGET __m256 avx2_load(const float *x) { return _mm256_loadu_ps(x); }
INLINE TARGET void avx2_store(float *to, __m256 x) { _mm256_storeu_ps(to, x); }
INLINE TARGET __m256 avx2_table(const float *x) { return _mm256_load_ps(x); }
INLINE TARGET Avx2Choice avx2_choose(const uint8_t *code) {
    const __m256i x = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)code));
    const __m256 top = _mm256_set1_ps(-0.0f);
    return (Avx2Choice){x, _mm256_or_ps(_mm256_and_ps(_mm256_castsi256_ps(x), top), _mm256_set1_ps(1))};
}
INLINE TARGET __m256 avx2_add(__m256 sum, __m256 table, Avx2Choice choice) {
    return _mm256_fmadd_ps(_mm256_permutevar8x32_ps(table, choice.entry), choice.sign, sum);
}
INLINE TARGET __m256 avx2_some(const float *x, int64_t count) {
    const int lanes = count >= 8 ? 8 : count < 0 ? 0 : (int)count;
    const __m256i each = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_ps(x, _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes), each));
}
INLINE TARGET __m256 avx2_keep(__m256 x, unsigned bits) {
    const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i chosen = _mm256_and_si256(_mm256_set1_epi32((int)bits), lanes);
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(chosen, lanes)));
}
INLINE TARGET void avx2_encode(const uint64_t words[4], uint8_t bytes[64]) { encode4(words, bytes); }
INLINE TARGET void avx2_tables(const float *const x[4], int64_t count, Places to) {
    const __m256 third = _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1);
    for (int64_t start = 0; start < count; start += 8) {
        const int lanes = count - start < 8 ? (int)(count - start) : 8;
        const __m256 a = avx2_some(x[0] + start, lanes), b = avx2_some(x[1] + start, lanes);
        const __m256 last = avx2_some(x[3] + start, lanes);
        const __m256 sum = _mm256_add_ps(a, b), difference = _mm256_sub_ps(b, a);
        const __m256 e0 = _mm256_add_ps(last, sum), e1 = _mm256_add_ps(last, difference);
        const __m256 e2 = _mm256_sub_ps(last, difference), e3 = _mm256_sub_ps(last, sum);
        const __m256d low01 = _mm256_castps_pd(_mm256_unpacklo_ps(e0, e1)), low23 = _mm256_castps_pd(_mm256_unpacklo_ps(e2, e3));
        const __m256d high01 = _mm256_castps_pd(_mm256_unpackhi_ps(e0, e1)), high23 = _mm256_castps_pd(_mm256_unpackhi_ps(e2, e3));
        _Alignas(32) double four[4][4]; /* lane 4 i + j of the entries is at [j][2 i] */
        _mm256_store_pd(four[0], _mm256_unpacklo_pd(low01, low23));
        _mm256_store_pd(four[1], _mm256_unpackhi_pd(low01, low23));
        _mm256_store_pd(four[2], _mm256_unpacklo_pd(high01, high23));
        _mm256_store_pd(four[3], _mm256_unpackhi_pd(high01, high23));
        for (int i = 0; i < lanes; i++) {
            const __m256 table = _mm256_broadcast_ps((const __m128 *)&four[i % 4][i / 4 * 2]);
            _mm256_store_ps(next_place(&to), _mm256_fmadd_ps(_mm256_set1_ps(x[2][start + i]), third, table));
        }
    }
}
#include "look_up_rows.h"
#endif

#if defined(__aarch64__)
/* ---- NEON: tables are looked up by bytes ---- */
#define NAME(x) neon_##x
#define TARGET
#define LANES 4
#define ENTRIES 8
#define FOLD 4
#define ROWS 12
#define VECTORS 2
#define Floats float32x4_t
#define Table uint8x16x2_t
typedef struct { uint8x16_t entry; float32x4_t sign; } NeonChoice;
#define Choice NeonChoice
INLINE float32x4_t neon_zero(void) { return vdupq_n_f32(0); }
INLINE float32x4_t neon_load(const float *x) { return vld1q_f32(x); }
INLINE void neon_store(float *to, float32x4_t x) { vst1q_f32(to, x); }
INLINE uint8x16x2_t neon_table(const float *x) {
    return (uint8x16x2_t){{vld1q_u8((const uint8_t *)x), vld1q_u8((const uint8_t *)x + 16)}};
}
INLINE NeonChoice neon_choose(const uint8_t *code) {
    uint32_t four;
    memcpy(&four, code, sizeof four);
    const uint32x4_t x = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
    const uint32x4_t entry = vmlaq_n_u32(vdupq_n_u32(0x03020100), vandq_u32(x, vdupq_n_u32(7)), 0x04040404);
    const uint32x4_t sign = vbslq_u32(vdupq_n_u32(1u << 31), vshlq_n_u32(x, 24), vreinterpretq_u32_f32(vdupq_n_f32(1)));
    return (NeonChoice){vreinterpretq_u8_u32(entry), vreinterpretq_f32_u32(sign)};
}
INLINE float32x4_t neon_add(float32x4_t sum, uint8x16x2_t table, NeonChoice choice) {
    return vfmaq_f32(sum, vreinterpretq_f32_u8(vqtbl2q_u8(table, choice.entry)), choice.sign);
}
INLINE float32x4_t neon_some(const float *x, int64_t count) {
    float lanes[4] = {0, 0, 0, 0};
    for (int i = 0; i < 4 && i < count; i++) lanes[i] = x[i];
    return vld1q_f32(lanes);
}
INLINE float32x4_t neon_keep(float32x4_t x, unsigned bits) {
    const uint32x4_t lanes = {1, 2, 4, 8};
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), vtstq_u32(vdupq_n_u32(bits), lanes)));
}
INLINE void neon_encode(const uint64_t words[4], uint8_t bytes[64]) { encode4(words, bytes); }
INLINE void neon_tables(const float *const x[4], int64_t count, Places to) {
    const float32x4_t first = {1, -1, 1, -1}, second = {1, 1, -1, -1};
    for (int64_t i = 0; i < count; i++) {
        float *at = next_place(&to);
        float32x4_t half = vfmaq_n_f32(vdupq_n_f32(x[3][i]), first, x[0][i]);
        half = vfmaq_n_f32(half, second, x[1][i]);
        vst1q_f32(at, vaddq_f32(half, vdupq_n_f32(x[2][i])));
        vst1q_f32(at + 4, vsubq_f32(half, vdupq_n_f32(x[2][i])));
    }
}
#include "look_up_rows.h"
#endif

typedef void (*Part)(Gradient *gradient, int64_t start, int64_t stop);

/* What differs between instruction sets: the sizes, and the four loops over them. */
typedef struct {
    int64_t wide, fold, rows;
    Part weight_codes, input_rows, input_codes, weight_blocks;
} Kernels;

static int kernels_of(int64_t isa, Kernels *kernels) {
#define KERNELS(name, wide, fold)                                                                                    \
    (Kernels){wide, fold, 12, name##_weight_codes, name##_input_rows, name##_input_codes, name##_weight_blocks}
    switch (isa) {
#if defined(__x86_64__)
    case AVX512: *kernels = KERNELS(avx512, 32, 5); return 1;
    case AVX2: *kernels = KERNELS(avx2, 8, 4); return 1;
#elif defined(__aarch64__)
    case NEON: *kernels = KERNELS(neon, 8, 4); return 1;
#endif
    default: return 0;
    }
#undef KERNELS
}

typedef struct {
    Part part;
    Gradient *gradient;
} Work;

static void work(int64_t start, int64_t stop, void *given) {
    const Work *one = given;
    one->part(one->gradient, start, stop);
}

static void share(Part part, Gradient *gradient, int64_t count, int64_t threads, ParallelFor parallel_for) {
    Work one = {part, gradient};
    if (parallel_for == NULL || threads < 2 || count < 2)
        part(gradient, 0, count);
    else if (parallel_for(0, count, 1, work, &one))
        gradient->failed = 1;
}

int look_up_grad_input(Gradient *gradient, int64_t threads, ParallelFor parallel_for) {
    Kernels kernels;
    if (!kernels_of(gradient->isa, &kernels)) return 1;
    const int64_t taps = gradient->kernel_h * gradient->kernel_w, tables = CEIL(gradient->out_channels, kernels.fold);
    const int64_t wides = CEIL(gradient->in_channels, kernels.wide), width = CEIL(gradient->width, gradient->stride_w);
    gradient->failed = 0;
    gradient->images = 1;
    for (int64_t n = 2; n <= gradient->batch && n <= kernels.rows && width < kernels.rows; n++) /* tiles as full as can be */
        if (n * width * CEIL(gradient->images * width, kernels.rows) >
            gradient->images * width * CEIL(n * width, kernels.rows))
            gradient->images = n;
    gradient->codes = malloc((size_t)(gradient->groups * wides * taps * tables * kernels.wide));
    if (gradient->codes == NULL) return 1;
    share(kernels.weight_codes, gradient, gradient->groups * taps, threads, parallel_for);
    share(kernels.input_rows, gradient, CEIL(gradient->batch, gradient->images) * gradient->height, threads, parallel_for);
    free(gradient->codes);
    return gradient->failed;
}

int look_up_grad_weight(Gradient *gradient, int64_t threads, ParallelFor parallel_for) {
    Kernels kernels;
    if (!kernels_of(gradient->isa, &kernels)) return 1;
    const int64_t folds = CEIL(gradient->batch, kernels.fold), wides = CEIL(gradient->in_channels, kernels.wide);
    const int64_t blocks = gradient->groups * CEIL(gradient->out_channels, kernels.rows);
    const int framed = gradient->padding_value != 0;
    gradient->failed = 0;
    gradient->grid_top = framed ? gradient->top : 0;
    gradient->grid_left = framed ? gradient->left : 0;
    gradient->grid_h = framed ? (gradient->out_h - 1) * gradient->stride_h + (gradient->kernel_h - 1) * gradient->dilation_h + 1
                              : gradient->height;
    gradient->grid_w = framed ? (gradient->out_w - 1) * gradient->stride_w + (gradient->kernel_w - 1) * gradient->dilation_w + 1
                              : gradient->width;
    gradient->parts = CEIL(4 * threads, blocks) < wides ? CEIL(4 * threads, blocks) : wides;
    if (threads < 2) gradient->parts = 1;
    gradient->codes = malloc((size_t)(gradient->groups * wides * folds * gradient->grid_h * gradient->grid_w * kernels.wide));
    if (gradient->codes == NULL) return 1;
    share(kernels.input_codes, gradient, folds * gradient->grid_h, threads, parallel_for);
    share(kernels.weight_blocks, gradient, blocks * gradient->parts, threads, parallel_for);
    free(gradient->codes);
    return gradient->failed;
}
