/* Rounding to levels, and the gradients of numbers and step through it: each in one pass over memory.
 *
 * Adding ROUNDS leaves no bits for a fraction: it rounds to the nearest whole number, half to even, which is then in
 * the low bits, of negative numbers too.
 */
#include "levels.h"

#include <string.h>

#define ROUNDS 12582912.0f /* 1.5 * 2^23 */

INLINE float clamped(float x, float low, float high) { /* NaN stays */
    const float raised = x < low ? low : x;
    return raised > high ? high : raised;
}

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

#define ROWS "levels_rows.h"
#include "each_isa.h"
DISPATCH(Levels, pass, portable)

int levels(Levels *of, ParallelFor parallel_for) {
    return share_out(parallel_for, of->rows * of->length, of->grain, pass, of);
}
