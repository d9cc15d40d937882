// Operations: views, copies, and a fallback that runs all others on the CPU on the same memory.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>
#include <cstring>
#include <unordered_set>
#include "clocks.h"
#include "device.h"

namespace simulated {

static const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1), kHostKeys(c10::DispatchKey::CPU);

static at::Tensor view_of(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}
at::Tensor host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kType) return tensor;
  const c10::Storage& storage = tensor.storage();
  c10::DataPtr data(storage.mutable_data(), c10::Device(c10::DeviceType::CPU));
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  at::Tensor made = view_of(std::move(same), kHostKeys, tensor);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}
static void free_storage(void* context) {
  auto* storage = (c10::Storage*)context;
  freed(storage->mutable_data());
  delete storage;
}
static at::Tensor device_tensor(const at::Tensor& made) {  // Moves a new tensor of the CPU to the device.
  auto* kept = new c10::Storage(made.storage());
  void* data = kept->mutable_data();
  allocated(data, kept->nbytes(), false);
  c10::DataPtr pointer(data, kept, &free_storage, c10::Device(kType, 0));
  c10::Storage storage(c10::Storage::use_byte_size_t(), kept->nbytes(), std::move(pointer), device_allocator(), true);
  return view_of(std::move(storage), kKeys, made);
}
static Range range(const at::Tensor& tensor) {
  if (!tensor.numel()) return {nullptr, 0};
  size_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {tensor.const_data_ptr(), (last + 1) * tensor.element_size()};
}
static bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

static at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                        std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}
static at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                                std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

static at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  static const std::string* what = interned("copy");
  bool up = !on_device(from), down = !on_device(to);
  int stream = current_stream();
  const at::Tensor& outside = up ? from : to;
  bool pinned = (up || down) && outside.numel() && is_pinned(outside.storage().data());
  std::vector<Range> reads, writes;
  if (!up || pinned) reads.push_back(range(from));
  if (!down || pinned) writes.push_back(range(to));
  kernel(stream, what, reads, writes);
  Range of_host = range(outside);
  if (pinned) before_copy(of_host.data, of_host.size);
  host(to).copy_(host(from));
  if (pinned)
    after_copy(of_host.data, of_host.size, down, stream, non_blocking && outside.is_non_overlapping_and_dense(),
               outside.element_size(), outside.is_floating_point());
  if ((up || down) && !(non_blocking && pinned))
    synchronize_stream(stream, up ? (non_blocking ? "host to device, pageable" : "host to device")
                                  : (non_blocking ? "device to host, pageable" : "device to host"));
  return to;
}
static at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) const_cast<at::Tensor&>(to).resize_(from.sizes());
  return copy_from(from, to, false);
}
static at::Scalar scalar(const at::Tensor& tensor) {
  kernel(current_stream(), interned("item"), {range(tensor)}, {});
  synchronize_stream(current_stream(), "device to host");
  return host(tensor).item();
}
static at::Tensor histogram(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  at::Tensor values = host(self);  // The CPU has no histograms of integers, other than GPUs.
  if (!values.is_floating_point()) values = values.to(at::kDouble);
  at::Tensor result = device_tensor(at::histc(values, bins, low, high).to(self.scalar_type()));
  kernel(current_stream(), interned("histc"), {range(self)}, {range(result)});
  return result;
}
static void mark_stream(at::Tensor& tensor, c10::Stream stream) {
  if (tensor.storage().nbytes()) record_stream(tensor.storage().data(), stream.id());
}

// Operations whose number of results the host must know.
static const std::unordered_set<std::string> synchronizing = {
    "aten::nonzero", "aten::bincount", "aten::equal",      "aten::masked_select",      "aten::is_nonzero",
    "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive"};
// Operations that accept indices of the CPU.
static const std::unordered_set<std::string> indexing = {"aten::index", "aten::_index_put_impl_", "aten::index_put"};

static bool is_mask(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
}
static bool synchronizes(const std::string& name, const std::vector<c10::IValue>& arguments) {
  if (synchronizing.count(name)) return true;
  if (name == "aten::repeat_interleave") return arguments.back().isNone();
  if (name != "aten::_index_put_impl_" && name != "aten::index_put") return false;  // Indexing calls nonzero itself.
  if (arguments[2].isTensor() && arguments[2].toTensor().numel() == 1) return false;
  for (const auto& index : arguments[1].toOptionalTensorVector())
    if (index && is_mask(*index)) return true;
  return false;
}

// Replaces each tensor in a value.
template <typename Function>
static c10::IValue mapped(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(function(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? function(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(function(*tensor)) : tensor);
    return list;
  }
  return value;
}

static void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const std::string* what = interned(name);
  size_t number = schema.arguments().size();
  std::vector<c10::IValue> arguments(stack->end() - number, stack->end());
  torch::jit::drop(*stack, number);
  std::vector<Range> reads, writes;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // Tensors of the device, and those of the CPU in their place.
  bool indices_of_host = false;
  for (size_t i = 0; i < number; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    bool is_written = alias && alias->isWrite();
    if (arguments[i].isDevice()) {
      stack->push_back(c10::Device(c10::DeviceType::CPU));
    } else if (arguments[i].isNone() && schema.arguments()[i].name() == "generator") {
      stack->push_back(generator());
    } else {
      stack->push_back(mapped(arguments[i], [&](const at::Tensor& tensor) {
        if (!on_device(tensor)) {
          bool is_index = i == 1 && indexing.count(name);
          indices_of_host |= is_index;
          TORCH_CHECK(tensor.dim() == 0 || is_index, name, ": Expected all tensors to be on the same device, but found at "
                      "least two devices, ", c10::Device(kType, 0), " and ", tensor.device(), "!");
          return tensor;
        }
        (is_written ? writes : reads).push_back(range(tensor));
        pairs.emplace_back(tensor, host(tensor));
        return pairs.back().second;
      }));
    }
  }
  op.redispatchBoxed(kHostKeys, stack);
  std::vector<Range> made;
  size_t results = schema.returns().size();
  for (auto value = stack->end() - results; value != stack->end(); ++value) {
    *value = mapped(*value, [&](const at::Tensor& result) {
      for (auto& [own, other] : pairs) {
        if (other.is_same(result)) return own;
        if (other.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl())
          return view_of(own.storage(), kKeys, result);
      }
      at::Tensor moved = device_tensor(result);
      writes.push_back(range(moved));
      return moved;
    });
  }
  for (auto& [own, other] : pairs)  // Operations with ``out`` may have resized it.
    if (own.sizes() != other.sizes() || own.strides() != other.strides()) {
      at::Tensor& mine = const_cast<at::Tensor&>(own);
      at::native::resize_(mine, other.sizes(), std::nullopt);
      writes.push_back(range(mine));
      host(mine).copy_(other);
    }
  kernel(current_stream(), what, reads, writes);
  if (indices_of_host) synchronize_stream(current_stream(), "host to device");
  if (synchronizes(name, arguments)) synchronize_stream(current_stream(), what->c_str());
}

static at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                              c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
                              bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  std::optional<at::Tensor> of_host = bias ? std::optional<at::Tensor>(host(*bias)) : std::nullopt;
  at::Tensor result = device_tensor(at::convolution(host(input), host(weight), of_host, stride, padding, dilation,
                                                    transposed, output_padding, groups));
  std::vector<Range> reads{range(input), range(weight)};
  if (bias && bias->defined()) reads.push_back(range(*bias));
  kernel(current_stream(), interned("convolution"), reads, {range(result)});
  return result;
}
static std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  std::vector<int64_t> bias_size{gradient.size(1)};
  auto [a, b, c] =
      at::convolution_backward(host(gradient), host(input), host(weight), c10::OptionalIntArrayRef(bias_size), stride,
                               padding, dilation, transposed, output_padding, groups, mask);
  std::vector<Range> writes;
  for (at::Tensor* result : {&a, &b, &c})
    if (result->defined()) {
      *result = device_tensor(*result);
      writes.push_back(range(*result));
    }
  kernel(current_stream(), interned("convolution_backward"), {range(gradient), range(input), range(weight)}, writes);
  return {a, b, c};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &scalar);
  m.impl("record_stream", &mark_stream);
  // Where this has no kernel, torch reads the sizes of the groups on the host.
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("histc", &histogram);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_", TORCH_FN(at::native::set_cpu_));
}

}  // namespace simulated
