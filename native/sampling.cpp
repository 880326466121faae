#include "sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "philox.h"

namespace twostep {
namespace {

using scan::kBlock;
using scan::kLowest;
using scan::Tally;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Finite floats and integers in the same order; its own inverse.
int32_t flip_negative(int32_t bits) { return bits < 0 ? bits ^ 0x7fffffff : bits; }

int64_t order_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return flip_negative(bits);
}

float value_at(int64_t order) {
  const int32_t bits = flip_negative(static_cast<int32_t>(order));
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Two floors, of which the lower one keeps enough tokens and the higher one does not, and the tallies that say so.
struct Bracket {
  float low, high;
  Tally kept, above;

  int between() const { return kept.count - above.count; }
};

// Bisects until the floors are neighbours, or a single token lies between them. At most 32 measurements.
template <class Measure, class Enough>
Bracket narrow(Bracket bracket, Measure measure, Enough enough) {
  int64_t low = order_of(bracket.low), high = order_of(bracket.high);
  while (high - low > 1 && bracket.between() > 1) {
    const int64_t middle = low + (high - low) / 2;
    const Tally tally = measure(value_at(middle));
    (enough(tally) ? low : high) = middle;
    (enough(tally) ? bracket.kept : bracket.above) = tally;
  }
  bracket.low = value_at(low);
  bracket.high = value_at(high);
  return bracket;
}

// Descends from the high floor by doubling steps until enough is kept: high floors are cheap to measure.
template <class Measure, class Enough>
Bracket descend(Bracket bracket, double step, Measure measure, Enough enough) {
  const double top = bracket.high;
  for (; top - step > bracket.low; step *= 2) {
    const float floor = static_cast<float>(top - step);
    const Tally tally = measure(floor);
    (enough(tally) ? bracket.low : bracket.high) = floor;
    (enough(tally) ? bracket.kept : bracket.above) = tally;
    if (enough(tally)) break;
  }
  return bracket;
}

}  // namespace

std::string explain(const Sampled& result, int vocab) {
  switch (result.status) {
    case SampleStatus::not_finite: return "the logits hold NaN or +infinity";
    case SampleStatus::all_impossible: return "every logit is -infinity";
    case SampleStatus::nothing_allowed: return "the mask allows no token whose logit is above -infinity";
    case SampleStatus::overflow: return "the penalties took the logits out of float32's range";
    case SampleStatus::unknown_token:
      return "token " + std::to_string(result.token) + " in logit_bias, prompt or output is not one of the " +
             std::to_string(vocab) + " of the vocabulary";
    case SampleStatus::ok: break;
  }
  return "ok";
}

RowSampler::RowSampler(int vocab)
    : vocab_(vocab),
      logit_(static_cast<size_t>(scan::blocks_of(vocab)) * kBlock),
      weight_(logit_.size()),
      highest_(scan::blocks_of(vocab)),
      ordered_(highest_.size()),
      occurrences_(vocab),
      row_{logit_.data(), weight_.data(), highest_.data(), scan::blocks_of(vocab)} {}

Sampled RowSampler::sample(const float* logits, const SampleRow& request) {
  Sampled result;
  result.status = load(logits);
  if (result.status != SampleStatus::ok) return result;
  const bool logprobs = request.params->logprobs;
  const double log_sum = logprobs ? log_of_sum() : 0;
  if (logprobs) report_alternatives(request.params->alternatives, log_sum, result);
  result.status = adjust(request, result);
  if (result.status != SampleStatus::ok) return result;
  result.token = choose(request);
  if (!logprobs) return result;
  result.logprob = static_cast<float>(logits[result.token] - log_sum);
  result.rank = 1 + scan::count_before(logits, vocab_, result.token);
  return result;
}

SampleStatus RowSampler::load(const float* logits) {
  scan::load(row_, logits, vocab_);
  if (!scan::find_maxima(row_)) return SampleStatus::not_finite;
  greatest_ = *std::max_element(highest_.begin(), highest_.end());
  return greatest_ == -kInfinity ? SampleStatus::all_impossible : SampleStatus::ok;
}

// Mask, bias and penalties.
SampleStatus RowSampler::adjust(const SampleRow& request, Sampled& result) {
  const SamplingParams& params = *request.params;
  if (!request.mask && params.bias.empty() && !params.reads_history()) return SampleStatus::ok;
  if (request.mask) scan::forbid(row_, request.mask, vocab_);
  if (!add_bias(params.bias, result) || !penalize(request, result)) return SampleStatus::unknown_token;
  if (!scan::find_maxima(row_)) return SampleStatus::overflow;
  greatest_ = *std::max_element(highest_.begin(), highest_.end());
  if (greatest_ > -kInfinity) return SampleStatus::ok;
  return request.mask ? SampleStatus::nothing_allowed : SampleStatus::overflow;
}

bool RowSampler::all_known(Tokens tokens, Sampled& result) const {
  for (size_t i = 0; i < tokens.size; ++i) {
    result.token = tokens.data[i];
    if (result.token < 0 || result.token >= vocab_) return false;
  }
  return true;
}

bool RowSampler::add_bias(const std::vector<Bias>& bias, Sampled& result) {
  for (const Bias& b : bias) {
    result.token = b.token;
    if (b.token < 0 || b.token >= vocab_) return false;
    logit_[b.token] += b.value;
  }
  return true;
}

bool RowSampler::penalize(const SampleRow& request, Sampled& result) {
  const SamplingParams& params = *request.params;
  if (!params.reads_history()) return true;
  if (!all_known(request.prompt, result) || !all_known(request.output, result)) return false;
  if (params.repetition_penalty != 1) {
    penalize_repetition(request.prompt, params.repetition_penalty);
    penalize_repetition(request.output, params.repetition_penalty);
    forget(request.prompt);
    forget(request.output);
  }
  if (params.counts_output()) penalize_output(request.output, params);
  return true;
}

void RowSampler::penalize_repetition(Tokens tokens, float penalty) {
  for (size_t i = 0; i < tokens.size; ++i) {
    const int32_t token = tokens.data[i];
    if (occurrences_[token]++) continue;
    float& x = logit_[token];
    x = x > 0 ? x / penalty : x * penalty;
  }
}

void RowSampler::penalize_output(Tokens output, const SamplingParams& params) {
  for (size_t i = 0; i < output.size; ++i) ++occurrences_[output.data[i]];
  for (size_t i = 0; i < output.size; ++i) {
    int32_t& times = occurrences_[output.data[i]];
    if (!times) continue;
    float& x = logit_[output.data[i]];
    x -= params.frequency_penalty * static_cast<float>(times);
    x -= params.presence_penalty;
    times = 0;
  }
}

void RowSampler::forget(Tokens tokens) {
  for (size_t i = 0; i < tokens.size; ++i) occurrences_[tokens.data[i]] = 0;
}

int RowSampler::choose(const SampleRow& request) {
  if (request.params->temperature == 0) return greedy();
  const float floor = weigh_candidates(*request.params);
  const double total = scan::tally_from(row_, floor).mass;
  return pick(total * uniform(request.params->seed, request.choice, request.position), floor);
}

int RowSampler::greedy() const {
  const auto block = std::find(highest_.begin(), highest_.end(), greatest_) - highest_.begin();
  const auto first = logit_.begin() + block * kBlock;
  return static_cast<int>(std::find(first, first + kBlock, greatest_) - logit_.begin());
}

// Weighs the tokens that temperature, top-k, top-p and min-p leave, relative to the most likely one. They are
// those at or above the floor returned whose weight is not 0.
float RowSampler::weigh_candidates(const SamplingParams& params) {
  constexpr double kLargest = 1e30;  // times a difference of 0 it must stay 0
  const double inverse = std::min(1 / params.temperature, kLargest);
  Cut cut = cut_to_top_k(params.top_k);
  scan::weigh(row_, greatest_, static_cast<float>(inverse), cut.floor);
  drop_excess(cut);
  if (params.top_p < 1) {
    cut = cut_to_top_p(params.top_p, params.temperature, cut.floor);
    drop_excess(cut);
  }
  if (params.min_p > 0) scan::trim(row_, cut.floor, params.min_p);
  return cut.floor;
}

// The first token at which the running sum of weights exceeds the target.
int RowSampler::pick(double target, float floor) const {
  int last = 0;
  for (int block = 0; block < row_.blocks; ++block) {
    if (highest_[block] < floor) continue;
    const Tally tally = scan::tally_block(row_, block, floor);
    if (tally.mass > target) return pick_within(block, target, floor);
    if (tally.count) last = block;
    target -= tally.mass;
  }
  return pick_within(last, DBL_MAX, floor);  // rounding used up the distance between the target and the total
}

int RowSampler::pick_within(int block, double target, float floor) const {
  int token = -1;
  for (int i = block * kBlock; i < (block + 1) * kBlock && target >= 0; ++i) {
    if (logit_[i] < floor || weight_[i] == 0) continue;
    token = i;
    target -= weight_[i];
  }
  return token;
}

RowSampler::Cut RowSampler::cut_to_top_k(int64_t k) {
  if (k == 0 || k >= vocab_ || scan::count_from(row_, kLowest) <= k) return {kLowest, 0};
  const auto count = [&](float floor) { return Tally{scan::count_from(row_, floor), 0}; };
  const auto enough = [&](const Tally& tally) { return tally.count >= k; };
  const float low = floor_of_top_k(k);
  const Bracket found = narrow({low, std::nextafter(greatest_, kInfinity), count(low), {0, 0}}, count, enough);
  return {found.low, found.kept.count - static_cast<int>(k)};
}

// A floor that keeps at least k tokens, if there are so many: the k-th greatest of the blocks' maxima.
float RowSampler::floor_of_top_k(int64_t k) {
  if (k > row_.blocks) return kLowest;
  ordered_ = highest_;
  std::nth_element(ordered_.begin(), ordered_.begin() + (k - 1), ordered_.end(), std::greater<float>());
  return std::max(ordered_[k - 1], kLowest);
}

RowSampler::Cut RowSampler::cut_to_top_p(double p, double temperature, float floor) const {
  const Tally all = scan::tally_from(row_, floor);
  const double target = std::max(p * all.mass, DBL_MIN);
  const auto tally = [&](float at) { return scan::tally_from(row_, at); };
  const auto enough = [&](const Tally& tally) { return tally.mass >= target; };
  const Bracket wide{floor, std::nextafter(greatest_, kInfinity), all, {0, 0}};
  const Bracket found = narrow(descend(wide, temperature, tally, enough), tally, enough);
  const double each = (found.kept.mass - found.above.mass) / found.between();
  const double needed = std::ceil((target - found.above.mass) / each);
  return {found.low, found.between() - static_cast<int>(std::clamp<double>(needed, 1, found.between()))};
}

void RowSampler::drop_excess(const Cut& cut) {
  int excess = cut.excess;
  for (int i = row_.blocks * kBlock - 1; i >= 0 && excess > 0; --i) {
    if (logit_[i] != cut.floor || weight_[i] == 0) continue;
    weight_[i] = 0;
    --excess;
  }
}

// Calls f for every token at or above the floor, in order of token ids.
template <class F>
void RowSampler::visit_from(float floor, F f) const {
  for (int block = 0; block < row_.blocks; ++block) {
    if (highest_[block] < floor) continue;
    for (int i = block * kBlock; i < (block + 1) * kBlock; ++i) {
      if (logit_[i] >= floor) f(i);
    }
  }
}

// The one call whose last bit may differ between C libraries; no choice of a token depends on it.
double RowSampler::log_of_sum() const { return greatest_ + std::log(scan::sum_of_exp(row_, greatest_)); }

void RowSampler::report_alternatives(int wanted, double log_sum, Sampled& result) {
  if (wanted == 0) return;
  const float floor = cut_to_top_k(wanted).floor;
  int& n = result.alternatives;
  visit_from(floor, [&](int token) {
    if (logit_[token] > floor) result.top[n++] = {token, logit_[token]};
  });
  visit_from(floor, [&](int token) {
    if (logit_[token] == floor && n < wanted) result.top[n++] = {token, floor};
  });
  std::sort(result.top, result.top + n, [](const Alternative& a, const Alternative& b) {
    return a.logprob != b.logprob ? a.logprob > b.logprob : a.token < b.token;
  });
  for (int i = 0; i < n; ++i) result.top[i].logprob = static_cast<float>(result.top[i].logprob - log_sum);
}

Sampler::Sampler(int vocab, std::shared_ptr<Team> team) : vocab_(vocab), team_(std::move(team)) {
  samplers_.reserve(team_->size());
  for (int member = 0; member < team_->size(); ++member) samplers_.emplace_back(vocab);
}

void Sampler::run(const float* logits, const std::vector<SampleRow>& rows, std::vector<Sampled>& results) {
  team_->run([&](int member) {
    team_->share(static_cast<int>(rows.size()), [&](int row) {
      results[row] = samplers_[member].sample(logits + static_cast<size_t>(row) * vocab_, rows[row]);
    });
  });
}

}  // namespace twostep
