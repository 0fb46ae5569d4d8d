/* What a file holds, and its checks. Little endian, as the machines that run it. */
#pragma once
#include "plan.h"

enum { MAGIC = 0x31504351, VERSION = 1 }; /* "QCP1" */
enum { F32, U8, BITS, TYPES };            /* types of values */
enum { INPUT, CONV_BITS, CONV_CODES, CONV_FLOATS, MEAN, OUTPUT, AVERAGE, MAXIMUM, SELECT, REPEAT, SHUFFLE, BILINEAR,
       LAYER_NORM, PAD, KINDS };
enum { CONSTANT, REFLECT, REPLICATE, CIRCULAR, MODES }; /* of a PAD */
enum { PLAIN, SIGMOID, SILU, HARD_SWISH, GELU, CURVES };
enum { PRODUCT, QUOTIENT, EDGES, FORMS }; /* how codes are found */

typedef struct {
    int32_t magic, version, values, ops, in_channels, outputs, guard;
    int32_t height, width; /* the only size of the first input; 0 for any */
    int32_t more_inputs;   /* than one; the first ops are the inputs */
    int64_t blob_bytes;
} Head;

typedef struct { int32_t type, channels, fill, none; } Value;

/* v = acc * scale_c + bias_c, + residual (or times it: is_factor), PReLU between two shifts or a curve, clamp; then
 * each output. SELECT has the numbers of its input's channels, int32, for a weight; REPEAT, SHUFFLE and BILINEAR have
 * times for strides, BILINEAR align_corners for ceil, LAYER_NORM its eps for a weight, and PAD its mode for ceil, and a
 * number that is padded with for a weight; ceil of a MEAN asks for the maximum. */
typedef struct {
    int32_t kind, in, cout;
    int32_t kh, kw, sh, sw, dh, dw, top, left, bottom, right, ceil; /* the window */
    int32_t groups, pad_value, zero, weight_bits;
    int32_t residual, res_stride, res_first; /* channel c takes channel c - res_first; stride 0 is one pixel for all */
    int32_t out_f32, out_bits, codes, out_code[2], form[2], low[2], high[2], out_zero[2], is_factor, curve;
    float clamp_low, clamp_high, number[2];
    int64_t weight, scale, bias, edges, rprelu, table[2]; /* places in the blob, -1 if there is none */
} Op;

_Static_assert(sizeof(Head) == 48 && sizeof(Value) == 16 && sizeof(Op) == 216, "records of a file have no gaps");

typedef struct { int32_t h, w; } Size;

/* A checked file for inputs of some sizes. */
typedef struct {
    Head head;
    Value *values;
    Op *ops;
    Size *value_size; /* of each value */
    Size *op_size;    /* of what each op computes */
    const char *blob; /* of the file's bytes */
} Program;

/* Returns 1, or 0 with an error as plan_open has it. `program` is to be freed in both cases. */
int program_read(Program *program, const void *bytes, size_t count, const int64_t (*sizes)[2], int inputs,
                 char error[PLAN_MESSAGE]);
void program_free(Program *program);

static inline int is_conv(const Op *op) { return op->kind >= CONV_BITS && op->kind <= CONV_FLOATS; }
static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
/* Bytes of the bits of a pixel. */
static inline int64_t bits_pixel(int64_t channels) { return channels <= 16 ? 2 : round_up(channels, 32) / 8; }
/* Bytes of a row (kh, kw, cin) of weights' filter. */
int64_t filter_bytes(const Op *op, int64_t cin);
/* A weight of 1 to 8 bits: `index` in its filter; the first one lies in the lowest bits. */
static inline int filter_number(const Op *op, const char *filter, int64_t index) {
    const int bits = op->weight_bits, start = (int)(index * bits & 7);
    const uint8_t *bytes = (const uint8_t *)filter + (index * bits >> 3);
    const int two = bytes[0] | (start + bits > 8 ? bytes[1] << 8 : 0);
    return two >> start & ((1 << bits) - 1);
}
/* The same with a sign, in two's complement. */
static inline int filter_code(const Op *op, const char *filter, int64_t index) {
    const int number = filter_number(op, filter, index), half = 1 << (op->weight_bits - 1);
    return (number ^ half) - half;
}
/* Bytes of the levels of each filter of a CONV_FLOATS, whose weights are numbers of these; they follow the filters. */
int64_t levels_bytes(const Op *op);
