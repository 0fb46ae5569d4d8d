/* Reading a file: each number in it is checked here, so that what follows need not ask again. */
#include "plan_file.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 1 << 24, MOST_TAPS = 1 << 15, MOST_PADDING = 1 << 12, MOST_CODE = 1 << 20, MOST_EDGES = 255 };

typedef struct {
    Program *program;
    char *error;
    int op;            /* that is being checked, for messages */
    int32_t outputs;   /* so far */
    uint8_t *written;  /* of each value */
} Check;

static int fail(const Check *check, const char *format, ...) {
    va_list arguments;
    int at = check->op < 0 ? 0 : snprintf(check->error, PLAN_MESSAGE, "op %d: ", check->op);
    va_start(arguments, format);
    vsnprintf(check->error + at, (size_t)(PLAN_MESSAGE - at), format, arguments);
    va_end(arguments);
    return 0;
}

/* `value` lies in low to high. */
static int within(const Check *check, const char *name, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return 1;
    return fail(check, "%s (=%lld) must be in %lld to %lld", name, (long long)value, (long long)low, (long long)high);
}

/* `bytes` of the blob from a place on. */
static int in_blob(const Check *check, const char *name, int64_t at, int64_t bytes) {
    const int64_t room = check->program->head.blob_bytes;
    if (at >= 0 && at % 64 == 0 && at <= room && bytes <= room - at) return 1;
    return fail(check, "%s, %lld bytes at %lld, must lie in the %lld bytes of the blob, at a multiple of 64", name,
                (long long)bytes, (long long)at, (long long)room);
}

static int floats_in_blob(const Check *check, const char *name, int64_t at, int64_t count) {
    return in_blob(check, name, at, 4 * count);
}

int64_t filter_bytes(const Op *op, int64_t cin) {
    const int64_t taps = (int64_t)op->kh * op->kw;
    return op->kind == CONV_BITS ? taps * bits_pixel(cin) : (taps * cin * op->weight_bits + 7) / 8;
}

int64_t levels_bytes(const Op *op) {
    return op->kind == CONV_FLOATS && op->weight_bits < 32 ? 4 << op->weight_bits : 0;
}

/* ---- values that an op reads and writes ---- */
static int reads(const Check *check, const char *name, int32_t value, int type) {
    const Program *program = check->program;
    if (!within(check, name, value, 0, program->head.values - 1)) return 0;
    if (!check->written[value]) return fail(check, "%s (=%d) is read before it is written", name, value);
    if (program->values[value].type != type)
        return fail(check, "%s (=%d) is of type %d, not %d", name, value, program->values[value].type, type);
    return 1;
}

static int writes(const Check *check, const char *name, int32_t value, int type, int32_t channels, Size size) {
    const Program *program = check->program;
    if (!within(check, name, value, 0, program->head.values - 1)) return 0;
    const Value *v = &program->values[value];
    if (check->written[value]) return fail(check, "%s (=%d) is written twice", name, value);
    if (v->type != type || v->channels != channels)
        return fail(check, "%s (=%d) is of type %d with %d channels, not of %d with %d", name, value, v->type,
                    v->channels, type, channels);
    check->written[value] = 1;
    program->value_size[value] = size;
    return 1;
}

/* ---- windows ---- */
/* Taps of a window from `start` on that lie in 0 to size - 1. */
static int64_t taps_inside(int64_t start, int64_t size, int64_t kernel, int64_t dilation) {
    int64_t first = start < 0 ? (-start + dilation - 1) / dilation : 0;
    int64_t last = start < size ? (size - 1 - start) / dilation : -1;
    if (last > kernel - 1) last = kernel - 1;
    return last < first ? 0 : last - first + 1;
}

/* How often a window fits along a side; 0 after an error. */
static int32_t places(const Check *check, const char *side, int64_t size, int64_t before, int64_t after, int64_t kernel,
                      int64_t stride, int64_t dilation, int ceil) {
    const int64_t spare = size + before + after - dilation * (kernel - 1) - 1 + (ceil ? stride - 1 : 0);
    if (spare < 0) {
        fail(check, "a window of %lld taps, %lld apart, does not fit into a %s of %lld with padding %lld and %lld",
             (long long)kernel, (long long)dilation, side, (long long)size, (long long)before, (long long)after);
        return 0;
    }
    int64_t count = spare / stride + 1;
    if (ceil && (count - 1) * stride >= size + before) count--;
    return within(check, side, count, 1, MOST) ? (int32_t)count : 0;
}

static int check_window(const Check *check, const Op *op, Size in, Size *out) {
    const int32_t least[] = {op->kh, op->kw, op->sh, op->sw, op->dh, op->dw};
    const int32_t pads[] = {op->top, op->left, op->bottom, op->right};
    for (int i = 0; i < 6; i++)
        if (!within(check, "a number of the window", least[i], 1, MOST_TAPS)) return 0;
    for (int i = 0; i < 4; i++)
        if (!within(check, "padding", pads[i], 0, MOST_PADDING)) return 0;
    if (!within(check, "ceil", op->ceil, 0, !is_conv(op))) return 0;
    out->h = places(check, "height", in.h, op->top, op->bottom, op->kh, op->sh, op->dh, op->ceil);
    if (out->h == 0) return 0;
    out->w = places(check, "width", in.w, op->left, op->right, op->kw, op->sw, op->dw, op->ceil);
    return out->w != 0;
}

/* Each window of a pool has a pixel. */
static int check_pool(const Check *check, const Op *op, Size in, Size out) {
    int empty = 0;
    for (int64_t y = 0; y < out.h; y++) empty |= taps_inside(y * op->sh - op->top, in.h, op->kh, op->dh) == 0;
    for (int64_t x = 0; x < out.w; x++) empty |= taps_inside(x * op->sw - op->left, in.w, op->kw, op->dw) == 0;
    return !empty || fail(check, "a window lies outside of the image");
}

/* ---- convolutions ---- */
/* Sums of codes fit into int32. */
static int check_sums(const Check *check, const Op *op, int64_t cin) {
    const int64_t bytes = filter_bytes(op, cin), count = (int64_t)op->kh * op->kw * cin;
    if (count << (op->weight_bits - 1) <= INT32_MAX / 255) return 1; /* whatever the weights are */
    for (int64_t o = 0; o < op->cout; o++) {
        const char *filter = check->program->blob + op->weight + o * bytes;
        int64_t sum = 0;
        for (int64_t i = 0; i < count; i++) sum += abs(filter_code(op, filter, i));
        if (sum > INT32_MAX / 255) return fail(check, "sums of channel %lld may not fit into 32 bits", (long long)o);
    }
    return 1;
}

static int check_conv(const Check *check, const Op *op) {
    const Value *in = &check->program->values[op->in];
    if (op->groups < 1 || in->channels % op->groups || op->cout % op->groups)
        return fail(check, "groups (=%d) must divide %d and %d channels", op->groups, in->channels, op->cout);
    const int bits = op->weight_bits;
    const int are_few = bits >= 1 && bits <= 8;
    if (op->kind == CONV_BITS ? bits != 1 : op->kind == CONV_FLOATS ? bits != 32 && !are_few : !are_few)
        return fail(check, "weight_bits (=%d) does not fit to the kind of convolution (=%d)", bits, op->kind);
    const int64_t cin = in->channels / op->groups, count = (int64_t)op->kh * op->kw * cin;
    if (count > INT32_MAX / 16) return fail(check, "a filter of %lld weights is too large", (long long)count);
    if (!in_blob(check, "weight", op->weight, op->cout * (filter_bytes(op, cin) + levels_bytes(op)))) return 0;
    if (op->kind == CONV_BITS) return within(check, "pad_value", op->pad_value, -1, 1);
    if (op->kind == CONV_FLOATS) return 1;
    const int pads = op->top || op->left || op->bottom || op->right;
    if (pads && op->zero != in->fill)
        return fail(check, "zero (=%d) must be what value %d is filled with (=%d)", op->zero, op->in, in->fill);
    return within(check, "zero", op->zero, 0, 255) && check_sums(check, op, cin);
}

/* ---- what follows a sum ---- */
static int check_residual(const Check *check, const Op *op, Size size) {
    if (op->residual == -1) return 1;
    if (!reads(check, "residual", op->residual, F32) || !within(check, "res_stride", op->res_stride, 0, MOST) ||
        !within(check, "is_factor", op->is_factor, 0, 1) ||
        !within(check, "res_first", op->res_first, -MOST, MOST))
        return 0;
    const Size from = check->program->value_size[op->residual];
    if ((size.h - 1) * (int64_t)op->res_stride < from.h && (size.w - 1) * (int64_t)op->res_stride < from.w) return 1;
    return fail(check, "a residual of %d x %d has no pixel for each of %d x %d at stride %d", from.h, from.w, size.h,
                size.w, op->res_stride);
}

/* `highest`: the highest of its codes. */
static int check_table(const Check *check, int64_t at, int highest) {
    int32_t count;
    if (!in_blob(check, "table", at, 4)) return 0;
    memcpy(&count, check->program->blob + at, 4);
    if (!within(check, "edges of a table", count, 0, MOST_EDGES) || !in_blob(check, "table", at, 4 + 5 * count + 1))
        return 0;
    float before = -INFINITY, edge;
    for (int i = 0; i < count; i++, before = edge) {
        memcpy(&edge, check->program->blob + at + 4 + 4 * i, 4);
        if (!(edge >= before)) return fail(check, "edge %d of a table must not be below the one before it", i);
    }
    const uint8_t *codes = (const uint8_t *)check->program->blob + at + 4 + 4 * count;
    for (int i = 0; i <= count; i++)
        if (!within(check, "a code of a table", codes[i], 0, highest)) return 0;
    return 1;
}

static int check_code(const Check *check, const Op *op, int k, Size size) {
    if (!writes(check, "out_code", op->out_code[k], U8, op->cout, size) ||
        !within(check, "form", op->form[k], 0, FORMS - 1))
        return 0;
    if (!within(check, "low", op->low[k], -MOST_CODE, MOST_CODE) ||
        !within(check, "high", op->high[k], op->low[k], MOST_CODE) ||
        !within(check, "out_zero", op->out_zero[k], -MOST_CODE, MOST_CODE) ||
        !within(check, "the lowest code", op->low[k] + op->out_zero[k], 0, 255) ||
        !within(check, "the highest code", op->high[k] + op->out_zero[k], 0, 255))
        return 0;
    if (op->form[k] == EDGES) return check_table(check, op->table[k], op->high[k] + op->out_zero[k]);
    if (!isfinite(op->number[k]) || op->number[k] == 0)
        return fail(check, "a number of codes must be finite and not 0");
    return 1;
}

static int check_epilogue(const Check *check, const Op *op, Size size) {
    const int64_t cout = op->cout;
    if ((op->scale == -1) != (op->bias == -1)) return fail(check, "scale and bias must both be there, or none");
    if (op->scale != -1 &&
        (!floats_in_blob(check, "scale", op->scale, cout) || !floats_in_blob(check, "bias", op->bias, cout)))
        return 0;
    if (op->rprelu != -1 && !floats_in_blob(check, "rprelu", op->rprelu, 3 * cout)) return 0;
    if (!within(check, "curve", op->curve, 0, CURVES - 1)) return 0;
    if (!(op->clamp_low <= op->clamp_high)) return fail(check, "the clamp's low must be at most its high");
    if (!check_residual(check, op, size)) return 0;
    if (op->out_f32 == -1 && op->out_bits == -1 && op->codes == 0) return fail(check, "it has no output");
    if (!within(check, "codes", op->codes, 0, 2)) return 0;
    if (op->out_f32 != -1 && !writes(check, "out_f32", op->out_f32, F32, op->cout, size)) return 0;
    for (int k = 0; k < op->codes; k++)
        if (!check_code(check, op, k, size)) return 0;
    if (op->out_bits == -1) return 1;
    return floats_in_blob(check, "edges", op->edges, cout) &&
           writes(check, "out_bits", op->out_bits, BITS, op->cout, size);
}

/* ---- ops ---- */
static int is_of_every_pixel(const Check *check, const Op *op) {
    return within(check, "stride", op->sh, 1, 1) && within(check, "stride", op->sw, 1, 1);
}

static int check_select(const Check *check, const Op *op) {
    if (!is_of_every_pixel(check, op) || !in_blob(check, "weight", op->weight, 4 * (int64_t)op->cout)) return 0;
    for (int32_t c = 0, from; c < op->cout; c++) {
        memcpy(&from, check->program->blob + op->weight + 4 * (int64_t)c, 4);
        if (!within(check, "a channel of the input", from, 0, check->program->values[op->in].channels - 1)) return 0;
    }
    return 1;
}

static int check_repeated(const Check *check, const Op *op, Size in, Size *out) {
    if (!within(check, "times", op->sh, 1, MOST / in.h) || !within(check, "times", op->sw, 1, MOST / in.w)) return 0;
    if (!within(check, "ceil", op->ceil, 0, op->kind == BILINEAR)) return 0;
    *out = (Size){in.h * op->sh, in.w * op->sw};
    const int32_t channels = check->program->values[op->in].channels;
    const int64_t block = op->kind == SHUFFLE ? (int64_t)op->sh * op->sw : 1;
    if (block > 1 && op->sh != op->sw) return fail(check, "stride (=%d, %d) must be of square blocks", op->sh, op->sw);
    if (channels % block || channels / block != op->cout)
        return fail(check, "cout (=%d) must be the input's (=%d) by the pixels of a block", op->cout, channels);
    return 1;
}

static int check_pad(const Check *check, const Op *op, Size in, Size *out) {
    const int32_t pads[] = {op->top, op->left, op->bottom, op->right};
    if (!within(check, "mode", op->ceil, 0, MODES - 1) || !floats_in_blob(check, "weight", op->weight, 1)) return 0;
    for (int i = 0; i < 4; i++) {
        const int32_t side = i % 2 ? in.w : in.h;
        const int32_t most = op->ceil == REFLECT ? side - 1 : op->ceil == CIRCULAR ? side : MOST_PADDING;
        if (!within(check, "padding", pads[i], 0, most)) return 0;
    }
    *out = (Size){in.h + op->top + op->bottom, in.w + op->left + op->right};
    return within(check, "height", out->h, 1, MOST) && within(check, "width", out->w, 1, MOST);
}

static int check_input(const Check *check, const Op *op, Size size) {
    if (op->in != -1) return fail(check, "in (=%d) must be -1", op->in);
    if (check->op == 0 && op->cout != check->program->head.in_channels)
        return fail(check, "cout (=%d) must be in_channels (=%d)", op->cout, check->program->head.in_channels);
    if (op->out_bits != -1 || op->codes || op->residual != -1) return fail(check, "an input has out_f32 alone");
    return writes(check, "out_f32", op->out_f32, F32, op->cout, size);
}

/* The op and the size of what it computes, for inputs of the given sizes. */
static int check_op(Check *check, Op *op, const int64_t (*sizes)[2], Size *size) {
    if (!within(check, "kind", op->kind, 0, KINDS - 1) || !within(check, "cout", op->cout, 1, MOST)) return 0;
    if ((op->kind == INPUT) != (check->op <= check->program->head.more_inputs))
        return fail(check, "the first ops, and no others, must be the inputs");
    if (op->kind == INPUT) {
        *size = (Size){(int32_t)sizes[check->op][0], (int32_t)sizes[check->op][1]};
        return check_input(check, op, *size);
    }
    const int type = op->kind == CONV_BITS ? BITS : op->kind == CONV_CODES ? U8 : F32;
    if (!reads(check, "in", op->in, type)) return 0;
    const int32_t channels = check->program->values[op->in].channels;
    const Size in = check->program->value_size[op->in];
    if (op->kind == MAXIMUM && op->cout < channels)
        return fail(check, "cout (=%d) must be at least that of its input (=%d)", op->cout, channels);
    if (!is_conv(op) && op->kind != MAXIMUM && op->kind < SELECT && op->cout != channels)
        return fail(check, "cout (=%d) must be that of its input (=%d)", op->cout, channels);
    *size = in;
    if (op->kind == OUTPUT) return ++check->outputs;
    if (op->kind == MEAN) {
        *size = (Size){1, 1};
        return within(check, "ceil", op->ceil, 0, 1) && check_epilogue(check, op, *size);
    }
    if (op->kind == SELECT) return check_select(check, op) && check_epilogue(check, op, *size);
    if (op->kind == PAD)
        return within(check, "cout", op->cout, channels, channels) && check_pad(check, op, in, size) &&
               check_epilogue(check, op, *size);
    if (op->kind == LAYER_NORM)
        return is_of_every_pixel(check, op) && within(check, "cout", op->cout, channels, channels) &&
               floats_in_blob(check, "weight", op->weight, 1) && check_epilogue(check, op, *size);
    if (op->kind >= REPEAT)
        return check_repeated(check, op, in, size) && check_epilogue(check, op, *size);
    if (!check_window(check, op, in, size)) return 0;
    if (!(is_conv(op) ? check_conv(check, op) : check_pool(check, op, in, *size))) return 0;
    return check_epilogue(check, op, *size);
}

static int check_values(const Check *check) {
    for (int i = 0; i < check->program->head.values; i++) {
        const Value *value = &check->program->values[i];
        if (!within(check, "the type of a value", value->type, 0, TYPES - 1) ||
            !within(check, "the channels of a value", value->channels, 1, MOST) ||
            !within(check, "fill", value->fill, 0, value->type == U8 ? 255 : 0))
            return 0;
    }
    return 1;
}

static int check_ops(Check *check, const int64_t (*sizes)[2]) {
    const Head *head = &check->program->head;
    for (check->op = 0; check->op < head->ops; check->op++)
        if (!check_op(check, &check->program->ops[check->op], sizes, &check->program->op_size[check->op])) return 0;
    check->op = -1;
    for (int i = 0; i < head->values; i++)
        if (!check->written[i]) return fail(check, "value %d is never written", i);
    return check->outputs == head->outputs ||
           fail(check, "outputs (=%d), but there are %d", head->outputs, check->outputs);
}

static int check_head(const Check *check, size_t count, const int64_t (*sizes)[2], int inputs) {
    const Head *head = &check->program->head;
    if (head->magic != MAGIC) return fail(check, "not the file of a program");
    if (head->version != VERSION) return fail(check, "version (=%d) must be %d", head->version, VERSION);
    if (!within(check, "values", head->values, 1, MOST) || !within(check, "ops", head->ops, 1, MOST) ||
        !within(check, "in_channels", head->in_channels, 1, MOST) ||
        !within(check, "outputs", head->outputs, 1, MOST) || !within(check, "guard", head->guard, 0, 1) ||
        !within(check, "blob_bytes", head->blob_bytes, 0, (int64_t)1 << 48) ||
        !within(check, "inputs", inputs, 1, MOST) ||
        !within(check, "more_inputs", head->more_inputs, inputs - 1, inputs - 1))
        return 0;
    for (int k = 0; k < inputs; k++)
        if (!within(check, "height", sizes[k][0], 1, MOST) || !within(check, "width", sizes[k][1], 1, MOST)) return 0;
    if ((head->height || head->width) && (head->height != sizes[0][0] || head->width != sizes[0][1]))
        return fail(check, "the program is for images of %d x %d", head->height, head->width);
    const int64_t wanted = (int64_t)sizeof(Head) + head->values * (int64_t)sizeof(Value) +
                           head->ops * (int64_t)sizeof(Op) + head->blob_bytes;
    return (int64_t)count == wanted ||
           fail(check, "the file has %zu bytes, and should have %lld", count, (long long)wanted);
}

int program_read(Program *program, const void *bytes, size_t count, const int64_t (*sizes)[2], int inputs,
                 char error[PLAN_MESSAGE]) {
    Check check = {.program = program, .error = error, .op = -1};
    error[0] = 0;
    memset(program, 0, sizeof *program);
    if (count < sizeof(Head)) return fail(&check, "a file of %zu bytes is too short", count);
    memcpy(&program->head, bytes, sizeof(Head));
    if (!check_head(&check, count, sizes, inputs)) return 0;
    const size_t values = (size_t)program->head.values, ops = (size_t)program->head.ops;
    const char *from = (const char *)bytes + sizeof(Head);
    program->values = malloc(values * sizeof(Value));
    program->ops = malloc(ops * sizeof(Op));
    program->value_size = calloc(values, sizeof(Size));
    program->op_size = calloc(ops, sizeof(Size));
    check.written = calloc(values, 1);
    int right = 0;
    if (program->values && program->ops && program->value_size && program->op_size && check.written) {
        memcpy(program->values, from, values * sizeof(Value));
        memcpy(program->ops, from + values * sizeof(Value), ops * sizeof(Op));
        program->blob = from + values * sizeof(Value) + ops * sizeof(Op);
        right = check_values(&check) && check_ops(&check, sizes);
    }
    free(check.written);
    return right;
}

void program_free(Program *program) {
    free(program->values);
    free(program->ops);
    free(program->value_size);
    free(program->op_size);
}
