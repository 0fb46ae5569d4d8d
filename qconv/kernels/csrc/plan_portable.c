#include "plan_steps.h"

#include <string.h>

#include "plan_lanes_portable.h"
#define PART portable_part
#include "plan_kernels.h"
