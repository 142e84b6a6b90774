"""`cimport strata_copy as sc`: sc.Request, sc.submit, sc.OK... Compile with include_dirs=[strata_copy.get_include()]."""

from strata_copy.abi cimport *
from strata_copy._core cimport (
    cancel, copier_of, finished, generation, plan_of, poll, release, reset, state_of, submit, sync, wait_done, wait_layer, wait_source,
)
