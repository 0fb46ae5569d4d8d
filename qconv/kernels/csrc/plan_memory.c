/* What a plan allocates, and where values lie. Memory is shared by values that do not live at the same time. A value
 * with a border, and bits, whose pixels may end in a gap, share only with values of the same geometry: so borders and
 * gaps are filled once. */
#include "plan_steps.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *plan_keep(Plan *plan, int64_t bytes) {
    if (plan->kept_count == plan->kept_room) {
        const int64_t room = 2 * plan->kept_room + 64;
        void **kept = realloc(plan->kept, (size_t)room * sizeof *kept);
        plan->failed |= kept == NULL;
        if (kept == NULL) return NULL;
        plan->kept = kept, plan->kept_room = room;
    }
    const size_t size = (size_t)round_up(bytes + 64, 64); /* kernels may read on to the end of a vector */
    void *p = aligned_alloc(64, size);
    plan->failed |= p == NULL;
    if (p == NULL) return NULL;
    plan->kept[plan->kept_count++] = memset(p, 0, size);
    plan->packed_bytes += bytes;
    return p;
}

void plan_drop(Plan *plan, int64_t bytes) {
    free(plan->kept[--plan->kept_count]);
    plan->packed_bytes -= bytes;
}

/* The ops that write a value first and read it last; values of one owner have one piece of memory. */
typedef struct { int32_t first, last, owner; int is_framed; int64_t room; } Life;

static void at_least(int32_t *border, int64_t wanted) {
    if (wanted > *border) *border = (int32_t)wanted;
}

/* The border that the windows of convolutions reach into. */
static void grow_border(const Program *program, int index, Place *place) {
    const Op *op = &program->ops[index];
    const Size in = program->value_size[op->in], out = program->op_size[index];
    at_least(&place->top, op->top);
    at_least(&place->left, op->left);
    at_least(&place->bottom, (out.h - 1) * (int64_t)op->sh + (op->kh - 1) * (int64_t)op->dh - op->top - (in.h - 1));
    at_least(&place->right, (out.w - 1) * (int64_t)op->sw + (op->kw - 1) * (int64_t)op->dw - op->left - (in.w - 1));
}

static int measure(const Program *program, int value, Place *place, char error[PLAN_MESSAGE]) {
    const int64_t channels = program->values[value].channels;
    const Size size = program->value_size[value];
    const int type = program->values[value].type;
    place->pixel = type == F32 ? 4 * channels : type == U8 ? round_up(channels, 4) : bits_pixel(channels);
    place->row = ((int64_t)place->left + size.w + place->right) * place->pixel;
    const int64_t height = (int64_t)place->top + size.h + place->bottom, most = INT32_MAX / 2;
    if (place->row > most || height > most / place->row) {
        snprintf(error, PLAN_MESSAGE, "value %d, %d x %d of %lld channels, takes more than 1 GB for an image", value,
                 size.h, size.w, (long long)channels);
        return 0;
    }
    place->bytes = height * place->row;
    return 1;
}

static void used(Life *lives, int32_t value, int op) {
    if (value >= 0 && lives[value].last < op) lives[value].last = op;
}

/* The op from which on a group of images is taken at once: weights are large there, and values small. */
static int late_op(const Program *program) {
    for (int i = 0; i < program->head.ops; i++) {
        const Op *op = &program->ops[i];
        const Size size = program->op_size[i];
        if (!is_conv(op) || (int64_t)size.h * size.w > 64) continue;
        const int64_t cin = program->values[op->in].channels / op->groups;
        const int64_t filter = op->kind == CONV_FLOATS ? 4 * cin * op->kh * op->kw : filter_bytes(op, cin);
        if (filter * op->cout >= 1 << 17) return i;
    }
    return program->head.ops;
}

static void find_lives(const Plan *plan, Life *lives) {
    const Program *program = &plan->program;
    for (int i = 0; i < program->head.values; i++) lives[i] = (Life){-1, -1, i, 0, 0};
    for (int i = 0; i < program->head.ops; i++) {
        const Op *op = &program->ops[i];
        const int32_t out[] = {op->out_f32, op->out_bits, op->codes > 0 ? op->out_code[0] : -1,
                               op->codes > 1 ? op->out_code[1] : -1};
        for (int k = 0; k < 4 && op->kind != OUTPUT; k++)
            if (out[k] >= 0) lives[out[k]].first = lives[out[k]].last = i;
        used(lives, op->in, i);
        if (op->kind != OUTPUT) used(lives, op->residual, i);
    }
    for (int i = 0; i < program->head.values; i++) {
        const Place *p = &plan->places[i];
        lives[i].is_framed = program->values[i].type == BITS || p->top || p->left || p->bottom || p->right;
        /* Values that early ops write and late ones read are kept while early ops run on the group's other images. */
        if (lives[i].last >= plan->late && lives[i].first < plan->late) lives[i].first = 0;
    }
}

/* A sum may take the place of the residual that it is added to, if nobody reads that any more. */
static void share_residuals(const Plan *plan, Life *lives) {
    const Program *program = &plan->program;
    for (int i = 0; i < program->head.ops; i++) {
        const Op *op = &program->ops[i];
        const int32_t from = op->residual, to = op->out_f32;
        if (op->kind == INPUT || op->kind == OUTPUT || from < 0 || to < 0 || from == op->in) continue;
        const Life *a = &lives[from], *b = &lives[to];
        const int is_alike = op->res_stride == 1 && op->res_first == 0 &&
                             plan->places[from].bytes == plan->places[to].bytes &&
                             plan->places[from].row == plan->places[to].row &&
                             program->values[from].channels == program->values[to].channels;
        if (!is_alike || a->is_framed || b->is_framed || a->last != i || b->first != i) continue;
        if ((a->last >= plan->late) != (b->last >= plan->late)) continue;
        lives[to].owner = a->owner;
        lives[a->owner].last = b->last;
    }
}

static int is_same_frame(const Program *program, const Place *places, int a, int b) {
    const Place *p = &places[a], *q = &places[b];
    return program->values[a].type == program->values[b].type &&
           program->values[a].channels == program->values[b].channels &&
           program->values[a].fill == program->values[b].fill && p->top == q->top && p->left == q->left &&
           p->row == q->row && p->right == q->right && p->bottom == q->bottom && p->bytes == q->bytes;
}

/* Values with a border: the memory of one of the same geometry that is not needed any more, or new memory. */
static int64_t place_framed(Plan *plan, Life *lives, int64_t end) {
    const Program *program = &plan->program;
    for (int i = 0; i < program->head.values; i++) {
        if (!lives[i].is_framed) continue;
        for (int k = 0; k < i && lives[i].owner == i; k++) {
            Life *slot = &lives[k];
            if (!slot->is_framed || slot->owner != k || slot->room != lives[i].room || slot->last >= lives[i].first)
                continue;
            if (!is_same_frame(program, plan->places, i, k)) continue;
            lives[i].owner = k;
            slot->last = lives[i].last;
        }
        if (lives[i].owner != i) continue;
        plan->places[i].at = end;
        end += lives[i].room;
    }
    return end;
}

typedef struct { int64_t room; int32_t value; } Wanted;

static int larger_first(const void *a, const void *b) {
    const Wanted *x = a, *y = b;
    return x->room != y->room ? (x->room < y->room ? 1 : -1) : x->value - y->value;
}

/* The end of a value placed before that lives with `value` and overlaps its room at `at`; -1 if there is none. */
static int64_t in_the_way(const Plan *plan, const Life *lives, const Wanted *wanted, int placed, int32_t value,
                          int64_t at) {
    for (int k = 0; k < placed; k++) {
        const Life *other = &lives[wanted[k].value], *mine = &lives[value];
        const int64_t start = plan->places[wanted[k].value].at;
        if (other->last < mine->first || mine->last < other->first) continue;
        if (start < at + mine->room && at < start + other->room) return start + other->room;
    }
    return -1;
}

/* Values without a border: the largest first, each at the lowest free place. Returns the end of all, or -1. */
static int64_t place_free(Plan *plan, const Life *lives, int64_t start) {
    const int values = plan->program.head.values;
    Wanted *wanted = malloc((size_t)values * sizeof *wanted);
    int64_t end = start;
    int count = 0;
    if (wanted == NULL) return -1;
    for (int i = 0; i < values; i++)
        if (!lives[i].is_framed && lives[i].owner == i) wanted[count++] = (Wanted){lives[i].room, i};
    qsort(wanted, (size_t)count, sizeof *wanted, larger_first);
    for (int k = 0; k < count; k++) {
        const int32_t value = wanted[k].value;
        int64_t at = start, next;
        while ((next = in_the_way(plan, lives, wanted, k, value, at)) >= 0) at = next;
        plan->places[value].at = at;
        if (at + lives[value].room > end) end = at + lives[value].room;
    }
    free(wanted);
    return end;
}

static int place_all(Plan *plan, Life *lives) {
    const int values = plan->program.head.values;
    find_lives(plan, lives);
    for (int i = 0; i < values; i++) {
        Place *place = &plan->places[i];
        const int64_t room = round_up(place->bytes + SLACK, 64);
        place->stride = lives[i].last >= plan->late ? room : 0;
        lives[i].room = room * (place->stride ? GROUP : 1);
    }
    share_residuals(plan, lives);
    plan->arena_bytes = place_free(plan, lives, place_framed(plan, lives, 0));
    for (int i = 0; i < values; i++) plan->places[i].at = plan->places[lives[i].owner].at;
    return plan->arena_bytes >= 0;
}

int plan_place_values(Plan *plan, char error[PLAN_MESSAGE]) {
    const Program *program = &plan->program;
    plan->places = plan_keep(plan, program->head.values * (int64_t)sizeof *plan->places);
    if (plan->places == NULL) return 0;
    for (int i = 0; i < program->head.ops; i++)
        if (is_conv(&program->ops[i])) grow_border(program, i, &plan->places[program->ops[i].in]);
    for (int i = 0; i < program->head.values; i++)
        if (!measure(program, i, &plan->places[i], error)) return 0;
    plan->late = late_op(program);
    Life *lives = malloc((size_t)program->head.values * sizeof *lives);
    const int is_placed = lives != NULL && place_all(plan, lives);
    free(lives);
    return is_placed;
}
