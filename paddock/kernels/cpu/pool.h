// One pool of worker threads for all kernels of a process.
//
// A job is a number of tasks that the caller and the workers take one by one; it ends when all tasks
// are done. Nobody waits for a worker that has not begun a task: on a busy machine, or after a fork,
// the caller does all of them. Workers spin for a while before they sleep, because a decode step is
// hundreds of short jobs. If another thread is running a job the caller works alone.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

constexpr double LEAST_WORK = 4e5;  // multiplications below which one thread is faster
constexpr int SPINS = 20000;        // of a worker, about 100 microseconds

class Pool {
 public:
  static Pool& get() {
    static Pool* pool = new Pool;  // never destroyed: workers may still be in it at exit
    return *pool;
  }
  // The number of threads that work on a job of this thread, the caller among them: an engine and a
  // trainer in one process may differ. Threads that never say it take the number said first.
  void resize(int threads) {
    std::lock_guard<std::mutex> guard(masters);
    for (; workers < threads - 1; workers++) std::thread([this, rank = workers] { serve(rank); }).detach();
    helpers() = threads - 1;
    if (usual.load() < 0) usual.store(threads - 1);
  }
  // How many threads work on a job of this one, or worked on the first.
  int threads() const { return 1 + std::max(0, helpers() < 0 ? usual.load(std::memory_order_relaxed) : helpers()); }
  void run(long count, void (*task)(void*, long), void* context) {
    int wanted = threads() - 1;
    if (count > 1 && wanted > 0 && masters.try_lock()) {
      limit.store(wanted, std::memory_order_relaxed);
      job.store(task, std::memory_order_relaxed), argument.store(context, std::memory_order_relaxed);
      total.store((uint32_t)count, std::memory_order_relaxed), done.store(0, std::memory_order_relaxed);
      uint64_t epoch = (state.load(std::memory_order_relaxed) >> 32) + 1;
      state.store(epoch << 32, std::memory_order_seq_cst);
      if (sleepers.load(std::memory_order_seq_cst)) {
        sleeping.lock(), sleeping.unlock();  // whoever looked before the job began is waiting now
        wake.notify_all();
      }
      take();
      for (int i = 0; done.load(std::memory_order_acquire) < (uint32_t)count; i++)
        if (i < SPINS) pause(); else std::this_thread::yield();
      state.store(epoch << 32 | CLOSED, std::memory_order_seq_cst);  // before the next job's fields are written
      masters.unlock();
    } else {
      for (long i = 0; i < count; i++) task(context, i);
    }
  }

 private:
  static constexpr uint32_t CLOSED = 0xffffffff;
  std::atomic<uint64_t> state{CLOSED};  // number of the job, and its next task in the lower half
  std::atomic<void (*)(void*, long)> job{nullptr};
  std::atomic<void*> argument{nullptr};
  std::atomic<uint32_t> total{0}, done{0};
  std::atomic<int> limit{0}, usual{-1}, sleepers{0};
  std::mutex masters, sleeping;
  std::condition_variable wake;
  int workers = 0;

  static int& helpers() {
    thread_local int count = -1;
    return count;
  }
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  // Work on the current job until none of its tasks is left.
  void take() {
    uint64_t now = state.load(std::memory_order_acquire);
    for (;;) {
      auto task = job.load(std::memory_order_relaxed);
      void* context = argument.load(std::memory_order_relaxed);
      uint32_t count = total.load(std::memory_order_relaxed), next = (uint32_t)now;
      if (next >= count) return;
      // Succeeds only if the job is still the one whose fields were read.
      if (!state.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) continue;
      task(context, next);
      done.fetch_add(1, std::memory_order_release);
      now = state.load(std::memory_order_acquire);
    }
  }
  void serve(int rank) {
    uint64_t seen = 0;
    for (;;) {
      uint64_t epoch = state.load(std::memory_order_acquire) >> 32;
      for (int i = 0; i < SPINS && epoch == seen; i++) pause(), epoch = state.load(std::memory_order_acquire) >> 32;
      if (epoch == seen) {
        std::unique_lock<std::mutex> guard(sleeping);
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        wake.wait(guard, [&] { return state.load(std::memory_order_seq_cst) >> 32 != seen; });
        sleepers.fetch_sub(1);
        continue;
      }
      seen = epoch;
      if (rank < limit.load(std::memory_order_relaxed)) take();
    }
  }
};

// Calls task(i) for i < count, on several threads if the work is worth it.
template <class F> inline void parallel(long count, double work, F&& task) {
  if (work < LEAST_WORK || count < 2) {
    for (long i = 0; i < count; i++) task(i);
    return;
  }
  using Task = std::remove_reference_t<F>;
  Pool::get().run(count, [](void* context, long i) { (*(Task*)context)(i); }, (void*)&task);
}
