"""strata_copy moves a conversation's state between sessions, batch slots and pinned memory at the speed of the
hardware.

Copier, State, Plan and Ticket are the way of a copy; Layout, Part, Growth, Patch and Place say what moves and where
it is.
"""

from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

from strata_copy._core import Copier
from strata_copy.arena import Arena
from strata_copy.cudart import RuntimeUnavailable
from strata_copy.errors import Cancelled, CopyError, Failed, Poisoned, Refused
from strata_copy.face_image import Image
from strata_copy.face_plan import Plan
from strata_copy.face_pool import Pool
from strata_copy.face_state import State
from strata_copy.face_ticket import Progress, Ticket
from strata_copy.layout import Layout
from strata_copy.parts import Growth, Part, Patch
from strata_copy.places import CALLER_SYNCED, Event, Place, Stream

__all__ = [
    "CALLER_SYNCED",
    "Arena",
    "Cancelled",
    "Copier",
    "CopyError",
    "Event",
    "Failed",
    "Growth",
    "Image",
    "Layout",
    "Part",
    "Patch",
    "Place",
    "Plan",
    "Poisoned",
    "Pool",
    "Progress",
    "Refused",
    "RuntimeUnavailable",
    "State",
    "Stream",
    "Ticket",
    "get_include",
]

try:
    __version__ = version("strata_copy")
except PackageNotFoundError:  # built in place, not installed
    __version__ = "0+unknown"


def get_include() -> str:
    """The folder with strata_copy.h, for include_dirs of a module that cimports strata_copy or includes the header."""
    package = Path(str(files("strata_copy")))
    for folder in (package / "include", package.parents[1] / "include"):
        if (folder / "strata_copy.h").is_file():
            return str(folder)
    raise FileNotFoundError(f"strata_copy.h is missing from the installation in {package}")
