// How many of a team's threads take part in its next run: as many as the cores that other programs really leave to it.
//
// Threads that meet at barriers are as slow as the slowest. Two threads on a core and a half take longer than one thread on
// one core, so a thread that lacks a good part of a core had better stay away. It is tried again after a while, and less and
// less often where that shows no more cores.
#pragma once
#include <algorithm>
#include <cstdint>

namespace twostep {

class Attendance {
 public:
  explicit Attendance(int threads) : threads_(threads), active_(threads) {}

  int active() const { return active_; }

  // A run of the active threads took `wall_ns` each, of which they were computing or waiting for each other `used_ns` together.
  void ran(int64_t wall_ns, int64_t used_ns) {
    wall_ns_ += wall_ns;
    used_ns_ += used_ns;
    if (wall_ns_ < (trying_ ? kTryNs : kWindowNs)) return;
    const double lacking = active_ - static_cast<double>(used_ns_) / static_cast<double>(wall_ns_);
    fewer_ns_ = active_ < threads_ ? fewer_ns_ + wall_ns_ : 0;
    wall_ns_ = used_ns_ = 0;
    if (active_ > 1 && lacking > kLacking) {
      pause_ns_ = trying_ ? std::min(2 * pause_ns_, kLongestPauseNs) : kPauseNs;
      leave(active_ - 1, false);
    } else if (active_ < threads_ && fewer_ns_ >= pause_ns_) {
      leave(active_ + 1, true);
    } else {
      trying_ = false;
    }
  }

 private:
  static constexpr double kLacking = 0.35;  // of a core: where fewer threads begin to be the faster
  static constexpr int64_t kWindowNs = 50'000'000, kTryNs = 30'000'000, kPauseNs = 500'000'000, kLongestPauseNs = 8'000'000'000;

  void leave(int active, bool trying) {
    active_ = active;
    trying_ = trying;
    fewer_ns_ = 0;
  }

  const int threads_;
  int active_;
  bool trying_ = false;
  int64_t wall_ns_ = 0, used_ns_ = 0, fewer_ns_ = 0, pause_ns_ = kPauseNs;
};

}  // namespace twostep
