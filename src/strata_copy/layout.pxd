"""Layouts: what the bytes of a state are. Parts, how they grow, the order in which they move, and identity.

A layout is immutable; everybody who keeps one holds a reference. The formulas of growth are in docs/layouts.md.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t

from strata_copy.abi cimport Error, Growth, PartSpec

cdef enum:
    MAX_GROUPS = 64     # a request names groups in the bits of one word
    MAX_MARKS = 16
    MAX_LAYERS = 1024

# Bytes set after a part has landed: the last unit of `part` in the target := unit 0 of `source_part` in the source.
cdef struct PatchData:
    int32_t part, source_part

cdef struct LayoutData:
    int64_t references
    int32_t n_parts, n_marks, n_groups, n_layers, n_patches
    PartSpec *parts
    PatchData *patches
    int32_t *patch_of       # for each part the index of its patch, or -1
    int32_t *order          # part indices, layer by layer in the order in which they move
    int32_t *first          # order[first[l]] to order[first[l + 1]] are the parts that layer l needs
    uint8_t fingerprint[32]


cdef void layout_hold(LayoutData *layout) noexcept nogil
cdef void layout_drop(LayoutData *layout) noexcept nogil

# TypeError for None, and for an object whose __init__ did not run.
cdef class Layout
cdef LayoutData *layout_data(Layout layout) except NULL

cdef int64_t units_at(const Growth *growth, const int64_t *marks) noexcept nogil
cdef int64_t settled_at(const Growth *growth, const int64_t *marks) noexcept nogil
# The first unit, behind the sinks, that is still there at `marks`: 0 but for a window.
cdef int64_t live_at(const Growth *growth, const int64_t *marks) noexcept nogil


cdef class Layout:
    cdef LayoutData *data
    cdef readonly tuple parts, patches, marks, groups
    cdef readonly str format
    cdef readonly bytes identity
    cdef bytes _encoded
