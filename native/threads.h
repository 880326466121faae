// A team of threads that runs one function at a time: every member enters it, they meet at barriers, tasks are
// handed out by a shared counter. Waiting spins briefly, then sleeps: on a machine that others use too, a thread that spins
// or yields takes the core that the one it waits for may need. Where others use the cores, fewer members take part.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <vector>

#include "attendance.h"

namespace twostep {

class Team {
 public:
  // Throws std::system_error where the system gives no more threads.
  explicit Team(int size);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // The right to run() and to write what its members read, for one caller at a time, to its end.
  class Turn {
   public:
    // Throws std::runtime_error while another has it: two steps over the same buffers would destroy each other.
    explicit Turn(Team& team) : team_(team) {
      if (team_.taken_.exchange(true, std::memory_order_acquire)) throw std::runtime_error("a step is running; these threads take one call at a time");
    }
    ~Turn() { team_.taken_.store(false, std::memory_order_release); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Team& team_;
  };

  // Inside run(): the members that take part, 0 to active() - 1.
  int active() const { return active_; }
  // Members, whether or not they take part.
  int size() const { return size_; }

  // Time since the team was made, inside of runs and added up over its members, that a member had no core: it had something
  // to do and was not let run, or it did not take part since others use the cores. Waiting for other members is no lack.
  uint64_t lacked_ns() const { return lacked_ns_.load(std::memory_order_relaxed); }

  // Runs body(member) on the members that take part, the caller being member 0; returns when all are done. `body` must not
  // throw, and must not need any other member: which take part is decided anew for each run.
  template <class F>
  void run(F&& body) {
    run_body({[](void* f, int member) { (*static_cast<std::remove_reference_t<F>*>(f))(member); }, &body});
  }

  // Inside run(): waits until every member is here. Opens a new set of tasks for share().
  void barrier();

  // Inside run(): calls f(task) for tasks 0..tasks-1, each on whichever member is free first. At most once between
  // two barriers, by all members with the same `tasks`; does not wait for the others (barrier() does).
  template <class F>
  void share(int tasks, F&& f) {
    for (int t = next_task(); t < tasks; t = next_task()) f(t);
  }

 private:
  struct Body {
    void (*call)(void*, int);
    void* f;
  };
  void run_body(Body body);
  int next_task() { return counter_.value.fetch_add(1, std::memory_order_relaxed); }
  void work(int member);
  void take_part(int member);
  void stop();
  uint64_t wait_for_start(uint64_t seen, bool spin);
  void release(uint32_t generation);
  void sleep_until_not(uint32_t generation);

  struct alignas(64) Counter { std::atomic<int> value{0}; };
  struct alignas(64) Gate { std::atomic<uint32_t> value{0}; };

  const int size_;
  Counter counter_;
  Gate arrived_, generation_, sleepers_;
  std::atomic<uint64_t> lacked_ns_{0};
  std::atomic<int64_t> released_ns_{0};  // when the last barrier opened at which somebody slept
  Attendance attendance_;
  int active_;             // members of this run
  int64_t begun_ns_ = 0;   // of this run
  // Runs begun, times kMostMembers, plus the members that take part in the last one: a member that did not may miss any.
  static constexpr uint64_t kMostMembers = 1 << 16;
  alignas(64) std::atomic<uint64_t> started_{0};
  std::atomic<bool> stop_{false}, taken_{false};
  Body body_{};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

}  // namespace twostep
