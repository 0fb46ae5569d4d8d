/* The call of a pass over numbers that are rounded to levels. */
#include "kernel.h"

enum { LEVELS_ADDRESSES = 6, LEVELS_NUMBERS = 7, LEVELS_FLOATS = 3 };
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

/* The call with these addresses and numbers, in the order of `Levels`. */
static inline Levels levels_of(void *const a[LEVELS_ADDRESSES], const int64_t n[LEVELS_NUMBERS],
                               const float f[LEVELS_FLOATS]) {
    return (Levels){
        .input = a[0], .divisors = a[1], .grad = a[2], .output = a[3], .terms = a[4], .is_nan = a[5], .rows = n[0],
        .length = n[1], .operation = n[2], .offset = n[3], .strict = n[4], .isa = n[5], .grain = n[6], .low = f[0],
        .high = f[1], .factor = f[2],
    };
}

/* With z = input / divisor. ROUND_CODES writes round(clamp(z, low, high) · factor) + offset, and whether one is NaN.
 * STEP_BACKWARD writes grad where low <= z <= high (if strict, low < z < high), else grad · 0; and grad ·
 * (round(clamp(z)) - clamp(z) where low < z < high) to terms. Levels lie between -2^21 and 2^21. Returns whether
 * threads failed to start. */
int levels(Levels *levels, ParallelFor parallel_for);
