// The compiled module `twostep.kernels._native`: what Python may ask of the kernels. Arguments were checked in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>

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

bool forward(Program& program, const Array<int32_t>& tokens, const Array<int32_t>& starts, const Array<int32_t>& counts,
             const Array<int32_t>& tables, const Array<int32_t>& table_starts, const Array<int32_t>& logit_rows, Logits& out) {
  const Batch batch{static_cast<int>(tokens.size()), static_cast<int>(starts.size()), static_cast<int>(logit_rows.size()),
                    tokens.data(), starts.data(), counts.data(), tables.data(), table_starts.data(), logit_rows.data()};
  nb::gil_scoped_release unlocked;
  return program.forward(batch, out.data());
}

std::map<std::string, double> seconds(const Program& program) {
  const auto& s = program.seconds();
  return {{"linear", s[0]}, {"attention", s[1]}, {"head", s[2]}, {"rest", s[3]}};
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

void bind_program(nb::module_& module) {
  nb::class_<Program>(module, "Program")
      .def("__init__", [](Program* self, const std::vector<int>& d, const std::string& isa, int threads, int kv_blocks, const Array<float>& frequencies) {
            new (self) Program({d[0], d[1], d[2], d[3], d[4], d[5], d[6]}, isa, threads, kv_blocks, to_vector(frequencies));
          }, "dims"_a, "isa"_a, "threads"_a, "kv_blocks"_a, "inverse_frequencies"_a)
      .def("add_matrix", [](Program& self, int format, const Array<uint8_t>& rows, int outputs, int inputs, const Array<int32_t>& order) {
            const std::vector<int32_t> permutation = to_vector(order);
            nb::gil_scoped_release unlocked;
            return self.add_matrix(static_cast<Format>(format), rows.data(), outputs, inputs, permutation);
          })
      .def("embed", [](Program& self, int format, const Array<uint8_t>& rows) { self.embed(static_cast<Format>(format), rows.data()); },
           nb::keep_alive<1, 3>())
      .def("norm_linear", [](Program& self, const Array<float>& norm, float eps, const std::vector<int>& matrices,
                             const std::vector<Array<float>>& biases, const std::vector<int>& offsets, const std::vector<bool>& fine) {
            std::vector<Program::Piece> pieces;
            for (size_t i = 0; i < matrices.size(); ++i) pieces.push_back({matrices[i], to_vector(biases[i]), offsets[i], fine[i]});
            self.norm_linear(to_vector(norm), eps, std::move(pieces));
          })
      .def("attention", &Program::attention)
      .def("linear_add", [](Program& self, int matrix, const Array<float>& bias, bool fine, bool from_heads) {
            self.linear_add({matrix, to_vector(bias), 0, fine}, from_heads ? Buffer::Heads : Buffer::Ffn);
          })
      .def("norm_gated_silu", [](Program& self, const Array<float>& norm, float eps, int gate, int up, bool fine) {
            self.norm_gated_silu(to_vector(norm), eps, {gate, {}, 0, fine}, {up, {}, 0, fine});
          })
      .def("logits", [](Program& self, const Array<float>& norm, float eps, int matrix, bool fine) {
            self.logits(to_vector(norm), eps, {matrix, {}, 0, fine});
          })
      .def("reserve", &Program::reserve)
      .def("forward", &forward)
      .def("copy_block", &Program::copy_block)
      .def("cancel", &Program::cancel)
      .def("seconds", &seconds)
      .def_prop_ro("isa", [](const Program& self) { return std::string(self.isa()); })
      .def_prop_ro("threads", &Program::threads)
      .def_prop_ro("lacked_ns", [](const Program& self) { return self.team()->lacked_ns(); })
      .def_prop_ro("weight_bytes", &Program::weight_bytes)
      .def_prop_ro("kv_bytes", &Program::kv_bytes)
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
  module.def("selftest", &run_selftest);
  module.def("peak_int8", [](const std::string& isa) { return peak(choose_kernels(isa).peak_int8); }, nb::call_guard<nb::gil_scoped_release>());
  module.def("peak_f32", [](const std::string& isa) { return peak(choose_kernels(isa).peak_f32); }, nb::call_guard<nb::gil_scoped_release>());
  module.def("read_bandwidth", &read_bandwidth, "bytes"_a, "threads"_a, "passes"_a = 7, nb::call_guard<nb::gil_scoped_release>());
}
