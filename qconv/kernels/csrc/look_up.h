/* Convolutions of numbers with signs by table look-up: the forward with a weight of signs, and the two gradients of a
 * binary convolution. */
#pragma once
#include "kernel.h"

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
    int64_t threads;     /* how many parts are worth making */
    int32_t failed; /* from here on it is filled in by the functions below */
    uint8_t *codes;
    /* of the weight: what is read and written, (N, h, w, groups, channels), and the pictures that are taken together */
    Axis down, across;
    int64_t from_h, from_w, from_channels, to_h, to_w, to_channels, images, forward;
    /* grad_weight: positions with codes, and parts of the input channels */
    int64_t grid_top, grid_left, grid_h, grid_w, parts;
} LookUp;

/* They return 0, or 1 where there was not enough memory. A forward is padded with zeros, whatever `padding_value`
 * is. */
int sign_conv2d(LookUp *call, ParallelFor parallel_for);
int sign_grad_input(LookUp *call, ParallelFor parallel_for);
int sign_grad_weight(LookUp *call, ParallelFor parallel_for);
