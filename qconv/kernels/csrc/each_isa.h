/* A file defines ROWS, the name of the header that holds its loops, and includes this one, which includes ROWS once for
 * each instruction set: NAME(f) is then the f of that set, for which TARGET lets the compiler make vectors. The
 * portable ones are those of NEON, too, which every arm64 has: DISPATCH(Call, f, portable). */
#define NAME(x) portable_##x
#define TARGET
#include ROWS
#undef NAME
#undef TARGET

#if defined(__x86_64__)
#define NAME(x) avx512_##x
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,popcnt")))
#include ROWS
#undef NAME
#undef TARGET

#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2,popcnt")))
#include ROWS
#undef NAME
#undef TARGET
#endif
