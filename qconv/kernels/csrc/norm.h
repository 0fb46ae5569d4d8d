/* The call of the backward of batch normalization in training. */
#include "kernel.h"

enum { NORM_ADDRESSES = 8, NORM_NUMBERS = 4 };

typedef struct {
    const float *grad, *input;                          /* (rows, channels) */
    const float *weight, *mean, *invstd;                /* (channels); weight is NULL where it is 1 */
    float *grad_input, *grad_weight, *grad_bias;        /* grad_input may be input */
    int64_t rows, channels, isa, grain;                 /* grain: numbers below which a thread is not worth its start */
    int64_t chunks; /* from here on it is filled in by `norm_backward`: parts of the rows that are added up alone */
    float *sums;    /* (chunks, 2, channels) */
    double *totals; /* (chunks, 2, channels) */
    float *factors; /* (3, channels) */
} Norm;

/* The call with these addresses and numbers, in the order of `Norm`. */
static inline Norm norm_of(void *const a[NORM_ADDRESSES], const int64_t n[NORM_NUMBERS]) {
    return (Norm){
        .grad = a[0], .input = a[1], .weight = a[2], .mean = a[3], .invstd = a[4], .grad_input = a[5],
        .grad_weight = a[6], .grad_bias = a[7], .rows = n[0], .channels = n[1], .isa = n[2], .grain = n[3],
    };
}

/* Returns 0, or 1 where there was not enough memory or threads did not start. */
int norm_backward(Norm *norm, ParallelFor parallel_for);
