// Attention of a tile of query rows over paged KV: online softmax over tiles of 64 positions, splits of 512, both fixed
// from position 0, so that a row's result does not depend on which rows share its tile. Included once an instruction set.
// Scores and maxima are logarithms to base 2: a probability is 2^(score - maximum).
//
// A position that a row does not see, later or before its window, has probability exactly 0; 0 · value adds nothing since
// the cache holds finite numbers.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"

namespace twostep::TWOSTEP_ISA {

constexpr float kF16Largest = 65504.0f;

// Up to 16 floats, with zeros after them.
inline F32 load_some(const float* from, int count) {
  if (count >= kPanel) return load(from);
  float out[kPanel] = {};
  std::copy_n(from, count, out);
  return load(out);
}

// Column `slot` of a key block, row `slot` of a value block; saturated to finite f16.
inline void write_kv(const float* key, const float* value, int head_dim, int slot, uint16_t* keys, uint16_t* values) {
  const F32 largest = set1(kF16Largest), lowest = set1(-kF16Largest);
  for (int i = 0; i < head_dim; i += kPanel) {
    uint16_t rounded[kPanel];
    store_f16(rounded, min(max(load_some(key + i, head_dim - i), lowest), largest));
    for (int j = 0; j < kPanel; ++j) keys[size_t(i + j) * kBlock + slot] = rounded[j];
    store_f16(values + size_t(slot) * padded(head_dim) + i, min(max(load_some(value + i, head_dim - i), lowest), largest));
  }
}

inline const uint8_t* bytes_of(const void* p) { return static_cast<const uint8_t*>(p); }

// What comes after the tile in work, fetched at the pace of the work: a block of one head is a run of a few KiB, too short for
// the hardware to foresee the next one, and fetching a whole tile at once stalls.
class Ahead {
 public:
  // The work is blocks first..end-1, then the beginning of what `after` names.
  Ahead(const KvView& kv, int first, int end, const KvAfter& after) : kv_(&kv), after_(&after), block_(first + kBlocks), end_(end) { enter(); }
  // Of a step over kVectors half lines.
  template <int kVectors>
  TWOSTEP_INLINE void fetch(int step) {
    if (kVectors == 1 && step % 2) return;
    constexpr int lines = std::max(1, kVectors / 2);
    for (int line = 0; line < lines; ++line) __builtin_prefetch(at_ + 64 * line);
    at_ += stride_ * lines;
    if ((left_ -= lines) <= 0) ++block_, enter();
  }

 private:
  static constexpr int kBlocks = 6;  // ahead of the work; 2 and 4 are slower, 12 is no faster (docs/LOG.md)

  // Begins block_, of what comes after where the work has no such block.
  void enter() {
    if (block_ >= end_ && after_->view) {
      kv_ = after_->view;
      block_ += after_->first - end_;
      end_ = after_->end;
      after_ = &kNothing;
    }
    const bool more = block_ < end_;
    stride_ = more ? 64 : 0;
    left_ = more ? padded(kv_->head_dim) : std::numeric_limits<int>::max();  // lines of a block's keys and values
    at_ = bytes_of(kv_->keys(std::min(block_, end_ - 1)));
  }

  static constexpr KvAfter kNothing{};
  const KvView* kv_;
  const KvAfter* after_;
  int block_, end_, left_;
  size_t stride_;
  const uint8_t* at_;
};

// What one tile of positions works on.
struct TileWork {
  const QueryTile& tile;
  const KvView& kv;
  int start, blocks;  // first position; KV blocks in use
  const float *keys, *values;  // f32 copies, [blocks][head_dim][16] and [positions][padded], or null: read the cache
  Ahead& ahead;
  // Blocks that rows up to `row` see: later ones would cost time and add nothing.
  int seen_by(int row) const { return std::min(blocks, (tile.position + row / tile.group - start) / kBlock + 1); }
};

// What attend() keeps of its query rows, in its scratch; `shrink`: what the last tile's new maximum left of earlier terms.
struct Rows {
  int first, count;  // those that see the tile: from `first` up to `count`
  size_t size;       // floats of a query, padded
  float *queries, *scores, *lane_sums;
  float *highest, *shrink;  // with a vector to spare
  Rows(float* at, size_t padded_size)
      : first(0), count(0), size(padded_size), queries(at), scores(queries + kMaxQueryRows * size),
        lane_sums(scores + kMaxQueryRows * kTile), highest(lane_sums + kMaxQueryRows * kPanel), shrink(highest + kMaxQueryRows + kPanel) {}
};

// Vectors of 16 that a tile of kCount rows holds at once: as many chains as there are registers, so that few rows too have
// enough of them to hide the latency of a multiply-add.
template <int kCount>
constexpr int vectors_of(int most = 4) {
  int vectors = most;
  while (vectors > 1 && kCount * vectors > kChains) vectors /= 2;
  return vectors;
}

template <int kCount, int kVectors>
using Accumulators = F32[kCount][kVectors];

// acc[r][v] += row's factor · w[v]; the factors then stand at the next.
template <int kCount, int kVectors>
TWOSTEP_INLINE inline void add_products(Accumulators<kCount, kVectors>& acc, const F32 (&w)[kVectors], RowParts<kCount>& factors) {
  unroll<kCount>([&](auto r) TWOSTEP_INLINE {
    const F32 x = set1(*factors.template row<float, r>());
    unroll<kVectors>([&](auto v) TWOSTEP_INLINE { acc[r][v] = fma(x, w[v], acc[r][v]); });
  });
  factors.advance(sizeof(float));
}

// Scores of kCount rows against kVectors blocks of keys.
template <class From, int kCount, int kVectors>
TWOSTEP_INLINE inline void score_blocks(const uint8_t* const (&keys)[kVectors], Ahead& ahead, int head_dim, RowParts<kCount> queries,
                                        float* scores) {
  Accumulators<kCount, kVectors> acc;
  unroll<kCount>([&](auto r) TWOSTEP_INLINE { unroll<kVectors>([&](auto v) TWOSTEP_INLINE { acc[r][v] = zero(); }); });
  for (int i = 0; i < head_dim; ++i) {
    if constexpr (std::is_same_v<From, FromF16>) ahead.fetch<kVectors>(i);
    F32 w[kVectors];
    unroll<kVectors>([&](auto v) TWOSTEP_INLINE { w[v] = From::at(keys[v], size_t(i) * kBlock); });
    add_products<kCount, kVectors>(acc, w, queries);
  }
  unroll<kCount>([&](auto r) TWOSTEP_INLINE {
    unroll<kVectors>([&](auto v) TWOSTEP_INLINE { store(scores + r * kTile + v * kBlock, acc[r][v]); });
  });
}

// Blocks from `b` on, kVectors at a time, then the rest with fewer.
template <class From, int kCount, int kVectors>
inline void score_rows(const TileWork& work, const Rows& rows, int row, int b) {
  const RowParts<kCount> queries(bytes_of(rows.queries + row * rows.size), rows.size * sizeof(float));
  const int head_dim = work.kv.head_dim, seen = work.seen_by(row + kCount - 1);
  for (; b + kVectors <= seen; b += kVectors) {
    const uint8_t* keys[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int block = work.start / kBlock + b + v;
      keys[v] = work.keys ? bytes_of(work.keys + size_t(b + v) * head_dim * kBlock) : bytes_of(work.kv.keys(block));
    }
    score_blocks<From, kCount, kVectors>(keys, work.ahead, head_dim, queries, rows.scores + size_t(row) * kTile + b * kBlock);
  }
  if constexpr (kVectors > 1) score_rows<From, kCount, kVectors / 2>(work, rows, row, b);
}

template <class From>
inline void score_tile(const TileWork& work, const Rows& rows) {
  in_even_tiles<kQueryRows>(rows.first, rows.count, [&](int row, auto count) { score_rows<From, count, vectors_of<count>()>(work, rows, row, 0); });
}

// Takes out the scores of positions that a row may not see.
inline void take_out(const TileWork& work, int row, float* scores) {
  const int position = work.tile.position + row / work.tile.group;
  const int passed = first_seen_position(position, work.tile.window) - work.start, visible = std::max(0, position + 1 - work.start);
  if (passed > 0) std::fill_n(scores, passed, -std::numeric_limits<float>::infinity());
  if (visible < kTile) std::fill(scores + visible, scores + kTile, -std::numeric_limits<float>::infinity());
}

// Maxima of up to 16 rows' scores.
inline F32 maxima(const float* scores, int count) {
  F32 of_row[kPanel];
  for (int r = 0; r < count; ++r, scores += kTile)
    of_row[r] = max(max(load(scores), load(scores + kPanel)), max(load(scores + 2 * kPanel), load(scores + 3 * kPanel)));
  if (count == kPanel) return horizontal_maxima(of_row);
  float out[kPanel] = {};
  for (int r = 0; r < count; ++r) out[r] = horizontal_max(of_row[r]);
  return load(out);
}

inline void store_first(float* to, F32 x, int count) {
  if (count == kPanel) return store(to, x);
  float whole[kPanel];
  store(whole, x);
  std::copy_n(whole, count, to);
}

// Turns scores into probabilities relative to the new maxima, 16 rows at a time. A row's sum stays spread over 16 lanes.
inline void soften(const TileWork& work, const Rows& rows) {
  const QueryTile& tile = work.tile;
  const bool all_seen = work.start + kTile - 1 <= tile.position && first_seen_position(tile.position + tile.tokens - 1, tile.window) <= work.start;
  for (int row = rows.first; row < rows.count; row += kPanel) {
    const int count = std::min(kPanel, rows.count - row);
    float *scores = rows.scores + size_t(row) * kTile, *sums = rows.lane_sums + size_t(row) * kPanel;
    if (!all_seen)
      for (int r = 0; r < count; ++r) take_out(work, row + r, scores + size_t(r) * kTile);
    const F32 before = load(rows.highest + row), highest = max(maxima(scores, count), before);
    store_first(rows.highest + row, highest, count);  // rows after them have maxima of their own
    store(rows.shrink + row, power_of_two(before - highest));
    for (int r = row; r < row + count; ++r, scores += kTile, sums += kPanel) {
      const F32 top = set1(rows.highest[r]);
      F32 p[kTile / kPanel];
      for (int i = 0; i < kTile / kPanel; ++i) store(scores + i * kPanel, p[i] = power_of_two(load(scores + i * kPanel) - top));
      store(sums, fma(load(sums), set1(rows.shrink[r]), (p[0] + p[1]) + (p[2] + p[3])));
    }
  }
}

// out[row][chunk .. +16·kVectors] = what it was · shrink + probabilities[row][0..positions) · values[..][chunk ..]
template <class From, int kCount, int kVectors>
inline void weigh_chunks(const TileWork& work, const Rows& rows, int row, int chunk, float* states) {
  const int size = rows.size, seen = work.seen_by(row + kCount - 1);
  float* out = states + row * (rows.size + kPanel) + kPanel + chunk * kPanel;
  RowParts<kCount> probabilities(bytes_of(rows.scores + size_t(row) * kTile), kTile * sizeof(float));
  Accumulators<kCount, kVectors> acc;
  unroll<kCount>([&](auto r) TWOSTEP_INLINE {
    const F32 shrink = set1(rows.shrink[row + r]);
    unroll<kVectors>([&](auto v) TWOSTEP_INLINE { acc[r][v] = load(out + r * (rows.size + kPanel) + v * kPanel) * shrink; });
  });
  for (int b = 0; b < seen; ++b) {
    const uint8_t* values = work.values ? bytes_of(work.values + size_t(b) * kBlock * size + chunk * kPanel)
                                        : bytes_of(work.kv.values(work.start / kBlock + b) + chunk * kPanel);
    for (int i = 0; i < kBlock; ++i) {
      if constexpr (std::is_same_v<From, FromF16>) work.ahead.template fetch<kVectors>(i);
      F32 w[kVectors];
      unroll<kVectors>([&](auto v) TWOSTEP_INLINE { w[v] = From::at(values, size_t(i) * size + v * kPanel); });
      add_products<kCount, kVectors>(acc, w, probabilities);
    }
  }
  unroll<kCount>([&](auto r) TWOSTEP_INLINE {
    unroll<kVectors>([&](auto v) TWOSTEP_INLINE { store(out + r * (rows.size + kPanel) + v * kPanel, acc[r][v]); });
  });
}

// Chunks from `chunk` on, kVectors at a time, then the rest with fewer.
template <class From, int kCount, int kVectors>
inline void weigh_rows(const TileWork& work, const Rows& rows, int row, int chunk, float* states) {
  const int chunks = rows.size / kPanel;
  for (; chunk + kVectors <= chunks; chunk += kVectors) weigh_chunks<From, kCount, kVectors>(work, rows, row, chunk, states);
  if constexpr (kVectors > 1) weigh_rows<From, kCount, kVectors / 2>(work, rows, row, chunk, states);
}

template <class From>
inline void weigh_tile(const TileWork& work, const Rows& rows, float* states) {
  in_even_tiles<kQueryRows>(rows.first, rows.count, [&](int row, auto count) { weigh_rows<From, count, vectors_of<count>()>(work, rows, row, 0, states); });
}

inline void widen(const uint16_t* from, size_t count, float* to) {
  for (size_t i = 0; i < count; i += kPanel) store(to + i, load_f16(from + i));
}

// The tile's work; many rows pay for one conversion of its keys and values to floats.
inline TileWork prepare_tile(const QueryTile& tile, const KvView& kv, int start, int last, bool copy, float* scratch, Ahead& ahead) {
  const int blocks = (std::min(kTile, last + 1 - start) + kBlock - 1) / kBlock;
  if (!copy) return {tile, kv, start, blocks, nullptr, nullptr, ahead};
  const size_t size = padded(kv.head_dim), key_floats = size_t(kv.head_dim) * kBlock;
  float* values = scratch + kTile * size;
  for (int b = 0; b < blocks; ++b) {
    widen(kv.keys(start / kBlock + b), key_floats, scratch + b * key_floats);
    widen(kv.values(start / kBlock + b), size * kBlock, values + b * size * kBlock);
  }
  return {tile, kv, start, blocks, scratch, values, ahead};
}

// Queries copied together, sums and outputs 0, maxima lowest.
inline Rows prepare_rows(const QueryTile& tile, int head_dim, float* states, float* scratch) {
  Rows rows(scratch, padded(head_dim));
  rows.count = tile.rows();
  for (int r = 0; r < rows.count; ++r)
    for (int i = 0; i < head_dim; i += kPanel) store(rows.queries + r * rows.size + i, load_some(tile.row(r) + i, head_dim - i));
  std::fill_n(rows.lane_sums, size_t(rows.count) * kPanel, 0.0f);
  std::fill_n(rows.highest, kMaxQueryRows + kPanel, -std::numeric_limits<float>::infinity());
  std::fill_n(states, rows.count * (rows.size + kPanel), 0.0f);
  return rows;
}

// The rows of a tile whose windows reach so far back that they see positions from `start` on, with the tile's last one.
inline int rows_that_reach(const QueryTile& tile, int start) {
  const int64_t tokens = int64_t(start) + kTile - 1 - tile.position + tile.window;
  return static_cast<int>(std::min<int64_t>(tile.tokens, tokens)) * tile.group;
}

inline void attend(const QueryTile& tile, const KvView& kv, int split, const KvAfter& after, float* states, float* scratch) {
  const int first = first_seen_position(tile.position, tile.window) / kTile * kTile;
  const int last = tile.position + tile.tokens - 1, end = std::min((split + 1) * kSplit, last + 1);
  Rows rows = prepare_rows(tile, kv.head_dim, states, scratch + size_t(2) * kTile * padded(kv.head_dim));
  const int begin = std::max(first, split * kSplit);
  Ahead ahead(kv, begin / kBlock, (end + kBlock - 1) / kBlock, after);
  for (int start = begin; start < end; start += kTile) {
    rows.first = std::max(0, start - tile.position) * tile.group;  // earlier tokens do not see this tile
    rows.count = rows_that_reach(tile, start);                      // nor do later ones whose window has passed it
    const bool copy = rows.count - rows.first > kQueryRows;
    const TileWork work = prepare_tile(tile, kv, start, last, copy, scratch, ahead);
    if (copy) score_tile<FromF32>(work, rows);
    else score_tile<FromF16>(work, rows);
    soften(work, rows);
    if (copy) weigh_tile<FromF32>(work, rows, states);
    else weigh_tile<FromF16>(work, rows, states);
  }
  for (int r = 0; r < tile.rows(); ++r) {
    float* state = states + r * (rows.size + kPanel);
    state[0] = rows.highest[r];
    state[1] = horizontal_sum(load(rows.lane_sums + size_t(r) * kPanel));
  }
}

// Joins the softmax states of two ranges of positions; a state with sum 0 saw none.
inline void merge(float* into, const float* other, int head_dim) {
  const int size = padded(head_dim);
  if (other[1] == 0.0f) return;
  if (into[1] == 0.0f) return static_cast<void>(std::copy_n(other, size + kPanel, into));
  const float highest = std::max(into[0], other[0]);
  const float a = power_of_two(into[0] - highest), b = power_of_two(other[0] - highest);
  into[0] = highest;
  into[1] = into[1] * a + other[1] * b;
  for (int i = kPanel; i < size + kPanel; i += kPanel) store(into + i, fma(load(other + i), set1(b), load(into + i) * set1(a)));
}

inline void finish(const float* state, int head_dim, float* out) {
  const float factor = 1.0f / state[1];
  const int whole = head_dim / kPanel * kPanel;
  for (int i = 0; i < whole; i += kPanel) store(out + i, load(state + kPanel + i) * set1(factor));
  for (int i = whole; i < head_dim; ++i) out[i] = state[kPanel + i] * factor;
}

}  // namespace twostep::TWOSTEP_ISA
