"""The copier: what a process opens once so that no copy has to make anything. The tables it fills are declared in lanes.pxd."""

from libc.stdint cimport int32_t, int64_t

from strata_copy.abi cimport Error
from strata_copy.cudart cimport Guard, cudaEvent_t, cudaStream_t
from strata_copy.lanes cimport CopierData, DeviceLanes
from strata_copy.plan cimport MAX_DEVICES

# What a copier is opened with.
cdef struct Opening:
    int32_t devices[MAX_DEVICES]
    int32_t n_devices, tickets, layer_events, window, ring_slots
    int32_t stage_slots, helpers, relay_slots
    int64_t ring_slot_bytes, stage_chunk_bytes, relay_slot_bytes, chunk, patience


# The copier if it is open, or NULL. A forked child has none.
cdef CopierData *the_copier() noexcept nogil
# Its tables, open or not.
cdef CopierData *the_tables() noexcept nogil
# NULL and `error` filled where something cannot be had; nothing is left behind then. Changes the thread's current device: call it on
# a thread of its own.
cdef CopierData *copier_open(const Opening *opening, Error *error) noexcept nogil
# Gives everything back, once no slot is taken any more (endings.pxd: free_all). Likewise.
cdef void copier_close(CopierData *copier, Error *error) noexcept nogil
# Makes what copies from device number `source` to device number `target` need, unless it is there: a lane where they go by P2P, else a
# ring. Both devices are alive. As plans are made, never in submit. Changes the thread's current device.
cdef int copier_link(CopierData *copier, int32_t source, int32_t target, bint p2p, Error *error) noexcept nogil
# cudart.pxd: stand_on, on a device of the copier that has not failed.
cdef int stand_on_device(CopierData *copier, int status_of_failure, Error *error) noexcept nogil
# Makes room for plans of so many parts: as plans are made, never in submit.
cdef int copier_reserve(CopierData *copier, int32_t parts, Error *error) noexcept nogil

# On the current device, which is the one that is named; NULL and REFUSED where it cannot be had. Freeing NULL does nothing.
cdef int make_stream(cudaStream_t *stream, const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil
cdef int make_event(cudaEvent_t *event, int flags, const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil
cdef void free_stream(cudaStream_t stream, const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil
cdef void free_event(cudaEvent_t event, const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil
