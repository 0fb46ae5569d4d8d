#include "plan_steps.h"

#include <string.h>

#include "plan_lanes_quarters.h"
#define PART portable_part
#include "plan_kernels.h"
