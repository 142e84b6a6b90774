"""A small inference engine without weights: what it does with the state of its conversations, and nothing else.

Sessions have the real geometry, in one stage or several; rows are made up by the loop. It moves them between its main
session and its batch slots in two ways, the one that engines have today and strata_copy's: `Engine.direct` says which.
"""

from engine_loop.engine import Copied, Engine
from engine_loop.geometry import FORMATS, Geometry, layout
from engine_loop.session import Checkpoint, Failed, Refused, Session, Stage

__all__ = [
    "FORMATS",
    "Checkpoint",
    "Copied",
    "Engine",
    "Failed",
    "Geometry",
    "Refused",
    "Session",
    "Stage",
    "layout",
]
