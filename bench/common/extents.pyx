"""Extents. Declared in extents.pxd."""

from bisect import bisect_right

from libc.stdlib cimport calloc, free
from libc.string cimport memset

from common.failure cimport check, noted
from strata_copy.abi cimport Error
from strata_copy.cudart cimport cudaMemoryTypeDevice, cudaPointerAttributes, cudaStream_t, rt


cdef class Extents:
    """What `plan.submit(upto)` copies. `n` extents in `layers` layers, `bytes` in all. One of its states at least is no image.

    The plan is asked once, before anything is measured: code that copies without this library knows its addresses too.
    """

    def __init__(self, plan, upto):
        found = plan.extents(upto)
        (source_state,), dense = set(plan.sources.values()), len(plan.target.places) > 0
        layer_at = layers_by_address(plan.target if dense else source_state)
        starts = sorted(layer_at)
        self.items = <Extent *>calloc(len(found), sizeof(Extent))
        if self.items == NULL:
            raise MemoryError
        self.n, self.layers = len(found), plan.layout.layers
        latest = -1
        for i, (target, source, width, rows, target_pitch, source_pitch) in enumerate(found):
            layer = -1 if rows > 1 else layer_at[starts[bisect_right(starts, target if dense else source) - 1]]
            if layer < latest:
                raise ValueError(f"extent {i}: {rows} rows, layer {layer} after layer {latest}; dense places are needed")
            latest = layer
            self.items[<int>i].target = <char *><size_t>target
            self.items[<int>i].source = <const char *><size_t>source
            self.items[<int>i].width, self.items[<int>i].rows = width, rows
            self.items[<int>i].target_pitch, self.items[<int>i].source_pitch = target_pitch, source_pitch
            self.items[<int>i].layer = layer
            self.bytes += width * rows

    def __dealloc__(self):
        free(self.items)

    def spoil(self, stream_on):
        """Overwrites every byte that the copy has to bring: what is right afterwards was brought by a copy after this. stream_on: gives a
        stream of a device."""
        cdef Error error
        cdef cudaPointerAttributes found
        cdef char *target
        cdef size_t row, stream
        cdef int i
        used = set()
        for i in range(self.n):
            check(noted(rt.cudaPointerGetAttributes(&found, self.items[i].target), "cudaPointerGetAttributes", &error), &error)
            stream = stream_on(found.device) if found.type == cudaMemoryTypeDevice else 0
            used.add(stream)
            for row in range(self.items[i].rows):
                target = self.items[i].target + row * self.items[i].target_pitch
                if found.type != cudaMemoryTypeDevice:
                    memset(target, 0xA5, self.items[i].width)
                    continue
                check(noted(rt.cudaMemsetAsync(target, 0xA5, self.items[i].width, <cudaStream_t>stream), "cudaMemsetAsync", &error),
                      &error)
        for stream in used - {0}:
            check(noted(rt.cudaStreamSynchronize(<cudaStream_t>stream), "cudaStreamSynchronize", &error), &error)


def layers_by_address(state):
    """The first address of each part's place, and the layer that needs the part."""
    return {
        place.base: max(part.layer, 0) if part.needed_by is None else part.needed_by
        for part, place in zip(state.layout.parts, state.places, strict=True)
    }
