/* The signs of a weight as bits, in the layout that the other kernels read. */
#pragma once
#include "kernel.h"

enum { MOST_TAPS = 256 };

typedef struct {
    const float *weight; /* (groups, out_channels, in_channels, taps), or with the channels last */
    uint64_t *words;     /* (groups, blocks, taps, ceil(in_channels / 64), BLOCK) */
    int32_t *sums;       /* (groups, taps, blocks * BLOCK) */
    int64_t groups, out_channels, in_channels, taps; /* channels of a group; at most MOST_TAPS unless channels_last */
    int64_t blocks, channels_last, isa;
    int64_t grain; /* blocks below which a thread is not worth its start */
} Packing;

/* Returns whether threads failed to start. */
int pack_weight(Packing *packing, ParallelFor parallel_for);
