// What device.cpp offers to python.cpp: the log, the streams and the generators of the simulated GPUs.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace simulated {

// One line of the log.
struct Event {
  std::string kind;  // sync, launch, race
  std::string what;
  std::string communicator;
  int64_t bytes = 0;
  int device = 0;
  int64_t stream = 0;
  std::string thread;
  std::vector<std::string> stack;  // innermost first; of Python, for what waits and what races
};

// What is not through when the call returns that began it: a collective, or a copy that the host has to wait for.
struct Pending {
  virtual ~Pending() = default;
  virtual void finish() = 0;  // returns when it is through
  virtual bool is_done() = 0;
  virtual bool is_of_host() const { return false; }  // it ends when the host waits, not when a stream does
};

int num_devices();
void note(Event event);
// The host waits for the device. `warned`: torch's sync debug mode sees it.
void sync(const std::string& what, bool warned, int64_t bytes = 0);
size_t begin_log();  // the place of the first line
std::vector<Event> end_log(size_t begin);
void set_stack_of(std::function<std::vector<std::string>()> stack_of);
void set_sync_debug_mode(int mode);
int sync_debug_mode();
void use_host_generator(bool on);

void initialize();
bool is_initialized();
bool is_in_bad_fork();
void check_usable();
int current_device();
void set_device(int device);

// Put a collective of `inputs` and `outputs` into `stream`, which waits for the current one; then what it waits for.
void launch(const c10::Stream& stream, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs,
            const std::string& what);
void attach(const c10::Stream& stream, std::shared_ptr<Pending> pending);
c10::Stream new_stream(int device);
void synchronize_device(int device, bool is_noted);

const at::Generator& default_generator(int device);

struct Memory {
  int64_t allocated = 0, peak = 0, num_allocations = 0, limit = 0;
};
Memory& memory_of(int device);
at::Tensor host_alias(const at::Tensor& tensor);
bool is_pinned(const void* data);

}  // namespace simulated
