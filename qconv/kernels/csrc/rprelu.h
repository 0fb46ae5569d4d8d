/* The calls of RPReLU and of its backward. */
#include "kernel.h"

enum { RPRELU_ADDRESSES = 9, RPRELU_NUMBERS = 4 };

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

/* The call with these addresses and numbers, in the order of `RPReLU`. */
static inline RPReLU rprelu_of(void *const a[RPRELU_ADDRESSES], const int64_t n[RPRELU_NUMBERS]) {
    return (RPReLU){
        .grad = a[0], .input = a[1], .before = a[2], .slope = a[3], .after = a[4], .output = a[5], .grad_before = a[6],
        .grad_slope = a[7], .grad_after = a[8], .rows = n[0], .channels = n[1], .isa = n[2], .grain = n[3],
    };
}

/* The backward where there is a grad. Returns 0, or 1 where there was not enough memory or threads did not start. */
int rprelu(RPReLU *rprelu, ParallelFor parallel_for);
