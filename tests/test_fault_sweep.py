"""Every CUDA call of every operation fails in turn, with every code that is known of it, once and for good, with and
without an error of other code pending: what is told is true, nothing of ours is in flight then, and the next copy is
whole. What the operations are and what each promises is in fault_operations.py, the codes are in fault_codes.py.

Opening makes about a thousand events and closing destroys them, in loops; and each of some hundred turns of the worker
changes the capture mode and puts it back. Of equal calls of theirs in a loop (a run of calls of one function from one
place) four stand for all: the first, the second, one in the middle, the last; and where such loops are in a loop, of
the runs likewise. The count that is printed is of the calls that were made to fail, and beside it stands how many they
are of."""

from dataclasses import dataclass
from itertools import groupby

import pytest

import strata_copy as sc
from fault_codes import CODES, NEVER_FAIL, STICKY
from fault_operations import COPY_CALLS, DEVICE_CALL, MODE_CALL, OPERATIONS, TURN_CALL, UPTO, Scene
from fixtures import untouched
from strata_copy import host_runtime, runtime

pytestmark = pytest.mark.host

FOREIGN = 101
THREAD_LOCAL, RELAXED = 1, 2


@dataclass(frozen=True)
class Fault:
    function: str
    nth: int
    last: bool  # there is no later one where nothing fails
    code: int
    forever: bool
    foreign: bool  # an error of other code is pending

    @property
    def sticky(self):
        return self.code in STICKY

    @property
    def restores(self):
        """It is at the call that puts the capture mode back: they come in pairs."""
        return self.function == MODE_CALL and self.nth % 2 == 0


@dataclass(frozen=True)
class Calls:
    """Of one function, in one operation: how many can be made to fail, and the numbers of those that are."""

    count: int
    numbers: tuple


def calls_of(operation, route):
    """What an operation calls, of the functions that can fail."""
    with Scene(route, operation) as scene:
        operation.prepare(scene)
        _, mode = arrive(foreign=False)
        operation.arm()
        host_runtime.keep_paths()
        try:
            operation.act(scene)
        except sc.CopyError:
            assert host_runtime.clear_faults() > 0  # those of `arm`
        paths = {name: came_from for name, came_from in host_runtime.paths().items() if came_from}
        runtime.capture_mode(mode)
    assert set(paths) <= {*CODES, *NEVER_FAIL, TURN_CALL}
    found = {}
    for function in [name for name in CODES if name in paths]:
        count = operation.tries(function, len(paths[function]))
        numbers = of_loops(paths[function][:count]) if function in operation.loops else range(1, count + 1)
        if count > 0:
            found[function] = Calls(count, tuple(numbers))
    return found


def of_loops(paths):
    """The numbers, from 1 on, of the calls that stand for all. paths: where each came from."""
    runs = {}
    for path, calls in groupby(enumerate(paths, 1), key=lambda call: call[1]):
        runs.setdefault(path, []).append([number for number, _ in calls])
    return sorted(number for of_path in runs.values() for run in four(of_path) for number in four(run))


def four(equal):
    return equal if len(equal) <= 4 else [equal[0], equal[1], equal[len(equal) // 2], equal[-1]]


def arrive(foreign):
    """The thread as `act` finds it, after the same calls in any case: they are turns of the worker. Its device, and the
    capture mode that it had."""
    device, mode = runtime.get_device(), runtime.capture_mode(THREAD_LOCAL)
    with pytest.raises(runtime.CudaError):
        runtime.set_device(99)
    if not foreign:
        runtime.get_last_error()
    return device, mode


MANY = 20
# Not called while an error of other code is pending, of which it would take the place.
NEVER_BESIDE_FOREIGN = ("cudaMemcpyBatchAsync",)


def variants(function, code, i, count):
    """(for good, beside a foreign error): all four. After a code that ends the device every later call fails anyhow:
    two then, and one in turn where a function is called many times."""
    if function in NEVER_BESIDE_FOREIGN:
        return [(False, False), (True, False)]
    if code not in STICKY:
        return [(forever, foreign) for forever in (False, True) for foreign in (False, True)]
    both = [(False, i % 4 > 1), (True, i % 4 < 2)]
    return both if count < MANY else [both[i % 2]]


def all_faults(calls):
    return [
        Fault(function, nth, nth == of.count, code, *variant)
        for function, of in calls.items()
        for nth in of.numbers
        for i, code in enumerate(CODES[function])
        for variant in variants(function, code, i + nth, of.count)
    ]


def one_for_each_code(calls):
    """Of each function one call for each code, dealt in turn."""
    faults = []
    for function, of in calls.items():
        for i, code in enumerate(CODES[function]):
            nth, choice = of.numbers[5 * i % len(of.numbers)], variants(function, code, i, of.count)
            faults.append(Fault(function, nth, nth == of.count, code, *choice[i // 3 % len(choice)]))
    return faults


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_meets_each_code(name, fault_pairs):
    operation = OPERATIONS[name]
    for turn, route in enumerate(operation.routes):
        calls = calls_of(operation, route)
        faults = one_for_each_code(calls)[turn :: len(operation.routes)]
        assert run(operation, name, route, faults, fault_pairs) == len(faults)


@pytest.mark.long
@pytest.mark.parametrize(("name", "route"), [(name, route) for name, op in OPERATIONS.items() for route in op.routes])
def test_every_call_fails_in_turn_with_every_code(name, route, fault_pairs, figure):
    operation = OPERATIONS[name]
    calls = calls_of(operation, route)
    wanted = sum(len(of.numbers) * len(CODES[function]) for function, of in calls.items())
    assert run(operation, name, route, all_faults(calls), fault_pairs) == wanted
    if operation.loops:
        tried, made = (sum(map(count, calls.values())) for count in (lambda of: len(of.numbers), lambda of: of.count))
        figure(f"{name} on route {route}: {tried} of {made} calls made to fail; of a loop's four each")


def test_of_a_loop_four_calls_stand_for_all():
    """As of the places they come from: one alone, nine of a loop, and five rows of six between single ones."""
    rows = "".join("w" + "e" * 6 for _ in range(5))
    assert of_loops("x" + "l" * 9) == [1, 2, 3, 6, 10]
    assert of_loops(rows) == [n + 7 * row for row in (0, 1, 2, 4) for n in (1, 2, 3, 5, 7)]
    assert of_loops("abab") == [1, 2, 3, 4]


def test_every_function_that_can_fail_is_called_by_an_operation():
    called = {function for op in OPERATIONS.values() for route in op.routes for function in calls_of(op, route)}
    assert called == set(CODES)


def run(operation, name, route, faults, fault_pairs):
    """Tries them all and returns how many (call, code) pairs there were."""
    tried = set()
    for fault in faults:
        with Scene(route, operation) as scene:
            try:
                try_one(scene, operation, fault)
            except BaseException as wrong:
                raise AssertionError(f"{name} on route {route}: {fault}") from wrong
        tried.add((name, route, fault.function, fault.nth, fault.code))
    fault_pairs(tried)
    return len(tried)


def try_one(scene, operation, fault):
    operation.prepare(scene)
    device, mode = arrive(fault.foreign)
    live, before, error = host_runtime.live(), host_runtime.calls(), None
    operation.arm()
    host_runtime.fail(fault.function, fault.nth, fault.code, fault.forever)
    try:
        operation.act(scene)
    except sc.CopyError as raised:
        error = raised
    pending = runtime.peek_last_error()
    host_runtime.clear_faults()
    assert calls_since(before, [fault.function]) >= fault.nth
    started = written_by_helpers(scene) or calls_since(before, COPY_CALLS) > 0
    check_device(fault, error, device)
    check_mode(scene, fault, error, runtime.capture_mode(mode))
    if operation is not OPERATIONS["open"]:
        assert all(host_runtime.live()[kind] <= n for kind, n in live.items())
    assert host_runtime.violations() == []
    wanted = operation.told_of_the_end(fault) if fault.sticky else operation.told(scene, fault, started)
    assert type(error) in (wanted if type(wanted) is tuple else (wanted or type(None),)), error
    if error is not None:
        operation.names_the_call(error, fault)
    if not fault.sticky:
        foreign_seen = fault.foreign and not operation.threaded and not scene.by_worker
        assert error is None or error.pending_before == (FOREIGN if foreign_seen else 0)
        assert (pending != 0) == fault.foreign
        runtime.get_last_error()
    if fault.sticky or type(error) is sc.Poisoned:
        assert untouched(scene.source)
        assert started or not operation.moves or untouched(scene.target)
        check_dead(scene, fault)
        return
    assert untouched(scene.source)
    operation.check(scene, error, started)
    scene.check_next_copy()
    assert host_runtime.violations() == []


def written_by_helpers(scene):
    """They make no copy call. Looked at unseen by the referee: what a dead device leaves is nobody's to read."""
    blocks = zip(scene.target.blocks, scene.target.pattern(), strict=True)
    return scene.route == "host" and any((runtime.view(base, size) != own).any() for (_, base, size), own in blocks)


def calls_since(before, functions):
    after = host_runtime.calls()
    return sum(after[name] - before[name] for name in functions)


def check_device(fault, error, device):
    """The current device is as before, or the error says that it is not."""
    if runtime.get_device() != device:
        assert fault.function == DEVICE_CALL
        assert not error.restored
        if not fault.sticky:
            runtime.set_device(device)


def check_mode(scene, fault, error, mode):
    """The capture mode is as before, or the error says that it is not. What the worker tells is not of this thread."""
    if error is not None and not scene.by_worker and fault.function != DEVICE_CALL:
        assert mode == (THREAD_LOCAL if error.restored else RELAXED)
    else:
        assert mode == THREAD_LOCAL or fault.restores


def check_dead(scene, fault):
    """Whatever is asked, CUDA is not, and everybody is told."""
    if scene.copier is None or scene.copier.closed:
        return
    if fault.restores:  # the operation went well: the library does not know yet
        check_poisoned(lambda: scene.plan.submit(UPTO, after=scene.after))
    before = host_runtime.calls()
    check_poisoned(lambda: scene.plan.submit(UPTO, after=scene.after))
    for ticket in scene.tickets:
        check_ticket_of_a_dead_device(scene, ticket)
    scene.copier.finished()
    assert {name for name, count in host_runtime.calls().items() if count > before[name]} <= {"cudaGetErrorName"}
    live = host_runtime.live()
    check_poisoned(scene.copier.close)
    assert host_runtime.live() == live


def check_ticket_of_a_dead_device(scene, ticket):
    if ticket.done and type(ticket.error) is not sc.Poisoned:  # it had ended before
        assert ticket.error is not None or scene.check_ended_well(ticket) is None
        return
    check_poisoned(ticket.poll)
    check_poisoned(ticket.sync)
    check_poisoned(lambda: ticket.wait_layer(1, scene.stream))
    check_poisoned(lambda: ticket.wait_done(scene.stream))
    assert not ticket.target.valid or untouched(scene.target)  # before the first copy call
    assert ticket.target.busy


def check_poisoned(act):
    with pytest.raises(sc.Poisoned):
        act()
