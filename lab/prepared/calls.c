// The hot half of lab/prepared: look at a call's tensors, find what was prepared for such, put its launches on the
// stream. In C, because in Python the looks alone cost as much as the launch.
//
// Nothing is included but what the compiler brings: of Python the functions of its stable ABI are declared here, of
// PyTorch the C functions of its AOT Inductor (aoti_torch_*), of the driver three; they come as addresses, in `api`.
//
// All that is shared is touched with Python's lock held. It is given back where PyTorch gives it back too: while memory
// is found and while the driver works. A record that is in use then is not freed: `users`.

#include <stdalign.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "python.h"
#include "look.h"
#include "memory.h"
#include "launch.h"

typedef struct { Record *buckets[BUCKETS]; int records, outs, numbers; } Table;

// Recordings under way in this thread: meanwhile all must go the checked way. At first a thread must be asked, as it may
// have begun one before this library was there.
static _Thread_local int paused = UNKNOWN;

static int is_paused(void) {
    if (paused == UNKNOWN) {
        PyObject *found = PyObject_CallNoArgs(api.recordings);
        if (!found) return 1;
        paused = (int)PyLong_AsLongLong(found);
        Py_DecRef(found);
    }
    return paused;
}

static void let_go(Record *record) {  // once nobody uses it
    if (record->users || !record->dead) return;
    PyObject *options = record->options, *supplies = record->supplies, *made = record->made;
    for (int i = 0; i < EXTRA * STREAMS; i++)
        if (record->of_stream[i].tensor) Py_DecRef(record->of_stream[i].tensor);
    free(record->plan), free(record);
    Py_DecRef(options), Py_DecRef(supplies), Py_DecRef(made);  // which may run any code
}

static void clear(Table *table) {
    for (int b = 0; b < BUCKETS; b++) {
        Record *record = table->buckets[b], *next;
        table->buckets[b] = NULL;
        for (; record; record = next) next = record->next, record->dead = 1, let_go(record);
    }
    table->records = 0;
}

// What is written must not overlap what is read, nor what else is written.
static int overlaps(const Kind *kinds, const Place *places, int outs, int count) {
    for (int i = 0; i < outs; i++)
        for (int j = 0; j < count && kinds[i].state == GIVEN; j++)
            if (j != i && kinds[j].state == GIVEN && places[i].begin < places[j].end && places[j].begin < places[i].end)
                return 1;
    return 0;
}

// Whether it does, or will not say.
static int asks_for_gradient(PyObject *tensor) {
    PyObject *asks = PyObject_GetAttr(tensor, requires_grad);
    if (!asks) return 1;
    int found = PyObject_IsTrue(asks);
    Py_DecRef(asks);
    return found;
}

// Look at all arguments: options, outputs, other tensors. tracked: none may ask for a gradient. 0: not for us.
static int look_at_all(Table *table, PyObject *const *args, int count, int tracked, Kind *kinds, Place *places,
                       uint64_t *hash) {
    Py_ssize_t options = PyObject_Hash(args[0]);
    if (options == -1) return 0;
    *hash = mix((uint64_t)count, (uint64_t)options);
    tracked = tracked && api.grad_mode();
    for (int i = 0; i < count; i++) {
        PyObject *object = args[1 + i];
        if (!look(object, &kinds[i], &places[i])) return 0;
        if (i < table->outs && kinds[i].state == ABSENT) kinds[i].state = MADE;
        if (kinds[i].state == GIVEN && (i < table->outs || tracked) && asks_for_gradient(object)) return 0;
        *hash = hash_of(*hash, &kinds[i]);
    }
    return !overlaps(kinds, places, table->outs, count);
}

// An output as Python has it: the one that was given, or a new Python tensor.
static PyObject *result(PyObject *given, PyObject **object, Handle made) {
    PyObject *found = *object;
    *object = NULL;
    if (found) return found;
    if (made) return api.wrap(made);
    Py_IncRef(given);
    return given;
}

// The outputs: the one, or a tuple.
static PyObject *results(int outs, PyObject *const *args, PyObject **objects, Handle *made) {
    if (outs == 1) return result(args[0], &objects[0], made[0]);
    PyObject *all = PyTuple_New(outs);
    for (int i = 0; all && i < outs; i++) {
        PyObject *out = result(args[i], &objects[i], made[i]);
        if (!out) return Py_DecRef(all), NULL;
        PyTuple_SetItem(all, i, out);
    }
    return all;
}

// The call is not for us: the checked way does it, or says what is wrong. But what is no error, such as
// KeyboardInterrupt, is not lost.
static PyObject *nothing(void) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
    PyErr_Clear();
    Py_IncRef(NONE);
    return NONE;
}

// The record of such a call, which is then in use (`users`); NULL if there is none, or PyErr_Occurred.
static Record *find(Table *table, uint64_t hash, const Kind *kinds, int count, PyObject *options) {
    for (Record *record = table->buckets[hash % BUCKETS]; record; record = record->next) {
        int same = record->hash == hash && record->count == count;
        for (int i = 0; same && i < count; i++) same = same_kind(&kinds[i], &record->kinds[i]);
        if (!same) continue;
        record->users++;  // to compare options may run any code, also such as clears the table
        same = same_options(options, record->options);
        if (same && !record->dead) return record;
        record->users--;
        if (!record->dead && !PyErr_Occurred()) continue;
        return let_go(record), NULL;
    }
    return NULL;
}

static PyObject *run_either(PyObject *self, PyObject *const *args, Py_ssize_t argc, int tracked) {
    Table *table = PyCapsule_GetPointer(self, NULL);
    int count = (int)argc - 1 - table->numbers, outs = table->outs, status = -1, held = 0, good = 1, capturing = 0;
    Kind kinds[TENSORS];
    Place places[TENSORS];
    uint64_t hash;
    int64_t numbers[NUMBERS];
    if (count < outs || count > TENSORS || !table->records || is_paused()) return nothing();
    if (!look_at_all(table, args, count, tracked, kinds, places, &hash)) return nothing();
    for (int i = 0; i < table->numbers; i++) {
        PyObject *number = args[1 + count + i], *type = PyObject_Type(number);
        Py_DecRef(type);
        if (type != api.whole) return nothing();
        numbers[i] = PyLong_AsLongLong(number);
        if (numbers[i] != (int32_t)numbers[i] || PyErr_Occurred()) return nothing();  // the kernels may take 32 bits
    }
    Record *record = find(table, hash, kinds, count, args[0]);
    if (!record) return nothing();
    char *addresses[TENSORS + 2 * EXTRA];
    Handle made[TENSORS + EXTRA];
    int scratches = (int)record->plan[1], owned = outs + scratches;  // of `made`: outputs, then scratch
    memset(made, 0, sizeof *made * (size_t)owned);
    PyObject *supplied[EXTRA] = {NULL}, *objects[TENSORS];
    memset(objects, 0, sizeof *objects * (size_t)outs), memset(addresses + count, 0, sizeof *addresses * (size_t)scratches);
    Space *space = NULL;
    for (int i = 0; i < count; i++) addresses[i] = places[i].begin;
    Py_ssize_t supplies = PyTuple_Size(record->supplies);
    void *stream;
    int device = (int)record->plan[0], now;
    if (api.stream(device, &stream)) good = 0;
    if (good && (supplies || scratches) && api.capturing(stream, &capturing)) capturing = 1;  // it cannot be asked now
    for (; good && held < supplies; held++) {  // tensors that a function gives for each launch, such as counters
        PyObject *entry = PyTuple_GetItem(record->supplies, held);
        char **place = &addresses[count + scratches + held];
        good = (*place = supply(record, held, entry, stream, capturing, &supplied[held])) != NULL;
    }
    if (good && scratches && !capturing) space = place_scratch(record, stream, addresses);
    if (PyErr_Occurred()) good = 0;
    int here = good && !api.context(&now) && now == device;
    for (int i = 0; here && i < outs; i++)
        if (kinds[i].state == MADE) objects[i] = make_object(PyTuple_GetItem(record->made, i), &addresses[i]);
    if (good) {
        void *thread = PyEval_SaveThread();
        status = launch_all(record, outs, addresses, numbers, made, stream);
        PyEval_RestoreThread(thread);
    }
    while (held)
        if (supplied[--held]) Py_DecRef(supplied[held]);
    if (space) space->busy = 0;
    PyObject *found = status ? NULL : results(outs, args + 1, objects, made);
    for (int i = 0; i < owned; i++)
        if (made[i]) api.delete(made[i]);
    for (int i = 0; i < outs; i++)
        if (objects[i]) Py_DecRef(objects[i]);
    record->users--, let_go(record);
    if (status > 0) return PyErr_Format(api.error, "a launch behind another: the CUDA driver says %d", status);
    return status ? nothing() : found;
}

// run(options, outputs..., other tensors..., numbers...): the outputs, or None where nothing was done.
static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t argc) { return run_either(self, args, argc, 0); }

// The same, and nothing is done where grad mode is on and a tensor asks for a gradient.
static PyObject *run_tracked(PyObject *self, PyObject *const *args, Py_ssize_t argc) {
    return run_either(self, args, argc, 1);
}

// Take a record out of the table.
static void drop(Table *table, Record *record) {
    Record **at = &table->buckets[record->hash % BUCKETS];
    while (*at != record) at = &(*at)->next;
    *at = record->next, table->records--, record->dead = 1;
}

// keep(options, made, tensors, plan, supplies): from now on `run` takes calls like this one, which was done. made: which
// outputs were None, and how they are made, if known (see make_object); tensors: outputs, those made too, and the others; plan: bytes; supplies: (function, whether it
// gives a stream always the same). A kind that is there is replaced. How many kinds there are, or None: it cannot be.
static PyObject *keep(PyObject *self, PyObject *const *args, Py_ssize_t argc) {
    Table *table = PyCapsule_GetPointer(self, NULL);
    int count = (int)PyTuple_Size(args[2]);
    char *plan;
    Py_ssize_t length;
    Place place;
    if (argc != 5 || count > TENSORS || PyTuple_Size(args[4]) > EXTRA) return nothing();
    if (PyBytes_AsStringAndSize(args[3], &plan, &length) || ((int64_t *)plan)[1] > EXTRA) return nothing();
    Py_ssize_t options = PyObject_Hash(args[0]);
    if (options == -1) return nothing();
    Record *record = calloc(1, sizeof *record + sizeof(Kind) * (size_t)count), *before;
    int64_t *copy = malloc((size_t)length);
    int good = record && copy;
    for (int i = 0; good && i < count; i++) {
        Kind *kind = &record->kinds[i];
        good = look(PyTuple_GetItem(args[2], i), kind, &place);
        if (i < table->outs && PyObject_IsTrue(PyTuple_GetItem(args[1], i))) {
            if (kind->state == ABSENT) kind->dim = NOTHING;
            kind->state = MADE;
        }
    }
    if (!good) return free(record), free(copy), nothing();
    record->hash = mix((uint64_t)count, (uint64_t)options);
    for (int i = 0; i < count; i++) record->hash = hash_of(record->hash, &record->kinds[i]);
    while ((before = find(table, record->hash, record->kinds, count, args[0])))
        drop(table, before), before->users--, let_go(before);
    if (PyErr_Occurred()) return free(record), free(copy), nothing();
    if (table->records >= MOST) clear(table);
    Py_IncRef(record->options = args[0]), Py_IncRef(record->supplies = args[4]), Py_IncRef(record->made = args[1]);
    record->plan = memcpy(copy, plan, (size_t)length), record->count = count;
    record->next = table->buckets[record->hash % BUCKETS], table->buckets[record->hash % BUCKETS] = record;
    table->records++;
    return PyLong_FromLongLong(table->records);
}

static void forget(PyObject *capsule) {
    Table *table = PyCapsule_GetPointer(capsule, NULL);
    clear(table), free(table);
}

// (run, run_tracked, keep) of a new table, for calls that have so many outputs and, at their end, numbers.
PyObject *prepared_table(int outs, int numbers) {
    static PyMethodDef methods[] = {
        {"run", run, METH_FASTCALL, NULL}, {"run_tracked", run_tracked, METH_FASTCALL, NULL},
        {"keep", keep, METH_FASTCALL, NULL}};
    Table *table = calloc(1, sizeof *table);
    if (!table) return PyErr_NoMemory();
    table->outs = outs, table->numbers = numbers;
    PyObject *capsule = PyCapsule_New(table, NULL, forget), *all = PyTuple_New(3);
    for (int i = 0; i < 3; i++) PyTuple_SetItem(all, i, PyCFunction_NewEx(&methods[i], capsule, NULL));
    Py_DecRef(capsule);
    return all;
}

// The addresses of what is called, in the order of `api`.
void prepared_begin(void *const *addresses) {
    memcpy(&api, addresses, sizeof api);
    cdata = PyUnicode_InternFromString("_cdata"), requires_grad = PyUnicode_InternFromString("requires_grad");
    strided = api.strided(), bytes = api.uint8();
}

// Find out from some tensors where they have the address of their TensorImpl. Returns `impl_at`.
int prepared_settle(PyObject *tensors) {
    int found[] = {BARE, FLAGGED, 0};
    for (int i = 0; i < 3; i++) {
        impl_at = found[i];
        Py_ssize_t one = 0, count = PyTuple_Size(tensors);
        while (one < count && impl_of(PyTuple_GetItem(tensors, one)) == impl_asked(PyTuple_GetItem(tensors, one))) one++;
        if (one == count) break;
    }
    return impl_at;
}

// How many recordings are under way in this thread.
void prepared_pause(int recordings) { paused = recordings; }

// For the first look at all this: what is read of a tensor, as 64-bit numbers. 0: it is none of ours.
int prepared_probe(PyObject *tensor, int64_t *numbers) {
    Kind kind;
    Place place;
    if (!look(tensor, &kind, &place) || kind.state != GIVEN || kind.dim != 3) return 0;
    int64_t found[] = {kind.dim, kind.dtype, kind.device_type, kind.device, (int64_t)place.begin, (int64_t)place.end};
    memcpy(numbers, found, sizeof found);
    memcpy(numbers + 6, kind.sizes, 3 * sizeof *numbers), memcpy(numbers + 9, kind.strides, 3 * sizeof *numbers);
    return 1;
}
