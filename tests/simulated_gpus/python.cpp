// The Python face of the simulated GPUs, and the "nccl" between them, whose data gloo carries.
#include <ATen/core/ivalue.h>
#include <ATen/core/ivalue_inl.h>
#include <c10/core/StreamGuard.h>
#include <sys/types.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "simulated.h"

namespace py = pybind11;
using namespace simulated;
using Tensors = std::vector<at::Tensor>;

namespace {

std::vector<std::string> python_stack() {
  std::vector<std::string> lines;
  if (!Py_IsInitialized()) return lines;
  py::gil_scoped_acquire gil;
  py::error_scope errors;
  auto* frame = PyEval_GetFrame();
  if (frame == nullptr) return lines;
  py::object at = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(frame));
  for (int i = 0; i < 60 && !at.is_none(); i++) {
    py::object code = at.attr("f_code");
    lines.push_back(py::str("{}:{} {}").format(code.attr("co_filename"), at.attr("f_lineno"), code.attr("co_name")));
    at = at.attr("f_back");
  }
  return lines;
}

struct Collective final : Pending {
  using clock = std::chrono::steady_clock;
  Collective(c10::intrusive_ptr<c10d::Work> work, std::string what, int rank, std::chrono::milliseconds timeout, std::function<void()> then)
      : work(std::move(work)), what(std::move(what)), rank(rank), timeout(timeout), began(clock::now()), then(std::move(then)) {}

  void finish() override {
    if (done) return;
    std::optional<py::gil_scoped_release> no_gil;
    if (PyGILState_Check()) no_gil.emplace();
    std::lock_guard<std::mutex> held(lock);
    if (done) return;
    try {
      work->wait();
    } catch (const std::exception&) {
      // NCCL does not learn that a peer is gone: it waits, until the watchdog ends the process.
      std::this_thread::sleep_until(began + timeout);
      auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(clock::now() - began).count();
      fprintf(stderr,
              "[rank%d]:E ProcessGroupNCCL (simulated) [Rank %d] Watchdog caught collective operation timeout: "
              "WorkNCCL(%s, Timeout(ms)=%ld) ran for %ld milliseconds before timing out.\n",
              rank, rank, what.c_str(), long(timeout.count()), long(ms));
      abort();
    }
    if (then) then();
    done = true;
    work.reset();
  }
  bool is_done() override { return done; }
  bool has_come() {
    std::unique_lock<std::mutex> held(lock, std::try_to_lock);
    return done || (held.owns_lock() && work->isCompleted());
  }

  c10::intrusive_ptr<c10d::Work> work;
  std::string what;
  int rank;
  std::chrono::milliseconds timeout;
  clock::time_point began;
  std::function<void()> then;
  std::mutex lock;
  std::atomic<bool> done{false};
};

struct Work final : c10d::Work {
  Work(int rank, c10d::OpType type, Tensors outputs, c10::Stream stream, std::shared_ptr<Collective> collective, std::string waits)
      : c10d::Work(rank, type), outputs(std::move(outputs)), stream(stream), end(stream.device_type()), collective(std::move(collective)), waits(std::move(waits)) {
    c10::StreamGuard guard(stream);
    end.record(stream);
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
    future->markCompleted(c10::IValue(this->outputs));
  }
  bool isCompleted() override { return collective->is_done() || collective->has_come(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(std::chrono::milliseconds(0)); }
  bool wait(std::chrono::milliseconds) override {
    c10::impl::VirtualGuardImpl guard(stream.device_type());
    end.block(guard.getStream(stream.device()));
    if (!waits.empty()) sync(waits, false);
    return true;
  }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  Tensors outputs;
  c10::Stream stream;
  c10::Event end;
  std::shared_ptr<Collective> collective;
  std::string waits;  // for what the host waits in `wait`
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

std::atomic<int> num_communicators{0};

struct Nccl final : c10d::Backend {
  struct Options final : c10d::Backend::Options {
    Options() : c10d::Backend::Options("nccl", std::chrono::minutes(10)) {}
    bool is_high_priority_stream = false;
  };

  Nccl(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<Options> options, std::string kind)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)), options(std::move(options)), kind(std::move(kind)) {}

  const std::string getBackendName() const override { return kind; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence; }
  void setTimeout(std::chrono::milliseconds timeout) override { options->timeout = timeout; }
  void eagerConnectSingleDevice(at::Device device) override { connect(device); }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }

  // The communicator of a device and its stream, made when it is first needed.
  c10::Stream connect(c10::Device device) {
    auto found = communicators.find(device.index());
    if (found == communicators.end()) {
      check_usable();
      auto name = (kind == "nccl" ? "comm" : kind) + std::to_string(num_communicators++);
      note({"communicator", getGroupDesc().empty() ? "made" : getGroupDesc(), name});
      found = communicators.emplace(device.index(), std::make_pair(name, new_stream(device.index()))).first;
    }
    name = found->second.first;
    return found->second.second;
  }

  static void check(const Tensors& tensors) {
    for (const auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type ", tensor.device().type(), ", which nccl does not reach");
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    }
  }
  static at::Tensor host(const at::Tensor& tensor) {
    auto alias = host_alias(tensor);
    return alias.is_contiguous() ? alias : alias.as_strided({alias.numel()}, {1});
  }
  static Tensors host(const Tensors& tensors) {
    Tensors made;
    for (const auto& tensor : tensors) made.push_back(host(tensor));
    return made;
  }
  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors all;
    for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
  }

  template <class Send>
  c10::intrusive_ptr<c10d::Work> go(c10d::OpType type, const Tensors& inputs, const Tensors& outputs, Send&& send,
                                    std::function<void()> then = nullptr, bool blocks = false) {
    check(inputs);
    check(outputs);
    auto device = !inputs.empty() ? inputs[0].device() : !outputs.empty() ? outputs[0].device() : c10::Device(c10::kCUDA, current_device());
    for (const auto* list : {&inputs, &outputs})
      for (const auto& tensor : *list)
        TORCH_CHECK(tensor.device() == device, "nccl: tensors on ", device, " and ", tensor.device());
    auto stream = connect(device);
    int64_t bytes = 0;
    for (const auto& tensor : inputs.empty() ? outputs : inputs) bytes += tensor.nbytes();
    auto what = c10d::opTypeToString(type);
    note({"launch", what, name, bytes});
    sequence++;
    auto said = "SeqNum=" + std::to_string(sequence) + ", OpType=" + what + ", NumBytes=" + std::to_string(bytes);
    launch(stream, inputs, outputs, what + " of " + name);
    auto work = send();
    auto collective = std::make_shared<Collective>(work, said, getRank(), options->timeout, std::move(then));
    attach(stream, collective);
    return c10::make_intrusive<Work>(getRank(), type, outputs, stream, collective, blocks ? "barrier" : kind == "nccl" ? "" : kind);
  }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) override {
    auto there = host(tensors);
    auto how = given;
    std::function<void()> then;
    if (given.reduceOp == c10d::ReduceOp::AVG) {
      how.reduceOp = c10d::ReduceOp::SUM;
      then = [there, size = getSize()] { for (auto tensor : there) tensor.div_(size); };
    }
    return go(c10d::OpType::ALLREDUCE, tensors, tensors, [&] { return gloo->allreduce(there, how); }, then);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& how) override {
    auto there = host(tensors);
    return go(c10d::OpType::BROADCAST, tensors, tensors, [&] { return gloo->broadcast(there, how); });
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& how) override {
    std::vector<Tensors> there;
    for (const auto& list : outputs) there.push_back(host(list));
    auto from = host(inputs);
    return go(c10d::OpType::ALLGATHER, inputs, flat(outputs), [&] { return gloo->allgather(there, from, how); });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& how) override {
    auto there = host(output), from = host(input);
    return go(c10d::OpType::_ALLGATHER_BASE, {input}, {output}, [&] { return gloo->_allgather_base(there, from, how); });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& how) override {
    auto there = host(output), from = host(input);
    return go(c10d::OpType::_REDUCE_SCATTER_BASE, {input}, {output}, [&] { return gloo->_reduce_scatter_base(there, from, how); });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& how) override {
    return go(c10d::OpType::BARRIER, {}, {}, [&] { return gloo->barrier(how); }, nullptr, true);
  }

  c10::intrusive_ptr<c10d::Backend> gloo;
  c10::intrusive_ptr<Options> options;
  std::map<int, std::pair<std::string, c10::Stream>> communicators;
  std::string kind;  // nccl, or gloo, which waits for the GPU
  std::string name;
  uint64_t sequence = 0;
};

}  // namespace

PYBIND11_MODULE(simulated_gpus_c, m) {
  set_stack_of(python_stack);
  m.def("begin_log", &begin_log);
  m.def("end_log", [](size_t begin) {
    py::list all;
    for (const auto& e : end_log(begin))
      all.append(py::dict(py::arg("kind") = e.kind, py::arg("what") = e.what, py::arg("communicator") = e.communicator,
                          py::arg("bytes") = e.bytes, py::arg("device") = e.device, py::arg("stream") = e.stream,
                          py::arg("thread") = e.thread, py::arg("stack") = e.stack));
    return all;
  });
  m.def("use_host_generator", &use_host_generator);
  m.def("initialize", [] { check_usable(); });
  m.def("is_in_bad_fork", &is_in_bad_fork);
  m.def("num_devices", &num_devices);
  m.def("current_device", &current_device);
  m.def("set_device", &set_device);
  m.def("exchange_device", [](int device) { int old = current_device(); if (device >= 0) set_device(device); return old; });
  m.def("synchronize", [] { synchronize_device(current_device(), true); });
  m.def("set_sync_debug_mode", &set_sync_debug_mode);
  m.def("sync_debug_mode", &sync_debug_mode);
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("memory", [](int device) { auto& at = memory_of(device); return std::make_tuple(at.allocated, at.peak, at.num_allocations); });
  m.def("reset_peak", [](int device) { memory_of(device).peak = memory_of(device).allocated; });
  m.def("limit_memory", [](int device, int64_t bytes) { memory_of(device).limit = bytes; });
  auto as_tuple = [](const c10::Stream& s) { return std::make_tuple(s.id(), int64_t(s.device_index()), int64_t(s.device_type())); };
  m.def("current_stream", [as_tuple](int device) {
    c10::impl::VirtualGuardImpl guard(c10::kCUDA);
    return as_tuple(guard.getStream(c10::Device(c10::kCUDA, device)));
  });
  m.def("default_stream", [as_tuple](int device) {
    c10::impl::VirtualGuardImpl guard(c10::kCUDA);
    return as_tuple(guard.getDefaultStream(c10::Device(c10::kCUDA, device)));
  });
  m.def("set_stream", [](int64_t id, int64_t device, int64_t type) {
    c10::impl::VirtualGuardImpl guard(c10::kCUDA);
    guard.exchangeStream(c10::Stream::unpack3(id, device, c10::DeviceType(type)));
    set_device(device);
  }, py::arg("stream_id"), py::arg("device_index"), py::arg("device_type"));
  // When torch.distributed's own types are there.
  m.def("process_group_nccl", [m]() mutable -> py::object {
    if (py::hasattr(m, "ProcessGroupNCCL")) return m.attr("ProcessGroupNCCL");
    auto nccl = py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(m, "ProcessGroupNCCL");
    py::class_<Nccl::Options, c10d::Backend::Options, c10::intrusive_ptr<Nccl::Options>>(nccl, "Options", py::dynamic_attr())
        .def(py::init([](bool high) { auto made = c10::make_intrusive<Nccl::Options>(); made->is_high_priority_stream = high; return made; }),
             py::arg("is_high_priority_stream") = false)
        .def_readwrite("is_high_priority_stream", &Nccl::Options::is_high_priority_stream);
    nccl.def(py::init([](const py::object& store, int rank, int size, c10::intrusive_ptr<Nccl::Options> options) {
               auto milliseconds = py::module_::import("datetime").attr("timedelta")(py::arg("milliseconds") = options->timeout.count());
               auto gloo = py::module_::import("torch._C._distributed_c10d").attr("ProcessGroupGloo")(store, rank, size, milliseconds);
               return c10::make_intrusive<Nccl>(gloo.cast<c10::intrusive_ptr<c10d::Backend>>(), options, "nccl");
             }), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"));
    nccl.def_property_readonly("options", [](Nccl& self) { return self.options; });
    nccl.def_property_readonly("uid", [](Nccl& self) { return self.getID(); });
    m.def("gloo_on_gpus", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
      auto options = c10::make_intrusive<Nccl::Options>();
      options->timeout = gloo->getBackendOptions()->timeout;
      return c10::make_intrusive<Nccl>(gloo, options, "gloo");
    });
    nccl.def("perform_nocolor_split", [](Nccl&, py::object) {});
    nccl.def("comm_split_count", [](Nccl&) { return 0; });
    nccl.def("_group_start", [](Nccl&) {});
    nccl.def("_group_end", [](Nccl&) {});
    return py::object(nccl);
  });
}

namespace c10d {
namespace {
// torch's own DDP asks in each forward how long the last pass took.
class SimulatedTimer : public Timer {
 public:
  explicit SimulatedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to && *from <= *to ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, SimulatedTimer)
}  // namespace
}  // namespace c10d
