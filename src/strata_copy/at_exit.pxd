"""The end of the interpreter: no copier opens any more, and copies in flight end before the memory is taken apart that they copy."""

cdef bint interpreter_ends() noexcept
