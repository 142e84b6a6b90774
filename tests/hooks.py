"""Hooks for submit that are Python functions: they take the GIL, which a hook for production does not."""

import ctypes

from strata_copy import runtime

SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)


def address(function):
    return ctypes.cast(function, ctypes.c_void_p).value


class Hook:
    """`how` is for submit. It notes each (layer, device), and what it raised; `act(layer, device, stream)` does the
    rest, and what it returns the hook returns."""

    def __init__(self, act=None, argument=0):
        self.act, self.argument, self.calls, self.errors = act, argument, [], []
        self.function = SIGNATURE(self.called)
        self.how = {"hook": address(self.function), "hook_arg": argument}

    def called(self, argument, layer, device, stream):
        self.calls.append((layer, device))
        try:
            assert (argument or 0) == self.argument
            assert runtime.get_device() == device
            return (self.act(layer, device, stream) if self.act is not None else 0) or 0
        except BaseException as error:
            self.errors.append(error)
            return 99

    def layers_of(self, device):
        return [layer for layer, of in self.calls if of == device]
