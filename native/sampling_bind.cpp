// The sampler as Python sees it; kernels/sampling.py is its only caller and has checked the parameters' ranges.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "program.h"
#include "sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace twostep {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using TokenArray = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Fields of a Python SampleRow, in order.
constexpr size_t kParams = 0, kChoice = 1, kPosition = 2, kPrompt = 3, kOutput = 4, kMask = 5;

class PySampler {
 public:
  PySampler(int vocab, int threads) : sampler_(vocab, std::make_shared<Team>(threads)) {}
  PySampler(int vocab, const Program& program) : sampler_(vocab, program.team()) {}

  // One entry for each row: (token, logprob, rank, ((token, logprob), ...)), or a string that says what is wrong.
  nb::list sample(const Logits& logits, const nb::list& rows);

 private:
  void read(const nb::tuple& row, SampleRow& out) const;

  Sampler sampler_;
  std::vector<SampleRow> rows_;
  std::vector<Sampled> results_;
};

// Views of arrays whose owner, the row, outlives the call.
template <class Array>
Array view(const nb::tuple& row, size_t field, const char* expected) {
  Array array;
  if (!nb::try_cast(row[field], array, false)) throw nb::type_error(expected);
  return array;
}

Tokens tokens_of(const nb::tuple& row, size_t field) {
  const char* expected = "with penalties, prompt and output have to be contiguous int32 arrays";
  const auto tokens = view<TokenArray>(row, field, expected);
  return {tokens.data(), tokens.size()};
}

const uint32_t* mask_of(const nb::tuple& row, int vocab) {
  const auto mask = view<Mask>(row, kMask, "mask has to be a contiguous uint32 array");
  const size_t words = (static_cast<size_t>(vocab) + 31) / 32;
  if (mask.size() == words) return mask.data();
  throw nb::value_error(
      nb::str("mask has {} words; a vocabulary of {} needs {}").format(mask.size(), vocab, words).c_str());
}

void PySampler::read(const nb::tuple& row, SampleRow& out) const {
  out = SampleRow{};
  out.params = nb::cast<const SamplingParams*>(row[kParams].attr("packed"));
  out.choice = nb::cast<uint32_t>(row[kChoice]);
  out.position = nb::cast<uint64_t>(row[kPosition]);
  if (!row[kMask].is_none()) out.mask = mask_of(row, sampler_.vocab());
  if (!out.params->reads_history()) return;
  out.prompt = tokens_of(row, kPrompt);
  out.output = tokens_of(row, kOutput);
}

nb::object to_python(const Sampled& result, const SampleRow& row, int vocab) {
  if (result.status != SampleStatus::ok) return nb::str(explain(result, vocab).c_str());
  if (!row.params->logprobs) return nb::make_tuple(result.token, nb::none(), nb::none(), nb::tuple());
  nb::list top;
  for (int i = 0; i < result.alternatives; ++i) top.append(nb::make_tuple(result.top[i].token, result.top[i].logprob));
  return nb::make_tuple(result.token, result.logprob, result.rank, nb::tuple(top));
}

nb::list PySampler::sample(const Logits& logits, const nb::list& rows) {
  if (logits.shape(0) != rows.size() || logits.shape(1) != static_cast<size_t>(sampler_.vocab())) {
    throw nb::value_error(nb::str("logits of shape ({}, {}) for {} rows and a vocabulary of {}")
                              .format(logits.shape(0), logits.shape(1), rows.size(), sampler_.vocab())
                              .c_str());
  }
  const Team::Turn turn(sampler_.team());
  rows_.resize(rows.size());
  results_.resize(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) read(nb::cast<nb::tuple>(rows[i]), rows_[i]);
  {
    nb::gil_scoped_release release;
    sampler_.run(logits.data(), rows_, results_);
  }
  nb::list out;
  for (size_t i = 0; i < rows.size(); ++i) out.append(to_python(results_[i], rows_[i], sampler_.vocab()));
  return out;
}

SamplingParams pack(double temperature, int64_t top_k, double top_p, float min_p, float repetition_penalty,
                    float presence_penalty, float frequency_penalty, const std::vector<std::pair<int, float>>& bias,
                    int64_t seed, nb::object logprobs) {
  SamplingParams out;
  out.temperature = temperature;
  out.top_k = top_k;
  out.top_p = top_p;
  out.min_p = min_p;
  out.repetition_penalty = repetition_penalty;
  out.presence_penalty = presence_penalty;
  out.frequency_penalty = frequency_penalty;
  for (const auto& [token, value] : bias) out.bias.push_back({token, value});
  out.seed = static_cast<uint64_t>(seed);
  out.logprobs = !logprobs.is_none();
  out.alternatives = out.logprobs ? nb::cast<int>(logprobs) : 0;
  return out;
}

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::class_<SamplingParams>(m, "PackedSamplingParams");
  m.def("pack_sampling_params", &pack, nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a,
        "repetition_penalty"_a, "presence_penalty"_a, "frequency_penalty"_a, "logit_bias"_a, "seed"_a,
        "logprobs"_a.none());
  nb::class_<PySampler>(m, "NativeSampler")
      .def(nb::init<int, int>(), "vocab"_a, "threads"_a)
      .def(nb::init<int, const Program&>(), "vocab"_a, "program"_a)
      .def("sample", &PySampler::sample, "logits"_a.noconvert(), "rows"_a);
}

}  // namespace twostep
