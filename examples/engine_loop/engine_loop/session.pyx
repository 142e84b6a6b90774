"""Sessions. The C side is declared in session.pxd."""

from typing import NamedTuple

from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memmove, memset

import numpy as np

from strata_copy import CopyError, Place, State, runtime

from engine_loop.cuda cimport copy, cuda, cudaMemcpyDefault, noted
from engine_loop.cuda import connect
from engine_loop.geometry import cell_bytes, draft_format, layout
from engine_loop.rows cimport row_key, token, write_row

cdef enum:
    STAGING = 4 << 20       # bytes of rows that are made up at once
    IN_USE = 16             # pages of a streamed layer that an append brings to the device, as attention would

ALIGNMENT = 256
POOL_ALIGNMENT = 16


class Refused(Exception):
    """Nothing was written."""


class Failed(Exception):
    """A copy failed under way: the session that was its target has lost its conversation."""


class Stage(NamedTuple):
    """Layers first to end (exclusive) run on a device, on one stream."""

    device: int
    first: int
    end: int
    stream: int

    @classmethod
    def split(cls, layers, ends, devices):
        """One stage for each device, each from where the one before ends."""
        stages = []
        for device, first, end in zip(devices, (0, *ends[:-1]), ends, strict=True):
            with current(device):
                stages.append(cls(device, first, end, runtime.stream_create()))
        if ends[-1] != layers:
            raise ValueError(f"the last stage ends with layer {ends[-1]}, the model has {layers}")
        return tuple(stages)


class Checkpoint(NamedTuple):
    """Running state that a session had at a length, kept in a bank of it. `stages`: whose part is there, a bit for each."""

    owner: object
    bank: int
    tokens: int
    draft: int
    stages: int
    serial: int


class current:
    """Makes a device current for a while."""

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        self.before = runtime.get_device()
        runtime.set_device(self.device)

    def __exit__(self, *exception):
        runtime.set_device(self.before)


cdef class Session:
    """The state of one conversation: a main session or a slot.

    stages: from Stage.split. capacity: tokens. mode: 0, K/V on the device; 1, streamed. draft_mode: 0; 2, a ring; None, no draft.
        Where nothing can be pinned for a ring it is 0.
    resident: cells of a layer that are on the device in modes 1 and 2. checkpoints: how many its running state has room for.

    `state` is what strata_copy knows of it; `checkpoints` is another state of the same layout, with the running state alone, in banks.
    """

    def __init__(self, geometry, format, stages, *, int64_t capacity, int mode=0, draft_mode=0, int64_t resident=20480, int checkpoints=2,
                 name="main"):
        connect()
        if mode not in (RESIDENT, STREAMED) or draft_mode not in (RESIDENT, RING, None):
            raise ValueError(f"mode {mode}, draft_mode {draft_mode}: rows are resident (0) or streamed (1), a draft is resident, "
                             "a ring (2) or not there (None)")
        self.geometry, self.format, self.stages, self.name = geometry, format, tuple(stages), name
        self.mode, self.draft_mode, self.taken = mode, draft_mode, {}
        self.memory, self._streams, self.reads = [], [], []
        self.layout = layout(geometry, format, [stage.first for stage in self.stages])
        self.data.capacity, self.data.n_banks = capacity, checkpoints
        self.data.heads, self.data.key_bytes, self.data.gdn_bytes = geometry.heads, geometry.key, geometry.gdn
        self.data.n_layers, self.data.draft = geometry.layers, -1
        self._allocate_tables()
        places, banks = {}, {}
        for number, stage in enumerate(self.stages):
            self.data.stages[number].device, self.data.stages[number].first, self.data.stages[number].end = stage[:3]
            self.data.stages[number].stream = <void *><size_t>stage.stream
            with current(stage.device):
                self._carve(number, stage, resident, places, banks)
        forget(&self.data)
        self.state = State(self.layout, [places[part.layer, part.name] for part in self.layout.parts], owner=self)
        self.checkpoints = State(self.layout, [banks[part.layer, part.name] for part in self.layout.parts], owner=self)

    def __dealloc__(self):
        cdef int32_t i
        for i in range(self.data.n_kv):
            free(self.data.kv[i].page_table)
        free(self.data.kv)
        free(self.data.kv_of_layer)
        free(self.data.running)
        free(self.data.ids)

    def free(self):
        """Gives the memory back, once nothing uses it."""
        for kind, address, _ in self.memory:
            (runtime.free if kind == "device" else runtime.host_free)(address)
        for stream in self._streams:
            runtime.stream_destroy(stream)
        self.memory, self._streams = [], []

    # ---- what a conversation does

    def append(self, int64_t conversation, int64_t n, draft=True):
        """The model reads or writes n tokens: rows, running state, and the draft up to the same length. Raises ValueError without room."""
        cdef sc.Error error
        cdef int status
        if not 0 <= n <= self.data.capacity - self.data.n_ids:
            raise ValueError(f"{n} tokens behind {self.data.n_ids}; the session has room for {self.data.capacity}")
        cdef char *staging = <char *>malloc(STAGING + self.data.gdn_bytes)
        cdef bint with_draft = draft and self.data.draft >= 0
        cdef int64_t kept[2]
        cdef int64_t marks[2]
        if staging == NULL:
            raise MemoryError
        kept[0], kept[1] = self.data.n_ids, self.data.n_draft
        marks[0], marks[1] = self.data.n_ids + n, self.data.n_ids + n if with_draft else self.data.n_draft
        try:
            written(self, kept, marks)
        except BaseException:
            free(staging)
            raise
        with nogil:
            status = append(&self.data, conversation, n, with_draft, staging, &error)
            free(staging)
        if status != sc.OK:
            raise_error(&error)

    def clear(self):
        """No conversation."""
        self.state.rewound((0, 0))
        forget(&self.data)
        self.taken.clear()

    @property
    def ids(self):
        """The conversation's token ids, an int32 array of its own."""
        return np.array(<int32_t[:self.data.capacity + 1]>self.data.ids)[:self.data.n_ids]

    @property
    def tokens(self):
        return self.data.n_ids

    @property
    def draft_tokens(self):
        return self.data.n_draft

    @property
    def streams(self):
        """(stream, device) of all that computes on the session: its stages, and the drafter."""
        found = [(stage.stream, stage.device) for stage in self.stages]
        return [*found, *((stream, self.stages[len(self.stages) - 1].device) for stream in self._streams)]

    @property
    def request(self):
        """The request that a slot serves; 0 where it serves none."""
        return self.data.request

    @property
    def turn(self):
        """Counts what changed the session."""
        return self.data.turn

    @property
    def previous_ids(self):
        """The last two token ids, the older one first; -1 where there is none."""
        return self.data.previous[0], self.data.previous[1]

    # ---- what a test looks at

    def resident_pages(self, int layer):
        """[(page, slot), ...] of a layer in mode 1 or 2, as the host side knows it."""
        cdef KvLayer *kv = &self.data.kv[self.data.kv_of_layer[layer]]
        if kv.mode == STREAMED:
            return [(page, kv.page_table[page]) for page in range(kv.n_pages) if kv.page_table[page] >= 0]
        end = -(-(self.data.n_draft if kv.layer == self.data.n_layers else self.data.n_ids) // PAGE)
        return [(page, page % kv.n_slots) for page in range(max(0, end - kv.n_slots), end)]

    def map_of(self, int layer):
        """(address, bytes of page_table and slot_block, bytes behind them) of a streamed layer's map on the device."""
        cdef KvLayer *kv = &self.data.kv[self.data.kv_of_layer[layer]]
        return <size_t>kv.map, kv.table_bytes, kv.counter_bytes

    def resident_arrays(self, int layer):
        """[(complete rows, pages on the device, bytes of a page), ...]"""
        cdef KvLayer *kv = &self.data.kv[self.data.kv_of_layer[layer]]
        return [(<size_t>kv.arrays[i].rows, <size_t>kv.arrays[i].resident, kv.arrays[i].page_bytes) for i in range(kv.n_arrays)]

    # ---- memory

    def _allocate_tables(self):
        cdef int32_t layers = self.geometry.layers, stages = len(self.stages), layer
        if stages > MAX_STAGES:
            raise ValueError(f"{stages} stages; at most {MAX_STAGES}")
        self.data.n_stages = stages
        self.data.kv = <KvLayer *>calloc(layers + 1, sizeof(KvLayer))
        self.data.kv_of_layer = <int32_t *>malloc((layers + 1) * sizeof(int32_t))
        self.data.running = <Running *>calloc(2 * layers + 2, sizeof(Running))
        self.data.ids = <int32_t *>malloc((self.data.capacity + 1) * sizeof(int32_t))
        if not (self.data.kv and self.data.kv_of_layer and self.data.running and self.data.ids):
            raise MemoryError
        for layer in range(layers + 1):
            self.data.kv_of_layer[layer] = -1

    def _carve(self, number, stage, resident, places, banks):
        """One device arena and one pinned arena for the checkpoints of a stage, and for each layer that is streamed a pinned pool."""
        g = self.geometry
        last = number == len(self.stages) - 1
        arena, store = Arena(ALIGNMENT), Arena(ALIGNMENT)
        attention = [layer for layer in range(stage.first, stage.end) if g.is_attention(layer)]
        recurrent = [layer for layer in range(stage.first, stage.end) if not g.is_attention(layer)]
        todo = []       # what is done once the arenas have addresses

        def running(layer, names, sizes):
            """Parts that lie in one piece, in a session and in each bank."""
            live, bank = arena.take(sum(sizes)), store.take(sum(sizes) * max(self.data.n_banks, 1))
            todo.append(lambda: self._place_running(number, stage.device, layer, names, sizes, arena.base + live, store.base + bank,
                                                    places, banks))

        if number == 0:
            running(-1, [(-1, "ple")], [g.ple])
        if recurrent:
            running(recurrent[0], [(layer, "gdn") for layer in recurrent], [g.gdn] * len(recurrent))
        for layer in attention:
            running(layer, [(layer, "idx_tail")], [3 * g.key])
            running(layer, [(layer, "idx_block_pos")], [4])
        for layer in (*attention, *([g.layers] if last else [])):
            self._carve_kv(number, stage, layer, resident, arena, places, banks, todo)
        arena.base = self._allocate("device", arena.size, stage.stream)
        store.base = self._allocate("pinned", store.size, stage.stream)
        runtime.stream_synchronize(stage.stream)
        for act in todo:
            act()

    def _allocate(self, kind, bytes, stream):
        """Memory of zeros, once the stream is done."""
        address = (runtime.malloc if kind == "device" else runtime.host_alloc)(bytes)
        self.memory.append((kind, address, bytes))
        runtime.memset_async(address, 0, bytes, stream)
        return address

    def _place_running(self, number, device, layer, names, sizes, live, bank, places, banks):
        cdef Running *one = &self.data.running[self.data.n_running]
        cdef int64_t bytes = sum(sizes)
        self.data.n_running += 1
        one.stage, one.layer, one.bytes = number, layer, bytes
        one.live, one.banks = <char *><size_t>live, <char *><size_t>bank
        at = 0
        for name, size in zip(names, sizes, strict=True):
            places[name] = Place(base=live + at, device=device)
            banks[name] = Place(base=bank + at, kind="pinned", device=device, banks=max(self.data.n_banks, 1), bank_stride=bytes)
            at += size

    def _carve_kv(self, number, stage, layer, resident, arena, places, banks, todo):
        cdef bint draft = layer == self.geometry.layers
        cdef KvLayer *kv
        cdef int32_t i
        g = self.geometry
        cells = cell_bytes(draft_format(self.format) if draft else self.format, g.head_dim)
        mode = self.draft_mode if draft else self.mode
        for name in cells:
            nowhere = Place(base=0, units=0, device=stage.device)
            banks[layer, name] = places[layer, name] = nowhere
        if mode is None:
            return
        kv = &self.data.kv[self.data.n_kv]
        self.data.kv_of_layer[<int32_t>layer] = self.data.n_kv
        if draft:
            self.data.draft = self.data.n_kv
            self._streams.append(runtime.stream_create())
        self.data.n_kv += 1
        kv.layer, kv.stage, kv.mode, kv.n_arrays = layer, number, mode, len(cells)
        kv.stream = <void *><size_t>(self._streams[-1] if draft else stage.stream)
        kv.n_pages = -(-self.data.capacity // PAGE)
        sizes = [PAGE * g.heads * cell for cell in cells.values()]
        try:
            rows = None if mode == RESIDENT else self._pool(kv.n_pages, sizes, stage)
        except runtime.CudaError:
            if mode != RING:
                raise
            runtime.get_last_error()
            self.draft_mode = kv.mode = mode = RESIDENT
        if mode == RESIDENT:
            rows = [arena.take(kv.n_pages * size) for size in sizes]
        kv.n_slots = 0 if mode == RESIDENT else min(max(resident // PAGE, 1), kv.n_pages)
        pages = [arena.take(kv.n_slots * size) for size in sizes]
        if mode == STREAMED:
            kv.table_bytes, kv.counter_bytes = 4 * (kv.n_pages + kv.n_slots), 4 * (4 * kv.n_slots + 16)
            kv.page_table = <int32_t *>malloc(kv.table_bytes)
            if kv.page_table == NULL:
                raise MemoryError
            kv.slot_block = kv.page_table + kv.n_pages
        table = arena.take(kv.table_bytes + kv.counter_bytes)
        indexer = [] if draft else [arena.take((self.data.capacity // PAGE + 2) * g.key), arena.take(g.key)]
        index = self.data.n_kv - 1

        def place():
            cdef KvLayer *kv = &self.data.kv[<int32_t>index]
            base = arena.base
            for i, (name, size) in enumerate(zip(cells, sizes, strict=True)):
                at = base + rows[i] if mode == RESIDENT else rows[i][0]
                kv.arrays[<int32_t>i].rows = <char *><size_t>at
                kv.arrays[<int32_t>i].resident = <char *><size_t>(base + pages[i])
                kv.arrays[<int32_t>i].page_bytes = size
                places[layer, name] = Place(
                    base=at, units=kv.n_pages, device=stage.device, kind="device" if mode == RESIDENT else "pinned",
                    host_base=None if mode == RESIDENT else rows[i][1],
                )
            kv.map = <char *><size_t>(base + table)
            if not draft:
                self._place_indexer(index, stage.device, layer, base + indexer[0], base + indexer[1], places, banks)
            if mode == STREAMED:
                self._start_map(index, stage.device)

        todo.append(place)

    def _start_map(self, index, device):
        cdef KvLayer *kv = &self.data.kv[<int32_t>index]
        if reset_map(kv, kv.stream) != 0:
            raise RuntimeError("the map of a streamed layer cannot be set")
        runtime.stream_synchronize(<size_t>kv.stream)

    def _place_indexer(self, index, device, layer, pooled, dead, places, banks):
        cdef KvLayer *kv = &self.data.kv[<int32_t>index]
        kv.pooled, kv.dead = <char *><size_t>pooled, <char *><size_t>dead
        kv.tail = <char *><size_t>places[layer, "idx_tail"].base
        kv.block_pos = <char *><size_t>places[layer, "idx_block_pos"].base
        places[layer, "pooled"] = Place(base=pooled, units=self.data.capacity // PAGE + 2, device=device)
        places[layer, "idx_dead"] = Place(base=dead, device=device)
        banks[layer, "pooled"] = banks[layer, "idx_dead"] = Place(base=0, units=0, device=device)

    def _pool(self, n_pages, sizes, stage):
        """A streamed layer's complete K/V: (device address, host address) of each array, in one pinned allocation."""
        cdef void *device = NULL
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-n_pages * size // POOL_ALIGNMENT) * POOL_ALIGNMENT
        host = self._allocate("pinned", end + 1024, stage.stream)
        if cuda.cudaHostGetDevicePointer(&device, <void *><size_t>host, 0) != 0:
            raise RuntimeError("pinned memory is not mapped for the device")
        return [(<size_t>device + offset, host + offset) for offset in offsets]


class Arena:
    """Sizes first, then one allocation for all of them."""

    def __init__(self, alignment):
        self.alignment, self.size, self.base = alignment, alignment, 0

    def take(self, bytes):
        """Where so many bytes will be, counted from `base`."""
        at = self.size
        self.size += -(-bytes // self.alignment) * self.alignment
        return at


cdef int written(Session session, const int64_t *kept, const int64_t *marks) except -1:
    """First the session's streams wait for the last reads of parks that are in flight."""
    cdef sc.Error error
    cdef sc.State *state = sc.state_of(session.state)
    while session.reads:
        ticket = session.reads.pop()
        try:
            for stream, device in session.streams:
                with current(device):
                    while not ticket.wait_source(stream, timeout=1.0):      # not queued to its end yet
                        pass
        except CopyError:       # it has ended, badly: nothing reads any more
            pass
    if sc.rewound(state, kept, 2, &error) != sc.OK or sc.advanced(state, marks, 2, &error) != sc.OK:
        raise_error(&error)
    return 0


cdef int raise_error(const sc.Error *error) except -1:
    text = error.text.decode(errors="replace")
    raise (Refused if error.status == sc.REFUSED else Failed)(text)


# ---- a model's writes

cdef int append(SessionData *s, int64_t conversation, int64_t n, bint draft, char *staging, sc.Error *error) noexcept nogil:
    cdef int64_t begin = s.n_ids, end = begin + n, p
    cdef int32_t i
    cdef int status = sc.OK
    for p in range(begin, end):
        s.ids[p] = token(conversation, p)
    s.n_ids = end
    s.turn += 1
    set_previous(s)
    for i in range(s.n_kv):
        if i == s.draft and not draft:
            continue
        if i == s.draft:
            begin, s.n_draft = s.n_draft, end
        status = append_rows(s, &s.kv[i], conversation, begin, end, staging, error)
        if status == sc.OK and i != s.draft:
            status = append_keys(s, &s.kv[i], conversation, begin, end, staging, error)
        if status != sc.OK:
            return status
    for i in range(s.n_running):
        if s.running[i].layer >= 0 and s.kv_of_layer[s.running[i].layer] >= 0:
            continue        # append_keys has written these
        for p in range(s.running[i].bytes // s.gdn_bytes if s.running[i].layer >= 0 else 1):
            status = write_running(s, &s.running[i], p, conversation, end, staging, error)
            if status != sc.OK:
                return status
    return sc.OK


cdef int write_running(const SessionData *s, const Running *running, int64_t row, int64_t conversation, int64_t tokens, char *staging,
                       sc.Error *error) noexcept nogil:
    """A gdn row, or the PLE window, as it is behind so many tokens."""
    cdef int64_t bytes = s.gdn_bytes if running.layer >= 0 else running.bytes
    write_row(staging, bytes, row_key(conversation, running.layer + <int32_t>row, MAX_ARRAYS), tokens)
    return copy(running.live + row * bytes, staging, bytes, s.stages[running.stage].stream, error)


cdef int append_rows(const SessionData *s, KvLayer *kv, int64_t conversation, int64_t begin, int64_t end, char *staging,
                     sc.Error *error) noexcept nogil:
    """K/V of tokens begin to end in whole pages and parts of pages, then the pages on the device."""
    cdef const Array *array
    cdef int64_t p, page, cells, n, cell
    cdef int32_t i
    cdef int status = sc.OK
    for i in range(kv.n_arrays):
        array = &kv.arrays[i]
        cell = array.page_bytes // PAGE // s.heads
        p = begin
        while p < end and status == sc.OK:
            page = p // PAGE
            if p % PAGE == 0 and end - p >= PAGE:
                cells, n = PAGE, min((end - p) // PAGE, STAGING // array.page_bytes)
            else:
                cells, n = min(PAGE - p % PAGE, end - p), 1
            make_pages(staging, row_key(conversation, kv.layer, i), p, n, cells, s.heads, cell)
            status = noted(cuda.cudaMemcpy2DAsync(
                array.rows + page * array.page_bytes + p % PAGE * cell, PAGE * cell, staging, cells * cell, cells * cell, n * s.heads,
                cudaMemcpyDefault, kv.stream), "cudaMemcpy2DAsync", error)
            p += n * cells
    if status == sc.OK and begin < end and kv.mode == RING:
        return noted(fill_ring(kv, begin // PAGE, end, kv.stream), "cudaMemcpyAsync", error)
    if status == sc.OK and begin < end and kv.mode == STREAMED:
        return bring_pages(kv, begin // PAGE, (end + PAGE - 1) // PAGE, error)
    return status


cdef void make_pages(char *to, uint64_t key, int64_t position, int64_t n, int64_t cells, int32_t heads, int64_t cell) noexcept nogil:
    """n pages, or parts of one, as [page][head][cell]."""
    cdef int64_t i, c
    cdef int32_t h
    for i in range(n):
        for h in range(heads):
            for c in range(cells):
                write_row(to, cell, key, (position + i * cells + c) * heads + h)
                to += cell


cdef int append_keys(const SessionData *s, const KvLayer *kv, int64_t conversation, int64_t begin, int64_t end, char *staging,
                     sc.Error *error) noexcept nogil:
    """The indexer: a pooled key for each block that is finished now, the block that is being filled, and the spare row."""
    cdef int64_t block, n, i, room = STAGING // s.key_bytes
    cdef int32_t position = <int32_t>(end // PAGE)
    cdef int status = sc.OK
    if begin == end:
        return sc.OK
    if begin == 0:
        write_row(staging, s.key_bytes, row_key(conversation, kv.layer, MAX_ARRAYS + 1), 0)
        status = copy(kv.dead, staging, s.key_bytes, kv.stream, error)
    block = begin // PAGE
    while block < end // PAGE and status == sc.OK:
        n = min(end // PAGE - block, room)
        for i in range(n):
            write_row(staging + i * s.key_bytes, s.key_bytes, row_key(conversation, kv.layer, MAX_ARRAYS), block + i)
        status = copy(kv.pooled + block * s.key_bytes, staging, n * s.key_bytes, kv.stream, error)
        block += n
    write_row(staging, 3 * s.key_bytes, row_key(conversation, kv.layer, MAX_ARRAYS + 2), end)
    if status == sc.OK:
        status = copy(kv.tail, staging, 3 * s.key_bytes, kv.stream, error)
    if status == sc.OK:
        status = copy(kv.block_pos, &position, sizeof(position), kv.stream, error)
    return status if status != sc.OK else write_spare_row(s, kv, error)


cdef int write_spare_row(const SessionData *s, const KvLayer *kv, sc.Error *error) noexcept nogil:
    return copy(kv.pooled + s.n_ids // PAGE * s.key_bytes, kv.dead, s.key_bytes, kv.stream, error)


# ---- residency

cdef int landed(void *landing, int32_t layer, int32_t device, void *stream) noexcept nogil:
    cdef Landing *now = <Landing *>landing
    cdef SessionData *s = now.session
    cdef KvLayer *kv
    if s.kv_of_layer[layer] < 0:
        return 0
    kv = &s.kv[s.kv_of_layer[layer]]
    if kv.mode == STREAMED:
        return reset_map(kv, stream)
    if kv.mode == RING:
        return fill_ring(kv, 0, now.marks[1], stream)
    return 0


cdef int reset_map(KvLayer *kv, void *stream) noexcept nogil:
    """Every page is evicted."""
    cdef int code
    memset(kv.page_table, 0xFF, kv.table_bytes)
    kv.next_slot = 0
    code = cuda.cudaMemsetAsync(kv.map, 0xFF, kv.table_bytes, stream)
    return code if code != 0 else cuda.cudaMemsetAsync(kv.map + kv.table_bytes, 0, kv.counter_bytes, stream)


cdef int fill_ring(const KvLayer *kv, int64_t first, int64_t tokens, void *stream) noexcept nogil:
    """The pages from `first` on that the window still holds: in each array one run, or two around the end of the ring."""
    cdef int64_t end = (tokens + PAGE - 1) // PAGE, page = max(first, end - kv.n_slots), n
    cdef const Array *array
    cdef int32_t i
    cdef int code = 0
    while page < end and code == 0:
        n = min(end - page, kv.n_slots - page % kv.n_slots)
        for i in range(kv.n_arrays):
            array = &kv.arrays[i]
            if code == 0:
                code = cuda.cudaMemcpyAsync(array.resident + page % kv.n_slots * array.page_bytes, array.rows + page * array.page_bytes,
                                            n * array.page_bytes, cudaMemcpyDefault, stream)
        page += n
    return code


cdef int bring_pages(KvLayer *kv, int64_t begin, int64_t end, sc.Error *error) noexcept nogil:
    """What attention does to a streamed layer: the latest of the pages that were written are on the device, and the map says where."""
    cdef int64_t page, slot
    cdef int32_t i
    cdef int status = sc.OK
    for page in range(max(begin, end - min(kv.n_slots, IN_USE)), end):
        slot = kv.page_table[page]
        if slot < 0:
            slot = kv.next_slot
            kv.next_slot = (slot + 1) % kv.n_slots
            if kv.slot_block[slot] >= 0:
                kv.page_table[kv.slot_block[slot]] = -1
            kv.slot_block[slot], kv.page_table[page] = <int32_t>page, <int32_t>slot
        for i in range(kv.n_arrays):
            if status == sc.OK:
                status = copy(kv.arrays[i].resident + slot * kv.arrays[i].page_bytes, kv.arrays[i].rows + page * kv.arrays[i].page_bytes,
                              kv.arrays[i].page_bytes, kv.stream, error)
    return status if status != sc.OK else copy(kv.map, kv.page_table, kv.table_bytes, kv.stream, error)


# ---- lengths

cdef void take_ids(SessionData *s, const int32_t *ids, const int64_t *marks, int64_t request) noexcept nogil:
    memmove(s.ids, ids, marks[0] * sizeof(int32_t))
    s.n_ids, s.n_draft, s.request = marks[0], marks[1], request
    s.turn += 1
    set_previous(s)


cdef void forget(SessionData *s) noexcept nogil:
    s.n_ids = s.n_draft = s.request = 0
    s.turn += 1
    set_previous(s)


cdef void set_previous(SessionData *s) noexcept nogil:
    s.previous[0] = s.ids[s.n_ids - 2] if s.n_ids > 1 else -1
    s.previous[1] = s.ids[s.n_ids - 1] if s.n_ids > 0 else -1
