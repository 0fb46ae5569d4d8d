/* What all kernels share: their instruction sets, and how a pass is shared out among threads. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

enum { PORTABLE = 0, AVX2 = 1, AVX512 = 2, NEON = 3 };

/* DISPATCH(Call, f, arm) defines f(start, stop, call), which calls the f of `call->isa`; that of NEON is arm_f. */
#if defined(__x86_64__)
#define OWN_ISAS(f, arm, call, start, stop)                                                                           \
    case AVX512: avx512_##f(call, start, stop); break;                                                                \
    case AVX2: avx2_##f(call, start, stop); break;
#elif defined(__aarch64__)
#define OWN_ISAS(f, arm, call, start, stop)                                                                           \
    case NEON: arm##_##f(call, start, stop); break;
#else
#define OWN_ISAS(f, arm, call, start, stop)
#endif
#define DISPATCH(Call, f, arm)                                                                                        \
    static void f(int64_t start, int64_t stop, void *given) {                                                         \
        Call *call = given;                                                                                           \
        switch (call->isa) {                                                                                          \
            OWN_ISAS(f, arm, call, start, stop)                                                                       \
        default: portable_##f(call, start, stop);                                                                     \
        }                                                                                                             \
    }

/* Bits of the instruction sets that this machine has. */
int64_t instruction_sets(void);

/* torch's `torch_parallel_for`, of its stable C ABI: calls `rows` for parts of begin to end on several threads. */
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, void (*rows)(int64_t, int64_t, void *),
                               void *given);

/* Calls `rows` for 0 to count, on several threads if that is above `grain`. Returns whether they failed to start. */
static inline int share_out(ParallelFor parallel_for, int64_t count, int64_t grain,
                            void (*rows)(int64_t, int64_t, void *), void *given) {
    if (parallel_for != NULL && count > grain) return parallel_for(0, count, grain, rows, given) != 0;
    rows(0, count, given);
    return 0;
}
