/* The gradient through the derivative of a piecewise quadratic, grad · max(2 - 2|input|, 0), in one pass over memory.
 *
 * A bfloat16 is rounded after the difference and after the product, as torch's operators do it.
 */
#include "slopes.h"
#include "bfloat16.h"

#include <math.h>

INLINE float above_zero(float x) { return x < 0 ? 0 : x; } /* NaN stays */

#define ROWS "slopes_rows.h"
#include "each_isa.h"
DISPATCH(Slope, pass, portable)

int approx_sign_backward(Slope *slope, ParallelFor parallel_for) {
    return share_out(parallel_for, slope->count, slope->grain, pass, slope);
}
