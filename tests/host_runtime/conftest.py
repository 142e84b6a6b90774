"""The host runtime is the referee of the other tests: each test here makes it catch, delay or refuse one thing."""

import pytest

from host_table import Gate
from strata_copy import host_runtime as host


@pytest.fixture(autouse=True)
def runtime():
    host.configure()
    yield
    while Gate.closed:
        Gate.closed.pop().open()
    found = host.violations()
    host.configure()
    assert found == []
