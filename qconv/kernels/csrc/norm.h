/* The call of the backward of batch normalization in training. */
#include "kernel.h"

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

/* Returns 0, or 1 where there was not enough memory or threads did not start. */
int norm_backward(Norm *norm, ParallelFor parallel_for);
