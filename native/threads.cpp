#include "threads.h"

#include <chrono>

namespace twostep {
namespace {

// Between steps a member spins this long before it sleeps: longer than the host's work between two steps.
constexpr auto kSpinBetweenSteps = std::chrono::microseconds(500);
constexpr int kSpinsBeforeYield = 4000;

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Team::Team(int size) : size_(size) {
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
    ++started_;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::run_body(Body body) {
  counter_.value.store(0, std::memory_order_relaxed);
  body_ = body;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    started_.fetch_add(1, std::memory_order_release);
  }
  if (size_ > 1) wake_.notify_all();
  body.call(body.f, 0);
  barrier();
}

void Team::work(int member) {
  for (uint64_t seen = 0;; ++seen) {
    wait_for_start(seen);
    if (stop_) return;
    body_.call(body_.f, member);
    barrier();
  }
}

void Team::wait_for_start(uint64_t seen) {
  const auto until = std::chrono::steady_clock::now() + kSpinBetweenSteps;
  while (started_.load(std::memory_order_acquire) == seen) {
    if (std::chrono::steady_clock::now() < until) {
      pause_cpu();
      continue;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [&] { return started_.load(std::memory_order_acquire) != seen; });
  }
}

void Team::barrier() {
  if (size_ == 1) {
    counter_.value.store(0, std::memory_order_relaxed);
    return;
  }
  const uint32_t generation = generation_.value.load(std::memory_order_acquire);
  if (arrived_.value.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size_)) {
    arrived_.value.store(0, std::memory_order_relaxed);
    counter_.value.store(0, std::memory_order_relaxed);
    generation_.value.store(generation + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; generation_.value.load(std::memory_order_acquire) == generation; ++spins) {
    if (spins < kSpinsBeforeYield) pause_cpu();
    else std::this_thread::yield();
  }
}

}  // namespace twostep
