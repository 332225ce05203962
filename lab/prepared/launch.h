// The launches of a prepared call, and what it is supplied with.

typedef struct { void *stream; PyObject *tensor; char *address; } OfStream;  // counters, say
typedef struct Record {
    struct Record *next;
    uint64_t hash;
    PyObject *options, *supplies, *made;  // made: of each output, 0 or how it is made (see make_object)
    int users, dead, count;
    int64_t *plan;  // see recording.py, Recording.plan
    OfStream of_stream[EXTRA * STREAMS];
    Kind kinds[];
} Record;
typedef struct { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count; } Config;
typedef struct { int which, padding; int value[16]; } Attribute;
enum { COOPERATIVE = 2, CLUSTER = 4, PROGRAMMATIC = 6 };
enum { ADDRESS, MAP, NUMBER };  // what is filled in

// One launch of a plan, with these addresses; returns the driver's status and moves `plan` behind it.
static int launch(const int64_t **plan, char *const *addresses, const int64_t *numbers, void *stream) {
    const int64_t *p = *plan;
    alignas(64) char values[PARAMETER_BYTES];
    void *parameters[PARAMETERS];
    Attribute attributes[3];
    Config config = {.stream = stream, .attributes = attributes};
    void *function = (void *)*p++;
    for (int i = 0; i < 3; i++) config.grid[i] = (unsigned)p[i], config.block[i] = (unsigned)p[3 + i];
    config.shared = (unsigned)p[6];
    if (p[7]) attributes[config.count++] = (Attribute){PROGRAMMATIC, 0, {1}};
    if (p[8]) attributes[config.count++] = (Attribute){COOPERATIVE, 0, {1}};
    if (p[9]) attributes[config.count++] = (Attribute){CLUSTER, 0, {(int)p[9], (int)p[10], (int)p[11]}};
    int64_t count = p[12], patches = p[13], words = p[14];
    p += 15;
    for (int64_t i = 0; i < count; i++) parameters[i] = values + p[i];
    p += count;
    memcpy(values, p + 4 * patches, (size_t)(8 * words));
    int status = 0;
    for (; patches--; p += 4) {  // where; whose address, bytes behind it; or which number, how wide; what it is
        char *address = p[3] == NUMBER ? NULL : addresses[p[1]] + p[2];
        if (p[3] == MAP) status = status ? status : api.move(values + p[0], address);
        else if (p[3] == NUMBER) memcpy(values + p[0], &numbers[p[1]], (size_t)p[2]);  // its low bytes
        else memcpy(values + p[0], &address, sizeof address);
    }
    *plan = p + words;
    return status ? status : api.launch(&config, function, parameters, NULL);
}

// The address of a supplied tensor: a new one, or that of this stream, which a record has kept. 0: there is none.
static char *supply(Record *record, int index, PyObject *entry, void *stream, int capturing, PyObject **held) {
    stream = own_stream(stream);
    Kind kind;
    Place place;
    OfStream *kept = record->of_stream + index * STREAMS, *room = NULL;
    int lasts = PyObject_IsTrue(PyTuple_GetItem(entry, 1)) == 1 && !capturing;
    for (int i = 0; lasts && i < STREAMS; i++) {
        if (kept[i].tensor && kept[i].stream == stream) return kept[i].address;
        if (!kept[i].tensor) room = &kept[i];
    }
    PyObject *tensor = *held = PyObject_CallNoArgs(PyTuple_GetItem(entry, 0));
    if (!tensor || !look(tensor, &kind, &place) || kind.state != GIVEN) return NULL;
    if (lasts && room && !room->tensor) {  // nobody has been here meanwhile
        Py_IncRef(tensor);
        *room = (OfStream){stream, tensor, place.begin};
    }
    return place.begin;
}

// Memory for all scratch of a call in the stream's space; NULL where it has none for it.
static Space *place_scratch(const Record *record, void *stream, char **addresses) {
    const int64_t *sizes = record->plan + 5;
    int64_t total = 0, count = record->plan[1];
    for (int64_t i = 0; i < count; i++) total += (sizes[i] + ROUND - 1) / ROUND * ROUND;
    Space *space = borrow((int)record->plan[0], stream, total);
    char *address = space ? space->address : NULL;
    for (int64_t i = 0; space && i < count; i++) {
        addresses[record->count + i] = address;
        address += (sizes[i] + ROUND - 1) / ROUND * ROUND;
    }
    return space;
}

// Find what memory is still wanted (addresses of 0) and launch, on the card that is the current one. 0: done; -1: nothing was done; else what the driver said
// to a launch that follows another.
static int launch_here(const Record *record, int outs, char **addresses, const int64_t *numbers, Handle *made,
                       void *stream) {
    const int64_t *plan = record->plan;
    int scratches = (int)plan[1], launches = (int)plan[2], status = 0;
    Kind some = {.dtype = bytes, .device_type = (int32_t)plan[3], .device = (int32_t)plan[4], .dim = 1};
    for (int i = 0; i < outs; i++) {
        const Kind *out = &record->kinds[i];
        if (out->state != MADE || out->dim == NOTHING || addresses[i]) continue;
        if (!make(out, &made[i], &addresses[i])) return -1;
    }
    plan += 5;
    some.strides[0] = 1;
    for (int i = 0; i < scratches; i++) {
        some.sizes[0] = *plan++;
        if (addresses[record->count + i]) continue;
        if (!make(&some, &made[outs + i], &addresses[record->count + i])) return -1;
    }
    for (int i = 0; i < launches && !status; i++) {
        status = launch(&plan, addresses, numbers, stream);
        if (status && !i) return -1;
    }
    return status;
}

// The same on whatever card. Python's lock is not held.
static int launch_all(const Record *record, int outs, char **addresses, const int64_t *numbers, Handle *made,
                      void *stream) {
    int device = (int)record->plan[0], now, status;
    void *guard;
    if (!api.context(&now) && now == device) return launch_here(record, outs, addresses, numbers, made, stream);
    if (api.enter(device, &guard)) return -1;
    status = api.context(&now) || now != device ? -1 : launch_here(record, outs, addresses, numbers, made, stream);
    api.leave(guard);
    return status;
}
