// See clocks.h. A lock guards everything here; it is never held while the GIL is taken or tensors are freed.
#include "clocks.h"
#include <Python.h>
#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <mutex>
#include <set>

namespace simulated {

struct Block {
  size_t size;
  bool is_pinned;
  int stream;
  std::vector<Access> accesses;
  std::vector<int> recorded;
};
struct Freed {
  size_t size;
  std::vector<Access> accesses;
};
struct HostCopy {
  char* host;
  bool to_host;
  std::vector<char> values;  // What the stream has written, or what it still reads.
  std::vector<char> hidden;  // What the host sees until it has waited; empty for copies to the device.
  int stream;
  uint64_t time;
  Site site;
};
struct Report {
  const char* kind;
  Access before, after;
  size_t size;
};

static std::mutex mutex;
static thread_local int current = 0;
static std::vector<Clock> clocks(1, Clock(1, 0));
static Clock host(1, 0);
static std::map<uintptr_t, Block> blocks;
static std::map<int, std::vector<Freed>> freed_of_stream;
static std::vector<HostCopy> copies;
static std::map<std::string, int> group_streams;
static std::vector<Report> reports;
static std::set<std::tuple<const void*, int, const void*, int, const void*, const void*>> reported;
static bool counts_on = false, races_on = false;
static int patience = 1;
static std::vector<std::pair<const char*, Site>> counted;
static Memory statistics;

Memory& memory() { return statistics; }

static void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}
static bool covers(const Clock& clock, int stream, uint64_t time) {
  return size_t(stream) < clock.size() && clock[stream] >= time;
}
static bool covers(const Clock& clock, const Clock& other) {
  for (size_t i = 0; i < other.size(); ++i)
    if (other[i] && !covers(clock, i, other[i])) return false;
  return true;
}
static Clock& clock_of(int stream) {
  if (size_t(stream) >= clocks.size()) clocks.resize(stream + 1);
  Clock& clock = clocks[stream];
  if (clock.size() <= size_t(stream)) clock.resize(stream + 1, 0);
  join(clock, host);
  return clock;
}
static void report(const char* kind, const Access& before, const Access& after, size_t size) {
  auto key = std::make_tuple(before.site.own ? before.site.own : before.site.inner, before.site.own_line,
                             after.site.own ? after.site.own : after.site.inner, after.site.own_line,
                             (const void*)before.what, (const void*)after.what);
  if (reports.size() < 200 && reported.insert(key).second) reports.push_back({kind, before, after, size});
}

// Streams

int current_stream() { return current; }
int exchange_stream(int stream) { return std::exchange(current, stream); }
static int add_stream() {
  clocks.emplace_back();
  clock_of(clocks.size() - 1);
  return clocks.size() - 1;
}
int new_stream() {
  std::lock_guard<std::mutex> guard(mutex);
  return add_stream();
}
void set_patience(int queries) { patience = queries; }

static void settle(HostCopy& copy) {
  Access before{copy.stream, copy.time, copy.to_host, 0, copy.values.size(), interned("copy"), copy.site};
  const auto& expected = copy.to_host ? copy.hidden : copy.values;
  if (std::memcmp(copy.host, expected.data(), expected.size()))
    report(copy.to_host ? "the host has written to pinned memory before the copy to it had ended"
                        : "the host has changed pinned memory before the copy from it had ended",
           before, before, expected.size());
  if (copy.to_host) std::memcpy(copy.host, copy.values.data(), copy.values.size());
}
static void host_waits(const Clock& clock) {
  join(host, clock);
  for (auto& copy : copies)
    if (covers(host, copy.stream, copy.time)) settle(copy), copy.host = nullptr;
  copies.erase(std::remove_if(copies.begin(), copies.end(), [](auto& copy) { return !copy.host; }), copies.end());
}

void record(EventState& event, int stream) {
  std::lock_guard<std::mutex> guard(mutex);
  event.clock = clock_of(stream);
  event.queries = 0;
  event.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
void block(const EventState& event, int stream) {
  std::lock_guard<std::mutex> guard(mutex);
  join(clock_of(stream), event.clock);
}
bool query(EventState& event) {
  std::lock_guard<std::mutex> guard(mutex);
  if (covers(host, event.clock)) return true;
  if (++event.queries <= patience) return false;
  host_waits(event.clock);
  return true;
}
bool query_stream(int stream) {
  std::lock_guard<std::mutex> guard(mutex);
  return covers(host, clock_of(stream));
}
static void wait_counted(const Clock& clock, const char* why) {
  bool is_new;
  {
    std::lock_guard<std::mutex> guard(mutex);
    is_new = !covers(host, clock);
  }
  if (is_new) count(why);
  std::lock_guard<std::mutex> guard(mutex);
  host_waits(clock);
}
void synchronize_event(const EventState& event) { wait_counted(event.clock, "synchronize event"); }
void synchronize_stream(int stream, const char* why) {
  Clock clock;
  {
    std::lock_guard<std::mutex> guard(mutex);
    clock = clock_of(stream);
  }
  if (std::strcmp(why, "synchronize stream")) {  // A transfer or an operation, which waits in any case.
    count(why);
    std::lock_guard<std::mutex> guard(mutex);
    host_waits(clock);
  } else {
    wait_counted(clock, why);
  }
}
void synchronize_device() {
  Clock every;
  {
    std::lock_guard<std::mutex> guard(mutex);
    for (auto& clock : clocks) join(every, clock);
  }
  count("synchronize device");
  std::lock_guard<std::mutex> guard(mutex);
  host_waits(every);
}

// Memory

static Block* find(const void* data, uintptr_t* begin = nullptr) {
  auto found = blocks.upper_bound((uintptr_t)data);
  if (found == blocks.begin()) return nullptr;
  --found;
  if ((uintptr_t)data >= found->first + found->second.size) return nullptr;
  if (begin) *begin = found->first;
  return &found->second;
}
void allocated(void* data, size_t size, bool is_pinned) {
  if (!data || !size) return;
  std::lock_guard<std::mutex> guard(mutex);
  Block block{size, is_pinned, current, {}, {}};
  if (!is_pinned) {
    statistics.allocated += size;
    statistics.peak = std::max(statistics.peak, statistics.allocated);
    auto& candidates = freed_of_stream[current];
    if (!candidates.empty()) {
      const Clock& clock = clock_of(current);
      for (auto& old : candidates) {
        auto& list = old.accesses;
        auto is_known = [&](auto& access) { return covers(clock, access.stream, access.time); };
        list.erase(std::remove_if(list.begin(), list.end(), is_known), list.end());
        if (size <= old.size)  // The allocator may give this memory to the new block.
          for (auto access : list) {
            access.freed = old.size;
            access.begin = 0, access.end = size;
            block.accesses.push_back(access);
          }
      }
      auto is_empty = [](auto& old) { return old.accesses.empty(); };
      candidates.erase(std::remove_if(candidates.begin(), candidates.end(), is_empty), candidates.end());
    }
  }
  blocks[(uintptr_t)data] = std::move(block);
}
void freed(void* data) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = blocks.find((uintptr_t)data);
  if (found == blocks.end()) return;
  Block block = std::move(found->second);
  blocks.erase(found);
  if (block.is_pinned) {  // The allocator of pinned memory waits for the copies itself.
    auto is_inside = [&](auto& c) { return c.host >= (char*)data && c.host < (char*)data + block.size; };
    copies.erase(std::remove_if(copies.begin(), copies.end(), is_inside), copies.end());
    return;
  }
  statistics.allocated -= block.size;
  if (!races_on) return;
  Clock known = clock_of(block.stream);
  for (int stream : block.recorded) join(known, clock_of(stream));
  Freed old{block.size, {}};
  for (auto& access : block.accesses)
    if (!access.freed && access.stream != block.stream && !covers(known, access.stream, access.time))
      old.accesses.push_back(access);
  if (!old.accesses.empty()) freed_of_stream[block.stream].push_back(std::move(old));
}
bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(mutex);
  Block* block = find(data);
  return block && block->is_pinned;
}
void record_stream(const void* data, int stream) {
  std::lock_guard<std::mutex> guard(mutex);
  if (Block* block = find(data)) block->recorded.push_back(stream);
}

static void access(const Range& range, Access now, const Clock& clock) {
  uintptr_t start;
  Block* block = range.size ? find(range.data, &start) : nullptr;
  if (!block) return;
  now.begin = (uintptr_t)range.data - start;
  now.end = now.begin + range.size;
  auto& list = block->accesses;
  size_t kept = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    Access& old = list[i];
    bool overlaps = old.begin < now.end && now.begin < old.end;
    bool is_known = covers(clock, old.stream, old.time);
    if (overlaps && !is_known && (now.is_write || old.is_write))
      report(old.freed ? "reuse of freed memory" : "race", old, now, old.freed ? old.freed : block->size);
    bool is_inside = now.begin <= old.begin && old.end <= now.end;
    bool is_replaced = is_inside && (now.is_write || (!old.is_write && old.stream == now.stream));
    if (!is_replaced) list[kept++] = old;
  }
  list.resize(kept);
  list.push_back(now);
}
static void launch(int stream, const std::string* what, const std::vector<Range>& reads,
                   const std::vector<Range>& writes, const Site& site) {
  Clock& clock = clock_of(stream);
  Access now{stream, ++clock[stream], false, 0, 0, what, site};
  for (auto& range : reads) access(range, now, clock);
  now.is_write = true;
  for (auto& range : writes) access(range, now, clock);
}
void kernel(int stream, const std::string* what, const std::vector<Range>& reads, const std::vector<Range>& writes) {
  Site site = races_on ? here() : Site();
  std::lock_guard<std::mutex> guard(mutex);
  if (races_on)
    launch(stream, what, reads, writes, site);
  else
    ++clock_of(stream)[stream];
}

// Copies

void before_copy(const void* data, size_t size) {
  std::lock_guard<std::mutex> guard(mutex);
  for (auto& copy : copies)
    if (copy.host < (char*)data + size && (char*)data < copy.host + copy.values.size()) {
      settle(copy);
      if (copy.to_host) copy.hidden = copy.values;  // It is hidden again after the copy.
    }
}
// Fills with signaling NaN where the size alone says which bytes these are. Every operation of the host turns them into
// others, so that its writing is seen; other NaN would stay the same.
static void fill_with_nan(std::vector<char>& values, int itemsize) {
  const uint64_t in_float64 = 0x7FF0000000000001;
  const uint32_t in_float32 = 0x7F800001;
  const void* pattern = itemsize == 8 ? (const void*)&in_float64 : &in_float32;
  if (itemsize != 8 && itemsize != 4) {
    std::memset(values.data(), 0xFF, values.size());  // This is NaN in all floating dtypes.
    return;
  }
  for (size_t at = 0; at + itemsize <= values.size(); at += itemsize) std::memcpy(&values[at], pattern, itemsize);
}
void after_copy(const void* data, size_t size, bool to_host, int stream, bool is_hidden, int itemsize, bool is_float) {
  Site site = here();
  std::lock_guard<std::mutex> guard(mutex);
  auto hide = [&](char* begin, size_t length) {
    std::vector<char> hidden(length, 0x5A);
    if (is_float && itemsize > 1) fill_with_nan(hidden, itemsize);
    std::memcpy(begin, hidden.data(), length);
    return hidden;
  };
  char* begin = (char*)data;
  std::vector<char> values(begin, begin + size);
  if (to_host) {  // Older copies have been checked before this one.
    auto is_replaced = [&](auto& c) {
      bool is_inside = c.host >= begin && c.host + c.values.size() <= begin + size;
      return is_inside || (!c.to_host && c.host < begin + size && begin < c.host + c.values.size());
    };
    copies.erase(std::remove_if(copies.begin(), copies.end(), is_replaced), copies.end());
  }
  for (auto& copy : copies)
    if (copy.to_host && copy.host < begin + size && begin < copy.host + copy.values.size() && copy.hidden == copy.values)
      copy.hidden = hide(copy.host, copy.values.size());
  if (!is_hidden) return;
  Clock& clock = clock_of(stream);
  HostCopy copy{begin, to_host, std::move(values), {}, stream, clock[stream], site};
  if (to_host) copy.hidden = hide(begin, size);
  copies.push_back(std::move(copy));
}

// Collectives

Clock begin_collective(const std::string& group, const std::vector<Range>& reads, const std::vector<Range>& writes) {
  Site site = races_on ? here() : Site();
  std::lock_guard<std::mutex> guard(mutex);
  auto found = group_streams.find(group);
  int stream = found != group_streams.end() ? found->second : group_streams[group] = add_stream();
  Clock begun = clock_of(current);
  join(clock_of(stream), begun);
  if (races_on) launch(stream, interned("collective"), reads, writes, site);
  return clock_of(stream);
}
void wait_collective(const Clock& end) {
  std::lock_guard<std::mutex> guard(mutex);
  join(clock_of(current), end);
}

// Reports

void count(const char* what) {
  if (!counts_on) return;
  Site site = here();
  std::lock_guard<std::mutex> guard(mutex);
  counted.emplace_back(what, site);
}
void enable_counts(bool is_on) {
  std::lock_guard<std::mutex> guard(mutex);
  if (is_on) counted.clear();
  counts_on = is_on;
}
void enable_races(bool is_on) { races_on = is_on; }
std::map<std::pair<std::string, std::pair<std::string, std::string>>, long> counts() {
  std::lock_guard<std::mutex> guard(mutex);
  std::map<std::pair<std::string, std::pair<std::string, std::string>>, long> result;
  for (auto& [what, site] : counted) {
    Site inner = site;
    inner.own = nullptr;
    Site own = site;
    if (own.own) own.inner = nullptr, own.node = nullptr;
    ++result[{what, {text(own), text(inner)}}];
  }
  return result;
}
std::vector<std::string> take_reports() {
  std::lock_guard<std::mutex> guard(mutex);
  std::vector<std::string> result;
  auto words = [](const Access& access) {
    return std::string(access.is_write ? "writes" : "reads") + " bytes " + std::to_string(access.begin) + " to " +
           std::to_string(access.end) + " in stream " + std::to_string(access.stream) + " by " + *access.what +
           " at " + text(access.site);
  };
  for (auto& found : reports)
    result.push_back(std::string(found.kind) + " (" + std::to_string(found.size) + " bytes): " + words(found.before) +
                     "; then " + words(found.after));
  reports.clear();
  reported.clear();
  return result;
}
void reset() {
  std::lock_guard<std::mutex> guard(mutex);
  reports.clear();
  reported.clear();
  group_streams.clear();
  freed_of_stream.clear();
  for (auto& clock : clocks) join(host, clock);
}

}  // namespace simulated
