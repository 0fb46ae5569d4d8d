/* Opening, buffers, and the order of work.
 *
 * Two ways to share a call among threads. Few images: all threads take parts of one op after the other. Many images:
 * each thread takes groups of images and runs the whole program on them alone; early ops image by image, so that values
 * stay in its cache, late ops (`late`) on the whole group, so that large weights are read once.
 */
#include "plan_steps.h"
#include "plan_threads.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

/* ---- opening ---- */
#if defined(__x86_64__)
static const Part kernels[] = {[PORTABLE] = portable_part, [AVX2] = avx2_part, [AVX512] = avx512_part};
static int has_dot(int isa) {
    unsigned a, b, c, d;
    if (isa == AVX512) return __builtin_cpu_supports("avx512vnni");
    return isa == AVX2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
}
#elif defined(__aarch64__)
static const Part kernels[] = {[PORTABLE] = portable_part, [NEON] = neon_part};
static int has_dot(int isa) {
#if defined(__ARM_FEATURE_DOTPROD)
    return isa == NEON;
#elif defined(__linux__)
    return isa == NEON && getauxval(AT_HWCAP) >> 20 & 1; /* HWCAP_ASIMDDP */
#else
    return 0 * isa;
#endif
}
#else
static const Part kernels[] = {[PORTABLE] = portable_part};
static int has_dot(int isa) { return 0 * isa; }
#endif

/* The kernels for `isa`; returns 0 if this machine does not have it. */
static int choose_kernels(Plan *plan, int isa) {
    const int64_t sets = instruction_sets();
    for (int set = NEON; isa == PLAN_BEST; set--)
        if (sets >> set & 1) isa = set;
    if (isa < 0 || isa > NEON || !(sets >> isa & 1)) return 0;
    if (isa == AVX512 && !has_dot(isa)) isa = AVX2;
    plan->isa = isa;
    plan->has_dot = has_dot(isa);
    plan->part = kernels[isa];
    return 1;
}

static int open_program(Plan *plan, const void *bytes, size_t count, const int64_t (*sizes)[2], int inputs,
                        char error[PLAN_MESSAGE]) {
    Program *program = &plan->program;
    if (!program_read(program, bytes, count, sizes, inputs, error) || !plan_place_values(plan, error)) return 0;
    plan->packed_bytes = 0;
    plan->steps = plan_keep(plan, program->head.ops * (int64_t)sizeof *plan->steps);
    plan->output_of = plan_keep(plan, 4 * (int64_t)program->head.ops);
    int outputs = 0;
    for (int i = 0; i < program->head.ops && !plan->failed; i++) {
        if (program->ops[i].kind == OUTPUT) plan->output_of[i] = outputs++;
        plan_pack(plan, i);
    }
    program->blob = NULL; /* the caller's */
    return !plan->failed;
}

Plan *plan_open(const void *bytes, size_t count, const int64_t (*sizes)[2], int inputs, int isa,
                char error[PLAN_MESSAGE]) {
    error[0] = 0;
    Plan *plan = calloc(1, sizeof *plan);
    if (plan == NULL) return NULL;
    if (!choose_kernels(plan, isa))
        snprintf(error, PLAN_MESSAGE, "instruction set (=%d) is not one of this machine", isa);
    else if (open_program(plan, bytes, count, sizes, inputs, error))
        return plan;
    plan_close(plan);
    return NULL;
}

void plan_close(Plan *plan) {
    while (plan->spare != NULL) {
        Arena *next = plan->spare->next;
        free(plan->spare);
        plan->spare = next;
    }
    for (int64_t i = 0; i < plan->kept_count; i++) free(plan->kept[i]);
    free(plan->kept);
    program_free(&plan->program);
    free(plan);
}

int64_t plan_sizes(const Plan *plan, int64_t *sizes, int64_t room) {
    const Program *program = &plan->program;
    const Size image = program->op_size[0];
    const int64_t first[] = {program->head.in_channels, image.h, image.w, plan->arena_bytes, plan->packed_bytes};
    int64_t count = PLAN_FIRST_OUTPUT;
    for (int64_t i = 0; i < count && i < room; i++) sizes[i] = first[i];
    for (int i = 0; i < program->head.ops; i++) {
        if (program->ops[i].kind != OUTPUT) continue;
        const int64_t shape[] = {program->ops[i].cout, program->op_size[i].h, program->op_size[i].w};
        for (int k = 0; k < 3; k++, count++)
            if (count < room) sizes[count] = shape[k];
    }
    return count;
}

/* ---- arenas ---- */
/* A new arena: borders hold what values are filled with. */
static Arena *new_arena(const Plan *plan) {
    const size_t size = (size_t)round_up(plan->arena_bytes, 4096) + 4096;
    char *memory = aligned_alloc(4096, size);
    if (memory == NULL) return NULL;
    memset(memory, 0, size);
    Arena *arena = (Arena *)memory;
    arena->memory = memory + round_up(sizeof *arena, 64);
    for (int i = 0; i < plan->program.head.values; i++) {
        const Place *place = &plan->places[i];
        for (int g = 0; g < (place->stride ? GROUP : 1) && plan->program.values[i].fill; g++)
            memset(arena->memory + place->at + g * place->stride, plan->program.values[i].fill, (size_t)place->bytes);
    }
    return arena;
}

static Arena *take_arena(Plan *plan) {
    short_lock();
    Arena *arena = plan->spare;
    if (arena != NULL) plan->spare = arena->next;
    short_unlock();
    return arena == NULL ? new_arena(plan) : arena;
}

static void give_arena(Plan *plan, Arena *arena) {
    short_lock();
    arena->next = plan->spare;
    plan->spare = arena;
    short_unlock();
}

/* ---- few images: all threads on one ---- */
typedef struct { const Plan *plan; const Step *step; const Run *run; int parts; } Shared;

static void share_step(void *given, int part) {
    const Shared *shared = given;
    shared->plan->part(shared->plan, shared->step, shared->run, part, shared->parts);
}

static void run_image(const Plan *plan, const Run *run, int ops, int threads) {
    atomic_store(&run->arena->odd[0], 0);
    for (int i = 0; i < ops; i++) {
        const Step *step = &plan->steps[i];
        Shared shared = {plan, step, run, step->parts < 2 * threads ? step->parts : 2 * threads};
        if (threads > 1 && step->parts > 1)
            pool_share(share_step, &shared, shared.parts, 1);
        else
            plan->part(plan, step, run, 0, 1);
    }
}

/* ---- many images: each thread on a group ---- */
typedef struct {
    Plan *plan;
    const float *const *inputs;
    const int64_t (*strides)[4];
    float *const *outputs;
    const int64_t (*to_strides)[4];
    int64_t n, group;
    atomic_int failed;
} Batch;

static void run_group(void *given, int piece) {
    Batch *batch = given;
    Plan *plan = batch->plan;
    const int64_t first = piece * batch->group, left = batch->n - first;
    const int count = (int)(left < batch->group ? left : batch->group);
    Run run = {take_arena(plan), 0, 1, batch->inputs, batch->strides, batch->outputs, batch->to_strides, first};
    if (run.arena == NULL) {
        atomic_store(&batch->failed, 1);
        return;
    }
    for (int g = 0; g < count; g++) {
        atomic_store_explicit(&run.arena->odd[g], 0, memory_order_relaxed);
        run.image = g;
        for (int i = 0; i < plan->late; i++) plan->part(plan, &plan->steps[i], &run, 0, 1);
    }
    run.image = 0, run.count = count;
    for (int i = plan->late; i < plan->program.head.ops; i++) plan->part(plan, &plan->steps[i], &run, 0, 1);
    give_arena(plan, run.arena);
}

static int run_groups(Batch *batch, int threads) {
    const int64_t fair = (batch->n + threads - 1) / threads;
    batch->group = fair < GROUP ? fair : GROUP;
    const int64_t pieces = (batch->n + batch->group - 1) / batch->group, most = INT32_MAX;
    if (pieces > most) return 1;
    if (threads > 1)
        pool_share(run_group, batch, (int)pieces, 0);
    else
        for (int piece = 0; piece < pieces; piece++) run_group(batch, piece);
    return atomic_load(&batch->failed);
}

static int run_images(Batch *batch, int threads) {
    Run run = {take_arena(batch->plan), 0, 1, batch->inputs, batch->strides, batch->outputs, batch->to_strides, 0};
    if (run.arena == NULL) return 1;
    for (; run.first < batch->n; run.first++)
        run_image(batch->plan, &run, batch->plan->program.head.ops, threads);
    give_arena(batch->plan, run.arena);
    return 0;
}

int plan_run(Plan *plan, const float *const *inputs, const int64_t (*strides)[4], int64_t n, int threads,
             float *const *outputs, const int64_t (*to_strides)[4]) {
    Batch batch = {plan, inputs, strides, outputs, to_strides, n, 1, 0};
    if (n < 1) return 0;
    threads = pool_take(threads);
    const int failed = n < 2 || n < threads ? run_images(&batch, threads) : run_groups(&batch, threads);
    if (threads > 1) pool_leave();
    return failed;
}
