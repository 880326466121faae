// Attention of a tile of query rows over paged KV: online softmax over tiles of 64 positions, splits of 512, both fixed
// from position 0, so that a row's result does not depend on which rows share its tile. Included once an instruction set.
//
// A position that a row may not see has probability exactly 0; 0 · value adds nothing since the cache holds finite numbers.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"

namespace twostep::TWOSTEP_ISA {

constexpr float kF16Largest = 65504.0f;

// Column `slot` of a key block, row `slot` of a value block; saturated to finite f16.
inline void write_kv(const float* key, const float* value, int head_dim, int slot, uint16_t* keys, uint16_t* values) {
  const F32 largest = set1(kF16Largest), lowest = set1(-kF16Largest);
  for (int i = 0; i < head_dim; i += kPanel) {
    float k[kPanel] = {}, v[kPanel] = {};
    const int count = std::min(kPanel, head_dim - i);
    std::copy_n(key + i, count, k);
    std::copy_n(value + i, count, v);
    uint16_t rounded[kPanel];
    store_f16(rounded, min(max(load(k), lowest), largest));
    for (int j = 0; j < kPanel; ++j) keys[size_t(i + j) * kBlock + slot] = rounded[j];
    store_f16(values + size_t(slot) * padded(head_dim) + i, min(max(load(v), lowest), largest));
  }
}

// What one tile of positions works on.
struct TileWork {
  const KvView& kv;
  int start, blocks, last_block;  // first position; KV blocks in use; the sequence's last block
  const float *keys, *values;  // f32 copies, [blocks][head_dim][16] and [positions][padded], or null: read the cache
};

// scores[row][64] of rows [first, rows) against the tile's blocks. `ahead` is fetched on the way.
template <class From>
inline void score_block(const uint8_t* keys, const uint8_t* ahead, int head_dim, const float* queries, int first, int rows, float* scores) {
  const int size = padded(head_dim);
  in_tiles<kFloatRows>(rows, [&](int row, auto count) {
    F32 acc[count];
    for (int r = 0; r < count; ++r) acc[r] = zero();
    float_tile<From, count>(keys, kBlock, head_dim, queries + size_t(row) * size, size, acc, ahead);
    for (int r = 0; r < count; ++r) store(scores + size_t(row + r) * kTile, acc[r]);
  }, first);
}

inline const uint8_t* bytes_of(const void* p) { return static_cast<const uint8_t*>(p); }

// A block of one head is a run of a few KiB, too short for the hardware to foresee the next one, and fetching a whole tile
// at once stalls. So scoring fetches the tile's values on its way, and weighing those fetches the next tile's keys.
inline void score_tile(const TileWork& work, const float* queries, int first, int rows, float* scores) {
  const int head_dim = work.kv.head_dim;
  for (int b = 0; b < work.blocks; ++b, scores += kBlock) {
    const int block = work.start / kBlock + b;
    if (work.keys) {
      score_block<FromF32>(bytes_of(work.keys + size_t(b) * head_dim * kBlock), nullptr, head_dim, queries, first, rows, scores);
    } else {
      score_block<FromF16>(bytes_of(work.kv.keys(block)), bytes_of(work.kv.values(block)), head_dim, queries, first, rows, scores);
    }
  }
}

// Turns one row's scores into probabilities relative to the new maximum; scales the row's sum and output to it.
inline void soften(float* scores, int visible, float* state, int size) {
  for (int i = visible; i < kTile; ++i) scores[i] = -std::numeric_limits<float>::infinity();
  F32 s[kTile / kPanel];
  for (int i = 0; i < kTile / kPanel; ++i) s[i] = load(scores + i * kPanel);
  const float highest = std::max(state[0], horizontal_max(max(max(s[0], s[1]), max(s[2], s[3]))));
  F32 sum = zero();
  for (int i = 0; i < kTile / kPanel; ++i) {
    const F32 p = exponential(s[i] - set1(highest));
    store(scores + i * kPanel, p);
    sum = sum + p;
  }
  const float shrink = exponential(state[0] - highest);
  state[0] = highest;
  state[1] = state[1] * shrink + horizontal_sum(sum);
  for (int i = 0; i < size; i += kPanel) store(state + kPanel + i, load(state + kPanel + i) * set1(shrink));
}

// out[row][chunk .. +16] += probabilities[row][0..positions) · values[..][chunk .. +16]
template <class From, class ValuesOf, class AheadOf>
inline void weigh_chunk(ValuesOf&& values_of, AheadOf&& ahead_of, int blocks, int size, int chunk, const float* scores, int first, int rows,
                        float* states) {
  const size_t stride = size + kPanel;
  in_tiles<kFloatRows>(rows, [&](int row, auto count) {
    F32 acc[count];
    float* out = states + row * stride + kPanel + chunk;
    for (int r = 0; r < count; ++r) acc[r] = load(out + r * stride);
    for (int b = 0; b < blocks; ++b)
      float_tile<From, count>(values_of(b), size, kBlock, scores + size_t(row) * kTile + b * kBlock, kTile, acc, ahead_of(b));
    for (int r = 0; r < count; ++r) store(out + r * stride, acc[r]);
  }, first);
}

inline void weigh_tile(const TileWork& work, const float* scores, int first, int rows, float* states) {
  const int size = padded(work.kv.head_dim), chunks = size / kPanel, next = work.start / kBlock + kTile / kBlock;
  for (int c = 0; c < chunks; ++c) {
    const auto copied = [&](int b) { return bytes_of(work.values + size_t(b) * kBlock * size + c * kPanel); };
    const auto cached = [&](int b) { return bytes_of(work.kv.values(work.start / kBlock + b) + c * kPanel); };
    const auto nothing = [](int) -> const uint8_t* { return nullptr; };
    const auto next_keys = [&](int b) {  // 16 steps of 32 bytes: the whole tile passes once over the next one's keys
      const int part = c * work.blocks + b, block = std::min(next + part / chunks, work.last_block);
      return bytes_of(work.kv.keys(block)) + part % chunks * kBlock * 32;
    };
    if (work.values) weigh_chunk<FromF32>(copied, nothing, work.blocks, size, c * kPanel, scores, first, rows, states);
    else weigh_chunk<FromF16>(cached, next_keys, work.blocks, size, c * kPanel, scores, first, rows, states);
  }
}

inline void widen(const uint16_t* from, size_t count, float* to) {
  for (size_t i = 0; i < count; i += kPanel) store(to + i, load_f16(from + i));
}

// The tile's work; many rows pay for one conversion of its keys and values to floats.
inline TileWork prepare_tile(const KvView& kv, int start, int last, bool copy, float* scratch) {
  const int blocks = (std::min(kTile, last + 1 - start) + kBlock - 1) / kBlock, last_block = last / kBlock;
  if (!copy) return {kv, start, blocks, last_block, nullptr, nullptr};
  const size_t size = padded(kv.head_dim), key_floats = size_t(kv.head_dim) * kBlock;
  float* values = scratch + kTile * size;
  for (int b = 0; b < blocks; ++b) {
    widen(kv.keys(start / kBlock + b), key_floats, scratch + b * key_floats);
    widen(kv.values(start / kBlock + b), size * kBlock, values + b * size * kBlock);
  }
  return {kv, start, blocks, last_block, scratch, values};
}

inline void reset_states(float* states, int rows, int size) {
  std::fill_n(states, size_t(rows) * (size + kPanel), 0.0f);
  for (int r = 0; r < rows; ++r) states[size_t(r) * (size + kPanel)] = -std::numeric_limits<float>::infinity();
}

inline void attend(const QueryTile& tile, const KvView& kv, int split, float* states, float* scratch) {
  const int size = padded(kv.head_dim), rows = tile.rows(), last = tile.position + tile.tokens - 1;
  float* queries = scratch + size_t(2) * kTile * size;
  float* scores = queries + size_t(kMaxQueryRows) * size;
  for (int r = 0; r < rows; ++r) std::copy_n(tile.row(r), kv.head_dim, queries + size_t(r) * size);
  reset_states(states, rows, size);
  const int end = std::min((split + 1) * kSplit, last + 1);
  for (int start = split * kSplit; start < end; start += kTile) {
    const int first = std::max(0, start - tile.position) * tile.group;  // earlier tokens do not see this tile
    const TileWork work = prepare_tile(kv, start, last, rows - first > kFloatRows, scratch);
    score_tile(work, queries, first, rows, scores);
    for (int r = first; r < rows; ++r) {
      const int visible = std::min(kTile, tile.position + r / tile.group + 1 - start);
      soften(scores + size_t(r) * kTile, visible, states + size_t(r) * (size + kPanel), size);
    }
    weigh_tile(work, scores, first, rows, states);
  }
}

// Joins the softmax states of two ranges of positions; a state with sum 0 saw none.
inline void merge(float* into, const float* other, int head_dim) {
  const int size = padded(head_dim);
  if (other[1] == 0.0f) return;
  const float highest = std::max(into[0], other[0]);
  const float a = exponential(into[0] - highest), b = exponential(other[0] - highest);
  into[0] = highest;
  into[1] = into[1] * a + other[1] * b;
  for (int i = kPanel; i < size + kPanel; i += kPanel) store(into + i, fma(load(other + i), set1(b), load(into + i) * set1(a)));
}

inline void finish(const float* state, int head_dim, float* out) {
  const float factor = 1.0f / state[1];
  for (int i = 0; i < head_dim; ++i) out[i] = state[kPanel + i] * factor;
}

}  // namespace twostep::TWOSTEP_ISA
