// The functions that Python calls.
#include <torch/csrc/utils/pybind.h>
#include <pybind11/stl.h>
#include "clocks.h"
#include "device.h"

static std::vector<simulated::Range> ranges(const std::vector<at::Tensor>& tensors) {
  std::vector<simulated::Range> result;
  for (const auto& tensor : tensors)
    if (tensor.numel()) result.push_back({tensor.const_data_ptr(), tensor.numel() * tensor.element_size()});
  return result;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulated;
  m.def("start", &register_hooks);
  m.def("set_roots", &set_roots);
  m.def("host", &host);
  m.def("generator", [] { return generator(); });
  m.def("set_patience", &set_patience);
  m.def("enable_counts", &enable_counts);
  m.def("counts", &counts);
  m.def("count", [](const std::string& what) { count(interned(what)->c_str()); });
  m.def("enable_races", &enable_races);
  m.def("take_reports", &take_reports);
  m.def("reset", &reset);
  m.def("memory", [] { return std::make_tuple(memory().allocated, memory().peak, memory().total); });
  m.def("reset_peak", [] { memory().peak = memory().allocated; });
  m.def("set_total", [](size_t size) { memory().total = size; });
  m.def("begin_collective", [](const std::string& group, const std::vector<at::Tensor>& inputs,
                               const std::vector<at::Tensor>& outputs) {
    return begin_collective(group, ranges(inputs), ranges(outputs));
  });
  m.def("wait_collective", &wait_collective);
}
