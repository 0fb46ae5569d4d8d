/* An open plan: steps, that is ops with their weights packed and their places worked out, for one instruction set. */
#pragma once
#include "kernel.h"
#include "plan_file.h"

#include <stdatomic.h>

/* GROUP: images that late ops take at once; SLACK: readable bytes behind a value; STRIP: pixels of one thread. */
enum { LANES = 16, GROUP = 4, SLACK = 256, STRIP = 8 };

/* How sums are made. MASKED: bits with a mask for each weight; NIBBLES: bits of AVX2, by a table for each 4 of them.
 * CODES_4: weights of 4 bits; CODES_SMALL: small weights on AVX2; CODES_WIDE: weights in 16 bits there; CODES_DOT: with
 * dot products, which AVX2 has from AVX-VNNI, and NEON from ARMv8.2; CODES_DEEP: of depthwise filters, a channel in each
 * lane.
 * SPREAD: floats of channels that lie anywhere, one for each lane; DEEP: the same where they follow each other. */
enum { SUM_BITS, SUM_MASKED, SUM_NIBBLES, SUM_CODES, SUM_CODES_4, SUM_CODES_SMALL, SUM_CODES_WIDE, SUM_CODES_DOT };
enum { SUM_CODES_DEEP = SUM_CODES_DOT + 1, SUM_CODES_AMX, SUM_FLOATS, SUM_SPREAD, SUM_DEEP, SUMS };

/* Where a value lies in an arena, as (H, W, C) with a border that holds `fill`. */
typedef struct {
    int32_t top, left, bottom, right; /* of the border */
    int64_t pixel, row, bytes;        /* bytes of a pixel, of a row, of all */
    int64_t at, stride;               /* stride: from an image of a group to the next; 0 where images share the place */
} Place;

/* The offsets of two neighbours along a side, and the part of the way from the first. */
typedef struct { int32_t at[2]; float part; } Between;

/* Of a byte: how many of its low 4 bits differ from those of 0 to 15, and how many of its high ones. */
typedef uint8_t Differing[2][16];

typedef struct {
    const Op *op;
    int32_t cin, out_h, out_w, pixels;       /* cin: of a group */
    int32_t cpad;                            /* channels in whole vectors */
    int32_t sums, nv, blocks;                /* a block is nv vectors of 16 channels */
    int32_t rows, run;                       /* taps: `run` units that follow each other in each of `rows` */
    int64_t pixel_step;                      /* CODES_AMX: bytes from a pixel of the input to the next */
    int32_t parts;                           /* that threads may take of an image */
    int32_t by_channels;                     /* parts are blocks, else tiles of pixels */
    int64_t block_bytes;                     /* of weights */
    int64_t narrow;                          /* CODES_SMALL: units that are added in 16 bits */
    int32_t *row_at, *block_at;              /* byte offsets of rows of taps, and of a block's first channel */
    int32_t *spread;                         /* byte offset of each channel's first input, where they lie anywhere */
    const int32_t *in_at, *res_at, *f32_at, *bits_at, *code_at[2]; /* byte offsets of the output's pixels in values */
    int32_t *base, *kind; /* what sums start from, for each class of pixels; the class of each pixel */
    char *weight;
    Differing *differing;                    /* of NIBBLES: for each byte */
    float *scale, *bias, *edges, *rprelu, *table[2];
    int32_t *table_codes[2], table_step[2];  /* form EDGES: codes, and the first step of the search */
    const Between *down, *across;            /* for each row and column of a BILINEAR */
    float number;                            /* the eps of a LAYER_NORM; what a PAD pads with */
    uint16_t *res_has;                       /* the lanes of each vector of channels that the residual has */
} Step;

/* The buffers of a thread. */
typedef struct Arena {
    struct Arena *next;
    atomic_int odd[GROUP]; /* whether an image of the group has a NaN or an infinity */
    char *memory;
} Arena;

/* What a part of a step works on: `count` images from `image` of the arena's group on. */
typedef struct {
    Arena *arena;
    int64_t image;
    int count;
    const float *const *inputs;
    const int64_t (*strides)[4];
    float *const *outputs;
    const int64_t (*to_strides)[4]; /* NULL for contiguous ones */
    int64_t first; /* the number of the group's first image in inputs and outputs */
} Run;

typedef void (*Part)(const Plan *plan, const Step *step, const Run *run, int part, int parts);

struct Plan {
    Program program;
    Place *places;
    Step *steps;
    int late; /* the first op that runs on a whole group of images */
    int isa, has_dot; /* has_dot: AVX-VNNI beside AVX2, dot products beside NEON */
    Part part;
    int64_t arena_bytes, packed_bytes;
    int32_t *output_of; /* the number of each OUTPUT op */
    void **kept;        /* what plan_close frees */
    int64_t kept_count, kept_room;
    int failed;         /* an allocation has failed */
    struct Table *tables;
    Differing *differing; /* NULL, or of all steps */
    Arena *spare;       /* that no call uses */
};

/* Zeroed memory that lives as long as the plan; NULL, and plan->failed, where there is none. */
void *plan_keep(Plan *plan, int64_t bytes);
/* Frees what was kept last, of this size. */
void plan_drop(Plan *plan, int64_t bytes);

/* Borders, sizes and places of values; returns 0 with an error. */
int plan_place_values(Plan *plan, char error[PLAN_MESSAGE]);

/* Weights and tables of a step. */
void plan_pack(Plan *plan, int index);

/* The kernels of each instruction set: a part of a step. */
void portable_part(const Plan *plan, const Step *step, const Run *run, int part, int parts);
void neon_part(const Plan *plan, const Step *step, const Run *run, int part, int parts);
void avx2_part(const Plan *plan, const Step *step, const Run *run, int part, int parts);
void avx512_part(const Plan *plan, const Step *step, const Run *run, int part, int parts);
