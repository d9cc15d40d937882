// The Python lines from which operations are called.
#include <Python.h>
#include <frameobject.h>
#include <torch/csrc/autograd/function.h>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include "clocks.h"

namespace simulated {

enum class Kind { own, other, hidden };
static std::vector<std::string> own_roots, hidden_roots;
static std::unordered_map<const void*, Kind> kinds;  // Guarded by the GIL.

void set_roots(std::vector<std::string> own, std::vector<std::string> hidden) {
  own_roots = std::move(own);
  hidden_roots = std::move(hidden);
  kinds.clear();
}

const std::string* interned(const std::string& name) {
  static std::mutex mutex;
  static std::unordered_set<std::string> names;
  std::lock_guard<std::mutex> guard(mutex);
  return &*names.insert(name).first;
}

static bool starts(const char* path, const std::vector<std::string>& roots) {
  for (const auto& root : roots)
    if (std::string(path).compare(0, root.size(), root) == 0) return true;
  return false;
}

static Kind kind_of(PyCodeObject* code) {
  auto found = kinds.find(code);
  if (found != kinds.end()) return found->second;
  Py_INCREF(code);
  const char* path = PyUnicode_AsUTF8(code->co_filename);
  Kind kind = !path || starts(path, hidden_roots) ? Kind::hidden : starts(path, own_roots) ? Kind::own : Kind::other;
  return kinds.emplace(code, kind).first->second;
}

Site here() {
  Site site;
  if (auto node = torch::autograd::get_current_node()) site.node = interned(node->name());
  if (!Py_IsInitialized()) return site;
  PyGILState_STATE state = PyGILState_Ensure();
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    Kind kind = kind_of(code);
    if (kind != Kind::hidden) {
      if (!site.inner) {
        site.inner = code;
        site.inner_line = PyFrame_GetLineNumber(frame);
      }
      if (kind == Kind::own) {
        site.own = code;
        site.own_line = PyFrame_GetLineNumber(frame);
      }
    }
    Py_DECREF(code);
    PyFrameObject* back = site.own ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  PyGILState_Release(state);
  return site;
}

static std::string line(const void* object, int number) {
  if (!object) return "";
  auto* code = (PyCodeObject*)object;
  return std::string(PyUnicode_AsUTF8(code->co_filename)) + ":" + std::to_string(number) + " in " +
         PyUnicode_AsUTF8(code->co_name);
}

std::string text(const Site& site) {
  std::string own = line(site.own, site.own_line), inner = line(site.inner, site.inner_line);
  std::string result = own;
  if (!inner.empty() && inner != own) result += (own.empty() ? "" : " < ") + inner;
  if (site.node) result += (result.empty() ? "" : ", in ") + *site.node;
  return result.empty() ? "an unknown line" : result;
}

}  // namespace simulated
