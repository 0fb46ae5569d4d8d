/* The calls of RPReLU and of its backward. */
#include "kernel.h"

typedef struct {
    const float *grad, *input;                        /* (rows, channels); grad is NULL for the forward */
    const float *before, *slope, *after;              /* (channels); after is NULL for the backward */
    float *output;                                    /* (rows, channels); of the backward it is grad_input */
    float *grad_before, *grad_slope, *grad_after;     /* (channels); NULL for the forward */
    int64_t rows, channels, isa, grain;               /* grain: numbers below which a thread is not worth its start */
    int64_t chunks; /* from here on it is filled in: parts of the rows that are added up alone */
    float *sums;    /* (chunks, 3, channels) */
    double *totals; /* (chunks, 3, channels) */
} RPReLU;

/* The backward where there is a grad. Returns 0, or 1 where there was not enough memory or threads did not start. */
int rprelu(RPReLU *rprelu, ParallelFor parallel_for);
