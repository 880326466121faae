// One token for each row of logits. The rows of a batch know nothing of each other.
//
// A row goes through, in this order (that of vLLM and Hugging Face):
//   1. log-probabilities are taken: log-softmax of the logits as they came, before everything below
//   2. allowed-token mask (-inf where forbidden), then logit bias (added)
//   3. repetition penalty: the logit of each token that occurs in prompt or output is divided by it if positive, else
//      multiplied by it (CTRL, arXiv:1909.05858); frequency penalty: minus frequency * occurrences in the output;
//      presence penalty: minus presence for each token that occurs in the output (OpenAI's definition)
//   4. temperature 0: the greatest logit, and nothing further
//   5. division by the temperature
//   6. top-k: the k most likely tokens
//   7. top-p: of those, renormalised, the fewest most likely ones whose probabilities reach p; at least one
//   8. min-p: of those, the ones at least min_p times as likely as the most likely token
//   9. one draw from what is left, by inversion of the cumulative distribution in order of token ids
// Equal logits rank by token id, lowest first, in all of these.
//
// No list is sorted: steps 6 and 7 search the logit below which tokens are dropped, by bisection of counts and sums.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sampling_scan.h"
#include "threads.h"

namespace twostep {

constexpr int kMaxAlternatives = 20;

struct Bias {
  int token;
  float value;
};

// What a request asked for. Ranges are checked by the caller (kernels/sampling.py).
struct SamplingParams {
  double temperature = 1;
  int64_t top_k = 0;  // 0: off
  double top_p = 1;   // 1: off
  float min_p = 0;    // 0: off
  float repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  std::vector<Bias> bias;
  uint64_t seed = 0;
  bool logprobs = false;  // report the chosen token's log-probability and rank
  int alternatives = 0;   // and this many of the most likely tokens

  bool counts_output() const { return presence_penalty != 0 || frequency_penalty != 0; }
  bool reads_history() const { return repetition_penalty != 1 || counts_output(); }
};

struct Tokens {
  const int32_t* data = nullptr;
  size_t size = 0;
};

// One row's request in this step. Pointers are borrowed for the call.
struct SampleRow {
  const SamplingParams* params = nullptr;
  uint32_t choice = 0;             // which of the request's n choices
  uint64_t position = 0;           // of the token to be sampled
  Tokens prompt, output;           // read only if params->reads_history()
  const uint32_t* mask = nullptr;  // ceil(vocab / 32) words, or null: everything is allowed
};

enum class SampleStatus { ok, not_finite, all_impossible, nothing_allowed, overflow, unknown_token };

struct Alternative {
  int token;
  float logprob;
};

struct Sampled {
  SampleStatus status = SampleStatus::ok;
  int token = 0;           // the one chosen; the one that does not exist if unknown_token
  float logprob = 0;       // defined if params->logprobs
  int rank = 0;            // 1 for the most likely token; likewise
  int alternatives = 0;    // fewer than asked for where fewer tokens are possible
  Alternative top[kMaxAlternatives];
};

// One line for the user about a status that is not ok.
std::string explain(const Sampled& result, int vocab);

// Samples single rows, in memory that it keeps.
class RowSampler {
 public:
  explicit RowSampler(int vocab);
  RowSampler(const RowSampler&) = delete;
  RowSampler(RowSampler&&) = default;
  Sampled sample(const float* logits, const SampleRow& request);

 private:
  // What a threshold keeps: the tokens at or above `floor`, but for the last `excess` of those that equal it.
  struct Cut {
    float floor;
    int excess;
  };

  SampleStatus load(const float* logits);
  SampleStatus adjust(const SampleRow& request, Sampled& result);
  bool all_known(Tokens tokens, Sampled& result) const;
  bool add_bias(const std::vector<Bias>& bias, Sampled& result);
  bool penalize(const SampleRow& request, Sampled& result);
  void penalize_repetition(Tokens tokens, float penalty);
  void penalize_output(Tokens output, const SamplingParams& params);
  void forget(Tokens tokens);

  int choose(const SampleRow& request);
  int greedy() const;
  float weigh_candidates(const SamplingParams& params);
  int pick(double target, float floor) const;
  int pick_within(int block, double target, float floor) const;
  Cut cut_to_top_k(int64_t k);
  float floor_of_top_k(int64_t k);
  Cut cut_to_top_p(double p, double temperature, float floor) const;
  void drop_excess(const Cut& cut);

  double log_of_sum() const;
  template <class F>
  void visit_from(float floor, F f) const;
  void report_alternatives(int wanted, double log_sum, Sampled& result);

  int vocab_;
  std::vector<float> logit_, weight_, highest_;
  std::vector<float> ordered_;        // scratch, as long as highest_
  std::vector<int32_t> occurrences_;  // of each token; all 0 between uses
  scan::Row row_;                     // views of the above
  float greatest_ = 0;                // of row_.logit
};

class Sampler {
 public:
  Sampler(int vocab, std::shared_ptr<Team> team);
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  int vocab() const { return vocab_; }
  Team& team() const { return *team_; }

  // The caller has the team's turn. Fills results[i] from logits[i * vocab ...], which are only read. Throws nothing, allocates nothing.
  void run(const float* logits, const std::vector<SampleRow>& rows, std::vector<Sampled>& results);

 private:
  int vocab_;
  std::shared_ptr<Team> team_;
  std::vector<RowSampler> samplers_;  // one for each thread
};

}  // namespace twostep
