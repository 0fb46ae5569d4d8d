/* The call of a binary convolution. */
#pragma once
#include "kernel.h"

typedef struct {
    const void *input;        /* bits (N, H, W, groups, words), or floats (N, groups * in_channels, H, W) */
    const uint64_t *weight;   /* (groups, blocks, kh, kw, words, BLOCK) */
    const int32_t *tap_sums;  /* (groups, kh, kw, blocks * BLOCK): sums of the weights of a tap */
    const float *scale;       /* is_scaled: (groups * out_channels) */
    const float *bias;        /* is_scaled: (groups * out_channels) */
    void *output;             /* (N, out_h, out_w, …) of int32 or floats */
    int64_t batch, height, width, groups, words, in_channels; /* in_channels, of a group */
    int64_t blocks, out_channels;                             /* of a group; blocks = ceil(out_channels / BLOCK) */
    int64_t kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w;
    int64_t top, left, padded_h, padded_w, out_h, out_w;
    int64_t padding_value, is_scaled, is_float, channels_last, isa; /* channels_last, of float inputs; outputs are */
    int64_t grain;  /* rows of the output below which a thread is not worth its start */
    int32_t failed; /* from here on it is filled in by `convolve` */
    int32_t *base;  /* (row classes, column classes, groups, blocks * BLOCK) */
    int32_t *row_class, *column_class;
    int64_t column_classes;
    int32_t past_caches; /* the output is too large to be found in a cache again, and is aligned */
} Conv;

/* Returns 0, or 1 where there was not enough memory. */
int convolve(Conv *conv, ParallelFor parallel_for);
