// GPUs of a torch that was built for the CPU alone: their memory is the host's, and their kernels are the CPU's, which run
// at once. Streams, events and host syncs are kept account of: see CONTRIBUTING.md.
#include "simulated.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace simulated {

namespace {

constexpr int kMostDevices = 16;
constexpr auto kType = c10::DeviceType::CUDA;

std::mutex lock;  // of all that follows; never held while Python runs
std::vector<Event> events;
std::atomic<int> num_logs{0};
std::atomic<bool> initialized{false}, in_bad_fork{false}, host_generator{false};
std::atomic<int> debug_mode{0};
std::atomic<int64_t> next_stream{1};
std::function<std::vector<std::string>()> stack_of;
Memory memory[kMostDevices];
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId streams[kMostDevices] = {};

// Order of work. A clock says how much of each stream's work is known to be done; (device, stream) -> count.
using Key = std::pair<int, int64_t>;
using Clock = std::map<Key, int64_t>;

void merge(Clock& into, const Clock& from) {
  for (const auto& [key, count] : from) into[key] = std::max(into[key], count);
}

struct Moment {  // a point in a stream's work
  Clock clock;
  std::vector<std::shared_ptr<Pending>> pending;
};
std::map<Key, Moment> order;
Clock seen_by_host;

struct Access {
  Key stream;
  int64_t count;
  const char *from, *to;
  bool is_write;
  std::string what;
};
struct Block {  // of device memory
  Key allocated_on;
  std::vector<Access> accesses;
  std::set<Key> recorded;  // by record_stream
};
std::unordered_map<const void*, Block> blocks;
std::map<const char*, size_t> pinned;

std::string thread_name() {
  if (syscall(SYS_gettid) == getpid()) return "main";
  char name[32] = {};
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::string(name) + "/" + std::to_string(syscall(SYS_gettid));
}

Key key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
c10::Stream stream_of(const Key& key) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, key.first), key.second);
}
Key current_key(int device) { return {device, streams[device]}; }

}  // namespace

int num_devices() {
  static int of_driver = -1;  // read once, when the driver starts
  if (of_driver >= 0) return of_driver;
  const char* text = getenv("SIMULATED_GPUS");
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  int all = std::min(kMostDevices, std::max(1, text ? atoi(text) : 2));
  int count = visible ? 0 : all;
  for (const char* at = visible; at && *at;) {
    char* end;
    long index = strtol(at, &end, 10);
    if (end == at || index < 0 || index >= all) break;  // what comes after a wrong one is not seen, as with CUDA
    count++;
    at = *end == ',' ? end + 1 : end;
  }
  if (initialized) of_driver = count;
  return count;
}

namespace {
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c < ' ' ? ' ' : char(c);
  }
  return out + '"';
}

// Line by line: what a process did that was killed is there as well. With the lock.
void write(const Event& event, const char* folder) {
  static FILE* file = nullptr;
  static pid_t written_by = 0;
  if (written_by != getpid()) {
    const char* rank = getenv("RANK");
    if (rank == nullptr) rank = getenv("DDPSHIM_RANK");  // of a program that does not see the launcher's variables
    mkdir(folder, 0777);
    auto name = std::string(folder) + "/rank" + (rank ? rank : "-") + "-" + std::to_string(getpid()) + ".jsonl";
    file = fopen(name.c_str(), "a");
    written_by = getpid();
  }
  if (file == nullptr) return;
  std::string stack;
  for (const auto& line : event.stack) stack += (stack.empty() ? "" : ", ") + quoted(line);
  fprintf(file,
          "{\"kind\": %s, \"what\": %s, \"communicator\": %s, \"bytes\": %ld, \"device\": %d, \"stream\": %ld, "
          "\"thread\": %s, \"stack\": [%s]}\n",
          quoted(event.kind).c_str(), quoted(event.what).c_str(), quoted(event.communicator).c_str(), long(event.bytes),
          event.device, long(event.stream), quoted(event.thread).c_str(), stack.c_str());
  fflush(file);
}
}  // namespace

void note(Event event) {
  const char* folder = getenv("SIMULATED_GPUS_LOG");  // each time: a process that was forked may have been given it
  if (!num_logs && folder == nullptr) return;
  if ((event.kind == "sync" || event.kind == "race") && stack_of) event.stack = stack_of();
  event.device = current;
  event.stream = streams[current];
  event.thread = thread_name();
  std::lock_guard<std::mutex> held(lock);
  if (folder != nullptr) write(event, folder);
  if (num_logs) events.push_back(std::move(event));
}

void sync(const std::string& what, bool warned, int64_t bytes) {
  note({"sync", what, "", bytes});
  if (!warned || !debug_mode) return;
  TORCH_CHECK(debug_mode != 2, "called a synchronizing CUDA operation (", what, ")");
  TORCH_WARN("called a synchronizing CUDA operation (", what, ")");
}

size_t begin_log() {
  std::lock_guard<std::mutex> held(lock);
  num_logs++;
  return events.size();
}
std::vector<Event> end_log(size_t begin) {
  std::lock_guard<std::mutex> held(lock);
  std::vector<Event> taken(events.begin() + begin, events.end());
  if (!--num_logs) events.clear();
  return taken;
}
void set_stack_of(std::function<std::vector<std::string>()> function) { stack_of = std::move(function); }
void set_sync_debug_mode(int mode) { debug_mode = mode; }
int sync_debug_mode() { return debug_mode; }
void use_host_generator(bool on) { host_generator = on; }
int current_device() { return current; }
Memory& memory_of(int device) { return memory[device]; }

bool is_initialized() { return initialized; }
bool is_in_bad_fork() { return in_bad_fork; }
void initialize() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { if (initialized) in_bad_fork = true; }); });
  initialized = true;
}
void check_usable() {
  TORCH_CHECK(!in_bad_fork,
              "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
              "start method");
  initialize();
}
static c10::DeviceIndex checked(c10::DeviceIndex device) {
  if (device < 0) return current;
  TORCH_CHECK(device < num_devices(), "CUDA error: invalid device ordinal");
  return device;
}
void set_device(int device) { current = checked(device); }
bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> held(lock);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(data) < after->first + after->second;
}

namespace {

// Wait for what is on its way at `moment`, without the lock.
void finish(const std::vector<std::shared_ptr<Pending>>& pending) {
  for (const auto& work : pending) work->finish();
}

Moment moment_of(const Key& key) {
  std::lock_guard<std::mutex> held(lock);
  return order[key];
}

void add(std::vector<std::shared_ptr<Pending>>& to, const std::shared_ptr<Pending>& work) {
  constexpr size_t kMost = 256;  // of a program that never waits
  to.erase(std::remove_if(to.begin(), to.end(), [](const auto& there) { return there->is_done(); }), to.end());
  if (std::find(to.begin(), to.end(), work) == to.end()) to.push_back(work);
  if (to.size() > kMost) to.erase(to.begin());
}

// `key` goes on after `moment`.
void go_on_after(const Key& key, const Moment& moment) {
  for (const auto& work : moment.pending)
    if (!work->is_of_host()) work->finish();
  std::lock_guard<std::mutex> held(lock);
  auto& here = order[key];
  merge(here.clock, moment.clock);
  for (const auto& work : moment.pending)
    if (work->is_of_host() && !work->is_done()) add(here.pending, work);
}

void host_waits_for(const Moment& moment) {
  finish(moment.pending);
  std::lock_guard<std::mutex> held(lock);
  merge(seen_by_host, moment.clock);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old(kType, current);
    current = checked(device.index());
    return old;
  }
  c10::Device getDevice() const override { return {kType, current}; }
  void setDevice(c10::Device device) const override { current = checked(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return stream_of(current_key(checked(device.index()))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of({checked(device.index()), 0}); }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(checked(device.index())); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(checked(device.index()));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = stream_of(current_key(stream.device_index()));
    streams[stream.device_index()] = stream.id();
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Moment;
    auto moment = moment_of(key_of(stream));
    std::lock_guard<std::mutex> held(lock);
    *static_cast<Moment*>(*event) = std::move(moment);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    go_on_after(key_of(stream), *static_cast<Moment*>(event));
  }
  bool queryEvent(void* event) const override {
    if (event != nullptr) host_waits_for(*static_cast<Moment*>(event));
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  bool queryStream(const c10::Stream& stream) const override {
    host_waits_for(moment_of(key_of(stream)));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    sync("stream", true);
    host_waits_for(moment_of(key_of(stream)));
  }
  void synchronizeEvent(void* event) const override {
    sync("event", false);
    if (event != nullptr) host_waits_for(*static_cast<Moment*>(event));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(device, true); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> held(lock);
    auto at = blocks.find(data.get());
    if (at != blocks.end()) at->second.recorded.insert(key_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Memory

struct Piece {  // what a DataPtr of device memory owns
  void* data;
  int64_t bytes;
  int device;
  at::Tensor host;  // a result of a CPU kernel, whose memory it is
};

void note_allocation(const Piece& piece) {
  std::lock_guard<std::mutex> held(lock);
  auto& here = memory[piece.device];
  here.allocated += piece.bytes;
  here.num_allocations++;
  here.peak = std::max(here.peak, here.allocated);
  if (piece.data) blocks[piece.data] = Block{current_key(piece.device)};
}

void release(void* context) {
  auto* piece = static_cast<Piece*>(context);
  std::string late;
  {
    std::lock_guard<std::mutex> held(lock);
    memory[piece->device].allocated -= piece->bytes;
    auto at = blocks.find(piece->data);
    if (at != blocks.end()) {
      const auto& block = at->second;
      const auto& clock = order[block.allocated_on].clock;
      for (const auto& access : block.accesses) {
        auto known = clock.find(access.stream);
        bool is_over = access.stream == block.allocated_on || (known != clock.end() && known->second >= access.count);
        auto by_host = seen_by_host.find(access.stream);
        is_over |= by_host != seen_by_host.end() && by_host->second >= access.count;
        if (!is_over && !block.recorded.count(access.stream)) {
          late = access.what + " on stream " + std::to_string(access.stream.second) +
                 " may still use memory that is freed: record_stream lacks";
        }
      }
      blocks.erase(at);
    }
  }
  if (!late.empty()) note({"race", late, "", piece->bytes});
  if (!piece->host.defined()) free(piece->data);
  delete piece;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    check_usable();
    auto device = current;
    {
      std::lock_guard<std::mutex> held(lock);
      const auto& here = memory[device];
      TORCH_CHECK_WITH(OutOfMemoryError, !here.limit || here.allocated + int64_t(bytes) <= here.limit,
                       "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ", int(device), " has a capacity of ",
                       here.limit, " bytes of which ", here.allocated, " are allocated.");
    }
    void* data = nullptr;
    if (bytes) TORCH_CHECK(posix_memalign(&data, 512, bytes) == 0, "the host is out of memory");
    auto* piece = new Piece{data, int64_t(bytes), device, {}};
    note_allocation(*piece);
    return {data, piece, &release, c10::Device(kType, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
DeviceAllocator allocator;
REGISTER_ALLOCATOR(kType, &allocator)

struct PinnedAllocator final : c10::Allocator {
  static void unpin(void* data) {
    {
      std::lock_guard<std::mutex> held(lock);
      pinned.erase(static_cast<char*>(data));
    }
    free(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    check_usable();
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 512, std::max<size_t>(bytes, 1)) == 0, "the host is out of memory");
    std::lock_guard<std::mutex> held(lock);
    pinned[static_cast<char*>(data)] = std::max<size_t>(bytes, 1);
    return {data, data, &unpin, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

// Random numbers: the CPU's algorithm, with a state for each device.

struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(int device) { be_on(c10::Device(kType, device)); }
  void be_on(c10::Device device) {
    device_ = device;
    key_set_ = c10::DispatchKeySet(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  }
};

// Lets a CPU kernel draw from a device's generator.
struct AsHost {
  explicit AsHost(at::Generator generator) : generator(std::move(generator)), device(this->generator.device()) {
    impl()->be_on(c10::kCPU);
  }
  ~AsHost() { impl()->be_on(device); }
  DeviceGenerator* impl() { return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl()); }
  at::Generator generator;
  c10::Device device;
};

// For a kernel that draws from the default generator without naming it: that has the device's state meanwhile.
struct Swapped {
  explicit Swapped(int device) : from(at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator())),
        to(static_cast<DeviceGenerator*>(default_generator(device).unsafeGetGeneratorImpl())) { swap(); }
  ~Swapped() { swap(); }
  void swap() {
    auto engine = from->engine();
    from->set_engine(to->engine());
    to->set_engine(engine);
  }
  at::CPUGeneratorImpl* from;
  at::CPUGeneratorImpl* to;
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override { check_usable(); }
  bool hasCUDA() const override { return num_devices() > 0; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return initialized; }
  c10::DeviceIndex deviceCount() const override { return num_devices(); }
  int getNumGPUs() const override { return num_devices(); }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = checked(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto old = current;
    current = checked(device);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return {kType, current}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(checked(device));
  }
  void deviceSynchronize(c10::DeviceIndex device) const override { synchronize_device(device, true); }
  std::string showConfig() const override { return "simulated"; }
};

}  // namespace

const at::Generator& default_generator(int device) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kMostDevices; i++) made.push_back(at::make_generator<DeviceGenerator>(i));
    return made;
  }();
  return generators[checked(device)];
}

c10::Stream new_stream(int device) {
  auto stream = stream_of({device, next_stream++});
  std::lock_guard<std::mutex> held(lock);
  order[key_of(stream)].clock = seen_by_host;
  return stream;
}

void synchronize_device(int device, bool is_noted) {
  if (is_noted) sync("device", false);
  std::vector<Moment> moments;
  {
    std::lock_guard<std::mutex> held(lock);
    for (const auto& [key, moment] : order)
      if (key.first == checked(device)) moments.push_back(moment);
  }
  for (const auto& moment : moments) host_waits_for(moment);
}

// Kernels

namespace {

struct Used {
  at::Tensor tensor;
  bool is_written;
};

// Put work that uses these tensors into `key`'s stream; a use that is not ordered after an earlier one is a race.
void order_work(const Key& key, const std::vector<Used>& used, const std::string& what) {
  std::vector<std::string> races;
  {
    std::lock_guard<std::mutex> held(lock);
    auto& here = order[key];
    merge(here.clock, seen_by_host);
    auto count = ++here.clock[key];
    for (const auto& [tensor, is_written] : used) {
      if (!tensor.defined() || !tensor.is_cuda() || !tensor.numel()) continue;
      auto at = blocks.find(tensor.storage().data_ptr().get());
      if (at == blocks.end()) continue;
      int64_t span = 1;
      for (int64_t d = 0; d < tensor.dim(); d++) span += (tensor.size(d) - 1) * tensor.stride(d);
      auto* from = static_cast<const char*>(tensor.const_data_ptr());
      auto* to = from + span * tensor.itemsize();
      auto& accesses = at->second.accesses;
      for (size_t i = 0; i < accesses.size();) {
        const auto& earlier = accesses[i];
        auto known = here.clock.find(earlier.stream);
        bool is_ordered = known != here.clock.end() && known->second >= earlier.count;
        bool overlaps = earlier.from < to && from < earlier.to;
        if (!is_ordered && overlaps && (is_written || earlier.is_write))
          races.push_back(what + " on stream " + std::to_string(key.second) + (is_written ? " writes" : " reads") + " what " +
                          earlier.what + " on stream " + std::to_string(earlier.stream.second) +
                          (earlier.is_write ? " writes" : " reads") + ", without having waited for it");
        bool is_covered = is_ordered && from <= earlier.from && earlier.to <= to && (is_written || !earlier.is_write);
        if (is_covered) accesses.erase(accesses.begin() + i);
        else i++;
      }
      accesses.push_back({key, count, from, to, is_written, what});
    }
  }
  for (auto& race : races) note({"race", race});
}

c10::Storage host_storage(const c10::Storage& storage) {
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      c10::DataPtr(const_cast<void*>(storage.data_ptr().get()), c10::kCPU),
                      c10::GetAllocator(c10::kCPU), true);
}

// A tensor of `storage` that is as `like`. In inference mode a view of a tensor from outside is none of it.
at::Tensor over(c10::Storage storage, const at::Tensor& like, c10::DispatchKeySet keys) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

c10::DispatchKeySet keys_of(const at::Tensor& tensor, c10::BackendComponent backend) {
  auto key = backend == c10::BackendComponent::CPUBit ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  c10::DispatchKeySet keys(key);
  return tensor.is_inference() ? keys : keys | c10::getAutogradRelatedKeySetFromBackend(backend);
}

at::Tensor alias_of(const at::Tensor& tensor, c10::Storage storage) {
  return over(std::move(storage), tensor, keys_of(tensor, c10::BackendComponent::CPUBit));
}

// The tensors of one call of a CPU kernel, and what they stand for.
struct Call {
  std::vector<std::pair<at::Tensor, at::Tensor>> of_device;  // (the device's, the host's)
  struct Shared {
    c10::StorageImpl* device;
    c10::Storage host;
    c10::DispatchKeySet keys;  // of the device's tensor
  };
  std::vector<Shared> storages;
  std::vector<Used> fresh;  // results in memory of their own

  at::Tensor to_host(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    TORCH_CHECK(tensor.layout() == c10::kStrided, "simulated GPUs know no ", tensor.layout(), " tensors");
    for (const auto& [device, host] : of_device)
      if (device.is_same(tensor)) return host;
    auto* impl = tensor.storage().unsafeGetStorageImpl();
    c10::Storage found;
    for (const auto& shared : storages)
      if (shared.device == impl) found = shared.host;
    if (!found) storages.push_back({impl, found = host_storage(tensor.storage()), tensor.key_set()});
    auto host = alias_of(tensor, found);
    of_device.emplace_back(tensor, host);
    return host;
  }

  at::Tensor to_device(const at::Tensor& result, int device) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (const auto& [there, host] : of_device)
      if (host.is_same(result)) return there;
    for (const auto& shared : storages)
      if (result.storage().unsafeGetStorageImpl() == shared.host.unsafeGetStorageImpl())
        return over(c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(shared.device)), result, shared.keys);
    auto keys = keys_of(result, c10::BackendComponent::CUDABit);
    fresh.push_back({over(own(result.storage(), result, device), result, keys), true});
    return fresh.back().tensor;
  }

  // What kernels have resized or replaced. Then the device's tensors are as the host's.
  void write_back() {
    for (auto& [impl, storage, keys] : storages) {
      if (storage.data_ptr().get() == impl->data_ptr().get()) continue;
      at::Tensor keeps = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                                 caffe2::TypeMeta::Make<uint8_t>());
      auto owned = own(storage, keeps, impl->device().index());
      auto bytes = storage.nbytes();
      impl->set_data_ptr(owned.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr()));
      impl->set_nbytes(bytes);
    }
    for (auto& [device, host] : of_device)
      if (device.sizes() != host.sizes() || device.strides() != host.strides())
        device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

  // Device memory that is the host's of `keeps`.
  static c10::Storage own(const c10::Storage& storage, const at::Tensor& keeps, int device) {
    auto* piece = new Piece{const_cast<void*>(storage.data_ptr().get()), int64_t(storage.nbytes()), device, keeps};
    note_allocation(*piece);
    return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                        c10::DataPtr(piece->data, piece, &release, c10::Device(kType, device)), &allocator, true);
  }
};

bool is_in(const std::string& name, std::initializer_list<const char*> names) {
  for (const char* other : names)
    if (name == other) return true;
  return false;
}

// Each kernel that has no function of its own below.
void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_usable();
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto num_arguments = schema.arguments().size();
  auto arguments = torch::jit::last(*stack, num_arguments);
  const bool is_index = is_in(name, {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"});
  // These know on which devices they have their tensors.
  const bool may_mix = is_index || is_in(name, {"aten::_pack_padded_sequence", "aten::_foreach_copy_"});
  std::optional<c10::Device> device;
  std::vector<Used> used;
  bool waits = is_in(name, {"aten::nonzero", "aten::_unique", "aten::_unique2", "aten::unique_dim",
                            "aten::unique_consecutive", "aten::masked_select", "aten::bincount", "aten::repeat_interleave",
                            "aten::equal", "aten::_ctc_loss"});
  if (name == "aten::repeat_interleave" && num_arguments > 1 && !arguments[num_arguments - 1].isNone()) waits = false;

  auto look = [&](const at::Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return;
    if (tensor.is_cuda()) {
      TORCH_CHECK(!device || *device == tensor.device() || may_mix,
                  "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                  tensor.device(), "! (", name, ")");
      if (!device) device = tensor.device();
      used.push_back({tensor, is_written});
    }
  };
  auto look_at_host = [&](const at::Tensor& tensor) {
    TORCH_CHECK(!tensor.defined() || tensor.is_cuda() || !tensor.dim() || may_mix,
                "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                tensor.device(), "! (", name, ")");
  };
  auto each = [&](auto&& with) {
    for (size_t i = 0; i < num_arguments; i++) {
      const auto& value = arguments[i];
      const auto* alias = schema.arguments()[i].alias_info();
      bool is_written = alias && alias->isWrite();
      if (value.isTensor()) with(value.toTensor(), is_written);
      else if (value.isTensorList()) for (const at::Tensor& t : value.toTensorList()) with(t, is_written);
      else if (value.isOptionalTensorList())
        for (const std::optional<at::Tensor>& t : value.toOptionalTensorList()) if (t) with(*t, is_written);
    }
  };
  each(look);
  for (size_t i = 0; i < num_arguments && !device; i++)
    if (arguments[i].isDevice()) device = arguments[i].toDevice();
  const int index = checked(device ? device->index() : -1);
  device = c10::Device(kType, index);
  each([&](const at::Tensor& tensor, bool) { look_at_host(tensor); });

  Call call;
  bool has_generator = false;
  std::optional<AsHost> drawing;
  std::optional<Swapped> swapped;
  std::vector<c10::IValue> on_host;
  for (size_t i = 0; i < num_arguments; i++) {
    const auto& value = arguments[i];
    if (value.isTensor()) on_host.emplace_back(call.to_host(value.toTensor()));
    else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(call.to_host(tensor));
      on_host.emplace_back(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        if (is_index && tensor && tensor->defined()) {
          // `index` has had its masks turned into indices before, by a nonzero of its own.
          waits |= name != "aten::index" && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte);
          if (tensor->is_cpu()) sync("an index on the CPU in " + name, true, tensor->nbytes());
        }
        list.push_back(tensor ? std::optional<at::Tensor>(call.to_host(*tensor)) : std::nullopt);
      }
      on_host.emplace_back(list);
    } else if (value.isDevice()) on_host.emplace_back(c10::Device(c10::kCPU));
    else if (value.isGenerator() || (value.isNone() && schema.arguments()[i].name() == "generator")) {
      has_generator = true;
      at::Generator generator = value.isNone() ? default_generator(index) : value.toGenerator();
      TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                  generator.device().type(), "'");
      if (value.isNone() && host_generator) on_host.emplace_back(value);
      else {
        drawing.emplace(generator);
        on_host.emplace_back(drawing->generator);
      }
    } else on_host.push_back(value);
  }
  if (!has_generator && !host_generator && op.hasSchema() && op.hasTag(at::Tag::nondeterministic_seeded))
    swapped.emplace(index);
  if (waits) sync(name, true);
  order_work(current_key(index), used, name);
  torch::jit::drop(*stack, num_arguments);
  for (auto& value : on_host) stack->push_back(std::move(value));
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(*stack);
  }
  call.write_back();
  const auto num_results = schema.returns().size();
  for (size_t i = 0; i < num_results; i++) {
    auto& value = (*stack)[stack->size() - num_results + i];
    if (value.isTensor()) value = call.to_device(value.toTensor(), index);
    else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(call.to_device(tensor, index));
      value = list;
    }
  }
  if (!call.fresh.empty()) order_work(current_key(index), call.fresh, name);
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::Device(kType, checked(device ? device->index() : -1)));
  return at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::Device(kType, checked(device ? device->index() : -1)));
  return at::detail::empty_strided_generic(sizes, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

uint64_t sum_of(const at::Tensor& host) {
  uint64_t sum = 1469598103934665603u;
  const auto* data = static_cast<const unsigned char*>(host.storage().data_ptr().get());
  for (size_t i = 0; i < host.storage().nbytes(); i++) sum = (sum ^ data[i]) * 1099511628211u;
  return sum;
}

// A copy to pinned memory arrives when the host has waited for it: who reads before finds what was there.
struct ToHost final : Pending {
  ToHost(at::Tensor to, at::Tensor from) : to(std::move(to)), from(std::move(from)) {}
  void finish() override {
    if (done.exchange(true)) return;
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
    to = from = at::Tensor();
  }
  bool is_done() override { return done; }
  bool is_of_host() const override { return true; }
  at::Tensor to, from;
  std::atomic<bool> done{false};
};

// A copy of pinned memory goes on until the host has waited for it: until then that memory must stay as it is.
struct FromHost final : Pending {
  FromHost(at::Tensor from, std::vector<std::string> stack) : from(std::move(from)), sum(sum_of(this->from)), stack(std::move(stack)) {}
  void finish() override {
    if (done.exchange(true)) return;
    if (sum_of(from) != sum) note({"race", "pinned memory was written to while its copy to the GPU may have gone on; copied at " + (stack.empty() ? "?" : stack[0])});
    from = at::Tensor();
  }
  bool is_done() override { return done; }
  bool is_of_host() const override { return true; }
  at::Tensor from;
  uint64_t sum;
  std::vector<std::string> stack;
  std::atomic<bool> done{false};
};

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  check_usable();
  if (to.is_same(from)) return to;
  const auto key = current_key((to.is_cuda() ? to : from).device().index());
  const int64_t bytes = from.nbytes();
  at::AutoDispatchBelowADInplaceOrView below;
  Call call;
  if (to.is_cuda() && from.is_cuda()) {
    if (to.device() != from.device()) {  // on the stream of the source; that of the other waits before and after
      const auto source = current_key(from.device().index());
      go_on_after(source, moment_of(key));
      order_work(source, {{from, false}, {to, true}}, "a copy");
      go_on_after(key, moment_of(source));
    } else order_work(key, {{from, false}, {to, true}}, "a copy");
  } else {
    order_work(key, {{from, false}, {to, true}}, "a copy");
    const auto& host = to.is_cuda() ? from : to;
    const std::string what = to.is_cuda() ? "copy to the GPU" : "copy to the host";
    const bool is_pinned_host = bytes && is_pinned(host.storage().data_ptr().get());
    if (bytes && (!non_blocking || (!to.is_cuda() && !is_pinned_host))) {
      sync(non_blocking ? what + ", into memory that is not pinned" : what, !non_blocking, bytes);
      host_waits_for(moment_of(key));
    } else if (bytes) {
      if (is_pinned_host && to.is_cuda()) attach(stream_of(key), std::make_shared<FromHost>(from, stack_of ? stack_of() : std::vector<std::string>()));
      else if (is_pinned_host) {
        attach(stream_of(key), std::make_shared<ToHost>(to.detach(), call.to_host(from).clone()));
        return to;
      }
    }
  }
  call.to_host(to).copy_(call.to_host(from));
  return to;
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  order_work(current_key(tensor.device().index()), {{tensor, false}}, "item()");
  sync("item", true, tensor.nbytes());
  host_waits_for(moment_of(current_key(tensor.device().index())));
  return host_alias(tensor).item();
}

void record_stream(at::Tensor& tensor, at::Stream stream) { Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream); }

at::Tensor& set_source_storage_offset(at::Tensor& to, at::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                                      c10::IntArrayRef strides) {
  auto* impl = to.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (strides.data() && strides.size() == sizes.size()) impl->set_sizes_and_strides(sizes, strides);
  else impl->set_sizes_contiguous(sizes);
  return to;
}
at::Tensor& set_source_storage(at::Tensor& to, at::Storage storage) {
  int64_t num = storage.nbytes() / to.dtype().itemsize();
  return set_source_storage_offset(to, std::move(storage), 0, {num}, {});
}
at::Tensor& set_empty(at::Tensor& to) { return set_source_storage(to, at::empty({0}, to.options()).storage()); }
at::Tensor& set_source_tensor(at::Tensor& to, const at::Tensor& from) {
  return set_source_storage_offset(to, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}
bool is_set_to(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
         a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides();
}
int64_t fused_sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                         bool, std::optional<double>, bool) {
  return 0;  // plain products: torch's fused ones are of CUDA
}
void foreach_copy(at::TensorList to, at::TensorList from, bool non_blocking) {
  for (size_t i = 0; i < to.size(); i++) const_cast<at::Tensor&>(to[i]).copy_(from[i], non_blocking);
}

}  // namespace

at::Tensor host_alias(const at::Tensor& tensor) { return alias_of(tensor, host_storage(tensor.storage())); }

void launch(const c10::Stream& stream, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs,
            const std::string& what) {
  auto key = key_of(stream);
  go_on_after(key, moment_of(current_key(stream.device_index())));
  std::vector<Used> used;
  for (const auto& tensor : inputs) used.push_back({tensor, false});
  for (const auto& tensor : outputs) used.push_back({tensor, true});
  order_work(key, used, what);
  std::lock_guard<std::mutex> held(lock);
  for (const auto& tensor : used)  // NCCL keeps them until it is through
    if (auto at = blocks.find(tensor.tensor.storage().data_ptr().get()); at != blocks.end()) at->second.recorded.insert(key);
}

void attach(const c10::Stream& stream, std::shared_ptr<Pending> pending) {
  std::lock_guard<std::mutex> held(lock);
  add(order[key_of(stream)].pending, pending);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("set_.source_Storage_storage_offset", set_source_storage_offset);
  m.impl("set_.source_Storage", set_source_storage);
  m.impl("set_", set_empty);
  m.impl("set_.source_Tensor", set_source_tensor);
  m.impl("is_set_to", is_set_to);
  m.impl("_fused_sdp_choice", fused_sdp_choice);
  m.impl("_foreach_copy_", foreach_copy);
}

}  // namespace simulated

namespace at::accelerator {
// A build for the CPU says none when it is compiled. This library is loaded before torch's, so this one is found.
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}  // namespace at::accelerator

namespace at {
using CUDAHooks = simulated::Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks)  // the name under which torch looks for them
}  // namespace at
