#include "batch.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace twostep {
namespace {

[[noreturn]] void refuse(int slice, const std::string& fault) {
  throw std::invalid_argument("slice " + std::to_string(slice) + ": " + fault);
}

int last_position(const Batch& batch, int slice) { return batch.starts[slice] + batch.counts[slice] - 1; }

}  // namespace

void BlockCheck::check(const Batch& batch) {
  if (next_mark_ > std::numeric_limits<int32_t>::max() - batch.slices) {
    std::fill(writers_.begin(), writers_.end(), 0);
    next_mark_ = 1;
  }
  const int32_t first_mark = next_mark_;
  next_mark_ += batch.slices;  // before anything is refused: what a refused step marked must look old to the next
  for (int slice = 0; slice < batch.slices; ++slice) {
    check_range(batch, slice);
    check_writes(batch, slice, first_mark);
  }
}

void BlockCheck::check_range(const Batch& batch, int slice) const {
  const int first = of_.first_seen_block(batch.starts[slice]), used = last_position(batch, slice) / kBlock + 1;
  const int32_t* table = this->table(batch, slice);
  const uint32_t blocks = static_cast<uint32_t>(writers_.size());
  uint32_t highest = 0;  // of unsigned numbers: a negative one is higher than any block
  for (int i = first; i < used; ++i) highest = std::max(highest, static_cast<uint32_t>(table[i]));
  if (highest < blocks) return;
  const int32_t* outside = std::find_if(table + first, table + used, [&](int32_t block) { return static_cast<uint32_t>(block) >= blocks; });
  refuse(slice, "block " + std::to_string(*outside) + " is outside the cache (0 to " + std::to_string(blocks - 1) + ")");
}

void BlockCheck::check_writes(const Batch& batch, int slice, int32_t first_mark) {
  const int32_t* table = this->table(batch, slice);
  for (int i = batch.starts[slice] / kBlock; i <= last_position(batch, slice) / kBlock; ++i) {
    int32_t& writer = writers_[table[i]];
    if (writer >= first_mark) refuse(slice, "block " + std::to_string(table[i]) + " is also written by slice " + std::to_string(writer - first_mark));
    writer = first_mark + slice;
  }
}

}  // namespace twostep
