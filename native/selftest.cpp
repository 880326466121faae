#include "selftest.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "attendance.h"
#include "pack.h"

namespace twostep {
namespace {

// Deterministic, uniform in [0, 1).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435769u + 1) {}
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  float between(float low, float high) { return low + (high - low) * static_cast<float>(uniform()); }
  int below(int limit) { return static_cast<int>(uniform() * limit); }
  std::vector<float> floats(size_t count, float size) {
    std::vector<float> out(count);
    for (float& x : out) x = between(-size, size);
    return out;
  }

 private:
  uint64_t next() {  // splitmix64
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint64_t state_;
};

class Worst {
 public:
  void see(double error) { worst_ = std::isnan(error) ? INFINITY : std::max(worst_, error); }
  void count_difference(const float* a, const float* b, size_t count) { worst_ += std::memcmp(a, b, count * 4) != 0; }
  double value() const { return worst_; }

 private:
  double worst_ = 0;
};

// Memory at the end of which reading is noticed by a sanitiser; aligned as the arena's.
struct Bytes64 {
  explicit Bytes64(size_t size) : data(static_cast<uint8_t*>(std::aligned_alloc(64, (size + 63) / 64 * 64)), std::free) {
    std::memset(data.get(), 0, (size + 63) / 64 * 64);
  }
  std::unique_ptr<uint8_t, void (*)(void*)> data;
};

const char* name_of(Format format) {
  switch (format) {
    case Format::F32: return "F32";
    case Format::F16: return "F16";
    case Format::BF16: return "BF16";
    case Format::Q4_0: return "Q4_0";
    case Format::Q4_1: return "Q4_1";
    case Format::Q5_0: return "Q5_0";
    case Format::Q8_0: return "Q8_0";
    case Format::Q4_K: return "Q4_K";
    default: return "Q6_K";
  }
}

// Rows as a file would hold them: any bits are a valid weight but for the scales, which are made small and finite.
std::vector<uint8_t> random_rows(Format format, int outputs, int inputs, Random& random) {
  const Layout layout = layout_of(format);
  std::vector<uint8_t> out(layout.file_row_bytes(inputs) * outputs);
  for (uint8_t& byte : out) byte = random.below(256);
  const auto half = [&](size_t at) {  // f16 in +-[2^-6, 2^-5)
    const uint16_t bits = (random.below(2) << 15) | (9 << 10) | random.below(1024);
    std::memcpy(&out[at], &bits, 2);
  };
  for (size_t block = 0; block < out.size(); block += layout.block_bytes) {
    if (format == Format::Q6_K) half(block + 208);
    else if (format == Format::BF16) out[block + 1] = 0x3c | random.below(2) << 7;
    else if (format == Format::F32) out[block + 3] = 0x3c | random.below(2) << 7;
    else half(block);
    if (format == Format::Q4_1 || format == Format::Q4_K) half(block + 2);
  }
  return out;
}

struct TestMatrix {
  std::vector<float> weights;  // [outputs][inputs]
  Bytes64 memory;
  Matrix matrix;
};

TestMatrix make_matrix(Format format, int outputs, int inputs, Random& random) {
  const Layout layout = layout_of(format);
  const std::vector<uint8_t> rows = random_rows(format, outputs, inputs, random);
  Matrix matrix{format, outputs, inputs, nullptr, layout.panel_bytes(inputs)};
  TestMatrix out{std::vector<float>(size_t(outputs) * inputs), Bytes64(matrix.panel_bytes * matrix.panels()), matrix};
  out.matrix.data = out.memory.data.get();
  for (int row = 0; row < outputs; ++row)
    decode_row(format, rows.data() + row * layout.file_row_bytes(inputs), inputs, &out.weights[size_t(row) * inputs]);
  for (int p = 0; p < matrix.panels(); ++p) {
    const uint8_t* sources[kPanel];
    for (int c = 0; c < kPanel; ++c) {
      const int row = p * kPanel + c;
      sources[c] = row < outputs ? rows.data() + row * layout.file_row_bytes(inputs) : nullptr;
    }
    pack_panel(format, sources, inputs, out.memory.data.get() + p * matrix.panel_bytes);
  }
  return out;
}

// Error of one panel's results against double sums, relative to the sum of sizes; x is [rows][inputs].
void compare_panel(const TestMatrix& test, int panel, const std::vector<double>& x, int rows, const float* out, Worst& worst) {
  const int inputs = test.matrix.inputs;
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < kPanel && panel * kPanel + c < test.matrix.outputs; ++c) {
      const float* w = &test.weights[size_t(panel * kPanel + c) * inputs];
      double sum = 0, size = 0;
      for (int i = 0; i < inputs; ++i) {
        sum += w[i] * x[size_t(r) * inputs + i];
        size += std::fabs(w[i] * x[size_t(r) * inputs + i]);
      }
      worst.see(std::fabs(out[r * kPanel + c] - sum) / (size + 1e-30));
    }
}

// What a record stands for, in order.
template <class Value>
std::vector<double> values_of(const QuantRows& rows, int row) {
  static const int order[4] = {0, 2, 1, 3};
  std::vector<double> out(rows.inputs);
  for (int i = 0; i < rows.inputs; ++i) {
    const int at = rows.fine ? i / 4 * 4 + order[i % 4] : i;
    out[i] = double(rows.scales<Value>(row)[i / kGroup]) * rows.values<Value>(row)[at];
  }
  return out;
}

void check_quantised(const Kernels& k, Format format, bool fine, int inputs, int rows, Worst& error, Worst& company) {
  Random random(inputs * 131 + rows);
  const TestMatrix test = make_matrix(format, kPanel + 5, inputs, random);
  const size_t record = QuantRows::record_bytes(inputs, fine);
  Bytes64 records(record * rows), scratch(kMostPanels * kScratchBytes);
  const QuantRows x{records.data.get(), record, inputs, fine};
  std::vector<double> rounded;
  for (int r = 0; r < rows; ++r) {
    uint8_t* at = records.data.get() + record * r;
    k.quantise(random.floats(inputs, 3).data(), inputs, fine ? nullptr : at, fine ? at : nullptr);
    const std::vector<double> row = fine ? values_of<int16_t>(x, r) : values_of<int8_t>(x, r);
    rounded.insert(rounded.end(), row.begin(), row.end());
  }
  std::vector<float> all(2 * rows * kPanel), again(rows * kPanel), one(kPanel);
  const Matrix& m = test.matrix;
  const PanelJob both[] = {{m.panel(0), m.panel(1), all.data()}, {m.panel(1), m.panel(0), all.data() + rows * kPanel}};
  k.linear_panels(format, both, 2, x, rows, scratch.data.get());
  for (int p = 0; p < m.panels(); ++p) {
    const float* found = both[p].out;
    compare_panel(test, p, rounded, rows, found, error);
    const PanelJob alone{m.panel(p), m.panel(p), again.data()};
    k.linear_panels(format, &alone, 1, x, rows, scratch.data.get());
    company.count_difference(again.data(), found, again.size());
    for (int r = 0; r < rows; ++r) {
      const PanelJob job{m.panel(p), m.panel(p), one.data()};
      k.linear_panels(format, &job, 1, {x.base + record * r, record, inputs, fine}, 1, scratch.data.get());
      company.count_difference(one.data(), &found[r * kPanel], kPanel);
    }
  }
}

void check_floats(const Kernels& k, Format format, int inputs, int rows, Worst& error, Worst& company) {
  Random random(inputs * 137 + rows);
  const TestMatrix test = make_matrix(format, kPanel + 3, inputs, random);
  const std::vector<float> x = random.floats(size_t(rows) * inputs, 3);
  std::vector<float> all(rows * kPanel), one(kPanel);
  for (int p = 0; p < test.matrix.panels(); ++p) {
    k.float_panel(test.matrix, p, x.data(), inputs, rows, all.data());
    compare_panel(test, p, {x.begin(), x.end()}, rows, all.data(), error);
    for (int r = 0; r < rows; ++r) {
      k.float_panel(test.matrix, p, &x[size_t(r) * inputs], inputs, 1, one.data());
      company.count_difference(one.data(), &all[r * kPanel], kPanel);
    }
  }
}

void check_linear(const Kernels& k, std::vector<Check>& out) {
  for (Format format : {Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Q8_0, Format::Q4_K, Format::Q6_K}) {
    Worst error, company;
    const int unit = layout_of(format).block_elements;
    for (int inputs : {unit, 3 * unit, (kScratchGroups * kGroup / unit + 1) * unit})
      for (int rows : {1, 2, 3, 5, 13, 14, 15, 16, 29})
        for (bool fine : {false, true}) check_quantised(k, format, fine, inputs, rows, error, company);
    out.push_back({std::string("linear ") + name_of(format), error.value(), 2e-6});
    out.push_back({std::string("linear ") + name_of(format) + ", rows and panels alone and together", company.value(), 0});
  }
  for (Format format : {Format::F32, Format::F16, Format::BF16}) {
    Worst error, company;
    for (int inputs : {1, 7, 64, 172})
      for (int rows : {1, 2, 5, 13, 25}) check_floats(k, format, inputs, rows, error, company);
    out.push_back({std::string("linear ") + name_of(format), error.value(), 2e-6});
    out.push_back({std::string("linear ") + name_of(format) + ", rows alone and together", company.value(), 0});
  }
}

template <class Value>
void check_sums(const QuantRows& rows, Worst& sums) {
  for (int g = 0; g < rows.inputs / kGroup; ++g) {
    int halves[2] = {0, 0};
    for (int i = 0; i < kGroup; ++i) halves[i / 16] += rows.values<Value>(0)[g * kGroup + i];
    sums.see(halves[0] != rows.half_sums<Value>(0)[2 * g] || halves[1] != rows.half_sums<Value>(0)[2 * g + 1]);
    sums.see(rows.scaled_sums<Value>(0)[g] != rows.scales<Value>(0)[g] * float(halves[0] + halves[1]));
  }
}

// Values are within half a step of what they stand for, and the sums are those of the values.
void check_quantise(const Kernels& k, std::vector<Check>& out) {
  Worst coarse, fine, sums;
  for (int inputs : {32, 96, 576}) {
    Random random(inputs);
    std::vector<float> x = random.floats(inputs, 5);
    std::fill_n(x.begin(), kGroup, 0.0f);  // a group of zeros
    Bytes64 record(QuantRows::record_bytes(inputs, false)), fine_record(QuantRows::record_bytes(inputs, true));
    k.quantise(x.data(), inputs, record.data.get(), fine_record.data.get());
    const QuantRows rows{record.data.get(), 0, inputs, false}, fine_rows{fine_record.data.get(), 0, inputs, true};
    const std::vector<double> q8 = values_of<int8_t>(rows, 0), q16 = values_of<int16_t>(fine_rows, 0);
    for (int i = 0; i < inputs; ++i) {
      const double scale = rows.scales<int8_t>(0)[i / kGroup] + 1e-30;
      coarse.see(std::fabs(x[i] - q8[i]) / scale - 0.5);
      fine.see(std::fabs(x[i] - q16[i]) / scale - 0.5 / 254);
    }
    check_sums<int8_t>(rows, sums);
    check_sums<int16_t>(fine_rows, sums);
  }
  out.push_back({"quantise, distance beyond half a step", coarse.value(), 1e-5});
  out.push_back({"quantise to 16 bits, the same", fine.value(), 1e-5});
  out.push_back({"quantise, sums", sums.value(), 0});
}

// What dividing says, which the kernels do only where they must: values at and beside halves of a step, and steps so small
// that a 254th of them is no normal number.
void check_quotients(const Kernels& k, std::vector<Check>& out) {
  Worst coarse, fine;
  Random random(11);
  for (float size : {1.0f, 3.7f, 1e20f, 1e-35f, 2e-36f, 1e-39f}) {
    constexpr int kInputs = 19 * kGroup;
    std::vector<float> x = random.floats(kInputs, size);
    for (int i = 0; i < kInputs; ++i) {
      const float unit = size / 127, half = (random.below(254) - 127 + 0.5f) * unit;
      if (i % kGroup == 0) x[i] = size;
      else if (i % 3 == 0) x[i] = i % 2 ? half : std::nextafter(half, 0.0f);
    }
    Bytes64 record(QuantRows::record_bytes(kInputs, false)), fine_record(QuantRows::record_bytes(kInputs, true));
    k.quantise(x.data(), kInputs, record.data.get(), fine_record.data.get());
    const QuantRows rows{record.data.get(), 0, kInputs, false}, fine_rows{fine_record.data.get(), 0, kInputs, true};
    static const int order[4] = {0, 2, 1, 3};
    for (int i = 0; i < kInputs; ++i) {
      const float scale = rows.scales<int8_t>(0)[i / kGroup], step = scale / 254.0f;
      const float q = scale > 0 ? std::nearbyint(x[i] / scale) : 0, left = x[i] - q * scale;
      coarse.see(std::fabs(rows.values<int8_t>(0)[i] - q));
      const int found = fine_rows.values<int16_t>(0)[i / 4 * 4 + order[i % 4]];
      fine.see(std::fabs(found - (scale > 0 ? std::nearbyint(std::fma(q, 254.0f, left / step)) : 0)));
    }
  }
  out.push_back({"quantise, the same as by division", coarse.value(), 0});
  out.push_back({"quantise to 16 bits, the same as by division", fine.value(), 0});
}

void check_rows(const Kernels& k, std::vector<Check>& out) {
  Worst norm, silu, gelu, rotation, panels;
  Random random(7);
  for (int n : {1, 15, 16, 17, 64, 576}) {
    const std::vector<float> x = random.floats(n, 4), w = random.floats(n, 2);
    std::vector<float> y(n);
    k.rms_norm(x.data(), w.data(), 1e-5f, n, y.data());
    double squares = 0;
    for (float v : x) squares += double(v) * v;
    for (int i = 0; i < n; ++i) norm.see(std::fabs(y[i] - x[i] / std::sqrt(squares / n + 1e-5) * w[i]));
  }
  for (int i = 0; i < 50; ++i) {
    const int count = 1 + random.below(kPanel);
    const std::vector<float> gate = random.floats(2 * kPanel, 100), up = random.floats(2 * kPanel, 3);
    std::vector<float> y(2 * count);
    k.gated(Activation::Silu, gate.data(), up.data(), 2, count, y.data(), count);
    for (int j = 0; j < 2 * count; ++j) {
      const int at = j / count * kPanel + j % count;
      const double expected = gate[at] / (1 + std::exp(-double(gate[at]))) * up[at];
      silu.see(std::fabs(y[j] - expected) / (std::fabs(expected) + 1e-3));
    }
    k.gated(Activation::GeluTanh, gate.data(), up.data(), 2, count, y.data(), count);
    for (int j = 0; j < 2 * count; ++j) {
      const int at = j / count * kPanel + j % count;
      const double x = gate[at], expected = x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979) * (x + 0.044715 * x * x * x))) / 2 * up[at];
      gelu.see(std::fabs(y[j] - expected) / (std::fabs(expected) + 1e-3));
    }
  }
  for (int dim : {2, 6, 8, 64, 128}) {
    std::vector<float> head = random.floats(dim, 2), cos_sin(dim);
    const std::vector<float> before = head;
    for (int i = 0; i < dim / 2; ++i) {
      cos_sin[i] = std::cos(0.3f * i);
      cos_sin[dim / 2 + i] = std::sin(0.3f * i);
    }
    k.rope(head.data(), cos_sin.data(), dim, 0.125f);
    for (int i = 0; i < dim / 2; ++i) {
      const double a = before[i], b = before[i + dim / 2], c = cos_sin[i], s = cos_sin[dim / 2 + i];
      rotation.see(std::fabs(head[i] - (a * c - b * s) / 8));
      rotation.see(std::fabs(head[i + dim / 2] - (b * c + a * s) / 8));
    }
  }
  const std::vector<float> panel = random.floats(3 * kPanel, 1), bias = random.floats(kPanel, 1);
  for (int count : {1, 9, 16}) {
    std::vector<float> y(3 * count, 0.5f);
    k.put(panel.data(), 3, count, bias.data(), y.data(), count);
    k.add(panel.data(), 3, count, y.data(), count);
    for (int j = 0; j < 3 * count; ++j) {
      const float p = panel[j / count * kPanel + j % count];
      panels.see(std::fabs(y[j] - (2 * p + bias[j % count])));
    }
  }
  out.push_back({"rms norm", norm.value(), 2e-5});
  out.push_back({"gated silu", silu.value(), 2e-6});
  out.push_back({"gated gelu", gelu.value(), 1e-5});
  out.push_back({"rope", rotation.value(), 1e-6});
  out.push_back({"put and add", panels.value(), 1e-6});
}

// One head's cache over a shuffled block table, filled by write_kv.
class TestCache {
 public:
  TestCache(const Kernels& k, int head_dim, int positions, Random& random)
      : dim_(head_dim), keys_(random.floats(size_t(positions) * head_dim, 2)), values_(random.floats(size_t(positions) * head_dim, 2)),
        memory_(size_t(positions + kBlock) * 2 * padded(head_dim) * 2 + 4096) {
    keys_[0] = 1e6f;  // beyond f16: saturates
    const int blocks = (positions + kBlock - 1) / kBlock;
    for (int b = 0; b < blocks; ++b) table_.push_back(blocks - 1 - b);
    for (int p = 0; p < positions; ++p) {
      const KvView kv = view();
      k.write_kv(&keys_[size_t(p) * dim_], &values_[size_t(p) * dim_], dim_, p % kBlock, const_cast<uint16_t*>(kv.keys(p / kBlock)),
                 const_cast<uint16_t*>(kv.values(p / kBlock)));
    }
  }
  KvView view() const {
    return {reinterpret_cast<const uint16_t*>(memory_.data.get()), size_t(2) * padded(dim_) * kBlock, table_.data(), dim_};
  }
  double key(int position, int i) const { return f16_to_f32(view().keys(position / kBlock)[i * kBlock + position % kBlock]); }
  double value(int position, int i) const {
    return f16_to_f32(view().values(position / kBlock)[size_t(position % kBlock) * padded(dim_) + i]);
  }
  // Distance of what is stored from what was written, beyond half a unit of the last place of f16.
  double rounding_error(int positions) const {
    double worst = 0;
    for (int p = 0; p < positions; ++p)
      for (int i = 0; i < dim_; ++i) {
        const double wanted = std::clamp(double(keys_[size_t(p) * dim_ + i]), -65504.0, 65504.0), v = values_[size_t(p) * dim_ + i];
        worst = std::max(worst, std::fabs(key(p, i) - wanted) - std::max(std::fabs(wanted) * 0x1p-11, 0x1p-25));
        worst = std::max(worst, std::fabs(value(p, i) - v) - std::max(std::fabs(v) * 0x1p-11, 0x1p-25));
      }
    return worst;
  }

 private:
  int dim_;
  std::vector<float> keys_, values_;
  Bytes64 memory_;
  std::vector<int32_t> table_;
};

// All splits of a tile, merged in order: [rows][head_dim].
std::vector<float> attend_all(const Kernels& k, const QueryTile& tile, const KvView& kv) {
  const size_t stride = state_floats(kv.head_dim);
  std::vector<float> states(kMaxQueryRows * stride), next(states.size()), scratch(attend_scratch_floats(kv.head_dim));
  k.attend(tile, kv, 0, {}, states.data(), scratch.data());
  for (int split = 1; split * kSplit < tile.position + tile.tokens; ++split) {
    k.attend(tile, kv, split, {}, next.data(), scratch.data());
    for (int r = 0; r < tile.rows(); ++r) k.merge(&states[r * stride], &next[r * stride], kv.head_dim);
  }
  std::vector<float> out(size_t(tile.rows()) * kv.head_dim);
  for (int r = 0; r < tile.rows(); ++r) k.finish(&states[r * stride], kv.head_dim, &out[size_t(r) * kv.head_dim]);
  return out;
}

void compare_attention(const TestCache& cache, const QueryTile& tile, int dim, const std::vector<float>& found, Worst& error) {
  for (int r = 0; r < tile.rows(); ++r) {
    const int positions = tile.position + r / tile.group + 1;
    std::vector<double> p(positions), out(dim, 0.0);
    double highest = -INFINITY, sum = 0;
    for (int t = 0; t < positions; ++t) {
      for (int i = 0; i < dim; ++i) p[t] += tile.row(r)[i] * cache.key(t, i);
      highest = std::max(highest, p[t]);
    }
    for (double& x : p) sum += x = std::exp2(x - highest);
    for (int i = 0; i < dim; ++i) {
      for (int t = 0; t < positions; ++t) out[i] += p[t] * cache.value(t, i);
      error.see(std::fabs(found[size_t(r) * dim + i] - out[i] / sum));
    }
  }
}

void check_attention(const Kernels& k, std::vector<Check>& out) {
  Worst error, company, cache_error;
  struct Case { int dim, group, tokens, position; };
  for (const Case& c : {Case{8, 2, 1, 0}, {8, 2, 7, 0}, {24, 1, 3, 61}, {64, 3, 16, 0}, {64, 3, 16, 500}, {64, 3, 1, 1030}, {80, 5, 9, 57}, {128, 7, 6, 507}}) {
    Random random(c.dim * 7 + c.tokens + c.position);
    const TestCache cache(k, c.dim, c.position + c.tokens, random);
    const std::vector<float> q = random.floats(size_t(c.tokens) * c.group * c.dim, 0.3f);
    const size_t token_stride = size_t(c.group) * c.dim;
    const QueryTile tile{q.data(), token_stride, size_t(c.dim), c.tokens, c.group, c.position};
    const std::vector<float> found = attend_all(k, tile, cache.view());
    compare_attention(cache, tile, c.dim, found, error);
    for (int t = 0; t < c.tokens; ++t)
      for (int h = 0; h < c.group; ++h) {
        const QueryTile lone{q.data() + t * token_stride + h * c.dim, token_stride, size_t(c.dim), 1, 1, c.position + t};
        company.count_difference(attend_all(k, lone, cache.view()).data(), &found[(size_t(t) * c.group + h) * c.dim], c.dim);
      }
    cache_error.see(cache.rounding_error(c.position + c.tokens));
  }
  out.push_back({"attention", error.value(), 1e-5});
  out.push_back({"attention, queries alone and together", company.value(), 0});
  out.push_back({"write to the cache", cache_error.value(), 1e-9});
}

// Runs of 10 ms: three threads to which others leave `cores` of their cores; how many take part on average of the last `count`.
double attendance(Attendance& team, int64_t& now_ns, double cores, int runs, int count, int64_t between_ns = 0) {
  constexpr int64_t kRunNs = 10'000'000;
  double sum = 0;
  for (int i = 0; i < runs; ++i) {
    const int active = team.begin(now_ns);
    if (i >= runs - count) sum += active;
    now_ns += kRunNs;
    team.ran(now_ns, kRunNs, static_cast<int64_t>(kRunNs * std::max<double>(0, active - cores)));
    now_ns += between_ns;
  }
  return sum / count;
}

// Threads stay away from cores that others use, but for a try now and then, and come back to free ones.
void check_attendance(std::vector<Check>& out) {
  Worst wrong;
  int64_t now_ns = 1;
  Attendance team(3);
  wrong.see(attendance(team, now_ns, 2.9, 100, 100) != 3);                     // little is lacking
  wrong.see(attendance(team, now_ns, 1.5, 6, 1) != 1);                         // two would lack half a core: both leave at once
  wrong.see(std::fabs(attendance(team, now_ns, 1.5, 3000, 1000) - 1) > 0.03);  // tries cost little
  wrong.see(attendance(team, now_ns, 3, 220, 10) != 3);                        // free again: all within 2.2 s of running
  wrong.see(std::fabs(attendance(team, now_ns, 2, 3000, 1000) - 2) > 0.03);
  wrong.see(attendance(team, now_ns, 0.3, 1000, 100) > 1.1);
  now_ns += 2'000'000'000;
  wrong.see(attendance(team, now_ns, 3, 100, 10) != 3);
  wrong.see(attendance(team, now_ns, 1.5, 6, 1) == 3);                         // they leave for a burst of 60 ms,
  wrong.see(attendance(team, now_ns, 3, 15, 1) != 3);                          // and are back 150 ms later
  wrong.see(attendance(team, now_ns, 3, 60, 10, 50'000'000) != 3);             // and of real time, with little to run
  wrong.see(attendance(team, now_ns, 1, 300, 100) > 1.1);
  now_ns += 2'000'000'000;                                                     // after a rest all take part at once,
  wrong.see(attendance(team, now_ns, 3, 1, 1) != 3);
  now_ns += 2'000'000'000;
  wrong.see(attendance(team, now_ns, 1, 6, 1) != 1);                           // and leave again if need be
  Attendance large(64);
  wrong.see(attendance(large, now_ns, 20, 20, 1) != 20);                       // two decisions, not 44
  wrong.see(attendance(large, now_ns, 64, 400, 1) != 64);
  Attendance lone(1);
  wrong.see(attendance(lone, now_ns, 0.2, 100, 100) != 1);
  out.push_back({"threads that take part", wrong.value(), 0});
}

}  // namespace

std::vector<Check> selftest(const Kernels& kernels) {
  std::vector<Check> out;
  check_linear(kernels, out);
  check_quantise(kernels, out);
  check_quotients(kernels, out);
  check_rows(kernels, out);
  check_attention(kernels, out);
  check_attendance(out);
  return out;
}

}  // namespace twostep
