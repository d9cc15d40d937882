// Vector clocks of the streams of the simulated accelerator, and the accesses to its memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace simulated {

using Clock = std::vector<uint64_t>;  // For each stream, the number of its last kernel that is known to have ended.

// The Python lines from which an operation was called: the innermost one of the project, and the innermost of all.
struct Site {
  const void* own = nullptr;  // A code object, which is never freed.
  const void* inner = nullptr;
  int own_line = 0, inner_line = 0;
  const std::string* node = nullptr;  // Name of the node of the backward, if there is one.
};

struct Access {
  int stream;
  uint64_t time;
  bool is_write;
  size_t begin, end;  // Bytes in the block.
  const std::string* what;
  Site site;
  size_t freed = 0;  // Number of bytes of the freed block to whose memory this was an access; 0: it is this block.
};

struct EventState {
  Clock clock;
  int queries = 0;
  double seconds = 0;
};

struct Range {
  const void* data;
  size_t size;
};

const std::string* interned(const std::string& name);
Site here();                        // Needs no lock, and takes the GIL.
std::string text(const Site& site);  // Needs the GIL.
void set_roots(std::vector<std::string> own, std::vector<std::string> hidden);

// Streams and events. The current stream is one of the calling thread.
int current_stream();
int exchange_stream(int stream);
int new_stream();
void record(EventState& event, int stream);
void block(const EventState& event, int stream);
bool query(EventState& event);
bool query_stream(int stream);
void synchronize_event(const EventState& event);
void synchronize_stream(int stream, const char* why);
void synchronize_device();
void set_patience(int queries);

// Memory
void allocated(void* data, size_t size, bool is_pinned);
void freed(void* data);
bool is_pinned(const void* data);
void record_stream(const void* data, int stream);
void kernel(int stream, const std::string* what, const std::vector<Range>& reads, const std::vector<Range>& writes);

// Copies between pinned memory and the device that the host has not yet waited for.
void before_copy(const void* host, size_t size);  // Gives pinned memory the values that the stream sees.
void after_copy(const void* host, size_t size, bool to_host, int stream, bool is_hidden, int itemsize, bool is_float);

// Collectives, which run on a stream of their group.
Clock begin_collective(const std::string& group, const std::vector<Range>& reads, const std::vector<Range>& writes);
void wait_collective(const Clock& end);

// Reports
void count(const char* what);
void enable_counts(bool is_on);
void enable_races(bool is_on);
std::map<std::pair<std::string, std::pair<std::string, std::string>>, long> counts();
std::vector<std::string> take_reports();
void reset();

// Statistics of the device's memory, in bytes
struct Memory {
  size_t allocated = 0, peak = 0, total = size_t(1) << 36;
};
Memory& memory();

}  // namespace simulated
