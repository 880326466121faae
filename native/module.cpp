// The compiled module `twostep.kernels._native`: what Python may ask of the kernels. Arguments were checked in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>

#include "crc32c.h"
#include "program.h"
#include "selftest.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace twostep {

void bind_sampling(nb::module_& module);

namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
std::vector<T> to_vector(const Array<T>& array) { return {array.data(), array.data() + array.size()}; }

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

bool forward(Program& program, const Array<int32_t>& tokens, const Array<int32_t>& starts, const Array<int32_t>& counts,
             const std::vector<Array<int32_t>>& tables, const Array<int32_t>& table_starts, const Array<int32_t>& logit_rows, Logits& out) {
  std::vector<const int32_t*> by_group;
  for (const Array<int32_t>& table : tables) by_group.push_back(table.data());
  const Batch batch{static_cast<int>(tokens.size()), static_cast<int>(starts.size()), static_cast<int>(logit_rows.size()), tokens.data(),
                    starts.data(), counts.data(), by_group.data(), table_starts.data(), logit_rows.data()};
  nb::gil_scoped_release unlocked;
  return program.forward(batch, out.data());
}

std::map<std::string, double> seconds(const Program& program) {
  const auto& s = program.seconds();
  return {{"linear", s[0]}, {"attention", s[1]}, {"head", s[2]}, {"rest", s[3]}};
}

// Steps that were added up, and nanoseconds as [member][instruction, the last: until it started][stage][work, wait].
std::pair<int64_t, nb::object> profile_of(const Program& program) {
  const Profile& profile = program.profile();
  const size_t members = profile.members(), rows = members ? profile.rows(0).size() : 0, row = kStages * 2;
  int64_t* out = new int64_t[std::max<size_t>(1, members * rows * row)];
  for (size_t m = 0; m < members; ++m)
    for (size_t i = 0; i < rows; ++i)
      for (size_t j = 0; j < row; ++j) out[(m * rows + i) * row + j] = profile.rows(static_cast<int>(m))[i][j / 2][j % 2];
  nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<int64_t*>(p); });
  const size_t shape[] = {members, rows, kStages, 2};
  return {profile.steps(), nb::cast(nb::ndarray<nb::numpy, int64_t>(out, 4, shape, owner))};
}

// Best of many short runs of one core's arithmetic: operations per second.
double peak(double (*run)()) {
  double best = 0;
  for (int i = 0; i < 200; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const double operations = run();
    best = std::max(best, operations / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

// Bytes per second of all threads reading `bytes` in all once, each its own part, after a first pass.
double read_bandwidth(size_t bytes, int threads, int passes) {
  Team team(threads);
  Arena arena;
  const size_t words = bytes / 8 / threads / 64 * 64;
  uint64_t* data = arena.take_array<uint64_t>(words * threads);
  std::fill_n(data, words * threads, 1);  // else all of it is one page of zeros
  std::vector<uint64_t> sums(threads * 8);
  std::vector<double> rates;
  for (int pass = 0; pass <= passes; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    team.run([&](int) {
      team.share(threads, [&](int part) {
        const uint64_t* from = data + words * part;
        uint64_t sum[16] = {};
        for (size_t i = 0; i < words; i += 16)
          for (int j = 0; j < 16; ++j) sum[j] += from[i + j];
        for (uint64_t s : sum) sums[part * 8] += s;
      });
    });
    rates.push_back(words * threads * 8 / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  volatile uint64_t keep = sums[0];
  (void)keep;
  std::sort(rates.begin() + 1, rates.end());
  return rates[1 + passes / 2];
}

// What add_matrix() will take for such a matrix.
size_t packed_bytes(int format, int outputs, int inputs) {
  const Matrix matrix{static_cast<Format>(format), outputs, inputs, nullptr, layout_of(static_cast<Format>(format)).panel_bytes(inputs)};
  return Arena::rounded(matrix.panel_bytes * matrix.panels());
}

// name -> (worst error, limit)
std::map<std::string, std::pair<double, double>> run_selftest(const std::string& isa) {
  std::map<std::string, std::pair<double, double>> out;
  for (const Check& check : selftest(choose_kernels(isa))) out[check.name] = {check.error, check.limit};
  return out;
}

// The parameters of one instruction by name; each that is given has to be read.
class Parameters {
 public:
  explicit Parameters(nb::dict given) : given_(std::move(given)) {}

  template <class T>
  T get(const char* name, T otherwise) {
    if (!given_.contains(name)) return otherwise;
    ++read_;
    return nb::cast<T>(given_[name]);
  }
  Norm norm(const char* name) {
    using Given = std::pair<Array<float>, float>;
    if (!given_.contains(name)) return {};
    ++read_;
    const Given given = nb::cast<Given>(given_[name]);
    return {to_vector(given.first), given.second};
  }
  std::vector<Piece> pieces() {
    using Given = std::vector<std::tuple<int, Array<float>, int, bool>>;  // matrix, bias, offset, fine
    std::vector<Piece> pieces;
    if (!given_.contains("pieces")) return pieces;
    ++read_;
    for (const auto& [matrix, bias, offset, fine] : nb::cast<Given>(given_["pieces"])) pieces.push_back({matrix, to_vector(bias), offset, fine});
    return pieces;
  }
  void check_all_read() const {
    if (read_ != nb::len(given_)) throw std::invalid_argument("an instruction has parameters that its kind does not read");
  }

 private:
  nb::dict given_;
  size_t read_ = 0;
};

template <class T>
T named(const std::map<std::string, T>& names, const std::string& name) {
  const auto found = names.find(name);
  if (found == names.end()) throw std::invalid_argument("the native program knows no " + name);
  return found->second;
}

const std::map<std::string, Instruction::Kind> kKinds = {
    {"embed", Instruction::Kind::Embed}, {"linear", Instruction::Kind::Linear}, {"attention", Instruction::Kind::Attention},
    {"linear_add", Instruction::Kind::LinearAdd}, {"gated", Instruction::Kind::Gated}, {"logits", Instruction::Kind::Logits}};
const std::map<std::string, Buffer> kBuffers = {
    {"residual", Buffer::Residual}, {"qkv", Buffer::Qkv}, {"heads", Buffer::Heads}, {"ffn", Buffer::Ffn}};
const std::map<std::string, Activation> kActivations = {{"silu", Activation::Silu}, {"gelu_tanh", Activation::GeluTanh}};

// Only the parameters that a kind reads (program.h) may be given.
Instruction instruction_of(const std::string& kind, nb::dict given) {
  using Kind = Instruction::Kind;
  Parameters parameters(std::move(given));
  Instruction out{named(kKinds, kind)};
  if (out.kind == Kind::Embed || out.kind == Kind::Attention) {
    out.scale = parameters.get("scale", 1.0f);
  } else {
    out.from = named(kBuffers, parameters.get<std::string>("from", "residual"));
    out.pieces = parameters.pieces();
  }
  if (out.kind == Kind::Linear || out.kind == Kind::Gated || out.kind == Kind::Logits) out.norm = parameters.norm("norm");
  if (out.kind == Kind::Linear || out.kind == Kind::Gated) out.to = named(kBuffers, parameters.get<std::string>("to", "residual"));
  if (out.kind == Kind::LinearAdd) out.post_norm = parameters.norm("post_norm");
  if (out.kind == Kind::Gated) out.activation = named(kActivations, parameters.get<std::string>("activation", "silu"));
  if (out.kind == Kind::Attention) {
    out.group = parameters.get("group", 0);
    out.layer = parameters.get("layer", 0);
    out.rotation = parameters.get("rotation", -1);
    out.q_norm = parameters.norm("q_norm");
    out.k_norm = parameters.norm("k_norm");
  }
  parameters.check_all_read();
  return out;
}

using Groups = std::vector<std::tuple<int, int, std::optional<int>>>;  // layers, blocks, window

std::unique_ptr<KvPool> make_pool(const Groups& groups, int kv_heads, int head_dim, nb::bytes digest, bool shareable) {
  std::vector<KvGroup> made;
  for (const auto& [layers, blocks, window] : groups) made.push_back({layers, blocks, window.value_or(kNoWindow)});
  return std::make_unique<KvPool>(std::move(made), kv_heads, head_dim, std::string(digest.c_str(), digest.size()), shareable);
}

nb::bytes export_block(Program& program, int group, int block) {
  nb::bytes out(nullptr, program.pool().image_bytes(group));
  uint8_t* bytes = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(out.ptr()));
  nb::gil_scoped_release unlocked;
  program.export_block(group, block, bytes);
  return out;
}

void bind_program(nb::module_& module) {
  nb::class_<Program>(module, "Program")
      .def("__init__", [](Program* self, const std::vector<int>& d, const std::string& isa, int threads, const Groups& groups, nb::bytes digest, bool shareable) {
            new (self) Program({d[0], d[1], d[2], d[3], d[4], d[5]}, isa, threads, make_pool(groups, d[2], d[3], digest, shareable));
          }, "dims"_a, "isa"_a, "threads"_a, "groups"_a, "digest"_a, "shareable"_a)
      .def("add_matrix", [](Program& self, int format, const Array<uint8_t>& rows, int outputs, int inputs, const Array<int32_t>& order) {
            const std::vector<int32_t> permutation = to_vector(order);
            nb::gil_scoped_release unlocked;
            return self.add_matrix(static_cast<Format>(format), rows.data(), outputs, inputs, permutation);
          })
      .def("set_embedding", [](Program& self, int format, const Array<uint8_t>& rows) { self.set_embedding(static_cast<Format>(format), rows.data()); },
           nb::keep_alive<1, 3>())
      .def("add_rotation", [](Program& self, const Array<float>& frequencies) { return self.add_rotation(to_vector(frequencies)); })
      .def("add", [](Program& self, const std::string& kind, nb::dict parameters) { self.add(instruction_of(kind, std::move(parameters))); })
      .def("reserve", &Program::reserve)
      .def("forward", &forward)
      .def("copy_block", &Program::copy_block)
      .def("export_block", &export_block)
      .def("import_block", [](Program& self, int group, int block, const Bytes& data) {
            nb::gil_scoped_release unlocked;
            self.import_block(group, block, data.data(), data.size());
          })
      .def("cancel", &Program::cancel)
      .def("seconds", &seconds)
      .def("profile_steps", &Program::profile_steps)
      .def("profile", &profile_of)
      .def_prop_ro("isa", [](const Program& self) { return std::string(self.isa()); })
      .def_prop_ro("threads", &Program::threads)
      .def_prop_ro("lacked_ns", [](const Program& self) { return self.team()->lacked_ns(); })
      .def_prop_ro("weight_bytes", &Program::weight_bytes)
      .def_prop_ro("kv_bytes", [](const Program& self) { return self.pool().bytes(); })
      .def_prop_ro("kv_file_descriptor", [](const Program& self) { return self.pool().file_descriptor(); })
      .def_prop_ro("buffer_bytes", &Program::buffer_bytes);
}

}  // namespace
}  // namespace twostep

NB_MODULE(_native, module) {
  using namespace twostep;
  nb::set_leak_warnings(false);  // module-level SamplingParams live to the end of the process
  bind_program(module);
  bind_sampling(module);
  module.def("usable_isas", &usable_isas);
  module.def("packed_bytes", &packed_bytes);
  module.def("crc32c", [](const Bytes& data, uint32_t crc) { return crc32c(data.data(), data.size(), crc); }, "data"_a, "crc"_a = 0);
  module.def("crc32c_portable", [](const Bytes& data, uint32_t crc) { return crc32c_portable(data.data(), data.size(), crc); }, "data"_a, "crc"_a = 0);
  module.def("selftest", &run_selftest);
  module.def("peak_int8", [](const std::string& isa) { return peak(choose_kernels(isa).peak_int8); }, nb::call_guard<nb::gil_scoped_release>());
  module.def("peak_f32", [](const std::string& isa) { return peak(choose_kernels(isa).peak_f32); }, nb::call_guard<nb::gil_scoped_release>());
  module.def("read_bandwidth", &read_bandwidth, "bytes"_a, "threads"_a, "passes"_a = 7, nb::call_guard<nb::gil_scoped_release>());
}
