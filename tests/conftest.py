"""Opens the runtime that the tests run on, the host runtime unless STRATA_COPY_RUNTIME=cuda, and looks after each test
whether it left something behind.

A test that takes `seed` runs in the host runtime's scheduled mode, once for each seed: 20 in the short tier, 200 in
the long one. With CUDA it runs once; what needs the host runtime is deselected then, and nothing is skipped."""

import gc
import importlib.util

import pytest

import strata_copy as sc
from fixtures import HOST, KIND, Held, Memory, Scene, pageable
from looked_at import LookedAt
from loops import build
from strata_copy import host_runtime, runtime

SHORT_SEEDS, LONG_SEEDS = 20, 200

# They say nothing of a GPU, and a machine with one and no network may lack what they need.
collect_ignore = (
    ["host_runtime/test_host_copies.py", "test_layout.py", "test_extents.py", "test_any_layout.py"]
    if importlib.util.find_spec("hypothesis") is None
    else []
)


def pytest_addoption(parser, pluginmanager):
    if not pluginmanager.has_plugin("timeout"):  # a machine with a GPU and no network may lack pytest-timeout
        parser.addini("timeout", "seconds after which pytest-timeout ends a test")
    parser.addoption("--no-skips", action="store_true", help="a skipped test fails the run")


def pytest_configure(config):
    if not config.pluginmanager.has_plugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout")
    config.pluginmanager.register(LookedAt(config))


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        seeds = [
            *range(SHORT_SEEDS),
            *(pytest.param(s, marks=pytest.mark.long) for s in range(SHORT_SEEDS, LONG_SEEDS)),
        ]
        metafunc.parametrize("seed", seeds if HOST else [0])


def pytest_collection_modifyitems(config, items):
    def fits(item):
        if HOST:
            return not item.get_closest_marker("gpu")
        if "second_device" in item.fixturenames and runtime.device_count() < 2:
            return False
        return not item.get_closest_marker("host")

    if not HOST:
        runtime.open(KIND)
    kept = [item for item in items if fits(item)]
    config.hook.pytest_deselected(items=[item for item in items if not fits(item)])
    items[:] = kept


def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--no-skips") and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def start_anew(seed=None):
    """The host runtime as new; of the CUDA runtime only the device that the tests expect."""
    if HOST:
        host_runtime.configure(devices=2, seed=seed)
    else:
        runtime.set_device(0)


def close_copiers():
    """Closes what a test left open, and says whether there was something."""
    try:
        sc.Copier(tickets=1, layer_events=1).close()
    except sc.CopyError:
        return False  # a dead device
    except RuntimeError:
        for left in [thing for thing in gc.get_objects() if isinstance(thing, sc.Copier)]:
            left.close()
        return True
    return False


@pytest.fixture(scope="session", autouse=True)
def opened_runtime():
    runtime.open(KIND)


@pytest.fixture(autouse=True)
def nothing_left_behind(request, opened_runtime):
    """Each test starts on a runtime as new, and ends without a violation of CUDA's contracts and without an open
    copier."""
    names = request.fixturenames
    start_anew(request.getfixturevalue("seed") if "seed" in names else 0 if "held" in names else None)
    if HOST and "seed" in names:
        request.node.user_properties.append(("seed", request.getfixturevalue("seed")))
    yield
    violations = host_runtime.violations() if HOST else []
    pending = runtime.peek_last_error() if not HOST else 0
    left_open = close_copiers()
    start_anew()
    pageable.clear()  # as the host runtime drops what is its own
    assert violations == []
    assert pending == 0
    assert not left_open, "the test left a copier open"


@pytest.fixture
def fault_pairs(request):
    """Takes the calls that a test has made to fail, each with each code, for the run to count: tuples of operation,
    route, function, number of the call, code."""
    return lambda tried: request.node.user_properties.append(("fault pairs", list(tried)))


@pytest.fixture
def figure(request):
    """Takes a line that the run prints at its end, of what the test has counted."""
    return lambda line: request.node.user_properties.append(("figure", line))


@pytest.fixture
def memory():
    """Makes a Memory; all of them are freed after the test."""
    made = []

    def make(layout, tag, *args, **kwargs):
        made.append(Memory(layout, tag, *args, **kwargs))
        return made[-1]

    yield make
    if not HOST:  # the host runtime drops everything by itself
        for one in made:
            one.free()


@pytest.fixture
def copier():
    """A copier of device 0, small enough to be made for each test."""
    with sc.Copier(tickets=8, layer_events=24) as opened:
        yield opened


@pytest.fixture
def scene(copier, memory):
    return Scene(copier, memory)


@pytest.fixture
def held():
    """What a submit can wait for so that nothing of it is done before `open`. The host runtime is in scheduled mode."""
    made = Held()
    yield made
    made.free()


@pytest.fixture
def cells(request):
    """Notes a cell of the engine loop's table, which the summary lists: what it is, the way, the length."""

    return lambda *cell: request.node.user_properties.append(("engine cell", cell))


@pytest.fixture(scope="session")
def package(tmp_path_factory):
    """The engine loop of examples/, built once."""
    return build(tmp_path_factory.mktemp("engine_loop"))


@pytest.fixture
def second_device():
    return 1
