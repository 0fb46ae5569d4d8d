/* The Python module `qconv.kernels._binary`. */
#include <Python.h>
#include <dlfcn.h>

#include "binary.h"
#include "bits.h"

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

static PyObject *binary_convolve(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != ADDRESSES + NUMBERS + 1)
        return PyErr_Format(PyExc_TypeError, "convolve() takes %d integers, not %zd", ADDRESSES + NUMBERS + 1, count);
    void *addresses[ADDRESSES];
    int64_t numbers[NUMBERS + 1];
    for (int i = 0; i < ADDRESSES; i++) addresses[i] = PyLong_AsVoidPtr(arguments[i]);
    for (int i = 0; i <= NUMBERS; i++) numbers[i] = PyLong_AsLongLong(arguments[ADDRESSES + i]);
    if (PyErr_Occurred()) return NULL;
    Conv conv = conv_of(addresses, numbers);
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = convolve(&conv, numbers[NUMBERS], parallel_for);
    Py_END_ALLOW_THREADS
    if (failed) {
        PyErr_SetString(PyExc_MemoryError, "no memory for the bits of a picture");
        return NULL;
    }
    Py_RETURN_NONE;
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

static int fill(PyObject *module) {
    parallel_for = torch_parallel_for();
    return PyModule_AddIntConstant(module, "instruction_sets", (long)instruction_sets());
}

static PyMethodDef methods[] = {
    {"convolve", (PyCFunction)(void (*)(void))binary_convolve, METH_FASTCALL, NULL},
    {"pass_over", (PyCFunction)(void (*)(void))bits_pass_over, METH_FASTCALL, NULL},
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
