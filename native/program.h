// A network compiled for one step at a time: instructions over fixed buffers, run by a team of threads from the first
// to the last without returning to Python. Instructions are already fused; kernels/lowering.py makes them.
#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "batch.h"
#include "kernels.h"
#include "kv_pool.h"
#include "memory.h"
#include "profile.h"
#include "threads.h"

namespace twostep {

struct Dims {
  int width, heads, kv_heads, head_dim, ffn_width, vocab;
  int query_width() const { return heads * head_dim; }
  int qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
  int group() const { return heads / kv_heads; }
};

// Where an instruction reads or writes: one row a token.
enum class Buffer { Residual, Qkv, Heads, Ffn };

struct Norm {
  std::vector<float> weight;  // empty: none
  float eps = 0;
  explicit operator bool() const { return !weight.empty(); }
};

// `offset`: its columns of the destination. `fine`: its input is rounded to 16 bits instead of 8.
struct Piece {
  int matrix;
  std::vector<float> bias;  // empty: none
  int offset;
  bool fine;
};

// One row of the program's table. Which parameters a kind reads:
//   Embed      scale                                              embedding · scale -> to
//   Linear     norm, pieces                                       from -> norm -> matrices -> to
//   Attention  group, layer, rotation, scale, q_norm, k_norm      Qkv -> norm of heads, rotation, cache -> Heads
//   LinearAdd  pieces[0], post_norm                               from -> matrix -> norm -> += to
//   Gated      norm, pieces (gate, up), activation                from -> norm -> activation(gate) · up -> to
//   Logits     norm, pieces[0]                                    from -> norm -> matrix -> the step's result
struct Instruction {
  enum class Kind { Embed, Linear, Attention, LinearAdd, Gated, Logits };
  Kind kind;
  Buffer from = Buffer::Residual, to = Buffer::Residual;
  Norm norm, post_norm, q_norm, k_norm;
  std::vector<Piece> pieces;
  Activation activation = Activation::Silu;
  int group = 0, layer = 0;  // of the KV pool; layer counts within the group
  int rotation = -1;         // -1: none
  float scale = 1;
};

// What the time of a step went to, by member 0's clock, each with its wait at the barrier.
enum class Part { Linear, Attention, Head, Rest };
constexpr int kParts = 4;

class Program {
 public:
  // `isa` empty: the best of this machine. Throws std::invalid_argument, std::bad_alloc.
  Program(const Dims& dims, const std::string& isa, int threads, std::unique_ptr<KvPool> pool);

  // --- building, in the order of the network ---
  // Packs a matrix from its rows in the file; row i of the packed matrix is row `order[i]` (empty: i). Returns its number.
  int add_matrix(Format format, const uint8_t* rows, int outputs, int inputs, const std::vector<int32_t>& order);
  // A table of angles: inverse frequencies of the head_dim / 2 pairs. Returns its number.
  int add_rotation(std::vector<float> inverse_frequencies);
  void set_embedding(Format format, const uint8_t* rows);  // not copied: must outlive the program
  // Throws std::invalid_argument where its matrices, norms and numbers do not fit the buffers and each other.
  void add(Instruction instruction);

  // --- running: one call at a time, any other throws std::runtime_error (Team::Turn) ---
  // Sizes the buffers for steps of so many rows: none of them then takes memory for rows. Throws std::bad_alloc.
  void reserve(int rows);
  // Computes a batch whose arrays fit each other; false when cancel() stopped it. `out`: [logit_count][vocab]. Throws
  // std::invalid_argument for blocks it may not use, before anything is changed.
  bool forward(const Batch& batch, float* out);
  // Stops the step that runs, at its next layer; where none runs it does nothing, since a step starts by forgetting it.
  void cancel() { cancel_.store(true, std::memory_order_relaxed); }
  // Of KvPool, while no step runs.
  void copy_block(int group, int source, int target);
  void export_block(int group, int block, uint8_t* out);
  void import_block(int group, int block, const uint8_t* data, size_t size);

  const char* isa() const { return kernels_.name; }
  int threads() const { return team_.size(); }
  size_t weight_bytes() const { return weights_.taken(); }
  const KvPool& pool() const { return *pool_; }
  size_t buffer_bytes() const { return buffer_bytes_; }
  const std::array<double, kParts>& seconds() const { return seconds_; }  // of the last step
  // Begins, from zero, or ends to add up where the time of steps goes. Rows of the profile are instructions, as added.
  void profile_steps(bool on);
  const Profile& profile() const { return profile_; }
  const std::shared_ptr<Team>& team() const { return team_owner_; }
  const Kernels& kernels() const { return kernels_; }

 private:
  // Rows ready for an instruction's matrices: records of either precision, as its pieces need, or floats where the
  // matrices are of floats.
  struct Input {
    QuantRows coarse, fine;
    const float* floats;
    size_t float_stride;
  };
  // One query tile of one KV head (or of one of its query heads), over a range of splits. See plan_attention().
  // `joined`: tasks whose states are merged into this one's, itself included; 0 where another merges it.
  struct QueryTask {
    int slice, first_row, tokens, position, kv_head, head, heads, first_split, splits, state, joined;
  };
  // The tasks of one group of layers. `joins`: each does one split, and keeps a state until all are merged.
  struct AttentionPlan {
    std::vector<QueryTask> tasks;
    int tile_tokens = 1;
    bool joins = false;
  };
  // Everything one thread writes during a step that no other reads.
  struct Member {
    Aligned<float> panels, attend, states;
    Aligned<uint8_t> unpacked, records, fine_records;
    int instruction = 0;  // that it is at
    float* panel(int i) { return panels.data() + i * (panels.size() / kMostPanels); }
  };
  struct PanelOf { const Piece* piece; int panel, next; float* out; };  // `next`: the panel to be fetched meanwhile

  void grow(int rows);
  int widest() const;
  void check(const Instruction&) const;
  void check_pieces(const Instruction&) const;
  void place_rows(const Batch& batch);
  void plan_attention(const Batch& batch, int group);
  void add_query_tasks(const Batch& batch, int group, int slice, int first_row, bool by_head);
  void run(const Batch& batch, float* out, int member);
  bool execute(const Instruction&, const Batch&, float* out, int member);  // false: the step was cancelled

  void run_embed(const Instruction&, const Batch&, int member);
  void run_linear(const Instruction&, const Batch&, int member);
  bool run_attention(const Instruction&, const Batch&, int member);
  void run_linear_add(const Instruction&, const Batch&, int member);
  void add_normed(const Instruction&, const Batch&, int member);
  void run_gated(const Instruction&, const Batch&, int member);
  void run_logits(const Instruction&, const Batch&, float* out, int member);

  // Of a step of many rows each member has a part of its own, which it prepares and multiplies: what one core has written
  // another would fetch from it line by line. Members then meet at attention and before the head only.
  bool owned(const Batch&) const;
  int first_owned(const Batch&, int member) const;
  void end_rows(const Batch&, Stage, int member);

  Input prepare(const Instruction&, const Batch&, int member);
  Input prepare_shared(const Instruction&, int rows, const int32_t* chosen_rows, int member);
  Input input_of(const Instruction&, bool own, int first, Member& mine);
  void prepare_row(const Instruction&, const Input&, bool own, int row, int source_row, Member& mine);
  template <class Store>
  void multiply_some(const std::vector<Piece>&, int begin, int end, int row, int rows, Store&& store);
  template <class Store>
  void multiply_shared(const std::vector<Piece>& pieces, size_t count, int rows, Store&& store);
  template <class Store>
  void multiply(const std::vector<Piece>& pieces, size_t count, const Batch&, int member, Store&& store);
  int panels_of(const std::vector<Piece>& pieces, size_t count) const;
  void quantise_row(const Instruction&, const float* x, const Input&, int row) const;
  void panels(const PanelOf*, int count, const Input&, int row, int rows, Member& mine) const;
  void consecutive_panels(const Piece&, int panel, int count, const Input&, int row, int rows, Member& mine) const;
  void gate_and_up(const Piece& gate, const Piece& up, int panel, const Input&, int row, int rows, Member& mine) const;

  void rotate_and_store(const Instruction&, const Batch&, int row);
  void rotate_and_store_all(const Instruction&, const Batch&, int member);
  void turn_head(const Instruction&, const Norm&, float* head, int row, float factor) const;
  KvAfter blocks_from(const QueryTask&, const KvView&, int split) const;
  void attend(const Instruction&, const QueryTask&, const QueryTask* next_task, const Batch&, int member);
  void join(const QueryTask&);
  void finish_heads(const QueryTask&, const float* states);
  KvView view(const Instruction&, const Batch&, int slice, int kv_head) const;
  float* buffer(Buffer which) const;
  int buffer_width(Buffer which) const;
  void lap(Part part, int member);
  void did(Stage stage, int member) { profile_.work(member, members_[member].instruction, stage); }
  void meet(Stage stage, int member);  // a barrier, after that stage
  bool pass(Stage stage, int member);  // the same; false: the step was cancelled

  const Dims dims_;
  const Kernels& kernels_;
  const std::shared_ptr<Team> team_owner_;  // shared with the sampler: a team of its own would spin beside this one
  Team& team_;
  const std::unique_ptr<KvPool> pool_;
  std::vector<BlockCheck> checks_;  // by group
  std::vector<std::vector<float>> rotations_;
  Arena weights_;
  std::vector<Matrix> matrices_;
  std::vector<Instruction> instructions_;
  Format embed_format_ = Format::F32;
  const uint8_t* embed_rows_ = nullptr;

  // --- of a step; sized by grow(), before a step that needs more ---
  int capacity_ = 0;
  size_t buffer_bytes_ = 0;
  Aligned<float> residual_, qkv_, heads_, ffn_, normed_, angles_;
  Aligned<uint8_t> records_, fine_records_;
  std::vector<int> row_slice_, row_position_;
  std::vector<Member> members_;
  std::vector<AttentionPlan> plans_;  // by group
  Aligned<float> states_;             // partial softmax states of split tasks
  std::atomic<bool> cancel_{false};
  bool stopped_ = false;
  std::array<double, kParts> seconds_{};
  std::chrono::steady_clock::time_point mark_;
  Profile profile_;
};

}  // namespace twostep
