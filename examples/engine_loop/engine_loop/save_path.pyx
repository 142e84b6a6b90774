"""The save path. Declared in save_path.pxd.

For each stage, strictly one after another: its running state is saved to host memory and restored, then layer after layer the K/V and
the pooled keys. Images are pageable, in segments of 16 MiB that are allocated and zeroed anew; each segment is one copy that is waited
for; the device is synchronized before every save and every restore. The spare row comes last: the donor's pooled row at its place
may be that of a finished block.
"""

from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from engine_loop.cuda cimport copy, cuda, noted, refused, stream_done
from engine_loop.session cimport MAX_ARRAYS, PAGE, KvLayer, Landing, Running, landed

cdef enum:
    SEGMENT = 16 << 20

# One array in host memory.
cdef struct Image:
    char **segments
    int64_t n, bytes


cdef int save_and_restore(const Save *save) noexcept nogil:
    cdef int32_t stage
    cdef int before = 0
    cdef int status = noted(cuda.cudaGetDevice(&before), "cudaGetDevice", save.error)
    for stage in range(save.source.n_stages):
        if status == sc.OK:
            status = one_stage(save, stage)
    if status == sc.OK and save.draft:
        status = draft(save)
    if noted(cuda.cudaSetDevice(before), "cudaSetDevice", save.error) != sc.OK:
        return sc.FAILED
    return status


cdef int one_stage(const Save *save, int32_t stage) noexcept nogil:
    cdef int32_t i
    cdef int status = noted(cuda.cudaSetDevice(save.source.stages[stage].device), "cudaSetDevice", save.error)
    if status == sc.OK:
        status = running_state(save, stage)
    for i in range(save.source.n_kv):
        if status == sc.OK and save.source.kv[i].stage == stage and i != save.source.draft:
            status = layer_rows(save, i, save.marks[0], save.streams[stage])
    for i in range(save.source.n_kv):
        if status == sc.OK and save.source.kv[i].stage == stage and i != save.source.draft and save.marks[0] > 0:
            status = copy(save.target.kv[i].pooled + save.marks[0] // PAGE * save.source.key_bytes, save.target.kv[i].dead,
                          save.source.key_bytes, save.streams[stage], save.error)
    if status == sc.OK:
        status = stream_done(save.streams[stage], save.error)
    return device_done(save) if status == sc.OK else status


cdef int running_state(const Save *save, int32_t stage) noexcept nogil:
    """A checkpoint of the source, restored into the target."""
    cdef const SessionData *source = save.source
    cdef void *stream = save.streams[stage]
    cdef Image *images = <Image *>calloc(source.n_running + source.n_kv, sizeof(Image))
    cdef const Running *one
    cdef int32_t i
    cdef int status = sc.OK if images != NULL else no_memory(save.error)
    if status == sc.OK:
        status = device_done(save)
    for i in range(source.n_running):
        one = &source.running[i]
        if one.stage == stage and status == sc.OK:
            status = image_save(&images[i], one.live if save.bank < 0 else one.banks + save.bank * one.bytes, one.bytes, stream, save.error)
    for i in range(source.n_kv):
        if source.kv[i].stage == stage and source.kv[i].dead != NULL and status == sc.OK:
            status = image_save(&images[source.n_running + i], source.kv[i].dead, source.key_bytes, stream, save.error)
    if status == sc.OK:
        status = device_done(save)
    for i in range(source.n_running):
        if status == sc.OK and images[i].n > 0:
            status = image_restore(&images[i], save.target.running[i].live, stream, save.error)
    for i in range(source.n_kv):
        if status == sc.OK and images[source.n_running + i].n > 0:
            status = image_restore(&images[source.n_running + i], save.target.kv[i].dead, stream, save.error)
    for i in range(source.n_running + source.n_kv if images != NULL else 0):
        image_free(&images[i])
    free(images)
    return device_done(save) if status == sc.OK else status


cdef int layer_rows(const Save *save, int32_t i, int64_t tokens, void *stream) noexcept nogil:
    """K/V and pooled keys of a layer up to `tokens`, then what is resident."""
    cdef const KvLayer *from_ = &save.source.kv[i]
    cdef KvLayer *to = &save.target.kv[target_index(save, i)]
    cdef Image images[MAX_ARRAYS + 1]
    cdef int64_t pages = (tokens + PAGE - 1) // PAGE, pooled = tokens // PAGE + 1 if tokens > 0 else 0
    cdef Landing landing
    cdef int32_t a
    cdef int status = device_done(save)
    memset(images, 0, sizeof(images))
    for a in range(from_.n_arrays):
        if status == sc.OK:
            status = image_save(&images[a], from_.arrays[a].rows, pages * from_.arrays[a].page_bytes, stream, save.error)
    if status == sc.OK and from_.pooled != NULL:
        status = image_save(&images[MAX_ARRAYS], from_.pooled, pooled * save.source.key_bytes, stream, save.error)
    if status == sc.OK:
        status = device_done(save)
    for a in range(from_.n_arrays):
        if status == sc.OK:
            status = image_restore(&images[a], to.arrays[a].rows, stream, save.error)
    if status == sc.OK and to.pooled != NULL:
        status = image_restore(&images[MAX_ARRAYS], to.pooled, stream, save.error)
    for a in range(MAX_ARRAYS + 1):
        image_free(&images[a])
    if status == sc.OK:
        landing.session, landing.marks = save.target, save.marks
        status = noted(landed(&landing, to.layer, save.target.stages[to.stage].device, to.stream), "residency", save.error)
    return status if status != sc.OK else stream_done(to.stream, save.error)


cdef int draft(const Save *save) noexcept nogil:
    """Both drafters are idle, then as a layer."""
    cdef const KvLayer *from_ = &save.source.kv[save.source.draft]
    cdef int status = noted(cuda.cudaSetDevice(save.source.stages[from_.stage].device), "cudaSetDevice", save.error)
    if status == sc.OK:
        status = stream_done(from_.stream, save.error)
    if status == sc.OK:
        status = stream_done(save.target.kv[save.target.draft].stream, save.error)
    return layer_rows(save, save.source.draft, save.marks[1], save.streams[from_.stage]) if status == sc.OK else status


cdef inline int32_t target_index(const Save *save, int32_t i) noexcept nogil:
    return save.target.draft if i == save.source.draft else i


cdef int keep_running(const SessionData *session, int32_t stage, int64_t bank, bint keep, void *stream, sc.Error *error) noexcept nogil:
    cdef const Running *one
    cdef int32_t i
    cdef int status = stream_done(session.stages[stage].stream, error)
    for i in range(session.n_running):
        one = &session.running[i]
        if one.stage == stage and status == sc.OK and keep:
            status = copy(one.banks + bank * one.bytes, one.live, one.bytes, stream, error)
        elif one.stage == stage and status == sc.OK:
            status = copy(one.live, one.banks + bank * one.bytes, one.bytes, stream, error)
    return status if status != sc.OK else stream_done(stream, error)


cdef int64_t images_at_once(const SessionData *source, const int64_t *marks) noexcept nogil:
    """The running state of a stage, or one layer."""
    cdef int64_t most = 0, bytes, pages
    cdef int32_t stage, i, a
    for stage in range(source.n_stages):
        bytes = 0
        for i in range(source.n_running):
            bytes += source.running[i].bytes if source.running[i].stage == stage else 0
        most = max(most, bytes)
    for i in range(source.n_kv):
        pages = (marks[1 if i == source.draft else 0] + PAGE - 1) // PAGE
        bytes = (pages + 1) * source.key_bytes
        for a in range(source.kv[i].n_arrays):
            bytes += pages * source.kv[i].arrays[a].page_bytes
        most = max(most, bytes)
    return most


# ---- images

cdef int image_save(Image *image, const char *from_, int64_t bytes, void *stream, sc.Error *error) noexcept nogil:
    """New zeroed segments, then the bytes. Zeroed after all are allocated: of malloc and memset side by side a compiler makes calloc,
    which would spare the pass over memory that a growing std::vector makes."""
    cdef int64_t i, n = (bytes + SEGMENT - 1) // SEGMENT
    cdef int status = sc.OK
    image.bytes = bytes
    image.segments = <char **>calloc(n + 1, sizeof(char *))
    if image.segments == NULL:
        return no_memory(error)
    image.n = n
    for i in range(n):
        image.segments[i] = <char *>malloc(segment_bytes(image, i))
        if image.segments[i] == NULL:
            return no_memory(error)
    for i in range(n):
        memset(image.segments[i], 0, segment_bytes(image, i))
    for i in range(n):
        if status == sc.OK:
            status = copy(image.segments[i], from_ + i * SEGMENT, segment_bytes(image, i), stream, error)
        if status == sc.OK:
            status = stream_done(stream, error)
    return status


cdef int image_restore(const Image *image, char *to, void *stream, sc.Error *error) noexcept nogil:
    cdef int64_t i
    cdef int status = sc.OK
    for i in range(image.n):
        if status == sc.OK:
            status = copy(to + i * SEGMENT, image.segments[i], segment_bytes(image, i), stream, error)
        if status == sc.OK:
            status = stream_done(stream, error)
    return status


cdef void image_free(Image *image) noexcept nogil:
    cdef int64_t i
    for i in range(image.n):
        free(image.segments[i])
    free(image.segments)
    image.segments, image.n = NULL, 0


cdef inline int64_t segment_bytes(const Image *image, int64_t i) noexcept nogil:
    return min(image.bytes - i * SEGMENT, <int64_t>SEGMENT)


cdef int device_done(const Save *save) noexcept nogil:
    return noted(cuda.cudaDeviceSynchronize(), "cudaDeviceSynchronize", save.error)


cdef int no_memory(sc.Error *error) noexcept nogil:
    refused(error, "no host memory for an image", 0, 0)
    error.status = sc.FAILED
    return sc.FAILED
