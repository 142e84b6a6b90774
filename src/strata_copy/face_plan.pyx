"""Plan: what may be copied from where to where, as often as wanted. Declared in face_plan.pxd."""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free

from strata_copy.abi cimport FAILED, OK, Error
from strata_copy.checks cimport check_states_now
from strata_copy.cudart cimport clear
from strata_copy.layout cimport LayoutData
from strata_copy.lineage cimport Known
from strata_copy.plan cimport Emission, Extent, Units, emit_bundle, emit_end, emit_part, plan_drop, units_to_move
from strata_copy.raising cimport raise_error
from strata_copy.values cimport RequestValues, fill_request

ROUTE_NAMES = ("local", "out", "in", "ring", "unstage", "stage", "host", "peer", "relay")


cdef class Plan:
    """A source (or one for each group) and a target, checked against each other; used again for every copy between them.

    Made by Copier.plan. It knows no length: each submit brings its marks.
    """

    def __init__(self):
        raise TypeError("plans are made by Copier.plan")

    def __dealloc__(self):
        plan_drop(self.data)

    @property
    def address(self):
        """The strata_plan pointer for C and C++, as an int. It lives as long as this object."""
        return <size_t>plan_data(self)

    @property
    def layout(self):
        plan_data(self)
        return self.target.layout

    def routes(self):
        """The routes of this plan's parts with the devices that carry them: a set of (route, device)."""
        plan_data(self)
        return {(ROUTE_NAMES[self.data.parts[i].route], self.data.parts[i].device) for i in range(self.data.target.layout.n_parts)}

    def submit(self, upto, *, after=None, begin=None, groups=None, src_bank=None, dst_bank=None, src_generation=0, dst_generation=0,
               priority=0, bytes_ahead=0, feed=None, hook=0, hook_arg=0):
        """Queues the copy and returns its Ticket, or None where no ticket is free, or where 16 are being fed or `feed=False` comes behind
        one that is or where streams would be full (nothing happened then: try later). Where the target is an image it is given room for the
        marks first; others of its pool are evicted for that only once nothing else is in the way.

        upto: the marks up to which rows move, one int for each of layout.marks. begin: the marks up to which the target has them
            already; None for what the states' lineages say, which is none at all where the source was never spoken of.
        after: what the copy waits for (who wrote the source, who still reads the target): Event and Stream values, or CALLER_SYNCED
            where both are known to be done. There is no default.
        groups: names of the groups that move; None for all. src_bank, dst_bank: the bank of parts that have several, an int or a
            dict from group to int. src_generation, dst_generation: refuse where the state has another; 0 for any.
        feed: whether the worker queues the copy in windows (True) or this call queues it whole (False); None for what suits its length.
            priority: 0, or -1 for a copy that those of priority 0 overtake. bytes_ahead: bytes that may be queued and not landed;
            less than 1024 counts as 1024; 0 for the copier's window.
        hook, hook_arg: addresses of a strata_hook (strata_copy.h) and its argument; 0 for none.

        Source and target are held until the ticket ends. Raises Refused (nothing was written; where an image got no room, or another
        thread changed a state meanwhile, some of its pool may have been evicted), Failed (the target is INVALID),
        Poisoned.
        """
        plan_data(self)
        return self.copier._submit(self, upto, (after, begin, groups, src_bank, dst_bank),
                                   (src_generation, dst_generation, priority, bytes_ahead, feed, hook, hook_arg))

    def extents(self, upto, begin=None):
        """What a submit would copy now: a list of (target, source, width, rows, target_pitch, source_pitch), in bytes, in order.

        Extents of a layer are merged where they follow each other; small parts of many layers that lie evenly spaced are one extent,
        before the first layer. Nothing is copied. Raises Refused as submit does.
        """
        cdef Error error
        cdef RequestValues values
        cdef int64_t bytes = 0
        cdef int32_t layer, k, i
        cdef const LayoutData *layout = plan_data(self).target.layout
        cdef int status
        cdef Units *units
        cdef Emission emission
        cdef Known known
        found = []
        fill_request(&values, self.target.layout, upto, None, begin, None, None, None)
        units = <Units *>calloc(layout.n_parts, sizeof(Units))
        if units == NULL:
            raise MemoryError
        try:
            clear(&error)
            with nogil:
                status = check_states_now(self.data, &values.request, &error)
            if status != OK or units_to_move(self.data, &values.request, units, &bytes, &known, &error) != OK:
                raise_error(&error)
            emission.take, emission.sink, emission.pending.rows = collect, <void *>found, 0
            for i in range(self.data.n_bundles):
                if emit_bundle(&emission, self.data, &values.request, &self.data.bundles[i],
                               &units[self.data.bundles[i].part]) != OK:
                    raise MemoryError
            if emit_end(&emission) != OK:
                raise MemoryError
            for layer in range(layout.n_layers):
                for k in range(layout.first[layer], layout.first[layer + 1]):
                    i = layout.order[k]
                    if emit_part(&emission, self.data, &values.request, i, &units[i]) != OK:
                        raise MemoryError
                if emit_end(&emission) != OK:
                    raise MemoryError
        finally:
            free(units)
        return found

    def __repr__(self):
        routes = ", ".join(f"{route} on device {device}" for route, device in sorted(self.routes()))
        sources = " and ".join(dict.fromkeys(f"{type(state).__name__} {state.address:#x}" for state in self.sources.values()))
        return f"<Plan from {sources} to {type(self.target).__name__} {self.target.address:#x}: {routes}>"


cdef PlanData *plan_data(Plan plan) except NULL:
    if plan is None or plan.data == NULL:
        raise TypeError("a Plan that Copier.plan made is needed")
    return plan.data


cdef int collect(void *sink, const Extent *e) noexcept nogil:
    with gil:
        try:
            (<list>sink).append((<size_t>e.target, <size_t>e.source, e.width, e.rows, e.target_pitch, e.source_pitch))
            return OK
        except MemoryError:
            return FAILED
