#include "plan_steps.h"

#if defined(__x86_64__)
#include <string.h>

#include "plan_lanes_avx512.h"
#define PART avx512_part
#include "plan_kernels.h"
#endif
