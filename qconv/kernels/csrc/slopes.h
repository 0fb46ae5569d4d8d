/* The call of a gradient through a surrogate of the sign. */
#include "kernel.h"

enum { SLOPE_ADDRESSES = 3, SLOPE_NUMBERS = 4 };
enum { SLOPE_FLOAT32, SLOPE_BFLOAT16 };

typedef struct {
    const void *grad, *input; /* of the same layout */
    void *output;             /* may be grad */
    int64_t count, type, isa, grain; /* grain: numbers below which a thread is not worth its start */
} Slope;

/* The call with these addresses and numbers, in the order of `Slope`. */
static inline Slope slope_of(void *const a[SLOPE_ADDRESSES], const int64_t n[SLOPE_NUMBERS]) {
    return (Slope){
        .grad = a[0], .input = a[1], .output = a[2], .count = n[0], .type = n[1], .isa = n[2], .grain = n[3],
    };
}

/* Writes grad · max(2 - 2|input|, 0). Returns whether threads failed to start. */
int approx_sign_backward(Slope *slope, ParallelFor parallel_for);
