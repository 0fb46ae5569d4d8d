/* 16 lanes as four vectors of 4, which compilers know on all processors. Portable C and NEON differ in sums alone. */
#if defined(USES_NEON)
#include <arm_neon.h>
#define HAS_FINISHES 1
#define HAS_DOT 1
#else
#include <math.h>
#endif

#define TARGET
#define LANE INLINE
#define PIXELS 4 /* of the largest tile */
#define VECTORS 1

typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));
typedef int16_t Short8 __attribute__((vector_size(16)));
typedef uint16_t Ushort8 __attribute__((vector_size(16)));
typedef F4 F4At __attribute__((may_alias, aligned(1))); /* anywhere */
typedef I4 I4At __attribute__((may_alias, aligned(1)));
typedef struct { F4 a, b, c, d; } F;
typedef struct { I4 a, b, c, d; } I;
/* Of all quarters. */
#define OF_1(T, f, x) (T){f(x.a), f(x.b), f(x.c), f(x.d)}
#define OF_2(T, f, x, y) (T){f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)}
#define OF_3(T, f, x, y, z) (T){f(x.a, y.a, z.a), f(x.b, y.b, z.b), f(x.c, y.c, z.c), f(x.d, y.d, z.d)}
#define EACH for (int l = 0; l < LANES; l++)

LANE F4 where(I4 mask, F4 yes, F4 no) { return (F4)((mask & (I4)yes) | (~mask & (I4)no)); }
LANE F f_all(float x) { const F4 all = {x, x, x, x}; return (F){all, all, all, all}; }
LANE F f_zero(void) { return f_all(0); }
LANE F f_load(const void *from) { const F4At *x = from; return (F){x[0], x[1], x[2], x[3]}; }
LANE F f_some(const void *from, uint16_t some) { /* 0 elsewhere */
    float x[LANES] = {0};
    EACH if (some >> l & 1) x[l] = ((const float *)from)[l];
    return f_load(x);
}
LANE void f_store(void *to, F x) { F4At *all = to; all[0] = x.a, all[1] = x.b, all[2] = x.c, all[3] = x.d; }
LANE void f_store_some(void *to, F x, uint16_t some) {
    float all[LANES];
    f_store(all, x);
    EACH if (some >> l & 1)((float *)to)[l] = all[l];
}
LANE F4 add4(F4 x, F4 y) { return x + y; }
LANE F4 mul4(F4 x, F4 y) { return x * y; }
LANE F4 div4(F4 x, F4 y) { return x / y; }
LANE F4 max4(F4 x, F4 y) { return where(x > y, x, y); } /* y where one is NaN, or both are 0 */
LANE F4 min4(F4 x, F4 y) { return where(x < y, x, y); }
LANE F4 sloped4(F4 x, F4 slope) { return where(x <= 0, x * slope, x); }
LANE F4 or_nan_of4(F4 x, F4 nan) { return where(nan == nan, x, nan); }
LANE I4 reached4(F4 edge, F4 x, I4 step) { return (edge <= x) & step; }
LANE I4 round4(F4 x) { return (I4)(x + 12582912.f) - 0x4b400000; } /* half to even; to 2^22 */
LANE F f_add(F x, F y) { return OF_2(F, add4, x, y); }
LANE F f_mul(F x, F y) { return OF_2(F, mul4, x, y); }
LANE F f_div(F x, F y) { return OF_2(F, div4, x, y); }
LANE F f_max(F x, F y) { return OF_2(F, max4, x, y); }
LANE F f_min(F x, F y) { return OF_2(F, min4, x, y); }
LANE F f_sloped(F x, F slope) { return OF_2(F, sloped4, x, slope); }
LANE F f_or_nan_of(F x, F nan) { return OF_2(F, or_nan_of4, x, nan); }
LANE I f_reached(F edge, F x, I step) { return OF_3(I, reached4, edge, x, step); }
LANE I f_round(F x) { return OF_1(I, round4, x); }
LANE uint16_t f_below(F x, F y) {
    const I4 bit = {1, 2, 4, 8}, low = ((x.a < y.a) & bit) | ((x.b < y.b) & bit << 4);
    const I4 bits = low | ((x.c < y.c) & bit << 8) | ((x.d < y.d) & bit << 12);
    return (uint16_t)(bits[0] | bits[1] | bits[2] | bits[3]);
}

LANE I i_all(int32_t x) { const I4 all = {x, x, x, x}; return (I){all, all, all, all}; }
LANE void i_store(void *to, I x) { I4At *all = to; all[0] = x.a, all[1] = x.b, all[2] = x.c, all[3] = x.d; }
LANE I i_zero(void) { return i_all(0); }
LANE I i_load(const void *from) { const I4At *x = from; return (I){x[0], x[1], x[2], x[3]}; }
LANE F f_gather(const void *from, I at) { /* `at`: in bytes */
    float x[LANES];
    int32_t places[LANES];
    i_store(places, at);
    EACH x[l] = *(const float *)((const char *)from + places[l]);
    return f_load(x);
}
LANE I i_of_bytes(const void *from) {
    int32_t x[LANES];
    EACH x[l] = ((const uint8_t *)from)[l];
    return i_load(x);
}
LANE I i_gather(const int32_t *from, I at) {
    int32_t x[LANES];
    i_store(x, at);
    EACH x[l] = from[x[l]];
    return i_load(x);
}
LANE I4 i_add4(I4 x, I4 y) { return (I4)((U4)x + (U4)y); }
LANE I4 less_twice4(I4 x, I4 y) { return (I4)((U4)x - 2 * (U4)y); }
LANE I4 times_4_4(I4 x) { return x * 4; }
LANE F4 float4(I4 x) { return __builtin_convertvector(x, F4); }
LANE F4 power_of_2_4(I4 n) { return (F4)((U4)(n + 127) << 23); }
LANE F4 signed4(F4 x, F4 sign) { return (F4)((I4)x ^ ((I4)sign & INT32_MIN)); } /* minus x where that is negative */
LANE F f_power_of_2(I n) { return OF_1(F, power_of_2_4, n); }
LANE F f_signed(F x, F sign) { return OF_2(F, signed4, x, sign); }
LANE I i_add(I x, I y) { return OF_2(I, i_add4, x, y); }
LANE I i_less_twice(I x, I y) { return OF_2(I, less_twice4, x, y); }
LANE I i_times_4(I x) { return OF_1(I, times_4_4, x); }
LANE F i_float(I x) { return OF_1(F, float4, x); }
LANE void i_bytes(void *to, I x) {
    int32_t all[LANES];
    i_store(all, x);
    EACH((uint8_t *)to)[l] = (uint8_t)all[l];
}

/* ---- sums ---- */
/* Codes times weights fit into 16 bits: those of even bytes, and of odd ones. */
LANE Short8 even_products(I4 codes, I4 weights) {
    return (Short8)(codes & 0x00ff00ff) * ((Short8)((Ushort8)weights << 8) >> 8);
}
LANE Short8 odd_products(I4 codes, I4 weights) { return (Short8)((Ushort8)codes >> 8) * ((Short8)weights >> 8); }
#if defined(USES_NEON)
LANE F f_fma(F x, F y, F sum) { return OF_3(F, vfmaq_f32, sum, x, y); }
LANE I4 add_pairs(I4 sum, Short8 x) { return vpadalq_s16(sum, x); }
LANE I4 add_count4(I4 sum, I4 x) { return (I4)vpadalq_u16((uint32x4_t)sum, vpaddlq_u8(vcntq_u8((uint8x16_t)x))); }
/* `sdot` of ARMv8.2 multiplies signed bytes: 128 is taken from codes here, and given back by what sums start from. It
 * is written as a number, as assemblers know it only where all is compiled for ARMv8.2; .Lv0 to .Lv31: registers. */
__asm__(".irp v,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31\n"
        ".equ .Lv\\v, \\v\n.endr");
LANE I4 dot_at_once4(I4 sum, I4 codes, I4 weights) {
    const I4 less_128 = codes ^ (int32_t)0x80808080;
    __asm__(".inst 0x4e809400 | .L%0 | .L%1 << 5 | .L%2 << 16" : "+w"(sum) : "w"(less_128), "w"(weights));
    return sum;
}
LANE I i_dot_at_once(I sum, I codes, I weights) { return OF_3(I, dot_at_once4, sum, codes, weights); }
#else
LANE F f_fma(F x, F y, F sum) {
    float all[3][LANES];
    f_store(all[0], x), f_store(all[1], y), f_store(all[2], sum);
    EACH all[2][l] = fmaf(all[0][l], all[1][l], all[2][l]);
    return f_load(all[2]);
}
LANE I4 add_pairs(I4 sum, Short8 x) { return sum + ((I4)((U4)x << 16) >> 16) + ((I4)x >> 16); }
LANE I4 add_count4(I4 sum, I4 x) {
    U4 u = (U4)x;
    u -= (u >> 1) & 0x55555555u;
    u = (u & 0x33333333u) + ((u >> 2) & 0x33333333u);
    u = (u + (u >> 4)) & 0x0f0f0f0fu;
    u += u >> 8;
    return sum + (I4)((u + (u >> 16)) & 63u);
}
#endif
LANE I4 dot4(I4 sum, I4 codes, I4 weights) {
    return add_pairs(add_pairs(sum, even_products(codes, weights)), odd_products(codes, weights));
}
LANE I i_dot(I sum, I codes, I weights) { return OF_3(I, dot4, sum, codes, weights); }
LANE I4 product4(I4 sum, I4 code, I4 weight) { return sum + code * weight; }
LANE I i_product(I sum, I code, I weight) { return OF_3(I, product4, sum, code, weight); } /* of one in each lane */
LANE I4 count4(I4 sum, I4 x, I4 y) { return add_count4(sum, x ^ y); }
LANE I i_count(I sum, I x, I y) { return OF_3(I, count4, sum, x, y); }
LANE I4 both4(I4 x, I4 mask) { return x & mask; }
LANE I i_count_of(I sum, I x, I y, I mask) { return i_count(sum, OF_2(I, both4, x, mask), OF_2(I, both4, y, mask)); }
