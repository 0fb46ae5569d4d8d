/* Convolutions of numbers with signs by table look-up, in float32, of numbers that are float32 or bfloat16.
 *
 * Of each product one factor is +-1, so FOLD factors g of the other side have 2^FOLD sums +-g0 +-g1 +- ..., half of
 * which are the negated other half. A table holds the ENTRIES = 2^(FOLD - 1) sums in which the last sign is +; one
 * permute looks up as many of them as a vector has lanes, and one multiply-add by the last sign adds LANES * FOLD
 * products.
 *
 * A code, one byte, is what is looked up: bit j is the sign of factor j times that of the last, bit 7 that of the last.
 * With a weight of signs the factors are channels of a pixel, and the codes those of the weight: in the forward, and in
 * the gradient of the input, where the pixels are those of grad_output. For grad_weight they are the same pixel of FOLD
 * pictures, so that no geometry parts them, and the codes those of the input.
 *
 * All are written once, in look_up_rows.h, over the few operations in which instruction sets differ.
 */
#include "look_up.h"
#include "bfloat16.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define CEIL(a, b) (((a) + (b) - 1) / (b))

enum { BLOCK = 8, FIRST_CACHE = 24 << 10, SECOND_CACHE = 256 << 10 };

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

INLINE int64_t floor_of(int64_t a, int64_t b) { return a >= 0 ? a / b : -CEIL(-a, b); }

/* Bit i of word j becomes bit j of word i. */
static void transpose(uint64_t words[64]) {
    uint64_t mask = UINT64_C(0x00000000ffffffff);
    for (int j = 32; j; j >>= 1, mask ^= mask << j)
        for (int k = 0; k < 64; k = (k + j + 1) & ~j) {
            const uint64_t swap = (words[k] >> j ^ words[k + j]) & mask;
            words[k] ^= swap << j;
            words[k + j] ^= swap;
        }
}

/* The signs of a tap of the weight's group, (channels of the numbers, words of channels of the output). */
static void rows_of_signs(const LookUp *g, int64_t group, int64_t tap, uint64_t *rows) {
    const int64_t taps = g->kernel_h * g->kernel_w, outs = CEIL(g->out_channels, 64), all = g->blocks * BLOCK;
    const uint64_t *signs = g->signs + (group * g->blocks * taps + tap) * g->words * BLOCK;
#define SIGNS(o, word) signs[((o) / BLOCK * taps * g->words + (word)) * BLOCK + (o) % BLOCK]
    if (!g->forward) {
        for (int64_t o = 0; o < g->out_channels; o++)
            for (int64_t word = 0; word < g->words; word++) rows[o * g->words + word] = SIGNS(o, word);
        return;
    }
    for (int64_t word = 0; word < g->words; word++)
        for (int64_t out = 0; out < outs; out++) {
            uint64_t square[64];
            for (int64_t i = 0; i < 64; i++) square[i] = out * 64 + i < all ? SIGNS(out * 64 + i, word) : 0;
            transpose(square);
            for (int64_t i = 0; i < 64; i++) rows[(word * 64 + i) * outs + out] = square[i];
        }
#undef SIGNS
}

/* Where the tables of a row of numbers go: (groups, tables, strips, columns, pictures, ENTRIES). Strip s holds the
 * columns s, s + step, ..., after a margin: those that neighbours of the output read at one tap are neighbours. */
typedef struct {
    int64_t margin, columns; /* of a strip */
    int64_t strips, used;    /* bit s of `used`: some tap reads strip s; with more strips than bits all count as read */
} Strips;

static Strips strips_of(const LookUp *g) {
    const Axis x = g->across;
    Strips strips = {0, CEIL(g->from_w, x.step), x.step, x.step > 62 ? ~INT64_C(0) : 0};
    int64_t last = strips.columns;
    for (int64_t phase = 0; phase < x.every && phase < g->to_w; phase++)
        for (int64_t kw = 0; kw < g->kernel_w; kw++) {
            const int64_t c = x.first + phase * x.step + kw * x.tap;
            if (c % x.every) continue;
            const int64_t column = floor_of(c / x.every, x.step), strip = c / x.every - column * x.step;
            const int64_t end = column + CEIL(g->to_w - phase, x.every);
            if (-column > strips.margin) strips.margin = -column;
            if (end > last) last = end;
            if (x.step <= 62) strips.used |= INT64_C(1) << strip;
        }
    strips.columns = strips.margin + last;
    return strips;
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
        const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(e0, e1));
        const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(e2, e3));
        const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(e0, e1));
        const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(e2, e3));
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
        const __m256d low01 = _mm256_castps_pd(_mm256_unpacklo_ps(e0, e1));
        const __m256d low23 = _mm256_castps_pd(_mm256_unpacklo_ps(e2, e3));
        const __m256d high01 = _mm256_castps_pd(_mm256_unpackhi_ps(e0, e1));
        const __m256d high23 = _mm256_castps_pd(_mm256_unpackhi_ps(e2, e3));
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

typedef void (*Part)(int64_t start, int64_t stop, void *call);

/* What differs between instruction sets: the sizes, and the four loops over them. */
typedef struct {
    int64_t wide, fold, rows;
    Part weight_codes, pixel_rows, input_codes, weight_blocks;
} Kernels;

static int kernels_of(int64_t isa, Kernels *kernels) {
#define KERNELS(name, wide, fold)                                                                                    \
    (Kernels){wide, fold, 12, name##_weight_codes, name##_pixel_rows, name##_input_codes, name##_weight_blocks}
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

/* Calls `part` for 0 to count, on several threads if there are some. */
static void share(LookUp *call, Part part, int64_t count, ParallelFor parallel_for) {
    if (share_out(call->threads < 2 ? NULL : parallel_for, count, 1, part, call)) call->failed = 1;
}

/* Sums over the taps of the weight, once it is known which pixels they read. */
static int look_up_pixels(LookUp *call, ParallelFor parallel_for) {
    Kernels kernels;
    if (!kernels_of(call->isa, &kernels)) return 1;
    const int64_t taps = call->kernel_h * call->kernel_w, tables = CEIL(call->from_channels, kernels.fold);
    const int64_t wides = CEIL(call->to_channels, kernels.wide), width = CEIL(call->to_w, call->across.every);
    call->failed = 0;
    call->images = 1;
    for (int64_t n = 2; n <= call->batch && n <= kernels.rows && width < kernels.rows; n++) /* fuller tiles */
        if (n * width * CEIL(call->images * width, kernels.rows) > call->images * width * CEIL(n * width, kernels.rows))
            call->images = n;
    call->codes = malloc((size_t)(call->groups * wides * taps * tables * kernels.wide));
    if (call->codes == NULL) return 1;
    share(call, kernels.weight_codes, call->groups * taps, parallel_for);
    if (!call->failed) share(call, kernels.pixel_rows, CEIL(call->batch, call->images) * call->to_h, parallel_for);
    free(call->codes);
    return call->failed;
}

int sign_conv2d(LookUp *call, ParallelFor parallel_for) {
    call->forward = 1;
    call->down = (Axis){-call->top, call->stride_h, call->dilation_h, 1};
    call->across = (Axis){-call->left, call->stride_w, call->dilation_w, 1};
    call->from_h = call->height, call->from_w = call->width, call->from_channels = call->in_channels;
    call->to_h = call->out_h, call->to_w = call->out_w, call->to_channels = call->out_channels;
    return look_up_pixels(call, parallel_for);
}

int sign_grad_input(LookUp *call, ParallelFor parallel_for) {
    call->forward = 0;
    call->down = (Axis){call->top, 1, -call->dilation_h, call->stride_h};
    call->across = (Axis){call->left, 1, -call->dilation_w, call->stride_w};
    call->from_h = call->out_h, call->from_w = call->out_w, call->from_channels = call->out_channels;
    call->to_h = call->height, call->to_w = call->width, call->to_channels = call->in_channels;
    return look_up_pixels(call, parallel_for);
}

/* Into how many parts to cut the input channels. Fewer leave threads without work; each needs the tables of its block,
 * and those of a position take about as long as what 9 taps of one block of input channels look up in them. */
static int64_t parts_of(int64_t blocks, int64_t wides, int64_t taps, int64_t threads) {
    int64_t best = 1, least = INT64_MAX;
    for (int64_t parts = 1; parts <= wides && parts <= 64; parts++) {
        const int64_t time = CEIL(blocks * parts, threads) * (9 + taps * CEIL(wides, parts));
        if (time < least) {
            least = time;
            best = parts;
        }
    }
    return best;
}

int sign_grad_weight(LookUp *call, ParallelFor parallel_for) {
    Kernels kernels;
    if (!kernels_of(call->isa, &kernels)) return 1;
    const int64_t folds = CEIL(call->batch, kernels.fold), wides = CEIL(call->in_channels, kernels.wide);
    const int64_t blocks = call->groups * CEIL(call->out_channels, kernels.rows);
    const int framed = call->padding_value != 0;
    call->failed = 0;
    call->grid_top = framed ? call->top : 0;
    call->grid_left = framed ? call->left : 0;
    call->grid_h = framed ? (call->out_h - 1) * call->stride_h + (call->kernel_h - 1) * call->dilation_h + 1
                              : call->height;
    call->grid_w = framed ? (call->out_w - 1) * call->stride_w + (call->kernel_w - 1) * call->dilation_w + 1
                              : call->width;
    call->parts = parts_of(blocks, wides, call->kernel_h * call->kernel_w, call->threads < 1 ? 1 : call->threads);
    call->codes = malloc((size_t)(call->groups * wides * folds * call->grid_h * call->grid_w * kernels.wide));
    if (call->codes == NULL) return 1;
    share(call, kernels.input_codes, folds * call->grid_h, parallel_for);
    share(call, kernels.weight_blocks, blocks * call->parts, parallel_for);
    free(call->codes);
    return call->failed;
}
