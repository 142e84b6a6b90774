"""Lineage: what is known to be equal between two states, so that it is not copied again.

The rows of a state that a group keeps along a mark are a **track**: segments (epoch, begin, end) in the mark's own count. An epoch stands
for what one state wrote behind one history, and its number is never used again. A copy hands the target the source's segments, and a cut
only shortens: so whoever has a segment of an epoch has, before it, what its first owner had there. Two states are equal up to where their
latest common epoch ends first.

The **tail** of a track stands for the bytes of units that the next append may change: of a partly filled last unit, its stale cells, the
units behind the last. It is new with everything that the engine says. The **stamp** of running state, for each part and bank, likewise;
a constant's stamp is new only when the engine says that it is dirty, and with the first row behind which it is written.

The last unit of a part with a patch is what that set in a state that a copy has brought, and only until the engine says something of it:
`patched` is the stamp of the value. Where that unit holds rows that are full, the target's rows are its own from there on.

Nothing here is ever guessed. A state that was told nothing, or that was copied from such a one, claims nothing. A table that is full
forgets the segment whose loss costs the fewest rows. What a copy that is queued will make equal counts as equal at once: whatever comes
later is ordered behind it, and if it ends badly its target is INVALID, which claims nothing until it is reset.

`Lineage.word` is taken for the few stores of a change: by the engine's calls, of which there may be one at a time for a state, and by
submits, which wait for each other.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from strata_copy.abi cimport Error, Growth, PlaceSpec
from strata_copy.layout cimport LayoutData

cdef enum:
    MAX_SEGMENTS = 64
    MAX_TRACKS = 64         # pairs of group and mark; parts of any further pair always move
    MAX_KIN = 8             # sources of a plan
    MAX_BANKS = 64          # of a part; running state in any further bank always moves

cdef struct Segment:
    uint64_t epoch
    int64_t begin, end

cdef struct Track:
    int32_t group, mark
    int32_t n
    bint open               # the last epoch was begun by this state, and nobody has rows of it behind its end
    uint64_t tail           # 0: like no other
    Segment segments[MAX_SEGMENTS]      # by begin; there may be gaps, where segments were forgotten

cdef struct Stamp:
    uint64_t epoch          # 0: like no other
    int64_t at              # the mark of the part's growth at which a bank of running state was written; -1: not told

cdef struct Lineage:
    int32_t word            # atomic
    bint told               # the engine has said something of this state, or of what was copied into it
    uint64_t version        # counts changes
    int32_t n_parts, n_tracks
    Track *tracks
    int32_t *track_of       # for each part, or -1
    int32_t *first_stamp    # stamps[first_stamp[p]] to stamps[first_stamp[p + 1]] are the banks of part p
    Stamp *stamps
    int32_t n_stamps
    uint64_t *patched       # for each part the epoch of what a copy's patch set its last unit to; 0: the engine wrote it, or nobody knows
    int64_t *ring           # for each part, of its place
    int64_t *held           # the first unit of each part, behind the sinks, that was there at the last copy or cut


# What a request found between the source and the target of each track.
cdef struct Known:
    bint valid                      # else nothing is known of the target
    uint64_t tracks                 # those that the request moves
    uint64_t banked                 # of them those with rows in banks, which lineage does not follow
    uint64_t unsaid                 # the sources of which the request moves rows that nobody spoke of
    int64_t prefix[MAX_TRACKS]      # equal up to this mark, which is the request's at most
    bint same_tail[MAX_TRACKS]      # in all units that the request moves, but for those that a patch sets
    uint64_t repatch                # the tracks in which patches would set another value than the target has
    uint64_t target_version
    uint64_t source_version[MAX_KIN]


# A lineage that claims nothing; NULL without memory. places: of each part, for their banks.
cdef Lineage *lineage_new(const LayoutData *layout, const PlaceSpec *places) noexcept nogil
cdef void lineage_free(Lineage *lineage) noexcept nogil

# What the engine says of a state's content, before the first kernel that writes it. OK; REFUSED for numbers without a meaning, and while
# another thread says something of the same state.
cdef int lineage_advanced(Lineage *lineage, const LayoutData *layout, const int64_t *marks, uint64_t n, Error *error) noexcept nogil
cdef int lineage_rewound(Lineage *lineage, const LayoutData *layout, const int64_t *marks, uint64_t n, Error *error) noexcept nogil
cdef int lineage_dirty(Lineage *lineage, const LayoutData *layout, int32_t part, int64_t first_unit, int64_t n,
                       Error *error) noexcept nogil
cdef void lineage_reset(Lineage *lineage) noexcept nogil
# OK where the engine could go back to the marks, or REFUSED with the first part that could not: it is not known so far, its ring has
# lost what would be live again, or a copy did not bring that, or its running state of then is nowhere.
cdef int lineage_rewindable(Lineage *lineage, const LayoutData *layout, const int64_t *marks, uint64_t n, Error *error) noexcept nogil

# For copies (kinship.pyx). Each needs the word.
cdef void take_words(Lineage **lineages, int32_t n) noexcept nogil
cdef void give_words(Lineage **lineages, int32_t n) noexcept nogil
cdef uint64_t new_epoch() noexcept nogil
cdef void advance(Lineage *lineage, const LayoutData *layout, const int64_t *marks) noexcept nogil
cdef int64_t end_of(const Track *track) noexcept nogil
cdef void cut(Track *track, int64_t mark) noexcept nogil
cdef void extend(Track *track, int64_t mark) noexcept nogil
# The largest mark at which a unit is not settled: what comes before the mark does not depend on it.
cdef int64_t mark_before(const Growth *growth, int64_t unit) noexcept nogil
cdef int64_t common(const Track *a, const Track *b) noexcept nogil
# NULL for a bank that is not followed.
cdef Stamp *stamp_of(Lineage *lineage, int32_t part, int64_t bank) noexcept nogil
