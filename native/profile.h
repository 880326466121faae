// Where the time of steps went, by member of the team, instruction and stage, waits for other members apart. Off, a mark
// costs one branch; on, a reading of the clock, about 20 ns.
#pragma once
#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

namespace twostep {

// Of one instruction. Prepare: norms, quantising, rotation and the write to the cache. Compute: matrices, or scores and
// values. Finish: joining splits of attention; norm after a projection.
enum class Stage { Prepare, Compute, Finish };
constexpr int kStages = 3;

class Profile {
 public:
  // Nanoseconds of one instruction by stage: {work, wait}.
  using Row = std::array<std::array<int64_t, 2>, kStages>;

  // From now on steps are added up, from zero; `instructions` rows a member, and one for the time until it starts.
  void start(int members, int instructions) {
    members_.assign(members, {});
    for (Member& member : members_) member.rows.assign(instructions + 1, {});
    steps_ = 0;
    on_ = true;
  }
  void stop() { on_ = false; }

  bool on() const { return on_; }
  int64_t steps() const { return steps_; }
  int members() const { return static_cast<int>(members_.size()); }
  const std::vector<Row>& rows(int member) const { return members_[member].rows; }

  // By the caller, before members begin.
  void begin_step() {
    if (!on_) return;
    ++steps_;
    const int64_t now = now_ns();
    for (Member& member : members_) member.marked_ns = now;
  }
  // By each member: the time since its last mark was work, or a wait, in a stage of an instruction.
  void work(int member, int instruction, Stage stage) { mark(member, instruction, stage, 0); }
  void wait(int member, int instruction, Stage stage) { mark(member, instruction, stage, 1); }

 private:
  struct alignas(64) Member {
    int64_t marked_ns = 0;
    std::vector<Row> rows;
  };

  static int64_t now_ns() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

  void mark(int member, int instruction, Stage stage, int kind) {
    if (!on_) return;
    Member& mine = members_[member];
    const int64_t now = now_ns();
    mine.rows[instruction][static_cast<int>(stage)][kind] += now - mine.marked_ns;
    mine.marked_ns = now;
  }

  bool on_ = false;
  int64_t steps_ = 0;
  std::vector<Member> members_;
};

}  // namespace twostep
