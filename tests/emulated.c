/* The kernels as a program: operands on standard input, the output on standard output. It lets a machine run the
 * kernels of another one under an emulator. */

#include <stdio.h>

#include "../qconv/kernels/csrc/binary.c"

enum { BUFFERS = 7 }; /* the pointers with which a call begins; the last one is the output */

int main(void) {
    int64_t bytes[BUFFERS];
    union {
        void *pointers[BUFFERS];
        char bytes[sizeof(Conv)];
    } call;
    if (fread(bytes, sizeof bytes, 1, stdin) != 1) return 2;
    if (fread(call.bytes, (size_t)qconv_size_of_call(), 1, stdin) != 1) return 2;
    for (int i = 0; i < BUFFERS; i++) {
        call.pointers[i] = bytes[i] ? calloc(1, (size_t)bytes[i]) : NULL;
        if (bytes[i] && i < BUFFERS - 1 && fread(call.pointers[i], (size_t)bytes[i], 1, stdin) != 1) return 2;
    }
    if (qconv_binary_conv2d(call.bytes, 1, NULL, NULL, NULL)) return 3;
    return fwrite(call.pointers[BUFFERS - 1], (size_t)bytes[BUFFERS - 1], 1, stdout) != 1;
}
