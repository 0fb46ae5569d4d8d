/* The Python module `qconv.kernels._binary`. */
#include <Python.h>
#include <dlfcn.h>

#include "binary.h"

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

static int fill(PyObject *module) {
    parallel_for = torch_parallel_for();
    return PyModule_AddIntConstant(module, "instruction_sets", (long)instruction_sets());
}

static PyMethodDef methods[] = {
    {"convolve", (PyCFunction)(void (*)(void))binary_convolve, METH_FASTCALL, NULL},
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
