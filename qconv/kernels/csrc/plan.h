/* Programs of frozen networks: a flat list of fused kernels over preallocated buffers.
 *
 * A file holds a head, values, ops and a blob of weights in their natural order (plan_file.h). It knows neither the
 * size of images nor the instruction set: opening works out sizes, memory and order for one size, and packs the
 * weights. Any threads may call with any plans at once. Needs no Python.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct Plan Plan;

enum { PLAN_BEST = -1, PLAN_MESSAGE = 200, PLAN_FIRST_OUTPUT = 5 };

/* The plan of a file for `inputs` inputs (1 for a network's images) of these heights and widths, or NULL. Then `error`
 * says what is wrong with the file, or is empty where memory was wanting. `isa` is a number of kernel.h, or PLAN_BEST.
 * The bytes are not needed after the call. */
Plan *plan_open(const void *bytes, size_t count, const int64_t (*sizes)[2], int inputs, int isa,
                char error[PLAN_MESSAGE]);

/* No call of plan_run may be under way. */
void plan_close(Plan *plan);

/* n images (n, channels, height, width), with the strides of each input and output in floats; `to_strides`: NULL for
 * outputs that are contiguous. Returns 0, or 1 where memory was wanting. */
int plan_run(Plan *plan, const float *const *inputs, const int64_t (*strides)[4], int64_t n, int threads,
             float *const *outputs, const int64_t (*to_strides)[4]);

/* Writes the first `room` of these numbers, and returns how many there are: channels, height and width of the first
 * input, bytes of a thread's buffers, bytes of packed weights and tables, then C, H and W of each output
 * (from PLAN_FIRST_OUTPUT on). */
int64_t plan_sizes(const Plan *plan, int64_t *sizes, int64_t room);
