/* Fills a strata_error. One line at each place where a call of this library ends badly. */
#ifndef STRATA_OUTCOME_H
#define STRATA_OUTCOME_H

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "strata_copy.h"

static inline void strata_error_clear(strata_error *error) {
    memset(error, 0, sizeof *error);
    error->device = error->layer = error->part = -1;
    error->restored = 1;
}

/* Sets the outcome and its text; returns the status, so that `return strata_outcome(...)` reads as what it does. Fields that
 * were set before (device, layer, part, wanted, found, the CUDA call) stay. */
__attribute__((format(printf, 4, 5)))
static inline int strata_outcome(strata_error *error, int status, int reason, const char *format, ...) {
    va_list arguments;
    error->status = status;
    error->reason = reason;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return status;
}

#endif
