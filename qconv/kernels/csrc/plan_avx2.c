#include "plan_steps.h"

#if defined(__x86_64__)
#include <string.h>

#include "plan_lanes_avx2.h"
#include "plan_nibbles_avx2.h"
#define HAS_CODES_AVX2 1
#define PART avx2_part
#include "plan_kernels.h"
#endif
