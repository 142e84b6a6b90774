"""A room behind the face: C functions, declared in the .pxd beside it."""

PATIENCE: float
