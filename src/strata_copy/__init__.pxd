"""`cimport strata_copy as sc`: sc.Request, sc.submit, sc.OK... Compile with include_dirs=[strata_copy.get_include()]."""

from strata_copy.abi cimport *
from strata_copy._core cimport (
    advanced, cancel, copier_of, dirty, finished, generation, image_blob, image_publish, image_reserve, plan_of, poll, release, reset,
    rewindable, rewound, state_of, submit, sync, wait_done, wait_layer, wait_source,
)
