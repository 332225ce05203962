// Memory for outputs, which are new for each call, and for scratch, which a stream keeps.

// New memory, as PyTorch makes it. 0: there is none, or it is no plain memory (a mode that fakes tensors is on).
static int make(const Kind *k, Handle *made, char **address) {
    int32_t type;
    return !api.empty(k->dim, k->sizes, k->strides, k->dtype, k->device_type, k->device, made) &&
           !api.device_type(*made, &type) && type == k->device_type && !api.data(*made, address) && *address &&
           !((uintptr_t)*address & 15);
}

// The same as a Python tensor on the current card, past PyTorch's dispatcher, which takes half a microsecond to see that
// nobody is to be asked: no mode that watches or fakes tensors, no transform of torch.func. NULL: make it otherwise.
static PyObject *make_object(PyObject *how, char **address) {  // how: (function, arguments); or it is not known
    PyObject *type = PyObject_Type(how);
    Py_DecRef(type);
    if (type != api.tuple || api.modes(false) || api.included((uint16_t)api.layer)) return NULL;
    PyObject *tensor = PyObject_CallObject(PyTuple_GetItem(how, 0), PyTuple_GetItem(how, 1));
    void *impl = tensor ? impl_of(tensor) : NULL;
    if (impl && !api.data(&impl, address) && *address && !((uintptr_t)*address & 15)) return tensor;
    if (tensor) Py_DecRef(tensor);
    PyErr_Clear();
    return NULL;
}

// A stream's launches follow each other, so its calls can have one piece of memory for their scratch, as they would get
// it from PyTorch, at a microsecond or two less. While a call is being launched (`busy`), another thread's on the stream
// gets memory of its own. A piece is never freed, as it may be in use; it may grow, a few times.
typedef struct { void *own; char *address; int64_t bytes; int device, busy; } Space;  // own: see own_stream
enum { SPACES = 16, ROUND = 512 };
static const int64_t least = 1 << 20, most = 1 << 24;  // bytes that a stream keeps
static Space spaces[SPACES];

static Space *space_of(int device, void *own) {
    Space *room = NULL;
    for (Space *one = spaces; one < spaces + SPACES; one++) {
        if (one->address && one->device == device && one->own == own) return one;
        if (!one->address && !one->busy && !room) room = one;
    }
    return room;
}

// The stream's space, for so many bytes; NULL if it has none, or was interrupted. May run any code.
static Space *borrow(int device, void *stream, int64_t size) {
    void *own = own_stream(stream);
    Space *space = size <= most ? space_of(device, own) : NULL;
    if (!space || space->busy) return NULL;
    space->busy = 1;
    if (space->bytes >= size) return space;
    int64_t room = space->bytes > least ? space->bytes : least;
    while (room < size) room *= 2;
    PyObject *tensor = PyObject_CallFunction(api.lasting, "iKL", device, (unsigned long long)stream, (long long)room);
    Kind kind;
    Place place;
    if (!tensor || !look(tensor, &kind, &place)) {
        if (tensor) Py_DecRef(tensor);
        if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
        space->busy = 0;
        return NULL;
    }
    *space = (Space){own, place.begin, room, device, 1};  // the tensor is never let go of
    return space;
}
