/* Passes over floats and their bits: one reading of memory each. */
#include "kernel.h"

enum { PACK_SIGNS, PACK_PASSES, PACK_BOTH, CLAMP, UNPACK_SIGNS, WHERE_PASSES, PACK_CODES, UNPACK_CODES };
enum { IS_FLOAT32, IS_BFLOAT16, IS_BYTE };

typedef struct {
    const void *input;  /* (N, P, C) if channels_last, else (N, C, P); NULL for UNPACK_* */
    void *output;       /* of the layout of the input; NULL for PACK_* */
    uint8_t *signs;     /* signs or codes, (N, P, row_bytes): written by PACK_*, read by UNPACK_* */
    uint8_t *passes;    /* (N, P, row_bytes): written by PACK_* and CLAMP, read by WHERE_PASSES */
    uint8_t *stops;     /* one byte, becomes 1 where a bit of passes is 0 */
    int64_t operation, type, batch, channels, groups, pixels, bits; /* channels, of a group; bits of a code, or 1 */
    int64_t channels_last, isa;
    int64_t grain;      /* numbers below which a thread is not worth its start */
    float low, high;    /* NaN where there is no bound */
    int64_t row_bytes, words, strips; /* from here on it is filled in by `pass_over` */
} Pass;

/* Returns whether threads failed to start. */
int pass_over(Pass *pass, ParallelFor parallel_for);
