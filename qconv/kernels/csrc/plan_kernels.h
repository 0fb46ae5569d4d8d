/* The kernels over 16 lanes: tiles of pixels × vectors of 16 output channels, and what becomes of their sums.
 *
 * A convolution is a loop over `rows` of taps, each `run` units that follow each other in memory. A unit of a pixel is
 * broadcast; a vector of weights holds the unit's weights of 16 channels. What a unit is, and how it is multiplied and
 * added, is all that bits, codes and floats differ in. Floats are added up in the order of rows and units, one fused
 * multiply-add each, on every machine.
 */

/* ---- sums of a tile, as floats (P, NV · 16); `base`: what they start from, for each pixel ---- */
typedef int32_t Unit __attribute__((may_alias, aligned(1)));
typedef float UnitFloat __attribute__((may_alias, aligned(1)));
typedef uint16_t Half __attribute__((may_alias, aligned(1)));
typedef void (*Tile)(const Step *, const char *const *, const char *, const int32_t *const *, const int32_t *, float *);

/* Whole sums after one more unit, from a pixel at x, for the vector v of the weights at w. */
LANE I add_whole(const int kind, I sum, const char *x, const char *w, int v, const int NV) {
    if (kind == SUM_CODES_DEEP) return i_product(sum, i_of_bytes(x + LANES * v), i_load(w + 64 * v));
    const I unit = i_all(*(const Unit *)x);
    switch (kind) {
    case SUM_BITS: return i_count(sum, unit, i_load(w + 64 * v));
    case SUM_MASKED: return i_count_of(sum, unit, i_load(w + 64 * v), i_load(w + 64 * (NV + v)));
#if defined(HAS_CODES_4)
    case SUM_CODES_4: return i_dot(sum, unit, v ? i_high(i_load(w)) : i_low(i_load(w)));
#endif
#if defined(HAS_DOT)
    case SUM_CODES_DOT: return i_dot_at_once(sum, unit, i_load(w + 64 * v));
#endif
    default: return i_dot(sum, unit, i_load(w + 64 * v));
    }
}

LANE F add_floats(const int kind, F sum, const char *x, const char *w, int v, const int32_t *spread) {
    const F k = f_load(w + 64 * v);
    switch (kind) {
    case SUM_SPREAD: return f_fma(f_gather(x, i_load(spread + LANES * v)), k, sum);
    case SUM_DEEP: return f_fma(f_load(x + 64 * v), k, sum);
    default: return f_fma(f_all(*(const UnitFloat *)x), k, sum);
    }
}

/* What a whole sum is as a float. */
LANE F finish_whole(const int kind, I sum, const int32_t *base) {
    if (kind == SUM_BITS || kind == SUM_MASKED) return i_float(i_less_twice(i_load(base), sum));
#if defined(HAS_CODES_4)
    if (kind == SUM_CODES_4) sum = i_sixteenth(sum);
#endif
    return i_float(base == NULL ? sum : i_add(sum, i_load(base)));
}

/* Of P pixels; `spread`: see Step. */
LANE void tile(const int kind, const int P, const int NV, const Step *s, const char *const *px, const char *w,
               const int32_t *const *base, const int32_t *spread, float *out) {
    const int are_floats = kind == SUM_FLOATS || kind == SUM_SPREAD || kind == SUM_DEEP;
    const int bytes = kind == SUM_MASKED ? 128 * NV : kind == SUM_CODES_4 ? 32 * NV : 64 * NV;
    I sums[PIXELS][VECTORS];
    F floats[PIXELS][VECTORS];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
        for (int v = 0; v < NV; v++) sums[p][v] = i_zero(), floats[p][v] = f_zero();
    const int64_t rows = s->rows, run = s->run;
    for (int64_t r = 0; r < rows; r++) {
        const char *at[PIXELS];
        for (int p = 0; p < P; p++) at[p] = px[p] + s->row_at[r];
        int64_t u = 0;
        do {
#pragma GCC unroll 8
            for (int p = 0; p < P; p++)
                for (int v = 0; v < NV; v++) {
                    if (are_floats)
                        floats[p][v] = add_floats(kind, floats[p][v], at[p] + 4 * u, w, v, spread);
                    else
                        sums[p][v] = add_whole(kind, sums[p][v], at[p] + 4 * u, w, v, NV);
                }
            w += bytes;
        } while (++u < run);
    }
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
        for (int v = 0; v < NV; v++) {
            const int32_t *from = base[p] == NULL ? NULL : base[p] + LANES * v;
            f_store(out + (p * NV + v) * LANES, are_floats ? floats[p][v] : finish_whole(kind, sums[p][v], from));
        }
}

#define TILE(kind, P, NV)                                                                                              \
    static TARGET void kind##_##P##_##NV(const Step *s, const char *const *px, const char *w,                          \
                                         const int32_t *const *base, const int32_t *spread, float *out) {              \
        tile(SUM_##kind, P, NV, s, px, w, base, spread, out);                                                          \
    }
/* NARROW: of one vector, for channels that lie anywhere or have a lane each. */
#if VECTORS == 2
#define TILES(kind) TILE(kind, 8, 2) TILE(kind, 4, 2) TILE(kind, 1, 2) NARROW_TILES(kind)
#define NARROW_TILES(kind) TILE(kind, 8, 1) TILE(kind, 4, 1) TILE(kind, 1, 1)
#define TABLE(kind) [SUM_##kind] = {{kind##_8_1, kind##_8_2}, {kind##_4_1, kind##_4_2}, {kind##_1_1, kind##_1_2}}
#define NARROW(kind) [SUM_##kind] = {{kind##_8_1}, {kind##_4_1}, {kind##_1_1}}
static const int tile_pixels[3] = {8, 4, 1};
#else
#define TILES(kind) TILE(kind, 4, 1) TILE(kind, 2, 1) TILE(kind, 1, 1)
#define NARROW_TILES TILES
#define TABLE(kind) [SUM_##kind] = {{kind##_4_1}, {kind##_2_1}, {kind##_1_1}}
#define NARROW TABLE
static const int tile_pixels[3] = {4, 2, 1};
#endif
TILES(BITS) TILES(MASKED) TILES(CODES) TILES(FLOATS) NARROW_TILES(CODES_DEEP) NARROW_TILES(SPREAD) NARROW_TILES(DEEP)
#if defined(HAS_CODES_4)
TILES(CODES_4)
#endif
#if defined(HAS_CODES_AVX2)
#include "plan_codes_avx2.h"
#endif
#if defined(HAS_DOT)
TILES(CODES_DOT)
#endif
static const Tile tiles[SUMS][3][3] = {
    TABLE(BITS), TABLE(MASKED), TABLE(CODES), TABLE(FLOATS), NARROW(CODES_DEEP), NARROW(SPREAD), NARROW(DEEP),
#if defined(HAS_CODES_4)
    TABLE(CODES_4),
#endif
#if defined(HAS_DOT)
    TABLE(CODES_DOT),
#endif
#if defined(HAS_CODES_AVX2)
    TABLE(CODES_SMALL),
    [SUM_CODES_WIDE] = {{CODES_WIDE_4_1, CODES_WIDE_4_2},
                        {CODES_WIDE_2_1, CODES_WIDE_2_2},
                        {CODES_WIDE_1_1, CODES_WIDE_1_2}},
    [SUM_NIBBLES] = {{NIBBLES_4_1, NIBBLES_4_2, NIBBLES_4_4},
                     {NIBBLES_2_1, NIBBLES_2_2, NIBBLES_2_4},
                     {NIBBLES_1_1, NIBBLES_1_2, NIBBLES_1_4}},
#endif
};

/* ---- what becomes of values: (count pixels, nv · 16), the first of which is pixel q ---- */
typedef struct {
    const Step *s;
    const char *res;
    char *f32, *bits, *code[2];
} Outs;

static char *memory_of(const Plan *plan, const Run *run, int32_t value, int image) {
    if (value < 0) return NULL;
    const Place *place = &plan->places[value];
    return run->arena->memory + place->at + (run->image + image) * place->stride;
}

static Outs outs_of(const Plan *plan, const Step *s, const Run *run, int image) {
    const Op *op = s->op;
    return (Outs){s, memory_of(plan, run, op->residual, image), memory_of(plan, run, op->out_f32, image),
                  memory_of(plan, run, op->out_bits, image),
                  {op->codes > 0 ? memory_of(plan, run, op->out_code[0], image) : NULL,
                   op->codes > 1 ? memory_of(plan, run, op->out_code[1], image) : NULL}};
}

LANE uint16_t first_of(int count) { return count >= LANES ? 0xffff : count <= 0 ? 0 : (uint16_t)((1 << count) - 1); }
/* The lanes that are channels, of a vector from channel c on. */
LANE uint16_t channels_from(const Op *op, int c) { return first_of(op->cout - c); }

typedef struct {
    F number, low, high;
    I zero;
    int form, step;
    const float *edges;
    const int32_t *codes;
    char *to;
    const int32_t *at;
} Coder;

LANE Coder coder_of(const Outs *o, int k, int c) {
    const Op *op = o->s->op;
    const Step *s = o->s;
    return (Coder){.number = f_all(op->number[k]),
                   .low = f_all((float)op->low[k]),
                   .high = f_all((float)op->high[k]),
                   .zero = i_all(op->out_zero[k]),
                   .form = op->form[k],
                   .step = s->table_step[k],
                   .edges = s->table[k],
                   .codes = s->table_codes[k],
                   .to = o->code[k] + c,
                   .at = s->code_at[k]};
}

/* The codes at the numbers of edges that x reaches, by bisection. */
LANE I look_up(const Coder *coder, F x) {
    I place = i_zero();
    for (int step = coder->step; step > 0; step /= 2) {
        const I edge = i_add(place, i_all(step - 1));
        place = i_add(place, f_reached(f_gather(coder->edges, i_times_4(edge)), x, i_all(step)));
    }
    return i_gather(coder->codes, place);
}

/* Numbers are clamped before they are rounded, which is the same, as the ends are whole; NaN becomes the lowest one. */
LANE I code_of(const Coder *coder, F x) {
    if (coder->form == EDGES) return look_up(coder, x);
    const F z = coder->form == PRODUCT ? f_mul(x, coder->number) : f_div(x, coder->number);
    return i_add(f_round(f_min(f_max(z, coder->low), coder->high)), coder->zero);
}

LANE void encode(const Coder *coder, F x, int q, int left, const int is_whole) {
    char *to = coder->to + coder->at[q], some[LANES];
    i_bytes(is_whole ? to : some, code_of(coder, x));
    for (int l = 0; !is_whole && l < left && l < LANES; l++) to[l] = some[l]; /* masked stores of bytes are slow */
}

/* Functions of floats as Python defines them. */
LANE F f_plus(F x, float y) { return f_add(x, f_all(y)); }
LANE F f_times(F x, float y) { return f_mul(x, f_all(y)); }
LANE F polynomial(const float *factors, int count, F x) {
    F sum = f_all(factors[0]);
    for (int k = 1; k < count; k++) sum = f_plus(f_mul(sum, x), factors[k]);
    return sum;
}

LANE F power(F z) {
    static const float taylor[] = {1.f / 5040, 1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1, 1};
    const I whole = f_round(f_times(z, 1.4426950216293335f));
    const F n = i_float(whole), r = f_add(f_add(z, f_times(n, -0.693359375f)), f_times(n, 2.1219444170128554e-4f));
    return f_mul(polynomial(taylor, 8, r), f_power_of_2(whole));
}

LANE F sigmoid(F x) {
    const F z = f_min(f_all(87), f_max(f_all(-87), f_times(x, -1)));
    return f_div(f_all(1), f_plus(power(z), 1));
}

LANE F gelu(F x) {
    static const float normal[] = {-0.11202044f, 0.436400741f,  -0.306797355f,
                                   0.316277772f, 0.0489801988f, 0.117159113f};
    const F z = f_times(f_max(x, f_times(x, -1)), 0.7071067690849304f);
    const F t = f_div(f_all(1), f_plus(f_times(z, 0.39f), 1)), square = f_times(f_mul(z, z), -1);
    const F tail = f_mul(f_mul(polynomial(normal, 6, t), t), power(f_max(f_all(-87), square)));
    return f_mul(f_times(x, 0.5f), f_plus(f_signed(f_plus(f_times(tail, -2), 1), x), 1));
}

LANE F hard_swish(F x) { return f_mul(x, f_times(f_min(f_all(6), f_max(f_all(0), f_plus(x, 3))), 1.f / 6)); }

enum { HAS_RESIDUAL = 1, TO_F32 = 2, TO_CODES = 4, TO_BITS = 8, TO_TWO_CODES = 16, HAS_CURVE = 32, FINISHES = 64 };

/* What comes before the curve, of channels from c on. */
typedef struct {
    const Op *op;
    F scale, bias, before, slope, after;
    int has_prelu;
    uint16_t res_has;
    const char *res;
    const int32_t *res_at;
} Stages;

LANE Stages stages_of(const Outs *o, int c, const int flags) {
    const Step *s = o->s;
    const F zero = f_zero();
    Stages found = {.op = s->op, .scale = f_load(s->scale + c), .bias = f_load(s->bias + c), .before = zero,
                    .slope = zero, .after = zero, .has_prelu = s->rprelu != NULL};
    if (found.has_prelu) {
        found.before = f_load(s->rprelu + c);
        found.slope = f_load(s->rprelu + s->cpad + c);
        found.after = f_load(s->rprelu + 2 * s->cpad + c);
    }
    if (flags & HAS_RESIDUAL) {
        found.res_has = s->res_has[c / LANES];
        found.res = o->res + 4 * ((int64_t)c - s->op->res_first);
        found.res_at = s->res_at;
    }
    return found;
}

LANE F staged(const Stages *stages, F x, int q, const int flags) {
    x = f_add(f_mul(x, stages->scale), stages->bias);
    if (flags & HAS_RESIDUAL) {
        const F other = f_some(stages->res + stages->res_at[q], stages->res_has);
        x = stages->op->is_factor ? f_mul(x, other) : f_add(x, other);
    }
    if (stages->has_prelu) x = f_add(f_sloped(f_add(x, stages->before), stages->slope), stages->after);
    return x;
}

/* All stages up to the curve, in place, so that those of several pixels overlap. */
static __attribute__((noinline)) TARGET void curve(const Outs *o, float *acc, int q, int count, int c, int next,
                                                   const int flags) {
    const Stages stages = stages_of(o, c, flags);
    const int kind = o->s->op->curve;
    for (int p = 0; p < count; p++) {
        const F x = staged(&stages, f_load(acc + p * next), q + p, flags);
        f_store(acc + p * next, kind == HARD_SWISH ? hard_swish(x) : kind == GELU ? gelu(x) : sigmoid(x));
        if (kind == SILU) f_store(acc + p * next, f_mul(x, f_load(acc + p * next)));
    }
}

/* Of a vector of channels from c on. `is_whole`: all lanes are channels. */
LANE void finish_vector(const Outs *o, float *acc, int q, int count, int c, int next, const int flags,
                        const int is_whole) {
    const Step *s = o->s;
    const Op *op = s->op;
    const F low = f_all(op->clamp_low), high = f_all(op->clamp_high);
    const Stages stages = stages_of(o, c, flags);
    const int left = op->cout - c;
    const uint16_t some = channels_from(op, c);
    F edge = f_zero();
    Coder first = {0}, second = {0};
    const int64_t f32_c = 4 * (int64_t)c, bits_c = c / 8;
    char *const f32 = o->f32, *const bits = o->bits;
    const int32_t *const f32_at = s->f32_at, *const bits_at = s->bits_at;
    if (flags & TO_BITS) edge = f_load(s->edges + c);
    if (flags & TO_CODES) first = coder_of(o, 0, c);
    if (flags & TO_TWO_CODES) second = coder_of(o, 1, c);
    if (flags & HAS_CURVE) curve(o, acc, q, count, c, next, flags);
    for (int p = 0; p < count; p++, q++, acc += next) {
        F x = f_load(acc);
        if (!(flags & HAS_CURVE)) x = staged(&stages, x, q, flags);
        x = f_min(high, f_max(low, x)); /* NaN stays */
        if (flags & TO_F32 && is_whole) f_store(f32 + (f32_at[q] + f32_c), x);
        if (flags & TO_F32 && !is_whole) f_store_some(f32 + (f32_at[q] + f32_c), x, some);
        if (flags & TO_BITS) *(Half *)(bits + (bits_at[q] + bits_c)) = f_below(x, edge) & some;
        if (flags & TO_CODES) {
            encode(&first, x, q, left, is_whole);
            if (flags & TO_TWO_CODES) encode(&second, x, q, left, is_whole);
        }
    }
}

static __attribute__((cold)) TARGET void finish_rest(const Outs *o, float *acc, int q, int count, int c, int next, int flags) {
    finish_vector(o, acc, q, count, c, next, flags, 0);
}

LANE void finish(const Outs *o, float *acc, int q, int count, int channel, int nv, const int flags) {
    for (int v = 0; v < nv; v++) {
        const int c = channel + v * LANES, left = o->s->op->cout - c;
        if (left <= 0) return;
        if (left >= LANES)
            finish_vector(o, acc + v * LANES, q, count, c, nv * LANES, flags, 1);
        else
            finish_rest(o, acc + v * LANES, q, count, c, nv * LANES, flags);
    }
}

static int flags_of(const Op *op) {
    return (op->residual >= 0 ? HAS_RESIDUAL : 0) | (op->out_f32 >= 0 ? TO_F32 : 0) | (op->codes ? TO_CODES : 0) |
           (op->out_bits >= 0 ? TO_BITS : 0) | (op->codes > 1 ? TO_TWO_CODES : 0) | (op->curve ? HAS_CURVE : 0);
}

typedef void (*Finish)(const Outs *, float *, int, int, int, int);
static __attribute__((noinline)) TARGET void finish_any(const Outs *o, float *acc, int q, int count, int channel,
                                                        int nv) {
    finish(o, acc, q, count, channel, nv, flags_of(o->s->op));
}
/* Compiled once more for each of the usual sets of outputs, but for vectors with lanes that are no channels. */
#if defined(HAS_FINISHES)
#define FINISH(n)                                                                                                      \
    static TARGET void finish_##n(const Outs *o, float *acc, int q, int count, int channel, int nv) {                  \
        finish(o, acc, q, count, channel, nv, n);                                                                      \
    }
FINISH(2) FINISH(3) FINISH(4) FINISH(5) FINISH(6) FINISH(7) FINISH(8) FINISH(9) FINISH(10) FINISH(11)
static const Finish finishes[FINISHES] = {NULL,     NULL,     finish_2, finish_3, finish_4,  finish_5,
                                          finish_6, finish_7, finish_8, finish_9, finish_10, finish_11};
#else
static const Finish finishes[FINISHES];
#endif

static Finish finish_of(const Op *op) {
    const Finish found = finishes[flags_of(op)];
    return found == NULL ? finish_any : found;
}

/* ---- convolutions ---- */
/* What the sums of a pixel start from, from a channel on. */
INLINE const int32_t *base_of(const Step *s, int q, int channel) {
    if (s->base == NULL) return NULL;
    return s->base + (s->kind == NULL ? 0 : s->kind[q] * (int64_t)s->cpad) + channel;
}

enum { FINISHED = 32 }; /* pixels whose sums become outputs at once */

/* Pixels start to stop - 1 of an image, for a block of channels. */
static TARGET void convolve_block(const Step *s, const char *in, const Outs *outs, int block, int start, int stop,
                                  Finish then) {
    const int channel = block * s->nv * LANES, wide = s->nv / 2;
    const char *w = s->weight + block * s->block_bytes;
    const int32_t *spread = s->spread == NULL ? NULL : s->spread + channel;
    float acc[FINISHED * 4 * LANES] __attribute__((aligned(64)));
    in += s->block_at[block];
    for (int q = start, done = start; q < stop;) {
        const char *px[PIXELS];
        const int32_t *base[PIXELS];
        int size = 0;
        while (tile_pixels[size] > stop - q) size++;
        const int count = tile_pixels[size];
        for (int p = 0; p < count; p++) px[p] = in + s->in_at[q + p];
        for (int p = 0; p < count; p++)
            base[p] = base_of(s, q + p, channel);
        tiles[s->sums][size][wide](s, px, w, base, spread, acc + (q - done) * s->nv * LANES);
        q += count;
        if (q < stop && q + PIXELS - done <= FINISHED) continue;
        then(outs, acc, done, q - done, channel, s->nv);
        done = q;
    }
}

#if defined(HAS_AMX)
#include "plan_codes_amx.h"
#endif

/* The share of a part: start to stop - 1 of `all`. */
static void share_of(int64_t all, int part, int parts, int *start, int *stop) {
    *start = (int)(all * part / parts);
    *stop = (int)(all * (part + 1) / parts);
}

static void convolve(const Plan *plan, const Step *s, const Run *run, int part, int parts) {
    const Finish then = finish_of(s->op);
    int first = 0, last = s->blocks, start = 0, stop = s->pixels;
    if (s->by_channels) {
        share_of(s->blocks, part, parts, &first, &last);
    } else if (parts > 1) {
        share_of((s->pixels + STRIP - 1) / STRIP, part, parts, &start, &stop);
        start *= STRIP, stop *= STRIP;
        if (stop > s->pixels) stop = s->pixels;
    }
    for (int block = first; block < last; block++)
        for (int g = 0; g < run->count; g++) {
            const Outs outs = outs_of(plan, s, run, g);
            const char *in = memory_of(plan, run, s->op->in, g);
#if defined(HAS_AMX)
            if (s->sums == SUM_CODES_AMX) {
                convolve_block_amx(s, in, &outs, block, start, stop, then);
                continue;
            }
#endif
            convolve_block(s, in, &outs, block, start, stop, then);
        }
}

/* ---- what takes its numbers from a few pixels ---- */
LANE F either(int is_sum, F a, F b) { return is_sum ? f_add(a, b) : f_or_nan_of(f_max(a, b), a); }
/* The mean or the largest value over the pixels of a window that lie inside. */
LANE F pooled(const Op *op, const char *in, const Place *place, Size size, int y, int x, uint16_t some) {
    const int is_mean = op->kind == AVERAGE;
    F a = is_mean ? f_zero() : f_all(-__builtin_inff());
    int count = 0;
    for (int i = 0; i < op->kh; i++)
        for (int j = 0; j < op->kw; j++) {
            const int row = y + i * op->dh, column = x + j * op->dw;
            if (row < 0 || row >= size.h || column < 0 || column >= size.w) continue;
            const F value = f_some(in + row * place->row + column * place->pixel, some);
            a = either(is_mean, a, value);
            count++;
        }
    return is_mean ? f_div(a, f_all((float)count)) : a;
}

/* What lies between four pixels, of channels from c on; see `Bilinear` in Python. */
LANE F between_pixels(const Step *s, const char *in, int q, uint16_t some) {
    const Between *y = s->down + q / s->out_w, *x = s->across + q % s->out_w;
    F rows[2];
    for (int k = 0; k < 2; k++)
        rows[k] = f_add(f_mul(f_some(in + y->at[k] + x->at[0], some), f_all(1 - x->part)),
                        f_mul(f_some(in + y->at[k] + x->at[1], some), f_all(x->part)));
    return f_add(f_mul(rows[0], f_all(1 - y->part)), f_mul(rows[1], f_all(y->part)));
}

/* Minus the mean of a pixel's channels, in each lane, and the root of their variance; see `LayerNorm` in Python. */
typedef struct { float shift[LANES], root; } Moments;

LANE void measure_pixel(const Step *s, const char *in, Moments *m) {
    const int count = s->op->cout;
    memset(m->shift, 0, sizeof m->shift);
    for (int is_variance = 0; is_variance < 2; is_variance++) {
        F sum = f_zero();
        for (int c = 0; c < count; c += LANES) {
            const F rest = f_add(f_some(in + 4 * c, first_of(count - c)), f_some(m->shift, first_of(count - c)));
            sum = f_add(sum, is_variance ? f_mul(rest, rest) : rest);
        }
        float lanes[LANES] __attribute__((aligned(64))), total = 0;
        f_store(lanes, sum);
        for (int l = 0; l < LANES; l++) total += lanes[l];
        for (int l = 0; l < LANES && !is_variance; l++) m->shift[l] = -(total / (float)count);
        m->root = __builtin_sqrtf(total / (float)count + s->number);
    }
}

/* Where the pixels of an image begin, behind its border. */
static char *inside(const Plan *plan, const Run *run, int32_t value, int image) {
    const Place *place = &plan->places[value];
    return memory_of(plan, run, value, image) + place->top * place->row + place->left * place->pixel;
}

static TARGET void gather(const Plan *plan, const Step *s, const Run *run, int image, int part, int parts) {
    const Op *op = s->op;
    const Size size = plan->program.value_size[op->in];
    const Outs outs = outs_of(plan, s, run, image);
    const char *in = memory_of(plan, run, op->in, image), *in_image = inside(plan, run, op->in, image);
    const Finish then = finish_of(op);
    const int cin = plan->program.values[op->in].channels; /* others are 0 */
    float number[LANES];
    int start, stop;
    f_store(number, f_all(s->number));
    share_of(s->pixels, part, parts, &start, &stop);
    for (int q = start, count; q < stop; q += count) {
        float acc[PIXELS * LANES] __attribute__((aligned(64)));
        Moments moments[PIXELS];
        count = stop - q < PIXELS ? stop - q : PIXELS;
        for (int p = 0; p < count && op->kind == LAYER_NORM; p++) measure_pixel(s, in + s->in_at[q + p], &moments[p]);
        for (int c = 0; c < op->cout; c += LANES) {
            const uint16_t some = first_of(cin - c);
            for (int p = 0; p < count; p++) {
                F x;
                if (s->spread != NULL) {
                    x = f_gather(in + s->in_at[q + p], i_load(s->spread + c));
                } else if (s->down != NULL) {
                    x = between_pixels(s, in + 4 * c, q + p, some);
                } else if (s->in_at != NULL) {
                    const int32_t at = s->in_at[q + p];
                    x = f_some(at < 0 ? (const char *)number : in + at + 4 * c, some);
                    if (op->kind == LAYER_NORM)
                        x = f_div(f_add(x, f_some(moments[p].shift, some)), f_all(moments[p].root));
                } else {
                    const int row = (q + p) / s->out_w * op->sh - op->top, column = (q + p) % s->out_w * op->sw - op->left;
                    x = pooled(op, in_image + 4 * c, &plan->places[op->in], size, row, column, some);
                }
                f_store(acc + p * LANES, x);
            }
            then(&outs, acc, q, count, c, 1);
        }
    }
}

/* The mean of all pixels, or the largest: each row is added up, then the rows; then divided. */
static TARGET void over_image(const Plan *plan, const Step *s, const Run *run, int image, int part, int parts) {
    const Op *op = s->op;
    const Place *place = &plan->places[op->in];
    const Size size = plan->program.value_size[op->in];
    const Outs outs = outs_of(plan, s, run, image);
    const char *in = inside(plan, run, op->in, image);
    const int is_mean = !op->ceil;
    const F none = f_all(is_mean ? 0 : -__builtin_inff());
    int start, stop;
    share_of(s->cpad / LANES, part, parts, &start, &stop);
    for (int c = start * LANES; c < stop * LANES; c += LANES) {
        const uint16_t some = channels_from(op, c);
        F a = none;
        for (int y = 0; y < size.h; y++) {
            F row = none;
            for (int x = 0; x < size.w; x++)
                row = either(is_mean, row, f_some(in + y * place->row + x * place->pixel + 4 * c, some));
            a = either(is_mean, a, row);
        }
        float acc[LANES] __attribute__((aligned(64)));
        f_store(acc, is_mean ? f_div(a, f_all((float)size.h * (float)size.w)) : a);
        finish_of(op)(&outs, acc, 0, 1, c, 1);
    }
}

/* ---- inputs and outputs ---- */
/* Whether one of the floats is a NaN or an infinity. */
static TARGET int has_odd(const float *x, int64_t count) {
    int32_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        found |= (bits & 0x7f800000) == 0x7f800000;
    }
    return found;
}

/* A row of an image, (C, W) with strides, to (W, C). */
static TARGET void copy_row(float *restrict to, const float *restrict from, int64_t channels, int64_t width,
                            int64_t plane, int64_t next) {
    if (plane == 1 && next == channels) {
        memcpy(to, from, (size_t)(width * channels) * 4);
    } else if (channels == 3 && next == 1) {
        const float *a = from, *b = from + plane, *c = from + 2 * plane;
        for (int64_t x = 0; x < width; x++) to[3 * x] = a[x], to[3 * x + 1] = b[x], to[3 * x + 2] = c[x];
    } else {
        for (int64_t x = 0; x < width; x++)
            for (int64_t c = 0; c < channels; c++) to[x * channels + c] = from[c * plane + x * next];
    }
}

/* Copies an image into (H, W, C) with a border. */
static void copy_input(const Plan *plan, const Step *s, const Run *run, int image, int part, int parts) {
    const Place *place = &plan->places[s->op->out_f32];
    const Size size = plan->program.value_size[s->op->out_f32];
    const int64_t channels = s->op->cout;
    char *to = inside(plan, run, s->op->out_f32, image);
    const int64_t number = s - plan->steps, *strides = run->strides[number];
    const float *from = run->inputs[number] + (run->first + run->image + image) * strides[0];
    int start, stop, odd = 0;
    share_of(size.h, part, parts, &start, &stop);
    for (int y = start; y < stop; y++) {
        float *row = (float *)(to + y * place->row);
        copy_row(row, from + y * strides[2], channels, size.w, strides[1], strides[3]);
        if (plan->program.head.guard) odd |= has_odd(row, size.w * channels);
    }
    if (odd) atomic_store_explicit(&run->arena->odd[run->image + image], 1, memory_order_relaxed);
}

/* Copies a value to an output. */
static TARGET void copy_output(const Plan *plan, const Step *s, const Run *run, int image) {
    const int32_t value = s->op->in;
    const Place *place = &plan->places[value];
    const Size size = plan->program.value_size[value];
    const int64_t channels = s->op->cout, plane = (int64_t)size.h * size.w, number = plan->output_of[s - plan->steps];
    const int64_t contiguous[] = {channels * plane, plane == 1 ? 1 : plane, size.w, 1};
    const int64_t *strides = run->to_strides == NULL ? contiguous : run->to_strides[number];
    float *to = run->outputs[number] + (run->first + run->image + image) * strides[0];
    const int is_odd = atomic_load_explicit(&run->arena->odd[run->image + image], memory_order_relaxed);
    for (int64_t y = 0; y < size.h; y++, to += strides[2]) {
        const char *from = inside(plan, run, value, image) + y * place->row;
        if (is_odd) {
            for (int64_t x = 0; x < size.w; x++)
                for (int64_t c = 0; c < channels; c++) to[c * strides[1] + x * strides[3]] = __builtin_nanf("");
        } else if (strides[1] == 1) {
            for (int64_t x = 0; x < size.w; x++)
                memcpy(to + x * strides[3], from + x * place->pixel, (size_t)channels * 4);
        } else {
            for (int64_t c = 0; c < channels; c++)
                for (int64_t x = 0; x < size.w; x++)
                    memcpy(to + c * strides[1] + x * strides[3], from + x * place->pixel + 4 * c, 4);
        }
    }
}

void PART(const Plan *plan, const Step *s, const Run *run, int part, int parts) {
    const int kind = s->op->kind;
    if (kind >= CONV_BITS && kind <= CONV_FLOATS) {
        convolve(plan, s, run, part, parts);
        return;
    }
    for (int g = 0; g < run->count; g++) {
        switch (kind) {
        case INPUT: copy_input(plan, s, run, g, part, parts); break;
        case MEAN: over_image(plan, s, run, g, part, parts); break;
        case OUTPUT: copy_output(plan, s, run, g); break; /* in one part */
        default: gather(plan, s, run, g, part, parts);
        }
    }
}
