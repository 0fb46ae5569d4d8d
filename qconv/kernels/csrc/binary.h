/* The call of a binary convolution. */
#pragma once
#include "kernel.h"

enum { ADDRESSES = 6, NUMBERS = 25 };

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
    int32_t failed; /* from here on it is filled in by `convolve` */
    int32_t *base;  /* (row classes, column classes, groups, blocks * BLOCK) */
    int32_t *row_class, *column_class;
    int64_t column_classes;
    int32_t past_caches; /* the output is too large to be found in a cache again, and is aligned */
} Conv;

/* The call with these addresses and numbers, in the order of `Conv`. */
static inline Conv conv_of(void *const a[ADDRESSES], const int64_t n[NUMBERS]) {
    return (Conv){
        .input = a[0], .weight = a[1], .tap_sums = a[2], .scale = a[3], .bias = a[4], .output = a[5],
        .batch = n[0], .height = n[1], .width = n[2], .groups = n[3], .words = n[4], .in_channels = n[5],
        .blocks = n[6], .out_channels = n[7], .kernel_h = n[8], .kernel_w = n[9], .stride_h = n[10], .stride_w = n[11],
        .dilation_h = n[12], .dilation_w = n[13], .top = n[14], .left = n[15], .padded_h = n[16], .padded_w = n[17],
        .out_h = n[18], .out_w = n[19], .padding_value = n[20], .is_scaled = n[21], .is_float = n[22],
        .channels_last = n[23], .isa = n[24],
    };
}

/* Returns 0, or 1 where there was not enough memory. Fewer than `grain` rows of the output are not shared out. */
int convolve(Conv *conv, int64_t grain, ParallelFor parallel_for);
