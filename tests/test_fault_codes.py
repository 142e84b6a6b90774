"""The codes that the fault sweep tries are those that CUDA's own headers document, and some more."""

import importlib.util
import re
from pathlib import Path

import pytest

from fault_codes import ANSWERS, CODES, OWN, STICKY, UNPREPARED

pytestmark = pytest.mark.host

DRIVERS = ("event_captured",)  # not of the runtime's header
# The manual's own slips.
MISSPELT = {"cudaErrorDeviceUnavailable": "cudaErrorDevicesUnavailable"}
# What the manual's standing notes say of a function.
NOTES = {"notefnerr": STICKY, "note_init_rt": UNPREPARED[:3], "note_callback": UNPREPARED[3:]}


@pytest.fixture(scope="module")
def include():
    spec = importlib.util.spec_from_file_location("cuda_headers", Path(__file__).parents[1] / "cuda_headers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.cuda_include()


@pytest.fixture(scope="module")
def errors(include):
    """Of each name of cudaError its number and what is said of it."""
    text = (include / "driver_types.h").read_text(errors="replace")
    text = text[text.index("enum __device_builtin__ cudaError") :].partition("};")[0]
    found = re.findall(r"/\*\*(.*?)\*/\s*(cuda\w+)\s*=\s*(\d+)", text, re.DOTALL)
    return {name: (int(number), " ".join(said.replace("*", " ").split())) for said, name, number in found}


@pytest.mark.parametrize("function", [function for function in OWN if function not in DRIVERS])
def test_every_documented_code_of_a_function_is_tried(include, errors, function):
    text = (include / "cuda_runtime_api.h").read_text(errors="replace")
    declared = re.search(rf"\sCUDARTAPI\s+{function}\s*\(", text).start()
    manual = text[text.rindex("/**", 0, declared) : declared]
    names = re.findall(r"::(cuda\w+)", re.search(r"\\return(.*?)\\note", manual, re.DOTALL).group(1))
    documented = {errors[MISSPELT.get(name, name)][0] for name in names} - {0}
    for note, codes in NOTES.items():
        if rf"\{note}" in manual:
            documented.update(codes)
    assert len(documented) > 1
    assert documented <= {*CODES[function], *ANSWERS.get(function, ())}


def test_what_the_header_says_ends_the_process_is_sticky(errors):
    ends = {number for number, said in errors.values() if "must be terminated and relaunched" in said}
    assert len(ends) > 8
    assert ends <= set(STICKY)
