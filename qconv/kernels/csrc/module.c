/* The Python module `qconv.kernels._binary`. */
#include <Python.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "binary.h"
#include "bits.h"
#include "levels.h"
#include "look_up.h"
#include "norm.h"
#include "pack_weight.h"
#include "plan.h"
#include "rprelu.h"
#include "slopes.h"

static ParallelFor parallel_for;

/* torch shares work out, with the threads that it has: an OpenMP runtime of our own would fight it for the cores. NULL,
 * for one thread, where torch's library has another name. */
static ParallelFor torch_parallel_for(void) {
#if defined(__APPLE__)
    void *torch = dlopen("@rpath/libtorch_cpu.dylib", RTLD_LAZY | RTLD_NOLOAD);
#else
    void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
#endif
    return torch == NULL ? NULL : (ParallelFor)dlsym(torch, "torch_parallel_for");
}

/* The arguments of a call: addresses, then whole numbers, then floats; 0 after an error. */
static int read_call(const char *name, PyObject *const *arguments, Py_ssize_t count, int addresses, int numbers,
                     int floats, void **a, int64_t *n, float *f) {
    if (count != addresses + numbers + floats) {
        PyErr_Format(PyExc_TypeError, "%s() takes %d numbers, not %zd", name, addresses + numbers + floats, count);
        return 0;
    }
    for (int i = 0; i < addresses; i++) a[i] = PyLong_AsVoidPtr(*arguments++);
    for (int i = 0; i < numbers; i++) n[i] = PyLong_AsLongLong(*arguments++);
    for (int i = 0; i < floats; i++) f[i] = (float)PyFloat_AsDouble(*arguments++);
    return PyErr_Occurred() == NULL;
}

/* Defines a function of the module, which calls the C function of its name, without the lock of the interpreter, and
 * raises an error if that returns that it had no memory for `what`. Its arguments fill the first fields of a `Call`:
 * addresses, then whole numbers, the first of which is the field `first`, then floats. */
#define FUNCTION(name, Call, addresses, first, numbers, floats, what)                                                 \
    static PyObject *call_##name(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {                    \
        void *a[addresses];                                                                                           \
        int64_t n[numbers];                                                                                           \
        float f[(floats) + 1];                                                                                        \
        Call call = {0};                                                                                              \
        int failed;                                                                                                   \
        _Static_assert(offsetof(Call, first) == sizeof a, "numbers follow the addresses");                            \
        (void)module;                                                                                                 \
        if (!read_call(#name, arguments, count, addresses, numbers, floats, a, n, f)) return NULL;                    \
        memcpy(&call, a, sizeof a);                                                                                   \
        memcpy((char *)&call + offsetof(Call, first), n, sizeof n);                                                   \
        memcpy((char *)&call + offsetof(Call, first) + sizeof n, f, (floats) * sizeof *f);                            \
        Py_BEGIN_ALLOW_THREADS                                                                                        \
        failed = name(&call, parallel_for);                                                                           \
        Py_END_ALLOW_THREADS                                                                                          \
        if (failed) return PyErr_Format(PyExc_MemoryError, "no memory for %s", what);                                 \
        Py_RETURN_NONE;                                                                                               \
    }

FUNCTION(approx_sign_backward, Slope, 3, count, 4, 0, "threads")
FUNCTION(convolve, Conv, 6, batch, 26, 0, "the bits of a picture")
FUNCTION(levels, Levels, 6, rows, 7, 3, "threads")
FUNCTION(norm_backward, Norm, 8, rows, 4, 0, "sums over channels")
FUNCTION(pack_weight, Packing, 3, groups, 8, 0, "threads")
FUNCTION(pass_over, Pass, 5, operation, 10, 2, "threads")
FUNCTION(rprelu, RPReLU, 9, rows, 4, 0, "sums over channels")
FUNCTION(sign_conv2d, LookUp, 6, batch, 22, 0, "tables")
FUNCTION(sign_grad_input, LookUp, 6, batch, 22, 0, "tables")
FUNCTION(sign_grad_weight, LookUp, 6, batch, 22, 0, "tables")

/* ---- programs of frozen networks ---- */
/* plan_open(address, count, isa, height, width, ... of each input) -> handle */
static PyObject *call_plan_open(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    enum { FIRST = 3 };
    void *a[1];
    int64_t n[2];
    char error[PLAN_MESSAGE];
    Plan *plan;
    (void)module;
    if (!read_call("plan_open", arguments, count < FIRST ? count : FIRST, 1, 2, 0, a, n, NULL)) return NULL;
    const Py_ssize_t inputs = (count - FIRST) / 2;
    int64_t(*sizes)[2] = malloc((size_t)(inputs + 1) * sizeof *sizes);
    if (sizes == NULL) return PyErr_NoMemory();
    for (Py_ssize_t k = 0; k < 2 * inputs; k++) sizes[k / 2][k % 2] = PyLong_AsLongLong(arguments[FIRST + k]);
    if (PyErr_Occurred() != NULL) {
        free(sizes);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    plan = plan_open(a[0], (size_t)n[0], (const int64_t(*)[2])sizes, (int)inputs, (int)n[1], error);
    Py_END_ALLOW_THREADS
    free(sizes);
    if (plan != NULL) return PyLong_FromVoidPtr(plan);
    return error[0] ? PyErr_Format(PyExc_ValueError, "%s", error) : PyErr_NoMemory();
}

/* plan_close(handle) */
static PyObject *call_plan_close(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    void *a[1];
    (void)module;
    if (!read_call("plan_close", arguments, count, 1, 0, 0, a, NULL, NULL)) return NULL;
    plan_close(a[0]);
    Py_RETURN_NONE;
}

/* plan_sizes(handle) -> tuple of numbers, see plan.h */
static PyObject *call_plan_sizes(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    void *a[1];
    (void)module;
    if (!read_call("plan_sizes", arguments, count, 1, 0, 0, a, NULL, NULL)) return NULL;
    const int64_t room = plan_sizes(a[0], NULL, 0);
    int64_t *sizes = malloc((size_t)room * sizeof *sizes);
    if (sizes == NULL) return PyErr_NoMemory();
    plan_sizes(a[0], sizes, room);
    PyObject *tuple = PyTuple_New(room);
    for (Py_ssize_t i = 0; i < room && tuple != NULL; i++) {
        PyObject *number = PyLong_FromLongLong(sizes[i]);
        if (number == NULL) Py_CLEAR(tuple);
        else PyTuple_SetItem(tuple, i, number);
    }
    free(sizes);
    return tuple;
}

/* plan_run(handle, n, threads, inputs, then of each input and output: address, 4 strides in floats) */
static PyObject *call_plan_run(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    enum { FIRST = 4 };
    void *a[1];
    int64_t n[3];
    int failed = 1;
    (void)module;
    if (!read_call("plan_run", arguments, count < FIRST ? count : FIRST, 1, 3, 0, a, n, NULL)) return NULL;
    const int64_t values = n[2] + (plan_sizes(a[0], NULL, 0) - PLAN_FIRST_OUTPUT) / 3;
    if (count != FIRST + 5 * values)
        return PyErr_Format(PyExc_TypeError, "plan_run() takes 5 numbers for each of %lld values, not %zd",
                            (long long)values, count - FIRST);
    arguments += FIRST;
    void **places = malloc((size_t)values * sizeof *places);
    int64_t(*strides)[4] = malloc((size_t)values * sizeof *strides);
    if (places != NULL && strides != NULL) {
        for (int64_t k = 0; k < values; k++) {
            places[k] = PyLong_AsVoidPtr(*arguments++);
            for (int i = 0; i < 4; i++) strides[k][i] = PyLong_AsLongLong(*arguments++);
        }
        if (PyErr_Occurred() == NULL) {
            Py_BEGIN_ALLOW_THREADS
            failed = plan_run(a[0], (const float *const *)places, (const int64_t(*)[4])strides, n[0], (int)n[1],
                              (float *const *)(places + n[2]), (const int64_t(*)[4])(strides + n[2]));
            Py_END_ALLOW_THREADS
        }
    }
    free(places);
    free(strides);
    if (PyErr_Occurred() != NULL) return NULL;
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static int fill(PyObject *module) {
    parallel_for = torch_parallel_for();
    return PyModule_AddIntConstant(module, "instruction_sets", (long)instruction_sets());
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))call_##name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    METHOD(approx_sign_backward),
    METHOD(convolve),
    METHOD(levels),
    METHOD(norm_backward),
    METHOD(pass_over),
    METHOD(pack_weight),
    METHOD(plan_close),
    METHOD(plan_open),
    METHOD(plan_run),
    METHOD(plan_sizes),
    METHOD(rprelu),
    METHOD(sign_conv2d),
    METHOD(sign_grad_input),
    METHOD(sign_grad_weight),
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)fill},
#if defined(Py_GIL_DISABLED)
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_binary", .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__binary(void) { return PyModuleDef_Init(&definition); }
