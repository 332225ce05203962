// A look at tensors: what is called of PyTorch and of the driver, and what kind of tensors a call has.

// A handle of PyTorch's C functions is the address of an at::Tensor, which is one pointer, to the TensorImpl.
typedef void *const *Handle;
static struct {
    int (*dtype)(Handle, int32_t *), (*device_type)(Handle, int32_t *), (*device)(Handle, int32_t *);
    int (*layout)(Handle, int32_t *), (*dim)(Handle, int64_t *), (*sizes)(Handle, int64_t **);
    int (*strides)(Handle, int64_t **), (*data)(Handle, char **), (*room)(Handle, int64_t *);
    int (*offset)(Handle, int64_t *);
    int (*empty)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, Handle *), (*delete)(Handle);
    int32_t (*strided)(void), (*uint8)(void);
    bool (*grad_mode)(void);
    size_t (*item_size)(int32_t);
    int (*enter)(int32_t device, void **guard), (*leave)(void *guard);  // another card becomes the current one
    bool (*negative)(Handle);                      // at::native::is_neg: negate what is in memory
    PyObject *(*wrap)(Handle);                     // THPVariable_Wrap: the Python tensor
    int (*stream)(int32_t device, void **stream);  // PyTorch's current one
    int (*context)(int *device);                   // cuCtxGetDevice: where launches of this thread go
    int (*launch)(const void *config, void *function, void **parameters, void **extra);  // cuLaunchKernelEx
    int (*move)(void *map, void *address);         // cuTensorMapReplaceAddress
    int (*capturing)(void *stream, int *status);   // cuStreamIsCapturing
    // torch.Tensor, torch.nn.Parameter, tuple, CudaError, int, and a function: the recordings under way in this thread
    PyObject *tensor, *parameter, *tuple, *error, *whole, *recordings;
    PyObject *lasting;                             // a function: (card, stream, bytes) -> memory that stays
    bool (*modes)(bool), (*included)(uint16_t);    // any_modes_set, tls_is_dispatch_key_included
    uintptr_t layer;                               // the dispatch key of a transform of torch.func
} api;

// One handle for the default stream that each thread has of its own (cu_stream_per_thread): a stream for each thread.
enum { PER_THREAD = 2 };

// A number of this thread, which is no handle and of no other thread. Python's lock is held.
static __attribute__((noinline, cold)) void *number_of_thread(void) {
    static uintptr_t threads;
    static _Thread_local uintptr_t own;
    if (!own) own = ~++threads;
    return (void *)own;
}

// What launches have in common that follow each other.
static void *own_stream(void *stream) { return (uintptr_t)stream == PER_THREAD ? number_of_thread() : stream; }

static PyObject *cdata, *requires_grad;
static int32_t strided, bytes;

enum { TENSORS = 24, DIM = 6, EXTRA = 8, PARAMETERS = 128, PARAMETER_BYTES = 4096, BUCKETS = 256, MOST = 1024 };
enum { NUMBERS = 4, STREAMS = 4, UNKNOWN = -1 };  // of a call; that a record knows the counters of
enum { ABSENT, GIVEN, MADE };  // a tensor of a call: None; one; an output that was None and is made here
enum { NOTHING = -1 };          // dim of an output that was None and stays so

typedef struct {  // what is seen of a tensor; all of it belongs to the kind of the call, apart from addresses
    int32_t state, dtype, device_type, device;
    int64_t dim, alignment, sizes[DIM], strides[DIM];
} Kind;
typedef struct { void *impl; char *begin, *end; } Place;  // impl: what a Handle points to

// Everything of a plain dense tensor, from PyTorch. 0: it is none, or its memory is not there.
static int measure(Handle tensor, Kind *kind, Place *place) {
    int64_t *sizes, *strides, room, offset;
    int32_t layout;
    if (api.negative(tensor) || api.layout(tensor, &layout) || layout != strided || api.dim(tensor, &kind->dim) || kind->dim > DIM ||
        api.dtype(tensor, &kind->dtype) || api.device_type(tensor, &kind->device_type) ||
        api.device(tensor, &kind->device) || api.sizes(tensor, &sizes) || api.strides(tensor, &strides) ||
        api.room(tensor, &room) || api.offset(tensor, &offset) || api.data(tensor, &place->begin) || !place->begin)
        return 0;
    int64_t extent = 1;  // elements from the first to the last
    for (int64_t axis = 0; axis < kind->dim; axis++) {
        kind->sizes[axis] = sizes[axis], kind->strides[axis] = strides[axis];
        if (sizes[axis] < 1) return 0;  // empty tensors are not launched
        extent += (sizes[axis] - 1) * strides[axis];
    }
    int64_t item = (int64_t)api.item_size(kind->dtype);
    uintptr_t address = (uintptr_t)place->begin | 16;
    kind->alignment = (int64_t)(address & -address);
    place->end = place->begin + extent * item;
    return (offset + extent) * item <= room;
}

// Where a Python tensor has the address of its TensorImpl, from its own address: behind the object's head, or behind that
// and a flag, which is 0 as long as it owns it. 0: nobody knows, ask Python (in ten times the time).
enum { BARE = 16, FLAGGED = 24 };
static int impl_at;

static void *impl_asked(PyObject *tensor) {
    PyObject *number = PyObject_GetAttr(tensor, cdata);
    if (!number) return NULL;
    void *impl = PyLong_AsVoidPtr(number);
    Py_DecRef(number);
    return impl;
}

static void *impl_of(PyObject *tensor) {
    const char *object = (const char *)tensor;
    if (!impl_at || (impl_at == FLAGGED && object[BARE])) return impl_asked(tensor);
    return *(void *const *)(object + impl_at);
}

// The same for a Python object. 0: no tensor, or of a class of its own.
static int look(PyObject *object, Kind *kind, Place *place) {
    if (object == NONE) {
        kind->state = ABSENT, place->begin = place->end = NULL;
        return 1;
    }
    PyObject *type = PyObject_Type(object);
    Py_DecRef(type);  // the object keeps it
    if (type != api.tensor && type != api.parameter) return 0;
    place->impl = impl_of(object);
    kind->state = GIVEN;
    return place->impl && measure(&place->impl, kind, place);
}

static uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
}

static uint64_t hash_of(uint64_t hash, const Kind *kind) {
    hash = mix(hash, (uint64_t)kind->state);
    if (kind->state != GIVEN) return hash;
    hash = mix(hash, (uint64_t)kind->dtype << 32 | (uint64_t)kind->alignment);
    for (int64_t axis = 0; axis < kind->dim; axis++) hash = mix(hash, (uint64_t)kind->sizes[axis]);
    return hash;
}

static int same_layout(const Kind *a, const Kind *b) {
    return a->dtype == b->dtype && a->device_type == b->device_type && a->device == b->device && a->dim == b->dim &&
           !memcmp(a->sizes, b->sizes, sizeof(int64_t) * (size_t)a->dim) &&
           !memcmp(a->strides, b->strides, sizeof(int64_t) * (size_t)a->dim) && a->alignment == b->alignment;
}

static int same_kind(const Kind *a, const Kind *b) {
    return a->state == b->state && (a->state != GIVEN || same_layout(a, b));
}

// Options are equal if they are one by one, and of one class: True is not 1, in tuples of tuples neither. This may run
// any code, and fail: then it is 0, and PyErr_Occurred.
static int same_options(PyObject *a, PyObject *b) {
    if (a == b) return 1;
    PyObject *its = PyObject_Type(a), *other = PyObject_Type(b);
    Py_DecRef(its), Py_DecRef(other);
    if (its != other) return 0;
    if (its != api.tuple) return PyObject_RichCompareBool(a, b, PY_EQ) == 1;
    Py_ssize_t count = PyTuple_Size(a), i = 0;
    if (count != PyTuple_Size(b)) return 0;
    while (i < count && same_options(PyTuple_GetItem(a, i), PyTuple_GetItem(b, i))) i++;
    return i == count;
}
