"""Ways: what a plan may use of a device, how it is cut up there, and which lanes a layer came by."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from strata_copy.lanes cimport IN_LANE, OUT_LANE, PEER_LANE, RELAY_LANE, CopierData, Slot
from strata_copy.plan cimport MAX_DEVICES, PartRoute, PlanData


# Lanes as bits.
cdef inline uint64_t bit(int32_t lane) noexcept nogil:
    return <uint64_t>1 << lane

cdef inline uint64_t peer_lanes() noexcept nogil:
    return (bit(MAX_DEVICES) - 1) << PEER_LANE

cdef inline uint64_t pcie_lanes() noexcept nogil:
    return bit(OUT_LANE) | bit(IN_LANE) | (bit(MAX_DEVICES) - 1) << RELAY_LANE


# The lanes that a part may use on the device that carries it, and those that a plan may use on a device, as bits; and STAGING in plans.
cdef uint64_t lanes_of_part(const PartRoute *part) noexcept nogil
cdef uint64_t lanes_of_plan(const PlanData *plan, int32_t d) noexcept nogil
# Whether what it moves there goes through a ring, all of it, and processors can do it.
cdef bint for_helpers(const PlanData *plan, int32_t d) noexcept nogil
# Bytes of the largest slot of a ring that it may use there; 0: it uses none.
cdef int64_t slot_of_plan(const CopierData *copier, const PlanData *plan, int32_t d) noexcept nogil
# Bytes after which the slowest of its lanes there changes streams.
cdef int64_t chunk_of_plan(const CopierData *copier, const PlanData *plan, int32_t d) noexcept nogil
# The lanes with bundles that parts of a layer moved in, as bits, but for those whose events behind the layer stand for them too.
cdef uint64_t bundles_of_layer(const Slot *slot, int32_t d, int32_t layer) noexcept nogil
