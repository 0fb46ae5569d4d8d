/* 16 lanes on AVX2 and FMA: two registers of 8. */
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma")))
#define LANE INLINE TARGET
#define HAS_FINISHES 1
#define PIXELS 4 /* of the largest tile */
#define VECTORS 1
#define HAS_DOT 1

typedef struct { __m256 a, b; } F;
typedef struct { __m256i a, b; } I;
/* Of both halves. */
#define F_EACH(call_a, call_b) (F){call_a, call_b}
#define I_EACH(call_a, call_b) (I){call_a, call_b}
/* All ones in the lanes of a mask. */
LANE __m256i some_of(uint16_t some, int first) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(some >> first), bit), bit);
}
LANE F f_all(float x) { return F_EACH(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
LANE F f_zero(void) { return f_all(0); }
LANE F f_load(const void *from) { return F_EACH(_mm256_loadu_ps(from), _mm256_loadu_ps((const float *)from + 8)); }
LANE F f_some(const void *from, uint16_t some) { /* 0 elsewhere */
    if (some == 0xffff) return f_load(from);
    return F_EACH(_mm256_maskload_ps(from, some_of(some, 0)),
                  _mm256_maskload_ps((const float *)from + 8, some_of(some, 8)));
}
LANE F f_gather(const void *from, I at) {
    return F_EACH(_mm256_i32gather_ps(from, at.a, 1), _mm256_i32gather_ps(from, at.b, 1));
}
LANE void f_store(void *to, F x) {
    _mm256_storeu_ps(to, x.a);
    _mm256_storeu_ps((float *)to + 8, x.b);
}
LANE void f_store_some(void *to, F x, uint16_t some) {
    _mm256_maskstore_ps(to, some_of(some, 0), x.a);
    _mm256_maskstore_ps((float *)to + 8, some_of(some, 8), x.b);
}
LANE F f_add(F a, F b) { return F_EACH(_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)); }
LANE F f_mul(F a, F b) { return F_EACH(_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)); }
LANE F f_div(F a, F b) { return F_EACH(_mm256_div_ps(a.a, b.a), _mm256_div_ps(a.b, b.b)); }
LANE F f_fma(F a, F b, F c) { return F_EACH(_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)); }
/* b where one is NaN, or both are 0 */
LANE F f_max(F a, F b) { return F_EACH(_mm256_max_ps(a.a, b.a), _mm256_max_ps(a.b, b.b)); }
LANE F f_min(F a, F b) { return F_EACH(_mm256_min_ps(a.a, b.a), _mm256_min_ps(a.b, b.b)); }
#define F_COMPARE(x, y, how) F_EACH(_mm256_cmp_ps(x.a, y.a, how), _mm256_cmp_ps(x.b, y.b, how))
LANE F f_where(F mask, F yes, F no) {
    return F_EACH(_mm256_blendv_ps(no.a, yes.a, mask.a), _mm256_blendv_ps(no.b, yes.b, mask.b));
}
LANE uint16_t f_below(F a, F b) {
    const F below = F_COMPARE(a, b, _CMP_LT_OQ);
    return (uint16_t)(_mm256_movemask_ps(below.a) | _mm256_movemask_ps(below.b) << 8);
}
LANE F f_sloped(F x, F slope) { /* x * slope where x is not above 0 */
    const F zero = f_zero();
    return f_where(F_COMPARE(x, zero, _CMP_LE_OQ), f_mul(x, slope), x);
}
LANE F f_or_nan_of(F x, F nan) { return f_where(F_COMPARE(nan, nan, _CMP_UNORD_Q), nan, x); }
LANE I i_bits(F x) { return I_EACH(_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)); }
LANE I i_and(I a, I b) { return I_EACH(_mm256_and_si256(a.a, b.a), _mm256_and_si256(a.b, b.b)); }
LANE I f_reached(F edge, F x, I step) { return i_and(i_bits(F_COMPARE(edge, x, _CMP_LE_OQ)), step); }
LANE I f_round(F x) { return I_EACH(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)); } /* half to even */
LANE I i_all(int32_t x) { return I_EACH(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
LANE I i_zero(void) { return i_all(0); }
LANE I i_load(const void *from) {
    return I_EACH(_mm256_loadu_si256(from), _mm256_loadu_si256((const __m256i *)from + 1));
}
LANE I i_of_bytes(const void *from) {
    const __m128i bytes = _mm_loadu_si128(from);
    return I_EACH(_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)));
}
LANE I i_gather(const int32_t *from, I at) {
    return I_EACH(_mm256_i32gather_epi32(from, at.a, 4), _mm256_i32gather_epi32(from, at.b, 4));
}
LANE I i_add(I a, I b) { return I_EACH(_mm256_add_epi32(a.a, b.a), _mm256_add_epi32(a.b, b.b)); }
LANE __m256 power_of_2(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
LANE F f_power_of_2(I n) { return F_EACH(power_of_2(n.a), power_of_2(n.b)); }
LANE F f_signed(F x, F sign) { /* minus x where the sign is negative */
    const __m256 bit = _mm256_set1_ps(-0.f);
    return F_EACH(_mm256_xor_ps(x.a, _mm256_and_ps(sign.a, bit)), _mm256_xor_ps(x.b, _mm256_and_ps(sign.b, bit)));
}
LANE I i_less_twice(I a, I b) {
    return I_EACH(_mm256_sub_epi32(a.a, _mm256_add_epi32(b.a, b.a)), _mm256_sub_epi32(a.b, _mm256_add_epi32(b.b, b.b)));
}
LANE I i_times_4(I x) { return I_EACH(_mm256_slli_epi32(x.a, 2), _mm256_slli_epi32(x.b, 2)); }
LANE F i_float(I x) { return F_EACH(_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }
LANE void i_bytes(void *to, I x) {
    const __m256i words = _mm256_packus_epi32(x.a, x.b); /* 4 of a, and 4 of b, in each half */
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(to, _mm_shuffle_epi32(bytes, _MM_SHUFFLE(3, 1, 2, 0)));
}
/* By asm: gcc 12 copies the sums of the intrinsic back and forth in every step. */
LANE __m256i plus(__m256i sum, __m256i x) {
    __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(x));
    return sum;
}
/* Products of 16 bits, which do not saturate: bytes of even places, then of odd ones. */
LANE __m256i dot(__m256i sum, __m256i codes, __m256i weights) {
    const __m256i even = _mm256_and_si256(codes, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(codes, 8);
    const __m256i w_even = _mm256_srai_epi16(_mm256_slli_epi16(weights, 8), 8), w_odd = _mm256_srai_epi16(weights, 8);
    const __m256i both = _mm256_add_epi32(_mm256_madd_epi16(even, w_even), _mm256_madd_epi16(odd, w_odd));
    return plus(sum, both);
}
LANE I i_dot(I sum, I codes, I weights) {
    return I_EACH(dot(sum.a, codes.a, weights.a), dot(sum.b, codes.b, weights.b));
}
/* Of a code and a weight in each lane. */
LANE I i_product(I sum, I codes, I weights) {
    return I_EACH(plus(sum.a, _mm256_madd_epi16(codes.a, weights.a)), plus(sum.b, _mm256_madd_epi16(codes.b, weights.b)));
}
/* AVX-VNNI. By asm, so that the rest need not be compiled once more for it. */
LANE I i_dot_at_once(I sum, I codes, I weights) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.a) : "x"(codes.a), "x"(weights.a));
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.b) : "x"(codes.b), "x"(weights.b));
    return sum;
}
/* Bits by a table for each half of a byte, added up to 32 bits. */
LANE __m256i popcount(__m256i x) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
    const __m256i half = _mm256_set1_epi8(15);
    const __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(x, half));
    const __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(x, 4), half));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_add_epi8(low, high), _mm256_set1_epi8(1));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
LANE I i_xor(I a, I b) { return I_EACH(_mm256_xor_si256(a.a, b.a), _mm256_xor_si256(a.b, b.b)); }
LANE I i_count_of(I sum, I a, I b, I mask) {
    const I x = i_and(i_xor(a, b), mask);
    return i_add(sum, I_EACH(popcount(x.a), popcount(x.b)));
}
LANE I i_count(I sum, I a, I b) { return i_count_of(sum, a, b, i_all(-1)); }
