/* 16 lanes in C for any processor: the same results, bit for bit. Compilers make vectors of the loops if they can. */
#include <math.h>

#define TARGET
#define LANE INLINE
#define PIXELS 4 /* of the largest tile */
#define VECTORS 1

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint8_t Codes __attribute__((vector_size(64)));
typedef int8_t Weights __attribute__((vector_size(64)));
#define EACH for (int l = 0; l < 16; l++)
LANE F f_zero(void) { return (F){0}; }
LANE F f_all(float x) { F all; EACH all[l] = x; return all; }
LANE F f_load(const void *from) { F x; memcpy(&x, from, 64); return x; }
LANE F f_some(const void *from, uint16_t some) {
    F x = {0};
    EACH if (some >> l & 1) x[l] = ((const float *)from)[l];
    return x;
}
LANE F f_gather(const void *from, I at) { F x; EACH x[l] = *(const float *)((const char *)from + at[l]); return x; }
LANE void f_store(void *to, F x) { memcpy(to, &x, 64); }
LANE void f_store_some(void *to, F x, uint16_t some) { EACH if (some >> l & 1)((float *)to)[l] = x[l]; }
LANE F f_add(F a, F b) { return a + b; }
LANE F f_mul(F a, F b) { return a * b; }
LANE F f_div(F a, F b) { return a / b; }
LANE F f_fma(F a, F b, F c) { EACH c[l] = fmaf(a[l], b[l], c[l]); return c; }
LANE F f_max(F a, F b) { EACH a[l] = a[l] > b[l] ? a[l] : b[l]; return a; } /* b where one is NaN, or both are 0 */
LANE F f_min(F a, F b) { EACH a[l] = a[l] < b[l] ? a[l] : b[l]; return a; }
LANE uint16_t f_below(F a, F b) { int bits = 0; EACH bits |= (a[l] < b[l]) << l; return (uint16_t)bits; }
LANE F f_sloped(F x, F slope) { EACH x[l] = x[l] <= 0 ? x[l] * slope[l] : x[l]; return x; }
LANE F f_or_nan_of(F x, F nan) { EACH x[l] = nan[l] == nan[l] ? x[l] : nan[l]; return x; }
LANE I f_reached(F edge, F x, I step) { EACH step[l] = edge[l] <= x[l] ? step[l] : 0; return step; }
LANE I f_round(F x) { return (I)(x + 12582912.f) - 0x4b400000; } /* half to even; to 2^22 */
LANE I i_zero(void) { return (I){0}; }
LANE I i_all(int32_t x) { return x - (I){0}; }
LANE I i_load(const void *from) { I x; memcpy(&x, from, 64); return x; }
LANE I i_gather(const int32_t *from, I at) { EACH at[l] = from[at[l]]; return at; }
LANE I i_add(I a, I b) { return (I)((U)a + (U)b); }
LANE I i_less_twice(I a, I b) { return (I)((U)a - 2 * (U)b); }
LANE I i_times_4(I x) { return x * 4; }
LANE F i_float(I x) { return __builtin_convertvector(x, F); }
LANE void i_bytes(void *to, I x) { EACH((uint8_t *)to)[l] = (uint8_t)x[l]; }
LANE I i_dot(I sum, I codes, I weights) {
    const Codes x = (Codes)codes;
    const Weights w = (Weights)weights;
    EACH sum[l] += x[4 * l] * w[4 * l] + x[4 * l + 1] * w[4 * l + 1] + x[4 * l + 2] * w[4 * l + 2] +
                   x[4 * l + 3] * w[4 * l + 3];
    return sum;
}
LANE I popcount(I v) {
    U u = (U)v;
    u -= (u >> 1) & 0x55555555u;
    u = (u & 0x33333333u) + ((u >> 2) & 0x33333333u);
    u = (u + (u >> 4)) & 0x0f0f0f0fu;
    u += u >> 8;
    return (I)((u + (u >> 16)) & 63u);
}
LANE I i_count(I sum, I a, I b) { return sum + popcount(a ^ b); }
LANE I i_count_of(I sum, I a, I b, I mask) { return sum + popcount((a ^ b) & mask); }
