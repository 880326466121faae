// A step as the program takes it, and what is checked of it here because it is read here anyway: the blocks it names.
#pragma once
#include <cstdint>
#include <vector>

namespace twostep {

// Slices of a step, flattened. Row i of the step is token i; slice s has counts[s] rows, after those of slice s - 1, at
// positions starts[s] and following; its block table begins at tables[table_starts[s]].
struct Batch {
  int rows, slices, logit_count;
  const int32_t *tokens, *starts, *counts, *tables, *table_starts, *logit_rows;
};

class BlockCheck {
 public:
  explicit BlockCheck(int kv_blocks) : writers_(kv_blocks) {}

  // Of a batch whose arrays fit each other (kernels/check.py): every block that a slice uses is in the cache, and none is
  // written twice. Throws std::invalid_argument that names slice and block. Reads each used table entry once.
  void check(const Batch& batch);

 private:
  void check_range(const Batch& batch, int slice) const;
  void check_writes(const Batch& batch, int slice, int32_t first_mark);

  // By block: the mark of the slice that last wrote it. Each step's marks are new, so that none has to be cleared.
  std::vector<int32_t> writers_;
  int32_t next_mark_ = 1;
};

}  // namespace twostep
