"""Where the headers of CUDA 13 are: for setup.py and bench/setup.py."""

import importlib.util
import os
import re
import sys
from pathlib import Path

CUDA_MAJOR = 13


def cuda_version(include: Path) -> int:
    """The CUDART_VERSION of the headers in `include`, or 0 where they are missing or incomplete."""
    header = include / "cuda_runtime_api.h"
    if not header.is_file() or not (include / "crt" / "host_defines.h").is_file():
        return 0
    found = re.search(r"#define CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"))
    return int(found.group(1)) if found else 0


def cuda_include() -> Path:
    """CUDA_HOME where its headers are of CUDA 13, else of nvidia-cuda-runtime and nvidia-cuda-crt."""
    tried = []
    homes = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    places = [home / "include" for home in homes]
    package = importlib.util.find_spec("nvidia")
    if package is not None:
        places += [Path(p) / f"cu{CUDA_MAJOR}" / "include" for p in package.submodule_search_locations or []]
    places.append(Path("/usr/local/cuda/include"))
    for include in places:
        version = cuda_version(include)
        if version // 1000 == CUDA_MAJOR:
            for line in tried:
                print(f"strata_copy: passed over {line}", file=sys.stderr)
            print(f"strata_copy: CUDA headers {version // 1000}.{version % 1000 // 10} from {include}", file=sys.stderr)
            return include
        what = f"are of CUDA {version // 1000}.{version % 1000 // 10}" if version else "are missing or incomplete"
        tried.append(f"{include}: its headers {what}, {CUDA_MAJOR}.x are needed")
    raise SystemExit(
        "strata_copy needs the headers of CUDA 13: install nvidia-cuda-runtime and nvidia-cuda-crt (13.x) "
        "or set CUDA_HOME.\n  " + "\n  ".join(tried)
    )
