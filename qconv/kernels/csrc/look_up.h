/* Convolutions of numbers with signs by table look-up: the forward with a weight of signs, and the two gradients of a
 * binary convolution. */
#pragma once
#include "kernel.h"

enum { LOOK_UP_ADDRESSES = 6, LOOK_UP_NUMBERS = 21 };

/* The place of the numbers that place y of the output takes at tap k: (first + y step + k tap) / every, if that
 * divides. */
typedef struct {
    int64_t first, step, tap, every;
} Axis;

typedef struct {
    const void *numbers;    /* grad_output, (N, out_h, out_w, groups, out_channels); convolve: the input, (N, H, W,
                             * groups, in_channels) */
    const uint64_t *signs;  /* of the weight, (groups, blocks, kh, kw, words, BLOCK); grad_weight: of the input, (N, H,
                             * W, groups, words) */
    const float *scale;     /* (groups, out_channels), or NULL; not of grad_weight */
    const float *bias;      /* convolve: as the scale */
    const uint64_t *passes; /* grad_input: (N, H, W, groups, words), or NULL */
    void *out;              /* convolve: (N, out_h, out_w, groups, out_channels); grad_input: (N, H, W, groups,
                             * in_channels); grad_weight: (groups, out_channels, in_channels, kh, kw) */
    int64_t batch, height, width, groups, words, in_channels, blocks, out_channels; /* channels of a group */
    int64_t kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w;
    int64_t top, left, out_h, out_w, padding_value, isa;
    int64_t is_bfloat16; /* numbers and out; else they are float32 */
    int32_t failed; /* from here on it is filled in by the functions below */
    uint8_t *codes;
    /* of the weight: what is read and written, (N, h, w, groups, channels), and the pictures that are taken together */
    Axis down, across;
    int64_t from_h, from_w, from_channels, to_h, to_w, to_channels, images, forward;
    /* grad_weight: positions with codes, and parts of the input channels */
    int64_t grid_top, grid_left, grid_h, grid_w, parts;
} LookUp;

/* The call with these addresses and numbers, in the order of `LookUp`. */
static inline LookUp look_up_of(void *const a[LOOK_UP_ADDRESSES], const int64_t n[LOOK_UP_NUMBERS]) {
    return (LookUp){
        .numbers = a[0], .signs = a[1], .scale = a[2], .bias = a[3], .passes = a[4], .out = a[5],
        .batch = n[0], .height = n[1], .width = n[2], .groups = n[3], .words = n[4], .in_channels = n[5],
        .blocks = n[6], .out_channels = n[7], .kernel_h = n[8], .kernel_w = n[9], .stride_h = n[10], .stride_w = n[11],
        .dilation_h = n[12], .dilation_w = n[13], .top = n[14], .left = n[15], .out_h = n[16], .out_w = n[17],
        .padding_value = n[18], .isa = n[19], .is_bfloat16 = n[20],
    };
}

/* They return 0, or 1 where there was not enough memory; `threads` is how many parts are worth making. A forward is
 * padded with zeros, whatever `padding_value` is. */
int look_up_convolve(LookUp *call, int64_t threads, ParallelFor parallel_for);
int look_up_grad_input(LookUp *call, int64_t threads, ParallelFor parallel_for);
int look_up_grad_weight(LookUp *call, int64_t threads, ParallelFor parallel_for);
