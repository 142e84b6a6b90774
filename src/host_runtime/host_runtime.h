/* The CUDA runtime over host memory, for tests and demos on a machine without a GPU. It works as late as CUDA allows and
 * checks what CUDA leaves undefined; control.hpp sets it up and reads what it found. */
#ifndef STRATA_HOST_RUNTIME_H
#define STRATA_HOST_RUNTIME_H

#include "table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* All functions of the table, never missing. The table lives as long as the process. */
const strata_cudart *host_runtime_table(void);

#ifdef __cplusplus
}
#endif
#endif
