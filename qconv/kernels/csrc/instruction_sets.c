#include "kernel.h"

int64_t instruction_sets(void) {
    int64_t found = 1 << PORTABLE;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found |= 1 << AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vpopcntdq"))
        found |= 1 << AVX512;
#elif defined(__aarch64__)
    found |= 1 << NEON;
#endif
    return found;
}
