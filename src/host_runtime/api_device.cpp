// Versions, errors and devices.
#include "api.hpp"
#include "runtime.hpp"

#include <cstdio>
#include <cstring>

namespace host_runtime::api {

namespace {

struct ErrorText {
    cudaError_t code;
    const char *name;
    const char *text;
};

constexpr ErrorText kErrors[] = {
#define STRATA_ERROR(code, text) {code, #code, text},
    STRATA_ERROR(cudaSuccess, "no error")
    STRATA_ERROR(cudaErrorInvalidValue, "invalid argument")
    STRATA_ERROR(cudaErrorMemoryAllocation, "out of memory")
    STRATA_ERROR(cudaErrorInitializationError, "initialization error")
    STRATA_ERROR(cudaErrorCudartUnloading, "driver shutting down")
    STRATA_ERROR(cudaErrorInvalidPitchValue, "invalid pitch argument")
    STRATA_ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy")
    STRATA_ERROR(cudaErrorStubLibrary, "CUDA driver is a stub library")
    STRATA_ERROR(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version")
    STRATA_ERROR(cudaErrorCallRequiresNewerDriver, "API call is not supported in the installed CUDA driver")
    STRATA_ERROR(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable")
    STRATA_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected")
    STRATA_ERROR(cudaErrorInvalidDevice, "invalid device ordinal")
    STRATA_ERROR(cudaErrorDeviceUninitialized, "invalid device context")
    STRATA_ERROR(cudaErrorAlreadyMapped, "resource already mapped")
    STRATA_ERROR(cudaErrorECCUncorrectable, "uncorrectable ECC error encountered")
    STRATA_ERROR(cudaErrorNvlinkUncorrectable, "uncorrectable NVLink error detected during the execution")
    STRATA_ERROR(cudaErrorContained, "contained memory error")
    STRATA_ERROR(cudaErrorOperatingSystem, "OS call failed or operation not supported on this OS")
    STRATA_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle")
    STRATA_ERROR(cudaErrorPeerAccessUnsupported, "peer access is not supported between these two devices")
    STRATA_ERROR(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled")
    STRATA_ERROR(cudaErrorPeerAccessNotEnabled, "peer access has not been enabled")
    STRATA_ERROR(cudaErrorTooManyPeers, "peer mapping resources exhausted")
    STRATA_ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state")
    STRATA_ERROR(cudaErrorNotReady, "device not ready")
    STRATA_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered")
    STRATA_ERROR(cudaErrorLaunchTimeout, "the launch timed out and was terminated")
    STRATA_ERROR(cudaErrorContextIsDestroyed, "context is destroyed")
    STRATA_ERROR(cudaErrorAssert, "device-side assert triggered")
    STRATA_ERROR(cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped")
    STRATA_ERROR(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region")
    STRATA_ERROR(cudaErrorHardwareStackError, "hardware stack error")
    STRATA_ERROR(cudaErrorIllegalInstruction, "an illegal instruction was encountered")
    STRATA_ERROR(cudaErrorMisalignedAddress, "misaligned address")
    STRATA_ERROR(cudaErrorInvalidAddressSpace, "operation not supported on global/shared address space")
    STRATA_ERROR(cudaErrorInvalidPc, "invalid program counter")
    STRATA_ERROR(cudaErrorLaunchFailure, "unspecified launch failure")
    STRATA_ERROR(cudaErrorTensorMemoryLeak, "tensor memory not completely freed")
    STRATA_ERROR(cudaErrorNotPermitted, "operation not permitted")
    STRATA_ERROR(cudaErrorNotSupported, "operation not supported")
    STRATA_ERROR(cudaErrorSystemNotReady, "system not yet initialized")
    STRATA_ERROR(cudaErrorSystemDriverMismatch, "system has unsupported display driver / cuda driver combination")
    STRATA_ERROR(cudaErrorCompatNotSupportedOnDevice, "forward compatibility was attempted on non supported HW")
    STRATA_ERROR(cudaErrorMpsClientTerminated, "MPS client has been terminated by the server")
    STRATA_ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")
    STRATA_ERROR(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture")
    STRATA_ERROR(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream")
    STRATA_ERROR(cudaErrorStreamCaptureImplicit, "operation would make the legacy stream depend on a capturing blocking stream")
    STRATA_ERROR(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream")
    STRATA_ERROR(cudaErrorStreamCaptureWrongThread, "attempt to terminate a thread-local capture sequence from another thread")
    STRATA_ERROR(cudaErrorExternalDevice, "an asynchronous error occurred on a device outside of CUDA")
    STRATA_ERROR(cudaErrorUnknown, "unknown error")
#undef STRATA_ERROR
};

const ErrorText &describe(cudaError_t code) {
    static constexpr ErrorText unknown{cudaErrorUnknown, "unrecognized error code", "unrecognized error code"};
    for (const ErrorText &error : kErrors)
        if (error.code == code) return error;
    return unknown;
}

void count(Function function) {
    Runtime &runtime = Runtime::instance();
    if (runtime.forked) return;
    const Lock lock(runtime.mutex);
    runtime.state->record.count(function);
}

cudaError_t version(Function function, int *out) {
    return Runtime::instance().call(function, kPlain, [&](State &, ThreadState &, Lock &) {
        if (!out) return cudaErrorInvalidValue;
        *out = CUDART_VERSION / 1000 * 1000;
        return cudaSuccess;
    });
}

bool is_device(const State &state, int device) { return device >= 0 && device < state.devices; }

}  // namespace

cudaError_t cudaRuntimeGetVersion(int *out) { return version(Function::cudaRuntimeGetVersion, out); }

cudaError_t cudaDriverGetVersion(int *out) { return version(Function::cudaDriverGetVersion, out); }

const char *cudaGetErrorName(cudaError_t code) {
    count(Function::cudaGetErrorName);
    return describe(code).name;
}

const char *cudaGetErrorString(cudaError_t code) {
    count(Function::cudaGetErrorString);
    return describe(code).text;
}

cudaError_t cudaGetLastError() { return Runtime::instance().last_error(Function::cudaGetLastError, true); }

cudaError_t cudaPeekAtLastError() { return Runtime::instance().last_error(Function::cudaPeekAtLastError, false); }

cudaError_t cudaGetDeviceCount(int *count) {
    return Runtime::instance().call(Function::cudaGetDeviceCount, kPlain, [&](State &state, ThreadState &, Lock &) {
        if (!count) return cudaErrorInvalidValue;
        *count = state.devices;
        return cudaSuccess;
    });
}

cudaError_t cudaGetDevice(int *device) {
    return Runtime::instance().call(Function::cudaGetDevice, kPlain, [&](State &, ThreadState &thread, Lock &) {
        if (!device) return cudaErrorInvalidValue;
        *device = thread.device;
        return cudaSuccess;
    });
}

cudaError_t cudaSetDevice(int device) {
    return Runtime::instance().call(Function::cudaSetDevice, kNeedsContext, [&](State &state, ThreadState &thread, Lock &) {
        if (!is_device(state, device)) return cudaErrorInvalidDevice;
        thread.device = device;
        state.contexts[static_cast<size_t>(device)] = true;
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    return Runtime::instance().call(Function::cudaDeviceGetAttribute, kPlain, [&](State &state, ThreadState &, Lock &) {
        if (!value) return cudaErrorInvalidValue;
        if (!is_device(state, device)) return cudaErrorInvalidDevice;
        switch (attribute) {
        case cudaDevAttrMaxPitch:
            *value = kMaxPitch;
            return cudaSuccess;
        case cudaDevAttrAsyncEngineCount:
            *value = 3;
            return cudaSuccess;
        case cudaDevAttrUnifiedAddressing:
        case cudaDevAttrCanUseHostPointerForRegisteredMem:
        case cudaDevAttrHostRegisterSupported:
            *value = 1;
            return cudaSuccess;
        case cudaDevAttrPageableMemoryAccess:
        case cudaDevAttrPageableMemoryAccessUsesHostPageTables:
        case cudaDevAttrHostRegisterReadOnlySupported:
            *value = 0;
            return cudaSuccess;
        default:
            return cudaErrorInvalidValue;
        }
    });
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    return Runtime::instance().call(Function::cudaDeviceGetPCIBusId, kPlain, [&](State &state, ThreadState &, Lock &) {
        if (!text || size <= 0) return cudaErrorInvalidValue;
        if (!is_device(state, device)) return cudaErrorInvalidDevice;
        const int length = std::snprintf(text, static_cast<size_t>(size), "host:%d", device);
        return length < size ? cudaSuccess : cudaErrorInvalidValue;
    });
}

cudaError_t device_properties(void *properties, int device) {
    return Runtime::instance().call(Function::device_properties, kPlain, [&](State &state, ThreadState &, Lock &) {
        constexpr size_t name_bytes = 256;
        if (!properties) return cudaErrorInvalidValue;
        if (!is_device(state, device)) return cudaErrorInvalidDevice;
        std::memset(properties, 0, STRATA_DEVICE_PROPERTIES_BYTES);
        std::snprintf(static_cast<char *>(properties), name_bytes, "Host runtime device %d", device);
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceSynchronize() {
    constexpr Function self = Function::cudaDeviceSynchronize;
    return Runtime::instance().call(self, kUnsafeInCapture, [&](State &state, ThreadState &thread, Lock &lock) {
        const Clock known = state.engine.known_behind_device(thread.device);
        const cudaError_t error = state.engine.wait_for_device(lock, self, thread.device);
        if (error == cudaSuccess) state.races.learn(thread, known);
        return error;
    });
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    return Runtime::instance().call(Function::cudaDeviceCanAccessPeer, kPlain, [&](State &state, ThreadState &, Lock &) {
        if (!can) return cudaErrorInvalidValue;
        if (!is_device(state, device) || !is_device(state, peer)) return cudaErrorInvalidDevice;
        *can = state.peers.can_reach(device, peer);
        return cudaSuccess;
    });
}

// For the current device, one way only.
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    constexpr Function self = Function::cudaDeviceEnablePeerAccess;
    return Runtime::instance().call(self, kUnsafeInCapture, [&](State &state, ThreadState &thread, Lock &) {
        if (flags != 0) return cudaErrorInvalidValue;
        if (!is_device(state, peer) || !state.peers.can_reach(thread.device, peer)) return cudaErrorInvalidDevice;
        if (state.peers.enabled(thread.device, peer)) return cudaErrorPeerAccessAlreadyEnabled;
        state.peers.enable(thread.device, peer, true);
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
    constexpr Function self = Function::cudaDeviceDisablePeerAccess;
    return Runtime::instance().call(self, kUnsafeInCapture, [&](State &state, ThreadState &thread, Lock &) {
        if (!is_device(state, peer)) return cudaErrorInvalidDevice;
        if (!state.peers.enabled(thread.device, peer)) return cudaErrorPeerAccessNotEnabled;
        state.peers.enable(thread.device, peer, false);
        return cudaSuccess;
    });
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    return Runtime::instance().call(Function::cudaMemGetInfo, kNeedsContext, [&](State &state, ThreadState &thread, Lock &) {
        if (!available || !total) return cudaErrorInvalidValue;
        *total = state.memory.device_limit();
        *available = *total - state.memory.used(thread.device);
        return cudaSuccess;
    });
}

}  // namespace host_runtime::api
