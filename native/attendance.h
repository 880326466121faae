// How many of a team's threads take part in its next run: as many as the cores that other programs really leave to it.
//
// Threads that meet at barriers are as slow as the slowest. Two threads on a core and a half take longer than one thread on
// one core, so a thread that lacks a good part of a core stays away. One more is tried after a pause, which is short at first,
// since a burst of another program (a front end that reads a prompt) is over soon, and doubles as long as tries fail: in the
// end 30 ms of every 2 s are spent on them. A try that succeeds is followed by the next at once. Pauses are real time, not
// time of runs, so a server that has little to do gets its threads back as soon as a busy one; after a rest nothing is known
// of the cores, and all threads take part.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace twostep {

class Attendance {
 public:
  explicit Attendance(int threads) : threads_(threads), active_(threads) {}

  // Threads for the run that begins now. Times are of one clock that never goes back.
  int begin(int64_t now_ns) {
    if (ran_ns_ > 0 && now_ns - ran_ns_ >= kRestNs) {
      pause_ns_ = kPauseNs;
      if (active_ < threads_) raise(threads_, now_ns);
      wall_ns_ = lacked_ns_ = 0;
    } else if (active_ < threads_ && now_ns - changed_ns_ >= pause_ns_) {
      raise(active_ + 1, now_ns);
    }
    return active_;
  }

  // That run took `wall_ns` until now. For `lacked_ns`, added up over its threads, they had something to do and no core.
  void ran(int64_t now_ns, int64_t wall_ns, int64_t lacked_ns) {
    ran_ns_ = now_ns;
    wall_ns_ += wall_ns;
    lacked_ns_ += lacked_ns;
    if (wall_ns_ < (trying_ ? kTryNs : kWindowNs)) return;
    const double lacking = static_cast<double>(lacked_ns_) / static_cast<double>(wall_ns_);
    wall_ns_ = lacked_ns_ = 0;
    if (active_ > 1 && lacking > kLacking) {
      lower(std::max(1, active_ - static_cast<int>(std::ceil(lacking - kLacking))), now_ns);
    } else if (trying_ && active_ < threads_) {
      raise(active_ + 1, now_ns);
    } else {
      trying_ = false;
    }
  }

 private:
  static constexpr double kLacking = 0.35;  // of a core: where fewer threads begin to be the faster
  static constexpr int64_t kMs = 1'000'000;
  static constexpr int64_t kWindowNs = 50 * kMs, kTryNs = 30 * kMs;                          // of runs
  static constexpr int64_t kPauseNs = 60 * kMs, kLongestPauseNs = 2000 * kMs, kRestNs = 2000 * kMs;  // real time
  static constexpr int64_t kLastingNs = 1000 * kMs;  // a larger number of threads that held so long was right

  void raise(int active, int64_t now_ns) {
    active_ = active;
    trying_ = true;
    changed_ns_ = raised_ns_ = now_ns;
    wall_ns_ = lacked_ns_ = 0;
  }

  void lower(int active, int64_t now_ns) {
    const bool failed = raised_ns_ > 0 && now_ns - raised_ns_ < kLastingNs;
    pause_ns_ = failed ? std::min(2 * pause_ns_, kLongestPauseNs) : kPauseNs;
    active_ = active;
    trying_ = false;
    changed_ns_ = now_ns;
  }

  const int threads_;
  int active_;
  bool trying_ = false;
  int64_t wall_ns_ = 0, lacked_ns_ = 0;                     // since the last decision
  int64_t ran_ns_ = 0, changed_ns_ = 0, raised_ns_ = 0;     // when; 0: never
  int64_t pause_ns_ = kPauseNs;
};

}  // namespace twostep
