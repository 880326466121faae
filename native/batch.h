// A step as the program takes it, and the check of the blocks that it names, which are read here anyway.
#pragma once
#include <cstdint>
#include <vector>

#include "kv_pool.h"

namespace twostep {

// Slices of a step, flattened. Row i of the step is token i; slice s has counts[s] rows, after those of slice s - 1, at
// positions starts[s] and following; its block table for group g of the KV pool begins at tables[g][table_starts[s]].
struct Batch {
  int rows, slices, logit_count;
  const int32_t *tokens, *starts, *counts;
  const int32_t* const* tables;
  const int32_t *table_starts, *logit_rows;
};

class BlockCheck {
 public:
  BlockCheck(int group, const KvGroup& of) : group_(group), of_(of), writers_(of.blocks) {}

  // Of one group of blocks, for a batch whose arrays fit each other (kernels/check.py): every block that a slice sees is in
  // the cache, and none is written twice. Throws std::invalid_argument that names slice and block. Reads each of these
  // table entries once.
  void check(const Batch& batch);

 private:
  const int32_t* table(const Batch& batch, int slice) const { return batch.tables[group_] + batch.table_starts[slice]; }
  void check_range(const Batch& batch, int slice) const;
  void check_writes(const Batch& batch, int slice, int32_t first_mark);

  int group_;
  KvGroup of_;
  // By block: the mark of the slice that last wrote it. Each step's marks are new, so that none has to be cleared.
  std::vector<int32_t> writers_;
  int32_t next_mark_ = 1;
};

}  // namespace twostep
