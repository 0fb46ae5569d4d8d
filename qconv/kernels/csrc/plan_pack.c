/* Packing a step: weights in the order in which a kernel reads them, and tables of addresses. */
#include "plan_steps.h"

#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Offsets of the pixels of an output, shared by all steps that have the same ones. */
typedef struct Table { struct Table *next; int64_t h, w, start, down, across; int32_t *at; } Table;

static const int32_t *pixels_of(Plan *plan, const Step *s, int32_t value, int64_t sh, int64_t sw, int64_t top,
                                int64_t left) {
    if (value < 0) return NULL;
    const Place *p = &plan->places[value];
    const int64_t start = (p->top - top) * p->row + (p->left - left) * p->pixel;
    const Table wanted = {NULL, s->out_h, s->out_w, start, sh * p->row, sw * p->pixel, NULL};
    for (const Table *t = plan->tables; t != NULL; t = t->next)
        if (t->h == wanted.h && t->w == wanted.w && t->start == wanted.start && t->down == wanted.down &&
            t->across == wanted.across)
            return t->at;
    Table *table = plan_keep(plan, sizeof *table);
    int32_t *at = plan_keep(plan, wanted.h * wanted.w * 4);
    if (table == NULL || at == NULL) return NULL;
    for (int64_t y = 0; y < wanted.h; y++)
        for (int64_t x = 0; x < wanted.w; x++)
            at[y * wanted.w + x] = (int32_t)(wanted.start + y * wanted.down + x * wanted.across);
    *table = wanted;
    table->at = at;
    table->next = plan->tables;
    plan->tables = table;
    return at;
}

static float *floats_of(Plan *plan, int64_t at, int64_t count, int64_t padded, float absent) {
    float *to = plan_keep(plan, 4 * padded);
    if (to == NULL) return NULL;
    if (at >= 0)
        memcpy(to, plan->program.blob + at, (size_t)count * 4);
    else
        for (int64_t i = 0; i < count; i++) to[i] = absent;
    return to;
}

/* ---- which kernel, and its rows and units ---- */
typedef struct {
    const Place *in;
    int64_t filter;
    int in_a_row, fan_out;
} Shape; /* fan_out: output channels of a group */

static Shape shape_of(const Plan *plan, const Step *s) {
    const Op *op = s->op;
    return (Shape){&plan->places[op->in], filter_bytes(op, s->cin), op->dw == 1 && op->groups == 1,
                   op->cout / op->groups};
}

/* Whether blocks of nv vectors hold channels of one group alone. */
static int is_apart(const Op *op, int fan_out, int nv) { return op->groups == 1 || fan_out % (nv * LANES) == 0; }

/* Whether all weights have 4 bits, and sums of them, times 16, fit into 32 bits. */
static int have_4_bits(const Plan *plan, const Step *s, int64_t filter) {
    const int64_t count = (int64_t)s->op->kh * s->op->kw * s->cin;
    for (int64_t o = 0; o < s->op->cout; o++) {
        int64_t sum = 0;
        for (int64_t i = 0; i < count; i++) {
            const int w = filter_code(s->op, plan->program.blob + s->op->weight + o * filter, i);
            if (w < -8 || w >= 8) return 0;
            sum += abs(w);
        }
        if (sum * 16 > INT32_MAX / 255) return 0;
    }
    return 1;
}

static int is_depthwise(const Step *s, const Shape *shape) {
    return s->op->groups > 1 && s->cin == 1 && shape->fan_out == 1;
}

/* Whether there is AMX; Linux gives its tiles to processes that ask. */
static int has_amx(const Plan *plan) {
#if defined(__x86_64__) && defined(__linux__) && __has_include(<amxint8intrin.h>)
    enum { ASK = 0x1023, TILES = 18 };
    unsigned a, b, c, d;
    return plan->isa == AVX512 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 24 & d >> 25 & 1 &&
           !syscall(SYS_arch_prctl, ASK, TILES);
#else
    (void)plan;
    return 0;
#endif
}

enum { FEW = 4 }; /* pixels and units, for which AMX is not worth it */

static int codes_kernel(const Plan *plan, const Step *s, const Shape *shape) {
    if (is_depthwise(s, shape)) return SUM_CODES_DEEP;
    const int64_t row = (int64_t)s->cin * (shape->in_a_row ? s->op->kw : 1);
    if (s->pixels >= FEW && row >= 4 * FEW && has_amx(plan)) return SUM_CODES_AMX;
    if (plan->has_dot && plan->isa != AVX512) return SUM_CODES_DOT;
    /* Weights of 4 bits, two to a byte, each times 16 in the sums. */
    return s->nv == 2 && have_4_bits(plan, s, shape->filter) ? SUM_CODES_4 : SUM_CODES;
}

static int bits_kernel(const Plan *plan, Step *s, const Shape *shape) {
    const Op *op = s->op;
    const int64_t row = shape->in->pixel * (shape->in_a_row ? op->kw : 1);
    if (plan->isa == AVX2 && (int64_t)op->kh * op->kw * shape->in->pixel * 8 <= UINT16_MAX) {
        for (int nv = s->cpad > 2 * LANES ? 4 : s->cpad > LANES ? 2 : 1; nv > 0; nv /= 2)
            if (op->groups == 1 || (is_apart(op, shape->fan_out, nv) && s->cin % 8 == 0))
                return s->nv = nv, SUM_NIBBLES;
    }
    const int is_whole = op->groups == 1 ? row % 4 == 0 : s->cin % 32 == 0 && is_apart(op, shape->fan_out, s->nv);
    return is_whole ? SUM_BITS : SUM_MASKED;
}

static int kernel_of(const Plan *plan, Step *s, const Shape *shape) {
    const Op *op = s->op;
    s->nv = plan->isa == AVX512 && s->cpad > LANES && is_apart(op, shape->fan_out, 2) ? 2 : 1;
    if (op->kind == CONV_BITS) return bits_kernel(plan, s, shape);
    if (op->kind == CONV_CODES) return codes_kernel(plan, s, shape);
    if (is_apart(op, shape->fan_out, 1)) return SUM_FLOATS;
    return is_depthwise(s, shape) ? SUM_DEEP : SUM_SPREAD;
}

static int is_deep(const Step *s) { return s->sums == SUM_DEEP || s->sums == SUM_CODES_DEEP; }

/* Bytes of a unit of taps in the input, and of its weights for a block. */
static int unit_bytes(const Step *s) { return s->sums == SUM_NIBBLES ? 1 : 4; }
static int64_t step_bytes(const Step *s) {
    switch (s->sums) {
    case SUM_MASKED: case SUM_CODES_WIDE: return s->nv * 128;
    case SUM_CODES_4: case SUM_NIBBLES: return s->nv * 32;
    default: return s->nv * 64;
    }
}

/* The bytes of a pixel that a block reads. */
static void reach(const Step *s, const Shape *shape, int block, int64_t *start, int64_t *end) {
    const int first = block * s->nv * LANES, after = first + s->nv * LANES;
    const int last = after < s->op->cout ? after : s->op->cout;
    const int64_t from = first / shape->fan_out * (int64_t)s->cin;
    const int64_t to = ((last - 1) / shape->fan_out + 1) * (int64_t)s->cin;
    *start = s->op->kind == CONV_BITS ? from / 8 : s->op->kind == CONV_CODES ? from : 4 * from;
    *end = s->op->kind == CONV_BITS ? (to + 7) / 8 : s->op->kind == CONV_CODES ? to : 4 * to;
    if (is_deep(s)) *end = *start + 4;
    if (s->sums == SUM_SPREAD) *start = 0, *end = 4 * s->cin;
}

/* Rows, units, and where blocks begin in a pixel. A block's units lie within the pixel. */
static void lay_out(Plan *plan, Step *s, const Shape *shape) {
    const Op *op = s->op;
    const int unit = unit_bytes(s);
    s->blocks = (s->cpad / LANES + s->nv - 1) / s->nv;
    s->cpad = s->blocks * s->nv * LANES;
    s->rows = shape->in_a_row ? op->kh : op->kh * op->kw;
    s->row_at = plan_keep(plan, 4 * (int64_t)s->rows);
    s->block_at = plan_keep(plan, 4 * (int64_t)s->blocks);
    if (plan->failed) return;
    int64_t start, end, longest = 0;
    for (int b = 0; b < s->blocks; b++) {
        reach(s, shape, b, &start, &end);
        if (end - start > longest) longest = end - start;
    }
    if (op->groups == 1) longest = shape->in->pixel * (shape->in_a_row ? op->kw : 1);
    s->run = (int32_t)((longest + unit - 1) / unit);
    for (int b = 0; b < s->blocks && op->groups > 1; b++) {
        reach(s, shape, b, &start, &end);
        const int64_t most = shape->in->pixel - s->run * unit;
        s->block_at[b] = (int32_t)(start < most || is_deep(s) ? start : most > 0 ? most : 0);
    }
    if (s->sums == SUM_CODES_AMX) s->run = (int32_t)round_up(s->run, 16); /* units of a tile; weights behind are 0 */
    for (int64_t r = 0; r < s->rows; r++) {
        const int64_t i = shape->in_a_row ? r : r / op->kw, j = shape->in_a_row ? 0 : r % op->kw;
        s->row_at[r] = (int32_t)(i * op->dh * shape->in->row + j * op->dw * shape->in->pixel);
    }
}

/* ---- weights ---- */
/* Where the filter of an output channel goes. */
typedef struct { char *block; int v, lane; int64_t first; } Filter; /* first: its first channel in the block's units */

static Filter filter_of(const Step *s, const Shape *shape, int64_t o) {
    const int64_t wide = s->nv * LANES, block = o / wide, channel = o / shape->fan_out * s->cin;
    const int64_t per_byte = s->op->kind == CONV_BITS ? 8 : 1, bytes = s->op->kind == CONV_FLOATS ? 4 : 1;
    Filter f = {s->weight + block * s->block_bytes, (int)(o % wide / LANES), (int)(o % LANES), 0};
    if (!is_deep(s) && s->sums != SUM_SPREAD) f.first = channel - s->block_at[block] / bytes * per_byte;
    return f;
}

/* 32 bits of the filter's lane in the first half of a step, or in all of it. */
static char *lane_of(const Step *s, const Filter *f, int64_t step) {
    return f->block + step * step_bytes(s) + (f->v * LANES + f->lane) * 4;
}

static int bit_of(const uint8_t *bits, int64_t k) { return bits[k / 8] >> k % 8 & 1; }

/* Bits with masks, one after the other. */
static void put_bits(const Step *s, const Filter *f, const uint8_t *bits, int64_t row, int64_t first) {
    for (int64_t k = 0; k < s->cin; k++) {
        uint32_t *to = (uint32_t *)lane_of(s, f, row * s->run + (first + k) / 32);
        *to |= (uint32_t)bit_of(bits, k) << (first + k) % 32;
        to[s->nv * LANES] |= (uint32_t)1 << (first + k) % 32;
    }
}

/* A byte of bits, without those that are no channels. */
static uint8_t byte_of(const uint8_t *bits, int64_t k, int64_t cin) {
    return (uint8_t)(bits[k / 8] & (cin - k < 8 ? (1 << (cin - k)) - 1 : 255));
}

static void put_bytes(const Step *s, const Filter *f, const uint8_t *bits, int64_t row, int64_t first) {
    for (int64_t k = 0; k < s->cin; k += 8)
        lane_of(s, f, row * s->run + (first + k) / 32)[(first + k) % 32 / 8] = (char)byte_of(bits, k, s->cin);
}

static void put_nibbles(const Step *s, const Filter *f, const uint8_t *bits, int64_t row, int64_t first) {
    for (int64_t k = 0; k < s->cin; k += 8) {
        char *to = f->block + (row * s->run + (first + k) / 8) * step_bytes(s) + f->v * LANES + f->lane;
        to[0] = byte_of(bits, k, s->cin) & 15;
        to[s->nv * LANES] = (char)(byte_of(bits, k, s->cin) >> 4);
    }
}

static void put_codes(const Step *s, const Filter *f, const char *filter, int64_t index, int64_t row, int64_t first) {
    for (int64_t k = 0; k < s->cin; k++) {
        const int64_t step = row * s->run + (first + k) / 4, place = (first + k) % 4;
        const int value = filter_code(s->op, filter, index + k);
        if (s->sums == SUM_CODES_4)
            f->block[step * step_bytes(s) + f->lane * 4 + place] |= (char)(f->v ? value * 16 : value & 15);
        else if (is_deep(s))
            memcpy(lane_of(s, f, step), &value, 4);
        else if (s->sums == SUM_CODES_WIDE) /* even places, then odd ones */
            ((int16_t *)lane_of(s, f, step))[place % 2 * s->nv * LANES * 2 + place / 2] = (int16_t)value;
        else
            lane_of(s, f, step)[place] = (char)value;
    }
}

/* The weights of a tap; `tap` is its number, `row` and `first` its row and its first channel there. */
static void put_tap(const Step *s, const Filter *f, const char *filter, int64_t tap, int64_t row, int64_t first) {
    const uint8_t *bits = (const uint8_t *)filter + tap * bits_pixel(s->cin);
    switch (s->sums) {
    case SUM_MASKED: put_bits(s, f, bits, row, first); break;
    case SUM_BITS: put_bytes(s, f, bits, row, first); break;
    case SUM_NIBBLES: put_nibbles(s, f, bits, row, first); break;
    case SUM_FLOATS: case SUM_SPREAD: case SUM_DEEP:
        for (int64_t k = 0; k < s->cin; k++)
            memcpy(lane_of(s, f, row * s->run + first + k), filter + (tap * s->cin + k) * 4, 4);
        break;
    default: put_codes(s, f, filter, tap * s->cin, row, first);
    }
}

/* For all steps of a plan; aligned, as all that is kept. */
static Differing *differing_bits(Plan *plan) {
    if (plan->differing != NULL) return plan->differing;
    plan->differing = plan_keep(plan, 256 * sizeof *plan->differing);
    for (int byte = 0; byte < 256 && plan->differing != NULL; byte++)
        for (int bits = 0; bits < 16; bits++) {
            plan->differing[byte][0][bits] = (uint8_t)__builtin_popcount((byte & 15) ^ bits);
            plan->differing[byte][1][bits] = (uint8_t)__builtin_popcount(byte >> 4 ^ bits);
        }
    return plan->differing;
}

/* The filter of an output channel; floats of few levels are looked up. */
static const char *filter_at(const Plan *plan, const Step *s, const Shape *shape, int64_t o, float *floats) {
    const Op *op = s->op;
    const char *filters = plan->program.blob + op->weight, *filter = filters + o * shape->filter;
    if (levels_bytes(op) == 0) return filter;
    const char *levels = filters + op->cout * shape->filter + o * levels_bytes(op);
    const int64_t count = (int64_t)op->kh * op->kw * s->cin;
    for (int64_t i = 0; i < count; i++) memcpy(floats + i, levels + 4 * filter_number(op, filter, i), 4);
    return (const char *)floats;
}

static void pack_weight(Plan *plan, Step *s, const Shape *shape) {
    const Op *op = s->op;
    const int64_t pixel = shape->in->pixel; /* in channels of a row, gaps included */
    const int64_t next = op->kind == CONV_BITS ? 8 * pixel : op->kind == CONV_CODES ? pixel : pixel / 4;
    s->block_bytes = (int64_t)s->rows * s->run * step_bytes(s);
    s->weight = plan_keep(plan, s->block_bytes * s->blocks);
    float *floats = malloc(4 * (size_t)op->kh * (size_t)op->kw * (size_t)s->cin);
    plan->failed |= floats == NULL;
    for (int64_t o = 0; o < op->cout && !plan->failed; o++) {
        const Filter f = filter_of(s, shape, o);
        const char *filter = filter_at(plan, s, shape, o, floats);
        for (int64_t tap = 0; tap < (int64_t)op->kh * op->kw; tap++) {
            const int64_t row = shape->in_a_row ? tap / op->kw : tap, j = shape->in_a_row ? tap % op->kw : 0;
            put_tap(s, &f, filter, tap, row, f.first + j * next);
        }
    }
    free(floats);
    if (s->sums == SUM_NIBBLES) s->differing = differing_bits(plan);
    if (s->sums != SUM_SPREAD) return;
    s->spread = plan_keep(plan, 4 * (int64_t)s->cpad);
    for (int o = 0; o < op->cout && s->spread != NULL; o++) s->spread[o] = o / shape->fan_out * s->cin * 4;
}

/* ---- sums of 16 bits ---- */
/* The largest code of a value, or of its border. */
static int largest_code(const Plan *plan, int32_t value) {
    int largest = plan->program.values[value].fill;
    for (int64_t i = 0; i < plan->program.head.ops; i++) {
        const Op *op = &plan->program.ops[i];
        for (int k = 0; k < op->codes; k++)
            if (op->out_code[k] == value && op->high[k] + op->out_zero[k] > largest)
                largest = op->high[k] + op->out_zero[k];
    }
    return largest;
}

/* Whether sums of products with `units` units of codes, which are at most `code`, fit into 16 bits. Several rows are
 * added at once if all their units are. */
static int fit_16_bits(const Step *s, int64_t units, int code) {
    const int8_t *w = (const int8_t *)s->weight;
    int32_t sums[2][2 * LANES];
    for (int64_t block = 0; block < s->blocks; block++)
        for (int64_t u = 0; u < s->rows * (int64_t)s->run; u++, w += 4 * LANES) {
            if ((units < s->run ? u % s->run : u) % units == 0) memset(sums, 0, sizeof sums);
            int32_t fits = 1;
            for (int k = 0; k < 2 * LANES; k++) {
                const int32_t a = w[2 * k], b = w[2 * k + 1];
                sums[0][k] += (a > 0 ? a : 0) + (b > 0 ? b : 0);
                sums[1][k] -= (a < 0 ? a : 0) + (b < 0 ? b : 0);
                fits &= sums[0][k] * code <= INT16_MAX && sums[1][k] * code <= INT16_MAX;
            }
            if (!fits) return 0;
        }
    return 1;
}

/* How many units are added in 16 bits on AVX2: of whole rows, or of a part of one; 0 where not even one fits. */
static int64_t narrow_units(const Plan *plan, const Step *s) {
    const int code = largest_code(plan, s->op->in);
    for (int64_t rows = s->rows; rows > 0; rows /= 2)
        if (fit_16_bits(s, rows * s->run, code)) return rows * s->run;
    for (int64_t units = s->run / 2; units > 0; units /= 2)
        if (fit_16_bits(s, units, code)) return units;
    return 0;
}

/* Codes on AVX2: sums in 16 bits where they fit; else, for many pixels, weights in 16 bits, which are twice the bytes. */
static void pack_for_avx2(Plan *plan, Step *s, const Shape *shape) {
    enum { MANY = 32 };
    s->narrow = narrow_units(plan, s);
    if (s->narrow > 0) s->sums = SUM_CODES_SMALL;
    if (s->narrow > 0 || s->pixels < MANY) return;
    plan_drop(plan, s->block_bytes * s->blocks);
    s->sums = SUM_CODES_WIDE;
    if (s->cpad > LANES && is_apart(s->op, shape->fan_out, 2)) s->nv = 2;
    lay_out(plan, s, shape);
    if (!plan->failed) pack_weight(plan, s, shape);
}

/* ---- what sums start from ---- */
/* The sums of zero times weight, taken away. */
static void subtract_zero(Plan *plan, Step *s, const Shape *shape) {
    const Op *op = s->op;
    const int zero = plan->isa == NEON && s->sums == SUM_CODES_DOT ? op->zero - 128 : op->zero; /* see the kernel */
    if (zero == 0 || (s->base = plan_keep(plan, 4 * (int64_t)s->cpad)) == NULL) return;
    const int64_t count = (int64_t)op->kh * op->kw * s->cin;
    for (int64_t o = 0; o < op->cout; o++)
        for (int64_t i = 0; i < count; i++)
            s->base[o] -= zero * filter_code(op, plan->program.blob + op->weight + o * shape->filter, i);
}

/* The taps of each place along a side that lie inside, first to last, and classes of places with the same ones. */
typedef struct { int32_t *first, *last, *class; int32_t classes; } Side;

static void classify(Plan *plan, Side *side, int32_t places, int64_t size, int64_t before, int64_t kernel,
                     int64_t stride, int64_t dilation) {
    int32_t *all = plan_keep(plan, 12 * (int64_t)places);
    if (all == NULL) return;
    *side = (Side){all, all + places, all + 2 * places, 0};
    for (int64_t i = 0; i < places; i++) {
        const int64_t start = i * stride - before;
        int64_t first = start < 0 ? (-start + dilation - 1) / dilation : 0;
        int64_t last = start < size ? (size - 1 - start) / dilation : -1;
        if (last > kernel - 1) last = kernel - 1;
        if (last < first) first = 0, last = -1;
        int k = 0;
        while (k < side->classes && (side->first[k] != first || side->last[k] != last)) k++;
        side->first[k] = (int32_t)first, side->last[k] = (int32_t)last, side->class[i] = k;
        if (k == side->classes) side->classes++;
    }
}

/* The sum of the signs of a tap's weights. */
static int32_t tap_sum(const char *filter, int64_t tap, int64_t cin) {
    const uint8_t *bits = (const uint8_t *)filter + tap * bits_pixel(cin);
    int32_t ones = 0;
    for (int64_t k = 0; k < cin; k += 8) ones += __builtin_popcount(byte_of(bits, k, cin));
    return (int32_t)cin - 2 * ones;
}

/* Of a class of pixels: the border counts as +1, which is taken away again where the padding is something else. */
static void fill_base(const Step *s, const Side *down, const Side *across, int64_t tap, const int32_t *sums) {
    const int64_t i = tap / s->op->kw, j = tap % s->op->kw;
    for (int64_t y = 0; y < down->classes; y++)
        for (int64_t x = 0; x < across->classes; x++) {
            const int is_inside = i >= down->first[y] && i <= down->last[y] && j >= across->first[x] &&
                                  j <= across->last[x];
            int32_t *base = s->base + (y * across->classes + x) * s->cpad;
            for (int64_t o = 0; o < s->op->cout && !is_inside; o++) base[o] -= (1 - s->op->pad_value) * sums[o];
        }
}

static void start_bits(Plan *plan, Step *s, const Shape *shape) {
    const Op *op = s->op;
    const Size in = plan->program.value_size[op->in];
    Side down = {0}, across = {0};
    classify(plan, &down, s->out_h, in.h, op->top, op->kh, op->sh, op->dh);
    classify(plan, &across, s->out_w, in.w, op->left, op->kw, op->sw, op->dw);
    if (plan->failed) return;
    const int64_t classes = (int64_t)down.classes * across.classes;
    s->base = plan_keep(plan, classes * s->cpad * 4);
    s->kind = plan_keep(plan, 4 * (int64_t)s->pixels);
    int32_t *sums = malloc((size_t)op->cout * sizeof *sums);
    plan->failed |= sums == NULL;
    const int64_t taps = (int64_t)op->kh * op->kw;
    if (!plan->failed) {
        for (int64_t k = 0; k < classes * s->cpad; k++) s->base[k] = (int32_t)(s->cin * taps);
        for (int64_t q = 0; q < s->pixels; q++)
            s->kind[q] = down.class[q / s->out_w] * across.classes + across.class[q % s->out_w];
        for (int64_t tap = 0; tap < taps; tap++) {
            for (int64_t o = 0; o < op->cout; o++)
                sums[o] = tap_sum(plan->program.blob + op->weight + o * shape->filter, tap, s->cin);
            fill_base(s, &down, &across, tap, sums);
        }
    }
    free(sums);
}

/* ---- what follows a sum ---- */
static void pack_table(Plan *plan, Step *s, int k) {
    const char *from = plan->program.blob + s->op->table[k];
    int32_t count, step = 1;
    memcpy(&count, from, 4);
    while (2 * step <= count) step *= 2;
    s->table[k] = plan_keep(plan, 4 * 2 * (int64_t)step);
    s->table_codes[k] = plan_keep(plan, 4 * 2 * (int64_t)step);
    if (plan->failed) return;
    s->table_step[k] = step;
    for (int i = 0; i < 2 * step; i++) {
        s->table[k][i] = __builtin_nanf(""); /* an edge that nothing reaches */
        s->table_codes[k][i] = ((const uint8_t *)from)[4 + 4 * count + (i < count ? i : count)];
    }
    memcpy(s->table[k], from + 4, 4 * (size_t)count);
}

static void pack_residual(Plan *plan, Step *s) {
    const Op *op = s->op;
    s->res_at = pixels_of(plan, s, op->residual, op->res_stride, op->res_stride, 0, 0);
    s->res_has = plan_keep(plan, s->cpad / LANES * 2);
    if (plan->failed) return;
    for (int c = 0; c < op->cout; c++) {
        const int from = c - op->res_first;
        s->res_has[c / LANES] |= (uint16_t)((from >= 0 && from < plan->program.values[op->residual].channels)
                                            << c % LANES);
    }
}

static void pack_epilogue(Plan *plan, Step *s) {
    const Op *op = s->op;
    s->scale = floats_of(plan, op->scale, op->cout, s->cpad, 1);
    s->bias = floats_of(plan, op->bias, op->cout, s->cpad, -0.f); /* keeps the sign of 0 */
    if (op->residual >= 0) pack_residual(plan, s);
    if (op->out_bits >= 0) s->edges = floats_of(plan, op->edges, op->cout, s->cpad, 0);
    if (op->rprelu >= 0 && (s->rprelu = plan_keep(plan, 12 * (int64_t)s->cpad)) != NULL)
        for (int k = 0; k < 3; k++)
            memcpy(s->rprelu + k * s->cpad, plan->program.blob + op->rprelu + 4 * (int64_t)k * op->cout,
                   (size_t)op->cout * 4);
    s->bits_at = pixels_of(plan, s, op->out_bits, 1, 1, 0, 0);
    for (int k = 0; k < op->codes; k++) {
        s->code_at[k] = pixels_of(plan, s, op->out_code[k], 1, 1, 0, 0);
        if (op->form[k] == EDGES) pack_table(plan, s, k);
    }
}

static void pack_conv(Plan *plan, Step *s) {
    const Op *op = s->op;
    s->cin = plan->program.values[op->in].channels / op->groups;
    const Shape shape = shape_of(plan, s);
    s->sums = kernel_of(plan, s, &shape);
    lay_out(plan, s, &shape);
    if (plan->failed) return;
    pack_weight(plan, s, &shape);
    if (plan->failed) return;
    if (plan->isa == AVX2 && s->sums == SUM_CODES) pack_for_avx2(plan, s, &shape);
    if (plan->failed) return;
    if (op->kind == CONV_CODES) subtract_zero(plan, s, &shape);
    if (op->kind == CONV_BITS) start_bits(plan, s, &shape);
    s->in_at = pixels_of(plan, s, op->in, op->sh, op->sw, op->top, op->left);
    s->pixel_step = op->sw * shape.in->pixel;
    /* Where weights outweigh values, threads share the channels, and each reads its weights alone. */
    s->by_channels = s->block_bytes * s->blocks > shape.in->bytes && s->blocks > 2;
}

/* See `Bilinear` in Python. */
static const Between *between(Plan *plan, int64_t length, int64_t times, int is_aligned, int32_t border, int64_t step) {
    const int64_t over = is_aligned ? (times * length > 1 ? times * length - 1 : 1) : 2 * times;
    Between *all = plan_keep(plan, times * length * (int64_t)sizeof *all);
    for (int64_t i = 0; i < times * length && all != NULL; i++) {
        const int64_t middle = 2 * i + 1 - times, place = is_aligned ? i * (length - 1) : middle < 0 ? 0 : middle;
        for (int64_t k = 0; k < 2; k++) {
            const int64_t pixel = place / over + k;
            all[i].at[k] = (int32_t)((border + (pixel < length ? pixel : length - 1)) * step);
        }
        all[i].part = (float)(place % over) / (float)over;
    }
    return all;
}

/* The row or column that a padding repeats at a place; -1 for a number. */
static int32_t repeated(int32_t place, int32_t size, int mode) {
    if (place >= 0 && place < size) return place;
    if (mode == REFLECT) return place < 0 ? -place : 2 * (size - 1) - place;
    if (mode == REPLICATE) return place < 0 ? 0 : size - 1;
    return mode == CIRCULAR ? (place < 0 ? place + size : place - size) : -1;
}

/* Where single pixels lie, each of which is an output, and their channels. */
static void pack_pixels(Plan *plan, Step *s) {
    const Op *op = s->op;
    const Place *p = &plan->places[op->in];
    if (op->kind == BILINEAR) {
        const Size in = plan->program.value_size[op->in];
        s->down = between(plan, in.h, op->sh, op->ceil, p->top, p->row);
        s->across = between(plan, in.w, op->sw, op->ceil, p->left, p->pixel);
    } else if (op->kind == PAD) {
        const Size in = plan->program.value_size[op->in];
        int32_t *at = plan_keep(plan, 4 * (int64_t)s->pixels);
        for (int32_t q = 0; q < s->pixels && at != NULL; q++) {
            const int64_t y = repeated(q / s->out_w - op->top, in.h, op->ceil);
            const int64_t x = repeated(q % s->out_w - op->left, in.w, op->ceil);
            at[q] = y < 0 || x < 0 ? -1 : (int32_t)((p->top + y) * p->row + (p->left + x) * p->pixel);
        }
        s->in_at = at;
    } else if (op->kind == REPEAT || op->kind == SHUFFLE) {
        int32_t *at = plan_keep(plan, 4 * (int64_t)s->pixels);
        for (int q = 0; q < s->pixels && at != NULL; q++) {
            const int y = q / s->out_w, x = q % s->out_w, in_block = y % op->sh * op->sw + x % op->sw;
            at[q] = (int32_t)((p->top + y / op->sh) * p->row + (p->left + x / op->sw) * p->pixel);
            if (op->kind == SHUFFLE) at[q] += 4 * in_block;
        }
        s->in_at = at;
    } else {
        s->in_at = pixels_of(plan, s, op->in, op->sh, op->sw, 0, 0);
    }
    if (op->kind == LAYER_NORM || op->kind == PAD) memcpy(&s->number, plan->program.blob + op->weight, 4);
    if (op->kind != SELECT && op->kind != SHUFFLE) return;
    if ((s->spread = plan_keep(plan, 4 * (int64_t)s->cpad)) == NULL) return;
    if (op->kind == SELECT) memcpy(s->spread, plan->program.blob + op->weight, 4 * (size_t)op->cout);
    for (int32_t c = 0; c < op->cout; c++) s->spread[c] = 4 * (op->kind == SELECT ? s->spread[c] : c * op->sh * op->sw);
}

static int has_pixels(const Op *op) {
    const int is_one = op->kh == 1 && op->kw == 1 && !(op->top || op->left || op->bottom || op->right);
    return op->kind >= SELECT || (op->kind == MAXIMUM && is_one);
}

/* About how many nanoseconds an image takes on one thread; good enough to cut it into parts. */
static double nanoseconds(const Plan *plan, const Step *s) {
    const Op *op = s->op;
    static const double rate[KINDS] = {4, 300, 250, 60, 10, 4, 4, 4, 4, 4, 4, 2, 1, 4}; /* products or numbers in a nanosecond */
    const double slow = plan->isa == AVX512 ? 1 : plan->isa == PORTABLE ? 20 : 2, out = (double)s->pixels * op->cout;
    if (op->kind == MEAN) return out * plan->places[op->in].bytes / plan->places[op->in].pixel / rate[MEAN] * slow;
    if (op->kind == INPUT || op->kind == OUTPUT) return out / rate[op->kind];
    const double fast = s->sums == SUM_CODES_AMX ? 4 : 1;
    return (out / 8 + out * op->kh * op->kw * (is_conv(op) ? s->cin : 1) / rate[op->kind] / fast) * slow;
}

static int32_t parts_of(const Plan *plan, const Step *s) {
    const double wanted = nanoseconds(plan, s) / 1500;
    const int64_t most = s->by_channels        ? s->blocks
                         : s->op->kind == MEAN ? s->cpad / LANES
                                               : (s->pixels + STRIP - 1) / STRIP;
    const int64_t parts = wanted > 64 ? 64 : (int64_t)wanted & ~1; /* two threads have half each */
    return (int32_t)(parts < 1 ? 1 : parts < most ? parts : most);
}

void plan_pack(Plan *plan, int index) {
    Step *s = &plan->steps[index];
    const Op *op = s->op = &plan->program.ops[index];
    const Size size = plan->program.op_size[index];
    s->out_h = size.h, s->out_w = size.w, s->pixels = size.h * size.w;
    s->cpad = (int32_t)round_up(op->cout, LANES);
    if (is_conv(op)) pack_conv(plan, s);
    if (has_pixels(op)) pack_pixels(plan, s);
    if (plan->failed) return;
    if (op->kind != OUTPUT) s->f32_at = pixels_of(plan, s, op->out_f32, 1, 1, 0, 0);
    if (op->kind != OUTPUT && op->kind != INPUT) pack_epilogue(plan, s);
    s->parts = parts_of(plan, s);
}
