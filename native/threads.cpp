#include "threads.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <chrono>
#include <ctime>

namespace twostep {
namespace {

// Between steps a member spins this long before it sleeps: longer than the host's work between two steps.
constexpr auto kSpinBetweenSteps = std::chrono::microseconds(500);
// At a barrier: longer than most waits, shorter than what being woken costs many times over.
constexpr auto kSpinAtBarrier = std::chrono::microseconds(50);

// Being woken takes so long on cores that nobody else uses; what it takes longer, others had the core.
constexpr int64_t kWakeNs = 100'000;

// What this thread has slept at barriers: it waited for others.
thread_local int64_t slept_here_ns = 0;

int64_t now_ns() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Processor time of the calling thread.
int64_t processor_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// So many pauses take kSpinAtBarrier: a pause is 24 ns on Zen 4 and 53 ns on Emerald Rapids (measured). The shortest of a few
// tries, since any may be interrupted.
int spins_at_barrier() {
  constexpr int kPauses = 100, kTries = 5;
  auto least = std::chrono::steady_clock::duration::max();
  for (int i = 0; i < kTries; ++i) {
    const auto start = std::chrono::steady_clock::now();
    for (int j = 0; j < kPauses; ++j) pause_cpu();
    least = std::min(least, std::chrono::steady_clock::now() - start);
  }
  const auto pauses = kPauses * (kSpinAtBarrier / std::max(least, std::chrono::steady_clock::duration(1)));
  return static_cast<int>(std::clamp<int64_t>(pauses, 200, 20000));
}

// Waits while `*word` is `value`, or for no reason; wakes all who wait so.
#if defined(__linux__)
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}
#else
void sleep_while(std::atomic<uint32_t>&, uint32_t) { std::this_thread::yield(); }
void wake_all(std::atomic<uint32_t>&) {}
#endif

}  // namespace

Team::Team(int size) : size_(size), attendance_(size), active_(size) {
  try {
    for (int member = 1; member < size_; ++member) threads_.emplace_back([this, member] { work(member); });
  } catch (...) {
    stop();
    throw;
  }
}

Team::~Team() { stop(); }

void Team::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    started_.fetch_add(kMostMembers);
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::run_body(Body body) {
  begun_ns_ = now_ns();
  const uint64_t lacked_before = lacked_ns();
  counter_.value.store(0, std::memory_order_relaxed);
  body_ = body;
  active_ = attendance_.begin(begun_ns_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t runs = started_.load(std::memory_order_relaxed) / kMostMembers + 1;
    started_.store(runs * kMostMembers + active_, std::memory_order_release);
  }
  if (active_ > 1) wake_.notify_all();
  take_part(0);
  const int64_t ended_ns = now_ns(), wall_ns = ended_ns - begun_ns_;
  attendance_.ran(ended_ns, wall_ns, static_cast<int64_t>(lacked_ns() - lacked_before));
  lacked_ns_.fetch_add(static_cast<uint64_t>((size_ - active_) * wall_ns), std::memory_order_relaxed);
}

// What it lacked is put down before the last barrier, so that it is there when the run has ended. After that barrier begins
// it has nothing to do.
void Team::take_part(int member) {
  const int64_t entered_ns = now_ns(), slept_before = slept_here_ns, before = processor_ns();
  body_.call(body_.f, member);
  const int64_t used_ns = processor_ns() - before, slept_ns = slept_here_ns - slept_before;
  const int64_t late_ns = std::max<int64_t>(0, entered_ns - begun_ns_ - kWakeNs);
  const int64_t lacked_ns = std::max<int64_t>(0, now_ns() - entered_ns - used_ns - slept_ns);
  lacked_ns_.fetch_add(static_cast<uint64_t>(late_ns + lacked_ns), std::memory_order_relaxed);
  barrier();
}

void Team::work(int member) {
  bool took_part = true;
  for (uint64_t seen = 0;;) {
    seen = wait_for_start(seen, took_part);
    if (stop_) return;
    took_part = member < static_cast<int>(seen % kMostMembers);
    if (took_part) take_part(member);
  }
}

// Returns what is new.
uint64_t Team::wait_for_start(uint64_t seen, bool spin) {
  const auto until = std::chrono::steady_clock::now() + (spin ? kSpinBetweenSteps : std::chrono::microseconds(0));
  for (;;) {
    const uint64_t now = started_.load(std::memory_order_acquire);
    if (now != seen) return now;
    if (std::chrono::steady_clock::now() < until) {
      pause_cpu();
      continue;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [&] { return started_.load(std::memory_order_acquire) != seen; });
  }
}

void Team::barrier() {
  if (active_ == 1) {
    counter_.value.store(0, std::memory_order_relaxed);
    return;
  }
  const uint32_t generation = generation_.value.load(std::memory_order_acquire);
  if (arrived_.value.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(active_)) {
    arrived_.value.store(0, std::memory_order_relaxed);
    counter_.value.store(0, std::memory_order_relaxed);
    release(generation);
    return;
  }
  static const int spins = spins_at_barrier();
  for (int i = 0; i < spins; ++i) {
    if (generation_.value.load(std::memory_order_acquire) != generation) return;
    pause_cpu();
  }
  sleep_until_not(generation);
}

void Team::release(uint32_t generation) {
  if (sleepers_.value.load(std::memory_order_relaxed) > 0) released_ns_.store(now_ns(), std::memory_order_relaxed);
  // Sequential order with the sleepers' own count: either they are seen here, or they see the new generation.
  generation_.value.store(generation + 1, std::memory_order_seq_cst);
  if (sleepers_.value.load(std::memory_order_seq_cst) > 0) wake_all(generation_.value);
}

// It waited until the barrier opened. What it takes longer than being woken does, it waits for a core.
void Team::sleep_until_not(uint32_t generation) {
  const int64_t start_ns = now_ns();
  sleepers_.value.fetch_add(1, std::memory_order_seq_cst);
  while (generation_.value.load(std::memory_order_seq_cst) == generation) sleep_while(generation_.value, generation);
  sleepers_.value.fetch_sub(1, std::memory_order_relaxed);
  const int64_t opened_ns = std::max(start_ns, released_ns_.load(std::memory_order_relaxed));
  slept_here_ns += std::min(now_ns(), opened_ns + kWakeNs) - start_ns;
}

}  // namespace twostep
