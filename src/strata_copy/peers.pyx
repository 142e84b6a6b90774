"""The proof of P2P. What it is about is said in peers.pxd."""

import os
import threading
from typing import NamedTuple

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdio cimport snprintf
from libc.string cimport memset, strncpy

from strata_copy.abi cimport OK, POISONED, REFUSED, Error
from strata_copy.cudart cimport (
    Guard, clear, cudaErrorNotReady, cudaErrorPeerAccessAlreadyEnabled, cudaHostAllocPortable, cudaMemcpyDefault, cudaStreamNonBlocking,
    cudaStream_t, cuda_failed, guard_enter, guard_leave, require_runtime, rt, stand_on,
)
from strata_copy.lanes cimport now
from strata_copy.on_thread cimport OnThread
from strata_copy.news cimport nap, ran_something

from strata_copy import host_runtime, runtime

P2P_VARIABLE = "STRATA_COPY_P2P"
SIZES = (4 << 10, 1 << 20, 64 << 20)    # bytes of the proof's copies: some faults begin at a size

cdef enum:
    COPIES = 5                  # of each size; the first and the last are looked at, for either may be the one that is lost
    LIMIT_NS = 2000000000       # of each copy: a way that hangs never ends
    NAP_NS = 20000              # between two looks at one
    HUNG = 16                   # statuses of our own
    WRONG = 17
    MAX_HUNG = 16

# Ordinals. Where the list is full, every device counts.
cdef int32_t hung[MAX_HUNG]
cdef int32_t n_hung = 0
# Pinned memory that a proof has left, as freeing it would wait for what hangs: the next one uses it.
cdef uint64_t *spare = NULL
cdef int64_t spare_bytes = 0


class PeerLink(NamedTuple):
    """How copies from device `source` to device `target` travel: by P2P, or through pinned memory; and why."""

    source: int
    target: int
    p2p: bool
    reason: str


_proving = threading.Lock()
_proofs = {}            # (source, target) -> PeerLink, of this process
_configuration = None   # of the host runtime, where that is open: another one has other devices


def mode():
    """What STRATA_COPY_P2P asks for: "auto" (P2P where it is proven), "on" (a pair without it is refused) or "off".

    Raises ValueError for another value."""
    found = os.environ.get(P2P_VARIABLE) or "auto"
    if found not in ("auto", "on", "off"):
        raise ValueError(f"{P2P_VARIABLE} is {found!r}; it may be 'auto', 'on' or 'off', or not set")
    return found


def link(int source, int target):
    """The PeerLink of an ordered pair of devices, as a copier that opens now would use it. The first call for a pair makes the proof,
    which takes about a tenth of a second, and 192 MiB of memory meanwhile. A device that is not there has no P2P, and the reason says so.

    Raises ValueError where both are one device, Poisoned where a device fails for good, Refused where CUDA cannot be asked at all."""
    global _configuration, n_hung, spare
    cdef Prover prover
    require_runtime()
    if source == target:
        raise ValueError(f"device {source} twice; two devices are needed")
    if mode() == "off":
        return PeerLink(source, target, False, f"{P2P_VARIABLE}=off")
    with _proving:
        if _configuration != host_runtime.configuration():
            _configuration = host_runtime.configuration()
            _proofs.clear()
            n_hung, spare = 0, NULL
        found = _proofs.get((source, target))
        if found is None:
            prover = Prover()
            try:
                prover.prove(source, target)
            finally:                # a signal that arrives meanwhile is raised at the end, and the proof was made
                found = prover.found()
                if prover.proof.state != PEER_UNTRIED and prover.error.status == OK:
                    _proofs[source, target] = found
    return found


def links(devices=None):
    """`link` of each ordered pair of these devices, all by default. The pairs of a machine take a while."""
    devices = list(range(runtime.device_count()) if devices is None else devices)
    return [link(source, target) for source in devices for target in devices if source != target]


def hangs(device=None):
    """Whether a copy of a proof hangs to or from this device, or (None) any: what waits for everything on a device never returns then, as
    freeing its memory does, and freeing or unregistering pinned memory."""
    return peer_hangs(-1 if device is None else device)


cdef class Prover(OnThread):
    cdef PeerProof proof
    cdef int64_t sizes[8]
    cdef int32_t n_sizes

    def prove(self, int source, int target):
        self.proof.source, self.proof.target = source, target
        self.n_sizes = len(SIZES)
        for i in range(self.n_sizes):
            self.sizes[i] = SIZES[i]
        self.run(self.work)

    def found(self):
        return PeerLink(self.proof.source, self.proof.target, self.proof.state == PEER_P2P, self.proof.reason.decode(errors="replace"))

    def work(self):
        with nogil:
            prove_peer(&self.proof, self.sizes, self.n_sizes, &self.error)


cdef bint peer_hangs(int32_t device) noexcept nogil:
    cdef int32_t i
    for i in range(n_hung):
        if device < 0 or hung[i] == device or n_hung == MAX_HUNG:
            return True
    return False


# ---- the proof

# What a proof uses. Index 0 is the source, 1 the target.
cdef struct Trial:
    int32_t devices[2]
    cudaStream_t streams[2]
    void *memory[2]
    uint64_t *host              # pinned
    int64_t bytes
    Guard guard
    Error *error                # of a call that failed


cdef int prove_peer(PeerProof *proof, const int64_t *sizes, int32_t n_sizes, Error *error) noexcept nogil:
    cdef Trial trial
    cdef int32_t i
    cdef int status
    memset(&trial, 0, sizeof(Trial))
    trial.devices[0], trial.devices[1], trial.error = proof.source, proof.target, error
    for i in range(n_sizes):
        trial.bytes = max(trial.bytes, sizes[i])
    proof.state = PEER_UNTRIED
    status = stand_on(proof.source, REFUSED, error)
    if status == OK:
        status = guard_enter(&trial.guard, error)
        if status != OK:
            return status
        status = prove(&trial, proof, sizes, n_sizes)
        guard_leave(&trial.guard, status, error)
    if status != POISONED and error.status != OK:
        if proof.reason[0] == 0:
            strncpy(proof.reason, error.text, PEER_REASON - 1)
        clear(error)            # a pair without P2P is no failure
    return POISONED if status == POISONED else OK


cdef int prove(Trial *trial, PeerProof *proof, const int64_t *sizes, int32_t n_sizes) noexcept nogil:
    """On a thread that stands on the source's device. OK where something is known of the pair, or the status of a call that failed."""
    cdef int can = 0
    cdef bint ours = False
    cdef int32_t i
    cdef int status
    for i in range(2):
        if peer_hangs(trial.devices[i]):
            return say(proof, PEER_NONE, "P2P from device %d to device %d was not tried: a copy to or from one of them hangs")
    status = called(trial, rt.cudaDeviceCanAccessPeer(&can, proof.source, proof.target), "cudaDeviceCanAccessPeer", 0)
    if status != OK:
        return status
    if not can:
        return say(proof, PEER_NONE, "no access from device %d to device %d (cudaDeviceCanAccessPeer)")
    status = enable(trial, proof, &ours)
    if status != OK:
        return status
    status = make(trial)
    if status == OK:
        status = try_sizes(trial, proof, sizes, n_sizes)
    if status == HUNG:          # whatever it uses may not be touched any more, and no call may wait for it
        note_hung(trial)
        return OK
    if status != POISONED:
        status = worse(status, give_back(trial))
    if ours and status != POISONED and proof.state != PEER_P2P:
        status = worse(status, disable(trial))
    return OK if status == WRONG else status


cdef void note_hung(const Trial *trial) noexcept nogil:
    global n_hung
    cdef int32_t i
    for i in range(2):
        if n_hung < MAX_HUNG:
            hung[n_hung] = trial.devices[i]
            n_hung += 1


cdef int enable(Trial *trial, PeerProof *proof, bint *ours) noexcept nogil:
    """Another's access is as good, and stays. What CUDA says of it is no failure, and so nobody's pending error."""
    cdef int status
    cdef int code = rt.cudaDeviceEnablePeerAccess(proof.target, 0)
    if code == cudaErrorPeerAccessAlreadyEnabled:
        if trial.guard.pending == 0:
            rt.cudaGetLastError()
        return OK
    ours[0] = code == 0
    status = called(trial, code, "cudaDeviceEnablePeerAccess", 0)
    if status != OK:
        proof.state = PEER_NONE
    return status


cdef int disable(Trial *trial) noexcept nogil:
    cdef int status = use(trial, 0)
    return status if status != OK else called(trial, rt.cudaDeviceDisablePeerAccess(trial.devices[1]), "cudaDeviceDisablePeerAccess", 0)


cdef int try_sizes(Trial *trial, PeerProof *proof, const int64_t *sizes, int32_t n_sizes) noexcept nogil:
    cdef int32_t i, copy
    cdef int status
    for i in range(n_sizes):
        for copy in range(1, COPIES + 1):
            status = try_copy(trial, sizes[i], copy, copy == 1 or copy == COPIES)
            if status == HUNG:
                say(proof, PEER_NONE, "P2P from device %d to device %d hangs: copy %d of %lld bytes did not end within 2 s. Its streams "
                    "and its memory are left as they are", copy, sizes[i])
            elif status == WRONG:
                say(proof, PEER_NONE, "P2P from device %d to device %d brings wrong bytes: copy %d of %lld bytes", copy, sizes[i])
            if status != OK:
                return status
    return say(proof, PEER_P2P, "P2P from device %d to device %d: proven by data")


cdef int try_copy(Trial *trial, int64_t bytes, int32_t copy, bint looked_at) noexcept nogil:
    """One copy of so many bytes. Where it is looked at, the source is new and the target holds something else before. All by copies, which
    need no multiprocessor: the engine's kernels may have them all for longer than the limit."""
    cdef uint64_t seed = <uint64_t>bytes + copy
    cdef int status = OK
    if looked_at:
        memset(trial.host, 0x5A, bytes)
        status = from_host(trial, 1, bytes)
        if status == OK:
            write_pattern(trial.host, bytes, seed)
            status = from_host(trial, 0, bytes)
    if status == OK:
        status = called(trial, rt.cudaMemcpyPeerAsync(trial.memory[1], trial.devices[1], trial.memory[0], trial.devices[0], bytes,
                                                      trial.streams[0]), "cudaMemcpyPeerAsync", 0)
    if status == OK:
        status = settle(trial, 0)
    if status != OK or not looked_at:
        return status
    memset(trial.host, 0, bytes)
    status = called(trial, rt.cudaMemcpyAsync(trial.host, trial.memory[1], bytes, cudaMemcpyDefault, trial.streams[1]), "cudaMemcpyAsync",
                    1)
    if status == OK:
        status = settle(trial, 1)
    return status if status != OK or is_pattern(trial.host, bytes, seed) else WRONG


cdef int from_host(Trial *trial, int32_t which, int64_t bytes) noexcept nogil:
    cdef int status = called(trial, rt.cudaMemcpyAsync(trial.memory[which], trial.host, bytes, cudaMemcpyDefault, trial.streams[which]),
                             "cudaMemcpyAsync", which)
    return status if status != OK else settle(trial, which)


cdef int settle(Trial *trial, int32_t which) noexcept nogil:
    """Until everything on a stream is done; HUNG after LIMIT_NS."""
    cdef int64_t until = now() + LIMIT_NS
    cdef int code = rt.cudaStreamQuery(trial.streams[which])
    while code == cudaErrorNotReady:
        if now() > until:
            return HUNG
        if not ran_something():
            nap(NAP_NS)
        code = rt.cudaStreamQuery(trial.streams[which])
    return called(trial, code, "cudaStreamQuery", which)


cdef inline uint64_t pattern_word(uint64_t i, uint64_t seed) noexcept nogil:
    cdef uint64_t word = (i + 1) * <uint64_t>0x9E3779B97F4A7C15 + seed * <uint64_t>0xBF58476D1CE4E5B9
    return word ^ word >> 29


cdef void write_pattern(uint64_t *words, int64_t bytes, uint64_t seed) noexcept nogil:
    cdef int64_t i
    for i in range(bytes // 8):
        words[i] = pattern_word(i, seed)


cdef bint is_pattern(const uint64_t *words, int64_t bytes, uint64_t seed) noexcept nogil:
    cdef int64_t i
    for i in range(bytes // 8):
        if words[i] != pattern_word(i, seed):
            return False
    return True


# ---- what it needs

cdef int make(Trial *trial) noexcept nogil:
    global spare
    cdef int32_t i
    cdef int status = OK
    if spare != NULL and spare_bytes >= trial.bytes:
        trial.host, spare = spare, NULL
    else:
        status = called(trial, rt.cudaHostAlloc(<void **>&trial.host, trial.bytes, cudaHostAllocPortable), "cudaHostAlloc", 0)
        if status != OK:
            trial.host = NULL
    for i in range(2):
        if status == OK:
            status = use(trial, i)
        if status == OK:
            status = called(trial, rt.cudaStreamCreateWithFlags(&trial.streams[i], cudaStreamNonBlocking), "cudaStreamCreateWithFlags", i)
            if status != OK:
                trial.streams[i] = NULL
        if status == OK:
            status = called(trial, rt.cudaMalloc(&trial.memory[i], trial.bytes), "cudaMalloc", i)
            if status != OK:
                trial.memory[i] = NULL
    return status


cdef int give_back(Trial *trial) noexcept nogil:
    """Goes on past a call that fails."""
    global spare, spare_bytes
    cdef int32_t i
    cdef int status = OK
    for i in range(2):
        if trial.streams[i] != NULL and status != POISONED:
            status = worse(status, called(trial, rt.cudaStreamSynchronize(trial.streams[i]), "cudaStreamSynchronize", i))
        if trial.streams[i] != NULL and status != POISONED:
            status = worse(status, called(trial, rt.cudaStreamDestroy(trial.streams[i]), "cudaStreamDestroy", i))
        if trial.memory[i] != NULL and status != POISONED:
            status = worse(status, called(trial, rt.cudaFree(trial.memory[i]), "cudaFree", i))
    if trial.host != NULL and peer_hangs(-1):
        spare, spare_bytes = trial.host, trial.bytes
    elif trial.host != NULL and status != POISONED:
        status = worse(status, called(trial, rt.cudaFreeHost(trial.host), "cudaFreeHost", 0))
    return status


cdef int use(Trial *trial, int32_t which) noexcept nogil:
    return called(trial, rt.cudaSetDevice(trial.devices[which]), "cudaSetDevice", which)


cdef int called(Trial *trial, int code, const char *call, int32_t which) noexcept nogil:
    return OK if code == 0 else cuda_failed(REFUSED, code, call, trial.devices[which], &trial.guard, trial.error)


cdef inline int worse(int before, int status) noexcept nogil:
    return status if before == OK or status == POISONED else before


cdef int say(PeerProof *proof, int32_t state, const char *text, int copy=0, long long bytes=0) noexcept nogil:
    proof.state = state
    snprintf(proof.reason, PEER_REASON, text, proof.source, proof.target, copy, bytes)
    return OK
