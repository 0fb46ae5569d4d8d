/* The call of a pass over numbers that are rounded to levels. */
#include "kernel.h"

enum { ROUND_CODES, STEP_BACKWARD };

typedef struct {
    const float *input, *divisors, *grad; /* (rows, length), (rows), (rows, length) */
    void *output;                         /* (rows, length): codes of a byte, or the floats of a gradient */
    float *terms;                         /* (rows, length) */
    unsigned char *is_nan;                /* set to 1 if a code is made of NaN */
    int64_t rows, length, operation, offset, strict, isa;
    int64_t grain; /* numbers below which a thread is not worth its start */
    float low, high, factor;
} Levels;

/* With z = input / divisor. ROUND_CODES writes round(clamp(z, low, high) · factor) + offset, and whether one is NaN.
 * STEP_BACKWARD writes grad where low <= z <= high (if strict, low < z < high), else grad · 0; and grad ·
 * (round(clamp(z)) - clamp(z) where low < z < high) to terms. Levels lie between -2^21 and 2^21. Returns whether
 * threads failed to start. */
int levels(Levels *levels, ParallelFor parallel_for);
