/* The signs of a weight as bits, in the layout that the other kernels read. */
#pragma once
#include "kernel.h"

enum { PACK_ADDRESSES = 3, PACK_NUMBERS = 7, MOST_TAPS = 256 };

typedef struct {
    const float *weight; /* (groups, out_channels, in_channels, taps), or with the channels last */
    uint64_t *words;     /* (groups, blocks, taps, ceil(in_channels / 64), BLOCK) */
    int32_t *sums;       /* (groups, taps, blocks * BLOCK) */
    int64_t groups, out_channels, in_channels, taps; /* channels of a group; at most MOST_TAPS unless channels_last */
    int64_t blocks, channels_last, isa;
} Packing;

/* The call with these addresses and numbers, in the order of `Packing`. */
static inline Packing packing_of(void *const a[PACK_ADDRESSES], const int64_t n[PACK_NUMBERS]) {
    return (Packing){
        .weight = a[0], .words = a[1], .sums = a[2], .groups = n[0], .out_channels = n[1], .in_channels = n[2],
        .taps = n[3], .blocks = n[4], .channels_last = n[5], .isa = n[6],
    };
}

/* Returns whether threads failed to start. Fewer than `grain` blocks are not shared out. */
int pack_weight(Packing *packing, int64_t grain, ParallelFor parallel_for);
