// What is called of Python: functions of its stable ABI, declared here, so that its headers need not be installed.

typedef struct _object PyObject;
typedef ptrdiff_t Py_ssize_t;
typedef PyObject *(*Call)(PyObject *self, PyObject *const *args, Py_ssize_t count);
typedef struct { const char *name; Call call; int flags; const char *doc; } PyMethodDef;
extern char _Py_NoneStruct[];
extern PyObject *PyExc_Exception;
#define NONE ((PyObject *)_Py_NoneStruct)
enum { METH_FASTCALL = 0x80, PY_EQ = 2 };
void Py_IncRef(PyObject *), Py_DecRef(PyObject *), PyErr_Clear(void), *PyLong_AsVoidPtr(PyObject *);
void *PyEval_SaveThread(void), PyEval_RestoreThread(void *);
int PyErr_ExceptionMatches(PyObject *);
PyObject *PyObject_CallFunction(PyObject *, const char *, ...), *PyObject_CallObject(PyObject *, PyObject *);
long long PyLong_AsLongLong(PyObject *);
PyObject *PyErr_Occurred(void), *PyErr_Format(PyObject *, const char *, ...), *PyErr_NoMemory(void);
PyObject *PyObject_Type(PyObject *), *PyObject_GetAttr(PyObject *, PyObject *), *PyObject_CallNoArgs(PyObject *);
PyObject *PyUnicode_InternFromString(const char *), *PyCFunction_NewEx(PyMethodDef *, PyObject *, PyObject *);
PyObject *PyCapsule_New(void *, const char *, void (*)(PyObject *)), *PyLong_FromLongLong(long long);
PyObject *PyTuple_New(Py_ssize_t), *PyTuple_GetItem(PyObject *, Py_ssize_t);
Py_ssize_t PyObject_Hash(PyObject *), PyTuple_Size(PyObject *);
void *PyCapsule_GetPointer(PyObject *, const char *);
int PyObject_RichCompareBool(PyObject *, PyObject *, int), PyObject_IsTrue(PyObject *);
int PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *), PyBytes_AsStringAndSize(PyObject *, char **, Py_ssize_t *);
