/* qconv_run: the outputs of a program for images on the standard input.
 *
 * Build it with the files of the runtime, on any machine with a C compiler:
 *   cc -O3 -ffp-contract=off -o qconv_run qconv_run.c plan*.c instruction_sets.c -lm -lpthread
 */
#include "plan.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { AT_ONCE = 64 }; /* images */

static int fail(const char *what, const char *why) {
    fprintf(stderr, "qconv_run: %s: %s\n", what, why);
    return 1;
}

/* The whole file, in memory that fits any alignment; NULL after a message. */
static char *read_file(const char *path, size_t *count) {
    FILE *file = fopen(path, "rb");
    char *bytes = NULL;
    *count = 0;
    if (file == NULL) return fail(path, strerror(errno)), NULL;
    for (size_t room = 1 << 16;; room *= 2) {
        char *larger = realloc(bytes, room);
        if (larger == NULL) {
            free(bytes), bytes = NULL;
            fail(path, "no memory");
            break;
        }
        bytes = larger;
        *count += fread(bytes + *count, 1, room - *count, file);
        if (*count < room) break;
    }
    if (bytes != NULL && ferror(file)) {
        free(bytes), bytes = NULL;
        fail(path, "it can't be read");
    }
    fclose(file);
    return bytes;
}

static int64_t number(const char *text) {
    char *end;
    const long value = strtol(text, &end, 10);
    return *text == '\0' || *end != '\0' || value < 1 || value > 65535 ? -1 : value;
}

/* The numbers of the outputs of an image on a line; `counts`: of each output. */
static void print(float *const *outputs, const int64_t *counts, int64_t count, int64_t image) {
    for (int64_t k = 0; k < count; k++)
        for (int64_t i = 0; i < counts[k]; i++)
            printf(k + i ? " %.9g" : "%.9g", (double)outputs[k][image * counts[k] + i]);
    printf("\n");
}

static int run(Plan *plan, int threads) {
    enum { MOST = 64 };
    int64_t sizes[PLAN_FIRST_OUTPUT + 3 * MOST], counts[MOST];
    float *outputs[MOST] = {NULL};
    const int64_t count = (plan_sizes(plan, sizes, PLAN_FIRST_OUTPUT + 3 * MOST) - PLAN_FIRST_OUTPUT) / 3;
    if (count > MOST) return fail("the program", "it has more than 64 outputs");
    const int64_t c = sizes[0], h = sizes[1], w = sizes[2], pixels = c * h * w;
    const int64_t strides[4] = {pixels, h * w, w, 1};
    float *input = malloc((size_t)(AT_ONCE * pixels) * sizeof *input);
    int failed = input == NULL;
    for (int64_t k = 0; k < count; k++) {
        const int64_t *size = sizes + PLAN_FIRST_OUTPUT + 3 * k;
        counts[k] = size[0] * size[1] * size[2];
        outputs[k] = malloc((size_t)(AT_ONCE * counts[k]) * sizeof **outputs);
        failed |= outputs[k] == NULL;
    }
    if (failed) fail("the images", "no memory");
    while (!failed) {
        const size_t numbers = fread(input, sizeof *input, (size_t)(AT_ONCE * pixels), stdin);
        const int64_t n = (int64_t)numbers / pixels;
        if (n > 0 && plan_run(plan, &(const float *){input}, &strides, n, threads, outputs, NULL))
            failed = fail("the images", "no memory");
        for (int64_t i = 0; i < n && !failed; i++) print(outputs, counts, count, i);
        if (!failed && (int64_t)numbers % pixels) failed = fail("the standard input", "it ends within an image");
        if ((int64_t)numbers < AT_ONCE * pixels) break;
    }
    if (!failed && (fflush(stdout) != 0 || ferror(stdout))) failed = fail("the standard output", strerror(errno));
    free(input);
    for (int64_t k = 0; k < count; k++) free(outputs[k]);
    return failed;
}

int main(int count, char **arguments) {
    const int64_t height = count > 3 ? number(arguments[2]) : -1, width = count > 3 ? number(arguments[3]) : -1;
    const int64_t threads = count > 4 ? number(arguments[4]) : 1;
    if (count < 4 || count > 5 || height < 0 || width < 0 || threads < 0) {
        fprintf(stderr, "usage: %s PROGRAM HEIGHT WIDTH [THREADS] < IMAGES\n", arguments[0]);
        fprintf(stderr, "IMAGES: float32 numbers (channels, HEIGHT, WIDTH), one image after the other, as the network\n"
                        "takes them. Prints a line with the outputs of each.\n");
        return 2;
    }
    size_t size;
    char error[PLAN_MESSAGE] = "";
    char *bytes = read_file(arguments[1], &size);
    if (bytes == NULL) return 1;
    const int64_t images[1][2] = {{height, width}};
    Plan *plan = plan_open(bytes, size, images, 1, PLAN_BEST, error);
    free(bytes);
    if (plan == NULL) return fail(arguments[1], *error ? error : "no memory");
    const int failed = run(plan, (int)threads);
    plan_close(plan);
    return failed;
}
