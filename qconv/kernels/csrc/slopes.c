/* The gradient through the derivative of a piecewise quadratic, grad · max(2 - 2|input|, 0), in one pass over memory.
 *
 * A bfloat16 is rounded after the difference and after the product, as torch's operators do it.
 */
#include "slopes.h"
#include "binary.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE float above_zero(float x) { return x < 0 ? 0 : x; } /* NaN stays */

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

#define ROWS "slopes_rows.h"
#include "each_isa.h"
DISPATCH(Slope, pass)

int approx_sign_backward(Slope *slope, ParallelFor parallel_for) {
    return share_out(parallel_for, slope->count, slope->grain, pass, slope);
}
