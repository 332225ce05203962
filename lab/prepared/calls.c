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
#include "launch.h"

typedef struct { Record *buckets[BUCKETS]; int records, outs; } Table;

static _Thread_local int paused;  // this thread notes launches: all must go the checked way

static void let_go(Record *record) {  // once nobody uses it
    if (record->users || !record->dead) return;
    Py_DecRef(record->options), Py_DecRef(record->supplies);
    free(record->plan), free(record);
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
static PyObject *result(PyObject *given, Handle made) {
    if (made) return api.wrap(made);
    Py_IncRef(given);
    return given;
}

// The outputs: the one, or a tuple.
static PyObject *results(int outs, PyObject *const *args, Handle *made) {
    if (outs == 1) return result(args[0], made[0]);
    PyObject *all = PyTuple_New(outs);
    for (int i = 0; all && i < outs; i++) {
        PyObject *out = result(args[i], made[i]);
        if (!out) return Py_DecRef(all), NULL;
        PyTuple_SetItem(all, i, out);
    }
    return all;
}

static PyObject *nothing(void) {  // the call is not for us: the checked way does it, or says what is wrong
    PyErr_Clear();
    Py_IncRef(NONE);
    return NONE;
}

static PyObject *run_either(PyObject *self, PyObject *const *args, Py_ssize_t argc, int tracked) {
    Table *table = PyCapsule_GetPointer(self, NULL);
    int count = (int)argc - 1, outs = table->outs, status = -1, held = 0;
    Kind kinds[TENSORS];
    Place places[TENSORS];
    uint64_t hash;
    if (count < outs || count > TENSORS || !table->records || paused) return nothing();
    if (!look_at_all(table, args, count, tracked, kinds, places, &hash)) return nothing();
    Record *record = table->buckets[hash % BUCKETS];
    for (; record; record = record->next) {
        int same = record->hash == hash && record->count == count;
        for (int i = 0; same && i < count; i++) same = same_kind(&kinds[i], &record->kinds[i]);
        if (!same) continue;
        record->users++;  // to compare options may run any code
        if (!record->dead && same_options(args[0], record->options)) break;
        if (!--record->users && record->dead) return let_go(record), nothing();
    }
    if (!record) return nothing();
    char *addresses[TENSORS + 2 * EXTRA];
    Handle made[TENSORS + EXTRA];
    int owned = outs + (int)record->plan[1];  // of `made`: outputs, then scratch
    memset(made, 0, sizeof *made * (size_t)owned);
    PyObject *supplied[EXTRA];
    for (int i = 0; i < count; i++) addresses[i] = places[i].begin;
    Py_ssize_t supplies = PyTuple_Size(record->supplies);
    for (; held < supplies; held++) {  // tensors that a function gives for each launch, such as counters
        Kind kind;
        Place place;
        if (!(supplied[held] = PyObject_CallNoArgs(PyTuple_GetItem(record->supplies, held)))) break;
        if (!look(supplied[held], &kind, &place) || kind.state != GIVEN) break;
        addresses[count + record->plan[1] + held] = place.begin;
    }
    if (held == supplies) {
        void *thread = PyEval_SaveThread();
        status = launch_all(record, outs, addresses, made);
        PyEval_RestoreThread(thread);
    } else held += supplied[held] != NULL;
    while (held) Py_DecRef(supplied[--held]);
    PyObject *found = status ? NULL : results(outs, args + 1, made);
    for (int i = 0; i < owned; i++)
        if (made[i]) api.delete(made[i]);
    record->users--, let_go(record);
    if (status > 0) return PyErr_Format(api.error, "a launch behind another: the CUDA driver says %d", status);
    return status ? nothing() : found;
}

// run(options, outputs..., other tensors...): the outputs, or None where nothing was done.
static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t argc) { return run_either(self, args, argc, 0); }

// The same, and nothing is done where grad mode is on and a tensor asks for a gradient.
static PyObject *run_tracked(PyObject *self, PyObject *const *args, Py_ssize_t argc) {
    return run_either(self, args, argc, 1);
}

// keep(options, made, tensors, plan, supplies): from now on `run` takes calls like this one, which was done. made: which
// outputs were None; tensors: outputs, those made too, and the others; plan: bytes. True, or False: it cannot be.
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
    Record *record = calloc(1, sizeof *record + sizeof(Kind) * (size_t)count);
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
    if (table->records >= MOST) clear(table);
    record->hash = mix((uint64_t)count, (uint64_t)options);
    for (int i = 0; i < count; i++) record->hash = hash_of(record->hash, &record->kinds[i]);
    Py_IncRef(record->options = args[0]), Py_IncRef(record->supplies = args[4]);
    record->plan = memcpy(copy, plan, (size_t)length), record->count = count;
    record->next = table->buckets[record->hash % BUCKETS], table->buckets[record->hash % BUCKETS] = record;
    table->records++;
    return PyLong_FromLongLong(table->records);
}

static void forget(PyObject *capsule) {
    Table *table = PyCapsule_GetPointer(capsule, NULL);
    clear(table), free(table);
}

// (run, run_tracked, keep) of a new table, for calls that have so many outputs.
PyObject *prepared_table(int outs) {
    static PyMethodDef methods[] = {
        {"run", run, METH_FASTCALL, NULL}, {"run_tracked", run_tracked, METH_FASTCALL, NULL},
        {"keep", keep, METH_FASTCALL, NULL}};
    Table *table = calloc(1, sizeof *table);
    if (!table) return PyErr_NoMemory();
    table->outs = outs;
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
