// The table of kernels: one filled for each instruction set this build holds, one chosen at run time.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "formats.h"

namespace twostep {

constexpr int kScratchGroups = 32;                                 // unpacked at a time: fits the first-level cache
constexpr size_t kScratchBytes = kScratchGroups * (512 + 2 * 64);  // of one panel
constexpr int kMostPanels = 2;                                     // of linear_panels; the scratch is kMostPanels * kScratchBytes
constexpr int kBlock = 16;                                         // token positions of a KV block
constexpr int kTile = 64;                                          // positions of one softmax tile
constexpr int kSplit = 512;  // positions whose softmax is computed on its own and merged in order; fixed from position 0

// Rows quantised in groups of 32: value = scale · q, q of 8 bits, or of 16 where `fine`. A record is q[inputs],
// scale[groups], scale · sum(q)[groups], sum(q) of each half group [2 · groups]. Fine values lie in the order 0, 2, 1, 3 of
// each four: bytes 0 and 2 of an output's four weights are the even 16-bit lanes, 1 and 3 the odd ones.
struct QuantRows {
  const uint8_t* base;
  size_t stride;
  int inputs;
  bool fine;
  static size_t record_bytes(int inputs, bool fine) {
    return (size_t(inputs) * (fine ? 2 : 1) + inputs / kGroup * 16 + 63) / 64 * 64;
  }
  template <class Value>
  const Value* values(int row) const { return reinterpret_cast<const Value*>(base + row * stride); }
  template <class Value>
  const float* scales(int row) const { return reinterpret_cast<const float*>(values<Value>(row) + inputs); }
  template <class Value>
  const float* scaled_sums(int row) const { return scales<Value>(row) + inputs / kGroup; }
  template <class Value>
  const int32_t* half_sums(int row) const { return reinterpret_cast<const int32_t*>(scales<Value>(row) + 2 * (inputs / kGroup)); }
};

// Head sizes are padded with zeros to whole vectors in the cache and in softmax states.
constexpr int padded(int head_dim) { return (head_dim + kPanel - 1) / kPanel * kPanel; }

// One KV head's cache as attention sees it: block table of a sequence, and where a block's K and V of that head lie.
struct KvView {
  const uint16_t* base;       // of the layer and head, block 0
  size_t block_stride;        // elements between blocks
  const int32_t* table;       // block i holds positions 16·i ..
  int head_dim;
  int first_block = 0;  // the first that the sequence still has: the table's entries before it are not read
  const uint16_t* keys(int block) const { return base + size_t(table[std::max(block, first_block)]) * block_stride; }  // [padded][16]
  const uint16_t* values(int block) const { return keys(block) + size_t(padded(head_dim)) * kBlock; }  // [16][padded]
};

// What is to be read after a part of attention: blocks first..end-1; no view: unknown.
struct KvAfter {
  const KvView* view = nullptr;
  int first = 0, end = 0;
};
constexpr float kLog2E = 1.44269504f;

constexpr int kNoWindow = std::numeric_limits<int>::max();
// The first position that a token sees through a window of so many positions, its own included.
constexpr int first_seen_position(int position, int window) { return std::max(0, position - window + 1); }

// Query rows of one KV head: row r of the tile is query head r % group of token r / group, which sits at `position`
// + r / group. `q` is rotated and scaled, by log2(e) too: scores are logarithms to base 2. A state row is max, sum,
// out[head_dim] of an online softmax.
struct QueryTile {
  const float* q;
  size_t token_stride, head_stride;  // floats
  int tokens, group, position;
  int window = kNoWindow;
  const float* row(int r) const { return q + r / group * token_stride + r % group * head_stride; }
  int rows() const { return tokens * group; }
};

// A panel to be multiplied into out[rows][16], and the one that will come after it: fetched, not read, so it may be no panel.
struct PanelJob {
  const uint8_t *panel, *next;
  float* out;
};

enum class Activation : int { Silu, GeluTanh };

struct Kernels {
  const char* name;
  void (*quantise)(const float* x, int inputs, uint8_t* record, uint8_t* fine_record);  // either may be null
  void (*rms_norm)(const float* x, const float* weight, float eps, int inputs, float* out);
  // One panel, or two of one format and length, with the same rows.
  void (*linear_panels)(Format, const PanelJob* jobs, int count, const QuantRows& x, int rows, uint8_t* scratch);
  void (*float_panel)(const Matrix&, int panel, const float* x, size_t x_stride, int rows, float* out);
  // out[row][0..count-1] = panel[row][..] (+ bias); or += ; or activation(gate panel) · up panel
  void (*put)(const float* panel, int rows, int count, const float* bias, float* out, size_t stride);
  void (*add)(const float* panel, int rows, int count, float* out, size_t stride);
  void (*gated)(Activation, const float* gate, const float* up, int rows, int count, float* out, size_t stride);
  // rotates one head in place (halves order), cos_sin: [dim/2] cosines, [dim/2] sines; then times `factor`
  void (*rope)(float* head, const float* cos_sin, int dim, float factor);
  void (*write_kv)(const float* key, const float* value, int head_dim, int slot, uint16_t* keys, uint16_t* values);
  // softmax state of the tile's rows over positions [split · kSplit, ..) of one split; fetches some of what comes after
  void (*attend)(const QueryTile&, const KvView&, int split, const KvAfter&, float* states, float* scratch);
  void (*merge)(float* into, const float* other, int head_dim);
  void (*finish)(const float* state, int head_dim, float* out);
  // machine limits, for the benchmark: operations done in one call of about a millisecond
  double (*peak_int8)();
  double (*peak_f32)();
};

constexpr int kMaxQueryRows = 192;  // of a QueryTile: they share one conversion of keys and values to floats
inline size_t state_floats(int head_dim) { return size_t(padded(head_dim)) + kPanel; }  // max, sum, padding, out
inline size_t attend_scratch_floats(int head_dim) {  // keys and values of a tile, queries, scores; sums; maxima and shrinking
  return size_t(padded(head_dim)) * (2 * kTile + kMaxQueryRows) + size_t(kMaxQueryRows) * (kTile + kPanel + 2) + 2 * kPanel;
}

const Kernels* portable_kernels();
const Kernels* avx2_kernels();    // null where the build does not hold them
const Kernels* avx512_kernels();

// Names of the instruction sets that this build holds and this machine runs, best first.
std::vector<std::string> usable_isas();
// By name; empty: the best. Throws std::invalid_argument that names those usable.
const Kernels& choose_kernels(const std::string& name);

}  // namespace twostep
