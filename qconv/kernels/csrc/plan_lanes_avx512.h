/* 16 lanes on AVX-512 with VNNI and VPOPCNTDQ. */
#include <immintrin.h>

#define SETS "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vpopcntdq"
#define TARGET __attribute__((target(SETS)))
#define LANE INLINE TARGET
#define HAS_FINISHES 1
#define PIXELS 8 /* of the largest tile */
#define VECTORS 2
#define HAS_CODES_4 1
#if __has_include(<amxint8intrin.h>)
#define HAS_AMX 1
#endif

typedef __m512 F;
typedef __m512i I;
LANE F f_zero(void) { return _mm512_setzero_ps(); }
LANE F f_all(float x) { return _mm512_set1_ps(x); }
LANE F f_load(const void *from) { return _mm512_loadu_ps(from); }
LANE F f_some(const void *from, uint16_t some) { return _mm512_maskz_loadu_ps(some, from); } /* 0 elsewhere */
LANE F f_gather(const void *from, I at) { return _mm512_i32gather_ps(at, from, 1); }          /* `at`: in bytes */
LANE void f_store(void *to, F x) { _mm512_storeu_ps(to, x); }
LANE void f_store_some(void *to, F x, uint16_t some) { _mm512_mask_storeu_ps(to, some, x); }
LANE F f_add(F a, F b) { return _mm512_add_ps(a, b); }
LANE F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
LANE F f_div(F a, F b) { return _mm512_div_ps(a, b); }
LANE F f_fma(F a, F b, F sum) { return _mm512_fmadd_ps(a, b, sum); }
LANE F f_max(F a, F b) { return _mm512_max_ps(a, b); } /* b where one is NaN, or both are 0 */
LANE F f_min(F a, F b) { return _mm512_min_ps(a, b); }
LANE uint16_t f_below(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
LANE F f_sloped(F x, F slope) { /* x * slope where x is not above 0 */
    return _mm512_mask_mul_ps(x, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LE_OQ), x, slope);
}
LANE F f_or_nan_of(F x, F nan) { return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(nan, nan, _CMP_UNORD_Q), nan); }
LANE I f_reached(F edge, F x, I step) { return _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(edge, x, _CMP_LE_OQ), step); }
LANE I f_round(F x) { return _mm512_cvtps_epi32(x); } /* half to even */
LANE I i_zero(void) { return _mm512_setzero_si512(); }
LANE I i_all(int32_t x) { return _mm512_set1_epi32(x); }
LANE I i_load(const void *from) { return _mm512_loadu_si512(from); }
LANE I i_of_bytes(const void *from) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(from)); }
LANE I i_gather(const int32_t *from, I at) { return _mm512_i32gather_epi32(at, from, 4); }
LANE I i_add(I a, I b) { return _mm512_add_epi32(a, b); }
LANE F f_power_of_2(I n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
LANE F f_signed(F x, F sign) { /* minus x where the sign is negative */
    return _mm512_xor_ps(x, _mm512_and_ps(sign, _mm512_set1_ps(-0.f)));
}
LANE I i_less_twice(I a, I b) { return _mm512_sub_epi32(a, _mm512_slli_epi32(b, 1)); }
LANE I i_times_4(I x) { return _mm512_slli_epi32(x, 2); }
LANE F i_float(I x) { return _mm512_cvtepi32_ps(x); }
LANE void i_bytes(void *to, I x) { _mm_storeu_si128(to, _mm512_cvtepi32_epi8(x)); }
/* Whole sums by asm: gcc 12 copies those of intrinsics back and forth in every step. */
LANE I i_dot(I sum, I codes, I weights) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(weights));
    return sum;
}
LANE I i_product(I sum, I code, I weight) { return i_dot(sum, code, weight); } /* of one in each lane */
LANE I i_high(I x) { return _mm512_and_si512(x, _mm512_set1_epi8((char)0xf0)); }
LANE I i_low(I x) { return _mm512_and_si512(_mm512_slli_epi32(x, 4), _mm512_set1_epi8((char)0xf0)); }
LANE I i_sixteenth(I x) { return _mm512_srai_epi32(x, 4); }
LANE I i_plus(I sum, I x) {
    __asm__("vpaddd %1, %0, %0" : "+v"(sum) : "v"(x));
    return sum;
}
LANE I i_count(I sum, I a, I b) { return i_plus(sum, _mm512_popcnt_epi32(_mm512_xor_si512(a, b))); }
LANE I i_count_of(I sum, I a, I b, I mask) { /* of (a ^ b) & mask */
    return i_plus(sum, _mm512_popcnt_epi32(_mm512_ternarylogic_epi32(a, b, mask, 0x28)));
}
