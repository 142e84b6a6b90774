"""P2P between two devices, believed only after bytes were seen to arrive.

A proof is about one direction: a stream of `source` writes memory of `target`. It is made once in a process, on a thread of its own, when
the first plan needs the pair. Without it the pair goes through pinned memory (lanes.pxd: Ring).
"""

from libc.stdint cimport int32_t, int64_t

from strata_copy.abi cimport Error

cdef enum:
    PEER_REASON = 256

cdef enum PeerState:
    PEER_UNTRIED        # something was missing that the proof needs: it may be had another time
    PEER_NONE           # no P2P, or P2P that does not bring the bytes
    PEER_P2P            # the bytes arrived

cdef struct PeerProof:
    int32_t source, target      # ordinals
    int32_t state
    char reason[PEER_REASON]    # why it is so, in words


# Whether a copy of a proof hangs to or from this device, or (-1) any. What waits for everything on the device then never returns: freeing
# its memory does, and so does freeing or unregistering pinned memory.
cdef bint peer_hangs(int32_t device) noexcept nogil
# Makes the proof with copies of these sizes; changes the current device. OK whatever was found, POISONED where a device ended.
cdef int prove_peer(PeerProof *proof, const int64_t *sizes, int32_t n_sizes, Error *error) noexcept nogil
