// Passes over the logits of one row: the part of sampling that touches the whole vocabulary.
//
// Every pass gives the same bits on every instruction set: eight lanes and one order of addition, whatever the width of
// the machine; an exponential made of additions and multiplications only; no fused multiply-add (the file is compiled
// with -ffp-contract=off).
#pragma once
#include <cfloat>
#include <cstdint>

namespace twostep::scan {

constexpr int kBlock = 128;          // elements that share one maximum; passes skip blocks that lie below their floor
constexpr float kLowest = -FLT_MAX;  // the floor that every token passes except those of logit -inf

inline int blocks_of(int vocab) { return (vocab + kBlock - 1) / kBlock; }

// One row, padded to whole blocks with -inf.
struct Row {
  float* logit;    // blocks * kBlock
  float* weight;   // the same; defined only in blocks whose maximum reaches the floor given to weigh()
  float* highest;  // blocks: the maximum of each block
  int blocks;
};

// Tokens at or above some floor: how many, and the sum of their weights.
struct Tally {
  int count;
  double mass;
};

// Copies `vocab` logits and pads them.
void load(Row& row, const float* logits, int vocab);

// Sets to -inf what the mask forbids: token i is allowed if bit i % 32 of word i / 32 is set.
void forbid(Row& row, const uint32_t* mask, int vocab);

// Finds the blocks' maxima. False if a logit is NaN or +inf.
bool find_maxima(Row& row);

// Sum of exp(logit - highest).
double sum_of_exp(const Row& row, float highest);

// weight = exp((logit - highest) * inverse_temperature) at or above the floor, 0 below it.
void weigh(Row& row, float highest, float inverse_temperature, float floor);

// Counts the logits at or above the floor.
int count_from(const Row& row, float floor);

// Tallies the tokens at or above the floor whose weight is not 0. Falls, or stays, as the floor rises: rounding is
// monotone and the order of addition fixed.
Tally tally_from(const Row& row, float floor);

// Tally of one block, whatever its maximum.
Tally tally_block(const Row& row, int block, float floor);

// Weights below the smallest become 0, in blocks that reach the floor.
void trim(Row& row, float floor, float smallest_weight);

// How many of `vocab` logits rank before that of `token`: greater, or equal with a lower id.
int count_before(const float* logits, int vocab, int token);

}  // namespace twostep::scan
