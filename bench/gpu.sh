#!/bin/sh
# The benchmarks for real, on a machine with a GPU: about ten minutes. Called by `make gpu`, which has built strata_copy in place.
# STRATA_COPY_COMMIT names what is measured, PYTHON the interpreter; arguments go to run.py.
set -eu
here=$(dirname "$0")
python=${PYTHON:-python3}
export STRATA_COPY_RUNTIME=cuda
PYTHONPATH="$(cd "$here/../src" && pwd)${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
"$python" "$here/setup.py" -q build_ext --inplace -j "$(nproc)"
exec "$python" "$here/run.py" "$@"
