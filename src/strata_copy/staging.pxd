"""Staging: pageable memory is reached through pinned chunks. A lane copies between the device and a chunk, helper threads between the
chunk and the pageable memory: the driver would do that with one thread, and hold the caller. Of a long copy from pinned to pinned memory,
which its ring bounds to half of PCIe, the helpers copy a share beside the ring.

Who owns what: each device has a few chunks, made as the copier opens, and one ticket at a time has all of them. A chunk's state is used
under the copier's lock; while it is STAGE_BUSY its pieces belong to the helpers (helpers.pxd) and the lock is free.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from strata_copy.abi cimport Error
from strata_copy.cudart cimport Guard
from strata_copy.lanes cimport STAGE_HOST, STAGE_IN, Budget, CopierData, DeviceLanes, Extent, StageChunk

# Under the lock, all of them. Whether the ticket has the chunks, or has them now.
cdef bint stage_take(DeviceLanes *device, uint64_t ticket, int32_t way) noexcept nogil
# Whether helpers of this way read the source, and have to see first that what the ticket waits for is over.
cdef inline bint stage_reads(int32_t way) noexcept nogil:
    return way == STAGE_IN or way == STAGE_HOST
# As lane_copy, with pageable memory on one side or no device at all. PAUSE also where no chunk is free.
cdef int stage_copy(const CopierData *copier, DeviceLanes *device, const Extent *extent, int64_t *into, Budget *budget, int32_t layer,
                    const Guard *guard, Error *error) noexcept nogil
# Lets the chunk go on that is being filled.
cdef int stage_flush(DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil
# Whether nothing waits for helpers or is with them; and nothing is in the chunks at all.
cdef bint stage_sent(const DeviceLanes *device) noexcept nogil
cdef bint stage_empty(const DeviceLanes *device) noexcept nogil
# The first layer of which bytes are still on their way, or `none`.
cdef int32_t stage_layer(const DeviceLanes *device, int32_t none) noexcept nogil
# Looks what lanes and helpers have done, sends on what can be sent, and adds to `landed`.
cdef int stage_look(const CopierData *copier, DeviceLanes *device, int64_t *landed, const Guard *guard, Error *error) noexcept nogil
# Whether that copies to the device.
cdef bint stage_sends(const DeviceLanes *device) noexcept nogil
# A chunk for the helpers, now STAGE_BUSY, or NULL; and when they are done with it.
cdef StageChunk *stage_next(DeviceLanes *device) noexcept nogil
cdef void stage_copied(StageChunk *chunk) noexcept nogil
# Forgets everything: the lanes are quiet, and the ticket ends.
cdef void stage_drop(DeviceLanes *device) noexcept nogil
