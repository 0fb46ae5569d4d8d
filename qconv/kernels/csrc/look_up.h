/* The two gradients of a binary convolution whose other operand is signs, by table look-up; and the packing of signs. */
#pragma once
#include "binary.h"

enum { GRADIENT_ADDRESSES = 5, GRADIENT_NUMBERS = 20 };

typedef struct {
    const float *grad_output; /* (N, out_h, out_w, groups, out_channels) */
    const uint64_t *signs;    /* grad_input: of the weight, (groups, blocks, kh, kw, words, BLOCK);
                               * grad_weight: of the input, (N, H, W, groups, words) */
    const float *scale;       /* grad_input: (groups, out_channels), or NULL */
    const uint64_t *passes;   /* grad_input: (N, H, W, groups, words), or NULL */
    float *out;               /* grad_input: (N, H, W, groups, in_channels);
                               * grad_weight: (groups, out_channels, in_channels, kh, kw) */
    int64_t batch, height, width, groups, words, in_channels, blocks, out_channels; /* channels of a group */
    int64_t kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w;
    int64_t top, left, out_h, out_w, padding_value, isa;
    int32_t failed; /* from here on it is filled in by the functions below */
    uint8_t *codes;
    int64_t images;                                   /* grad_input: that are taken together */
    int64_t grid_top, grid_left, grid_h, grid_w, parts; /* grad_weight: positions with codes; parts of the input channels */
} Gradient;

/* The call with these addresses and numbers, in the order of `Gradient`. */
static inline Gradient gradient_of(void *const a[GRADIENT_ADDRESSES], const int64_t n[GRADIENT_NUMBERS]) {
    return (Gradient){
        .grad_output = a[0], .signs = a[1], .scale = a[2], .passes = a[3], .out = a[4],
        .batch = n[0], .height = n[1], .width = n[2], .groups = n[3], .words = n[4], .in_channels = n[5],
        .blocks = n[6], .out_channels = n[7], .kernel_h = n[8], .kernel_w = n[9], .stride_h = n[10], .stride_w = n[11],
        .dilation_h = n[12], .dilation_w = n[13], .top = n[14], .left = n[15], .out_h = n[16], .out_w = n[17],
        .padding_value = n[18], .isa = n[19],
    };
}

/* Both return 0, or 1 where there was not enough memory; `threads` is how many parts are worth making. */
int look_up_grad_input(Gradient *gradient, int64_t threads, ParallelFor parallel_for);
int look_up_grad_weight(Gradient *gradient, int64_t threads, ParallelFor parallel_for);
