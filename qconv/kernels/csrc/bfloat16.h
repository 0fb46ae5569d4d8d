/* Numbers of 16 bits, the upper half of a float32. */
#pragma once
#include "kernel.h"

#include <string.h>

/* The float with these upper bits, and the upper bits of the nearest bfloat16. */
INLINE float widened(uint32_t upper) {
    const uint32_t bits = upper << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
INLINE uint32_t rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest; /* adding could make an infinity of a NaN */
}
