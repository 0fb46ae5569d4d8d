#include "plan_steps.h"

#if defined(__aarch64__)
#include <string.h>

#define USES_NEON 1
#include "plan_lanes_quarters.h"
#define PART neon_part
#include "plan_kernels.h"
#endif
