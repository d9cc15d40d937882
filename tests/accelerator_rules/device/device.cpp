// Allocators, streams, events and generators.
#include "device.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <cstring>
#include "clocks.h"

namespace simulated {

static void free_block(void* data) {
  if (!data) return;
  freed(data);
  c10::free_cpu(data);
}

template <bool is_pinned_memory>
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (!is_pinned_memory && memory().allocated + size > memory().total)
      TORCH_CHECK_WITH(OutOfMemoryError, false, "The simulated accelerator is out of memory: tried to allocate ", size,
                       " bytes, of ", memory().total, " are ", memory().allocated, " in use");
    void* data = size ? c10::alloc_cpu(size) : nullptr;
    allocated(data, size, is_pinned_memory);
    return {data, data, &free_block, is_pinned_memory ? c10::Device(c10::DeviceType::CPU) : c10::Device(kType, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t size) const final { std::memcpy(to, from, size); }
};
static Allocator<false> memory_of_device;
static Allocator<true> pinned_memory;
REGISTER_ALLOCATOR(kType, &memory_of_device);
c10::Allocator* device_allocator() { return &memory_of_device; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(int id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, 0), id); }
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return c10::Device(kType, 0); }
  c10::Device getDevice() const override { return c10::Device(kType, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(new_stream()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(new_stream()); }
  c10::Stream exchangeStream(c10::Stream s) const override { return stream(exchange_stream(s.id())); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new EventState();
    simulated::record(*(EventState*)*event, s.id());
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) simulated::block(*(EventState*)event, s.id());
  }
  bool queryEvent(void* event) const override { return !event || query(*(EventState*)event); }
  bool queryStream(const c10::Stream& s) const override { return query_stream(s.id()); }
  void synchronizeStream(const c10::Stream& s) const override { synchronize_stream(s.id(), "synchronize stream"); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize_event(*(EventState*)event);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (EventState*)event; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    record_stream(data.get(), s.id());
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return 1000 * (((EventState*)end)->seconds - ((EventState*)begin)->seconds);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_device(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

at::Generator& generator() {
  static at::Generator made = at::make_generator<at::CPUGeneratorImpl>();
  return made;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void init() const override {}
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(kType, 0); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto fresh = memory_of_device.allocate(size);
    size_t before = impl->nbytes();
    if (size && before && impl->data()) {
      std::memcpy(fresh.get(), impl->data(), std::min(size, before));
      kernel(current_stream(), interned("resize"), {{impl->data(), std::min(size, before)}}, {{fresh.get(), size}});
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(size);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
};
void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }

}  // namespace simulated
