/* The call of a gradient through a surrogate of the sign. */
#include "kernel.h"

enum { SLOPE_FLOAT32, SLOPE_BFLOAT16 };

typedef struct {
    const void *grad, *input; /* of the same layout */
    void *output;             /* may be grad */
    int64_t count, type, isa, grain; /* grain: numbers below which a thread is not worth its start */
} Slope;

/* Writes grad · max(2 - 2|input|, 0). Returns whether threads failed to start. */
int approx_sign_backward(Slope *slope, ParallelFor parallel_for);
