// The owner of KV memory: groups of blocks, private or shareable with other processes, and blocks as bytes to send.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace twostep {

// Layers that share block tables. `window`: positions that a token sees, its own included; kNoWindow: all.
struct KvGroup {
  int layers, blocks, window;
  int first_seen_block(int position) const { return first_seen_position(position, window) / kBlock; }
};

class KvPool {
 public:
  // `digest`: 16 bytes that stand for the layout (spec/kv_layout.py), checked at every import. `shareable`: in a memory file
  // whose descriptor other processes can map; otherwise private to this one. Throws std::bad_alloc, and
  // std::invalid_argument where the system has no memory files.
  KvPool(std::vector<KvGroup> groups, int kv_heads, int head_dim, std::string digest, bool shareable);
  ~KvPool();
  KvPool(const KvPool&) = delete;
  KvPool& operator=(const KvPool&) = delete;

  const std::vector<KvGroup>& groups() const { return groups_; }
  size_t bytes() const { return bytes_; }
  int file_descriptor() const { return descriptor_; }  // -1: private memory

  // One layer of a block; `layer` counts within the group. All layers of a block lie together, so that memory is first
  // touched as blocks are first used: with a region for each layer one step meets a new huge page in all of them at once,
  // and the system clears 2 MB each.
  uint16_t* block(int group, int layer, int block) const {
    return starts_[group] + (size_t(block) * groups_[group].layers + layer) * layer_elements_;
  }
  size_t block_stride(int group) const { return groups_[group].layers * layer_elements_; }  // elements
  size_t head_elements() const { return layer_elements_ / kv_heads_; }
  size_t block_bytes(int group) const { return block_stride(group) * sizeof(uint16_t); }

  // The following take groups and blocks that exist.
  void copy(int group, int source, int target);
  // A block as bytes (kernels/kv_image.py): header, then the block. `out` has image_bytes(group) bytes.
  static constexpr size_t kHeader = 64;
  size_t image_bytes(int group) const { return kHeader + block_bytes(group); }
  void export_block(int group, int block, uint8_t* out) const;
  // Throws std::invalid_argument that says what is wrong with the bytes; nothing is changed then.
  void import_block(int group, int block, const uint8_t* data, size_t size);

 private:
  uint8_t* take(size_t bytes, bool shareable);

  const std::vector<KvGroup> groups_;
  const int kv_heads_;
  const size_t layer_elements_;  // of one block in one layer
  const std::string digest_;
  Arena arena_;
  int descriptor_ = -1;
  uint8_t* mapped_ = nullptr;  // of the memory file
  size_t bytes_ = 0;
  std::vector<uint16_t*> starts_;  // by group
};

}  // namespace twostep
