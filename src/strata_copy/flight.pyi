"""A room behind the face: only C functions, declared in the .pxd beside it."""
