"""How an engine calls strata_copy from nogil code. Declared in direct.pxd.

The plan was made once, when the sessions were (engine.pyx); it knows all addresses. A request brings what differs from copy to copy:
the lengths, the groups that move, the bank of a checkpoint, and what the copy has to wait for.
"""

from libc.stdint cimport int32_t

from engine_loop.cuda cimport cuda, noted, refused, stream_done
from engine_loop.session cimport MAX_STAGES, Landing, SessionData, StageData, landed

cdef enum:
    PATIENCE = 2_000_000        # ns that a wait may hold this thread where a layer is not queued yet


cdef int move(Move *m) noexcept nogil:
    """OK once the target's bytes and what is resident of them are there. REFUSED: nothing was written. FAILED: the target has nothing
    any more; strata_copy would refuse it as a source until the reset."""
    cdef sc.Wait after[MAX_STAGES + 2]
    cdef sc.Request request = sc.request_new(m.marks, 2)
    cdef sc.Progress progress
    cdef sc.Ticket ticket
    cdef int status
    request.groups = m.groups
    request.src_bank, request.dst_bank = m.src_bank, m.dst_bank
    request.src_generation = m.generation
    request.after, request.n_after = after, users(m, after)
    status = sc.submit(m.plan, &request, &ticket, m.error)      # every check on every stage, then the first byte
    if status == sc.AGAIN:
        return refused(m.error, "every ticket is in flight", 0, 0)
    if status == sc.OK:
        sc.poll(ticket, &progress)
        m.moved = progress.bytes_total
        status = follow(m, ticket)
        sc.release(&ticket)
        if status == sc.REFUSED:        # a wait: the bytes are there, but a stage does not stand behind them
            status = m.error.status = sc.FAILED
    if status < sc.REFUSED:
        sc.reset(m.to_state, NULL)
    return status


cdef int users(const Move *m, sc.Wait *after) noexcept nogil:
    """Who wrote the source and who still reads the target: the streams of all stages, and of the drafters. No device is synchronized."""
    cdef const SessionData *session = m.source if m.source != NULL else m.target
    cdef const StageData *stage
    cdef int32_t k, n = 0
    for k in range(session.n_stages):
        stage = &session.stages[k]
        after[n].handle, after[n].device, after[n].kind = stage.stream, stage.device, sc.WAIT_STREAM
        n += 1
    if m.groups & DRAFT:
        for k in range(2 if m.source != NULL else 1):
            after[n].handle = m.source.kv[m.source.draft].stream if k else m.target.kv[m.target.draft].stream
            after[n].device, after[n].kind = session.stages[session.n_stages - 1].device, sc.WAIT_STREAM
            n += 1
    return n


cdef int follow(const Move *m, sc.Ticket ticket) noexcept nogil:
    """Lets the stages go on behind the copy, then waits for the end of both."""
    cdef sc.Error how
    cdef int before = 0
    cdef int32_t k
    cdef int ended, status = noted(cuda.cudaGetDevice(&before), "cudaGetDevice", m.error)
    for k in range(m.target.n_stages):
        if status == sc.OK:
            status = one_stage(m, ticket, k)
    if noted(cuda.cudaSetDevice(before), "cudaSetDevice", &how) != sc.OK and status == sc.OK:
        m.error[0], status = how, sc.FAILED
    ended = sc.sync(ticket, -1, &how)           # how the copy itself has ended
    for k in range(m.target.n_stages):
        if status == sc.OK:
            status = stream_done(m.target.stages[k].stream, m.error)
    if status == sc.OK and m.groups & DRAFT:
        status = stream_done(m.target.kv[m.target.draft].stream, m.error)
    if ended != sc.OK:
        m.error[0] = how
    return ended if ended != sc.OK else status


cdef int one_stage(const Move *m, sc.Ticket ticket, int32_t k) noexcept nogil:
    """Layer by layer: once `wait_layer` is OK, the stage's stream depends on the layer's bytes, and whatever is launched there comes
    behind them. Here that is residency; an engine launches the layer itself."""
    cdef const StageData *stage = &m.target.stages[k]
    cdef int32_t layer
    cdef int status = noted(cuda.cudaSetDevice(stage.device), "cudaSetDevice", m.error)
    for layer in range(stage.first, stage.end):
        if status == sc.OK and m.groups & KV:
            status = one_layer(m, ticket, layer, stage.device, stage.stream)
    if status == sc.OK and m.groups & DRAFT and m.target.kv[m.target.draft].stage == k:
        status = one_layer(m, ticket, m.target.n_layers, stage.device, m.target.kv[m.target.draft].stream)
    return status


cdef int one_layer(const Move *m, sc.Ticket ticket, int32_t layer, int32_t device, void *stream) noexcept nogil:
    cdef Landing landing
    cdef int status = sc.AGAIN
    while status == sc.AGAIN:
        status = sc.wait_layer(ticket, layer, stream, PATIENCE, m.error)
    if status != sc.OK:
        return status
    landing.session, landing.marks = m.target, m.marks
    return noted(landed(&landing, layer, device, stream), "residency", m.error)
