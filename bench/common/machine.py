"""What a result was measured on."""

import os
import subprocess
from datetime import date
from pathlib import Path

from strata_copy import runtime

ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict:
    """Date, device, driver, runtime, commit and host."""
    opened = runtime.describe()
    return {
        "date": date.today().isoformat(),
        "device": runtime.device_name(0),
        "driver": (driver() if opened["kind"] == "cuda" else None) or opened["driver"],
        "runtime": f"{opened['kind']} {opened['runtime']}",
        "commit": commit(),
        "host": {"cpu": cpu(), "cores": len(os.sched_getaffinity(0))},
    }


def driver() -> str | None:
    """The version of the kernel module, which says more than the CUDA version that it is for."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    return next((word for word in first.split() if word[:1].isdigit() and "." in word), None)


def commit() -> str:
    """STRATA_COPY_COMMIT, for a tree that is no repository; else what git says, with a mark for a changed tree."""
    if os.environ.get("STRATA_COPY_COMMIT"):
        return os.environ["STRATA_COPY_COMMIT"]
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
