// The simulated accelerator: a device whose memory is the host's, and whose operations run on the CPU at once.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

namespace simulated {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

c10::Allocator* device_allocator();
at::Tensor host(const at::Tensor& tensor);  // A tensor of the CPU with the same memory as one of the device.
at::Generator& generator();
void register_hooks();

}  // namespace simulated
