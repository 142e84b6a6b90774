"""Images as Python has them."""

from strata_copy.face_state cimport State
from strata_copy.images cimport ImageData
from strata_copy.pool cimport PoolData


cdef class Image(State):
    cdef PoolData *pool         # that it belongs to, or NULL
    cdef object __weakref__


# TypeError for None, and for one whose __init__ did not run.
cdef ImageData *image_data(Image image) except NULL
