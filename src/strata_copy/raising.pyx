"""From a filled strata_error to a Python exception."""

from strata_copy.errors import BY_STATUS, REASONS


cdef int raise_error(const Error *error) except -1:
    text = error.text.decode(errors="replace")
    raise BY_STATUS[error.status](text, {
        "reason": REASONS[error.reason],
        "device": error.device,
        "layer": error.layer,
        "part": error.part,
        "cuda_code": error.cuda_code,
        "call": error.call.decode(errors="replace"),
        "pending_before": error.pending_before,
        "restored": bool(error.restored),
        "wanted": error.wanted,
        "found": error.found,
    })


cdef object as_exception(const Error *error):
    try:
        raise_error(error)
    except Exception as failure:
        return failure
