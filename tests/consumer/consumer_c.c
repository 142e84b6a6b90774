/* An engine in C (and C++, see consumer_cpp.cpp) that submits a copy and follows it. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <strata_copy.h>

#ifndef MODULE_NAME
#define MODULE_NAME "consumer_c"
#define MODULE_INIT PyInit_consumer_c
#endif

static void *address(unsigned long long number) { return (void *)(uintptr_t)number; }

/* copy(plan, copier, source, target, stream, upto, layers): the outcomes of each step, and the last error's text. */
static PyObject *copy(PyObject *self, PyObject *args) {
    unsigned long long plan, copier, source, target, stream;
    long long upto_value;
    int layers, layer;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKKLi", &plan, &copier, &source, &target, &stream, &upto_value, &layers)) return NULL;

    int64_t upto[1];
    strata_request request;
    strata_error error;
    strata_progress progress;
    strata_ticket ticket, ended[4];
    int reason, submitted, waited = STRATA_OK, done, source_done, synced, polled, found, released, reset, said, unsaid, rewindable, room;
    uint64_t before, after;

    upto[0] = upto_value;
    request = strata_request_new(upto, 1);
    request.flags = STRATA_CALLER_SYNCED;

    Py_BEGIN_ALLOW_THREADS
    before = strata_state_generation((const strata_state *)address(target));
    submitted = strata_submit((strata_plan *)address(plan), &request, &ticket, &error);
    for (layer = 0; layer < layers && waited == STRATA_OK; layer++)
        waited = strata_wait_layer(ticket, layer, address(stream), 0, &error);
    done = strata_wait_done(ticket, address(stream), 0, NULL);
    source_done = strata_wait_source(ticket, address(stream), 0, NULL);
    synced = strata_sync(ticket, -1, &error);
    polled = strata_poll(ticket, &progress);
    found = strata_finished((strata_copier *)address(copier), ended, 4);
    after = strata_state_generation((const strata_state *)address(target));
    strata_release(&ticket);
    released = strata_sync(ended[0], 0, &error);
    reason = error.reason;
    reset = strata_state_reset((strata_state *)address(source), NULL);
    said = strata_state_advanced((strata_state *)address(source), upto, 1, NULL);
    said |= strata_state_rewound((strata_state *)address(source), upto, 1, NULL);
    said |= strata_state_dirty((strata_state *)address(source), 0, 0, 1, NULL);
    rewindable = strata_state_rewindable((strata_state *)address(source), upto, 1, NULL);
    unsaid = strata_state_advanced((strata_state *)address(source), NULL, 0, &error);
    room = strata_image_reserve((strata_state *)address(source), upto, 1, NULL);
    room += strata_image_blob((strata_state *)address(source), upto, 8, NULL);
    room += strata_image_publish((strata_state *)address(source), 0, NULL);
    Py_END_ALLOW_THREADS

    return Py_BuildValue("{s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:L,s:L,s:K,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:s}", "submitted", submitted, "waited", waited,
                         "done", done, "source_done", source_done, "synced", synced, "polled", polled, "found", found, "bytes",
                         (long long)progress.bytes, "grown", (long long)(after - before), "ticket", (unsigned long long)ticket.v,
                         "released", released, "reason", reason, "reset", reset, "said", said,
                         "rewindable", rewindable, "unsaid", unsaid, "room", room, "text", error.text);
}

static PyObject *sizes(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n}", "Error", (Py_ssize_t)sizeof(strata_error), "Progress",
                         (Py_ssize_t)sizeof(strata_progress), "Growth", (Py_ssize_t)sizeof(strata_growth), "PartSpec",
                         (Py_ssize_t)sizeof(strata_part), "PlaceSpec", (Py_ssize_t)sizeof(strata_place), "Wait",
                         (Py_ssize_t)sizeof(strata_wait), "Pages", (Py_ssize_t)sizeof(strata_pages), "Request",
                         (Py_ssize_t)sizeof(strata_request), "Ticket", (Py_ssize_t)sizeof(strata_ticket), "table",
                         (Py_ssize_t)strata_copy_table->size);
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, NULL},
    {"sizes", sizes, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, MODULE_NAME, NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC MODULE_INIT(void) {
    if (strata_copy_import() < 0) return NULL;
    return PyModule_Create(&module);
}
