"""Ways. Declared in ways.pxd."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from strata_copy.abi cimport PINNED, PlaceSpec
from strata_copy.lanes cimport IN_LANE, LOCAL_LANES, OUT_LANE, PEER_CHUNKS, STAGING, CopierData, Slot, SlotDevice
from strata_copy.layout cimport LayoutData
from strata_copy.plan cimport MAX_DEVICES, ROUTE_LOCAL, ROUTE_RELAY, ROUTE_RING, is_staged
from strata_copy.states cimport one_address


cdef uint64_t lanes_of_part(const PartRoute *part) noexcept nogil:
    return (bit(LOCAL_LANES) - 1 if part.route == ROUTE_LOCAL else bit(IN_LANE) | bit(OUT_LANE) if part.route == ROUTE_RING else
            bit(part.lane))


cdef uint64_t lanes_of_plan(const PlanData *plan, int32_t d) noexcept nogil:
    cdef const PartRoute *part
    cdef uint64_t lanes = 0
    cdef int32_t i
    for i in range(plan.target.layout.n_parts):
        part = &plan.parts[i]
        if part.device_number == d:
            lanes |= lanes_of_part(part)
            if is_staged(part.route):
                lanes |= bit(STAGING)
    return lanes


cdef bint for_helpers(const PlanData *plan, int32_t d) noexcept nogil:
    cdef const LayoutData *layout = plan.target.layout
    cdef const PlaceSpec *patch
    cdef const PartRoute *part
    cdef int32_t i
    for i in range(layout.n_parts):
        part = &plan.parts[i]
        if part.device_number != d:
            continue
        if part.route != ROUTE_RING or not one_address(&part.source.places[i]) or not one_address(&plan.target.places[i]):
            return False
        if layout.patch_of[i] >= 0:
            patch = &part.source.places[layout.patches[layout.patch_of[i]].source_part]
            if patch.kind != PINNED or not one_address(patch):
                return False
    return True


cdef int64_t slot_of_plan(const CopierData *copier, const PlanData *plan, int32_t d) noexcept nogil:
    cdef const PartRoute *part
    cdef int64_t bytes = 0
    cdef int32_t i
    for i in range(plan.target.layout.n_parts):
        part = &plan.parts[i]
        if part.device_number == d and part.route == ROUTE_RING:
            bytes = max(bytes, copier.devices[d].ring.slot_bytes)
        elif part.device_number == d and part.route == ROUTE_RELAY:
            bytes = max(bytes, copier.relay_slot_bytes)
    return bytes


cdef int64_t chunk_of_plan(const CopierData *copier, const PlanData *plan, int32_t d) noexcept nogil:
    return copier.chunk * (PEER_CHUNKS if lanes_of_plan(plan, d) & ~peer_lanes() == 0 else 1)


cdef uint64_t bundles_of_layer(const Slot *slot, int32_t d, int32_t layer) noexcept nogil:
    cdef const SlotDevice *share = &slot.devices[d]
    cdef uint64_t lanes = slot.plan.early[layer * MAX_DEVICES + d]
    if lanes & 1:
        lanes = (lanes ^ 1) | bit(share.bundle_local)
    return lanes & share.bundle_lanes & ~share.layer_lanes[layer]
