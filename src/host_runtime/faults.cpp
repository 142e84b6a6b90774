#include "faults.hpp"

namespace host_runtime {

namespace {

bool sticky(cudaError_t code) {
    switch (code) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
        return true;
    default:
        return false;
    }
}

}  // namespace

void Faults::fail(Function function, uint64_t at, cudaError_t code, bool forever) {
    armed_.push_back({function, at, code, forever});
}

uint64_t Faults::clear() {
    const uint64_t fired = fired_;
    armed_.clear();
    copies_until_corruption_ = copies_until_delay_ = 0;
    fired_ = 0;
    return fired;
}

std::optional<cudaError_t> Faults::next(Function function, uint64_t call) {
    for (const Fault &fault : armed_) {
        if (fault.function != function || (fault.forever ? call < fault.at : call != fault.at)) continue;
        ++fired_;
        if (dead_ == cudaSuccess && sticky(fault.code)) dead_ = fault.code;
        return fault.code;
    }
    return std::nullopt;
}

bool Faults::fires(uint64_t &countdown) {
    if (countdown == 0 || --countdown > 0) return false;
    ++fired_;
    return true;
}

}  // namespace host_runtime
