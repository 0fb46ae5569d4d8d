/* The Python module `qconv.kernels._binary`. */
#include <Python.h>
#include <dlfcn.h>

#include "binary.h"
#include "bits.h"
#include "levels.h"
#include "look_up.h"
#include "norm.h"
#include "pack_weight.h"
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

/* The addresses and numbers of a call, all integers; 0 after an error. */
static int read_call(const char *name, PyObject *const *arguments, Py_ssize_t count, int addresses, int numbers, void **a,
                     int64_t *n) {
    if (count != addresses + numbers) {
        PyErr_Format(PyExc_TypeError, "%s() takes %d integers, not %zd", name, addresses + numbers, count);
        return 0;
    }
    for (int i = 0; i < addresses; i++) a[i] = PyLong_AsVoidPtr(arguments[i]);
    for (int i = 0; i < numbers; i++) n[i] = PyLong_AsLongLong(arguments[addresses + i]);
    return PyErr_Occurred() == NULL;
}

static PyObject *none_unless(int failed, const char *what) {
    if (failed) return PyErr_Format(PyExc_MemoryError, "no memory for %s", what);
    Py_RETURN_NONE;
}

static PyObject *binary_convolve(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    void *addresses[ADDRESSES];
    int64_t numbers[NUMBERS + 1];
    int failed;
    (void)module;
    if (!read_call("convolve", arguments, count, ADDRESSES, NUMBERS + 1, addresses, numbers)) return NULL;
    Conv conv = conv_of(addresses, numbers);
    Py_BEGIN_ALLOW_THREADS
    failed = convolve(&conv, numbers[NUMBERS], parallel_for);
    Py_END_ALLOW_THREADS
    return none_unless(failed, "the bits of a picture");
}

static PyObject *look_up_call(const char *name, int (*look_up)(LookUp *, int64_t, ParallelFor),
                              PyObject *const *arguments, Py_ssize_t count) {
    void *addresses[LOOK_UP_ADDRESSES];
    int64_t numbers[LOOK_UP_NUMBERS + 1];
    int failed;
    if (!read_call(name, arguments, count, LOOK_UP_ADDRESSES, LOOK_UP_NUMBERS + 1, addresses, numbers)) return NULL;
    LookUp call = look_up_of(addresses, numbers);
    Py_BEGIN_ALLOW_THREADS
    failed = look_up(&call, numbers[LOOK_UP_NUMBERS], parallel_for);
    Py_END_ALLOW_THREADS
    return none_unless(failed, "tables");
}

static PyObject *sign_conv2d(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    return look_up_call("sign_conv2d", look_up_convolve, arguments, count);
}

static PyObject *sign_grad_input(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    return look_up_call("sign_grad_input", look_up_grad_input, arguments, count);
}

static PyObject *sign_grad_weight(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    return look_up_call("sign_grad_weight", look_up_grad_weight, arguments, count);
}

static PyObject *bits_pass_over(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    const int wanted = PASS_ADDRESSES + PASS_NUMBERS + 3;
    if (count != wanted) return PyErr_Format(PyExc_TypeError, "pass_over() takes %d numbers, not %zd", wanted, count);
    void *a[PASS_ADDRESSES];
    int64_t n[PASS_NUMBERS + 1]; /* the last one is the grain */
    for (int i = 0; i < PASS_ADDRESSES; i++) a[i] = PyLong_AsVoidPtr(arguments[i]);
    for (int i = 0; i <= PASS_NUMBERS; i++) n[i] = PyLong_AsLongLong(arguments[PASS_ADDRESSES + i]);
    const double low = PyFloat_AsDouble(arguments[wanted - 2]), high = PyFloat_AsDouble(arguments[wanted - 1]);
    if (PyErr_Occurred()) return NULL;
    Pass pass = pass_of(a, n, (float)low, (float)high);
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = pass_over(&pass, n[PASS_NUMBERS], parallel_for);
    Py_END_ALLOW_THREADS
    if (failed) {
        PyErr_SetString(PyExc_RuntimeError, "torch's threads did not start");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *levels_call(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    const int integers = LEVELS_ADDRESSES + LEVELS_NUMBERS;
    void *addresses[LEVELS_ADDRESSES];
    int64_t numbers[LEVELS_NUMBERS];
    float floats[LEVELS_FLOATS];
    int failed;
    if (!read_call("levels", arguments, count - LEVELS_FLOATS, LEVELS_ADDRESSES, LEVELS_NUMBERS, addresses, numbers))
        return NULL;
    for (int i = 0; i < LEVELS_FLOATS; i++) floats[i] = (float)PyFloat_AsDouble(arguments[integers + i]);
    if (PyErr_Occurred()) return NULL;
    Levels call = levels_of(addresses, numbers, floats);
    Py_BEGIN_ALLOW_THREADS
    failed = levels(&call, parallel_for);
    Py_END_ALLOW_THREADS
    return none_unless(failed, "threads");
}

static PyObject *norm_call(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    void *addresses[NORM_ADDRESSES];
    int64_t numbers[NORM_NUMBERS];
    int failed;
    (void)module;
    if (!read_call("norm_backward", arguments, count, NORM_ADDRESSES, NORM_NUMBERS, addresses, numbers)) return NULL;
    Norm norm = norm_of(addresses, numbers);
    Py_BEGIN_ALLOW_THREADS
    failed = norm_backward(&norm, parallel_for);
    Py_END_ALLOW_THREADS
    return none_unless(failed, "sums over channels");
}

static PyObject *rprelu_call(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    void *addresses[RPRELU_ADDRESSES];
    int64_t numbers[RPRELU_NUMBERS];
    int failed;
    (void)module;
    if (!read_call("rprelu", arguments, count, RPRELU_ADDRESSES, RPRELU_NUMBERS, addresses, numbers)) return NULL;
    RPReLU call = rprelu_of(addresses, numbers);
    Py_BEGIN_ALLOW_THREADS
    failed = rprelu(&call, parallel_for);
    Py_END_ALLOW_THREADS
    return none_unless(failed, "sums over channels");
}

static PyObject *slope_call(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    void *addresses[SLOPE_ADDRESSES];
    int64_t numbers[SLOPE_NUMBERS];
    int failed;
    (void)module;
    if (!read_call("approx_sign_backward", arguments, count, SLOPE_ADDRESSES, SLOPE_NUMBERS, addresses, numbers))
        return NULL;
    Slope slope = slope_of(addresses, numbers);
    Py_BEGIN_ALLOW_THREADS
    failed = approx_sign_backward(&slope, parallel_for);
    Py_END_ALLOW_THREADS
    return none_unless(failed, "threads");
}

static PyObject *weight_pack(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    void *addresses[PACK_ADDRESSES];
    int64_t numbers[PACK_NUMBERS + 1];
    int failed;
    (void)module;
    if (!read_call("pack_weight", arguments, count, PACK_ADDRESSES, PACK_NUMBERS + 1, addresses, numbers)) return NULL;
    Packing packing = packing_of(addresses, numbers);
    Py_BEGIN_ALLOW_THREADS
    failed = pack_weight(&packing, numbers[PACK_NUMBERS], parallel_for);
    Py_END_ALLOW_THREADS
    return none_unless(failed, "threads");
}

static int fill(PyObject *module) {
    parallel_for = torch_parallel_for();
    return PyModule_AddIntConstant(module, "instruction_sets", (long)instruction_sets());
}

static PyMethodDef methods[] = {
    {"approx_sign_backward", (PyCFunction)(void (*)(void))slope_call, METH_FASTCALL, NULL},
    {"convolve", (PyCFunction)(void (*)(void))binary_convolve, METH_FASTCALL, NULL},
    {"levels", (PyCFunction)(void (*)(void))levels_call, METH_FASTCALL, NULL},
    {"norm_backward", (PyCFunction)(void (*)(void))norm_call, METH_FASTCALL, NULL},
    {"pass_over", (PyCFunction)(void (*)(void))bits_pass_over, METH_FASTCALL, NULL},
    {"pack_weight", (PyCFunction)(void (*)(void))weight_pack, METH_FASTCALL, NULL},
    {"rprelu", (PyCFunction)(void (*)(void))rprelu_call, METH_FASTCALL, NULL},
    {"sign_conv2d", (PyCFunction)(void (*)(void))sign_conv2d, METH_FASTCALL, NULL},
    {"sign_grad_input", (PyCFunction)(void (*)(void))sign_grad_input, METH_FASTCALL, NULL},
    {"sign_grad_weight", (PyCFunction)(void (*)(void))sign_grad_weight, METH_FASTCALL, NULL},
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
