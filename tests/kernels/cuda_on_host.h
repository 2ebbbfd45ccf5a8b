// Enough of CUDA to run one kernel on a CPU: the threads of a block are fibers of one thread, taken in a random order, and
// in each round most warps sleep, so that a missing barrier eventually gives a wrong result.
// Include it, then the kernel's source, then call on_host(grid, block, order, kernel, arguments...).
#include <ucontext.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

struct Dim { unsigned x; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

constexpr int SHARED_BYTES = 227 << 10, STACK_BYTES = 64 << 10;
uint4 memory[SHARED_BYTES / 16]; // what `extern __shared__ uint4 memory[]` means

namespace host {
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  unsigned id;
  long passed = 0; // barriers
  bool done = false;
};
struct Warp {
  int arrived = 0;
  long round = 0;
  unsigned value[2][32];
};
std::vector<Fiber> fibers;
std::vector<Warp> warps;
ucontext_t scheduler;
Fiber* current;
int waiting;
long barriers;
std::function<void()> body;

inline void yield() { swapcontext(&current->context, &scheduler); }
inline void enter() {
  body();
  current->done = true;
  yield();
}
inline void barrier() {
  long mine = barriers;
  if (++waiting == (int)fibers.size()) waiting = 0, barriers++;
  else while (barriers == mine) yield();
}
// Every lane hands in a value and sees those of its whole warp.
inline const unsigned* meet(unsigned value) {
  Warp& warp = warps[current->id / 32];
  long mine = warp.round;
  warp.value[mine & 1][current->id % 32] = value;
  if (++warp.arrived == 32) warp.arrived = 0, warp.round++;
  else while (warp.round == mine) yield();
  return warp.value[mine & 1];
}
} // namespace host

Dim blockIdx, gridDim;
#define threadIdx (Dim{host::current->id})
#define __syncthreads() host::barrier()

inline unsigned __shfl_up_sync(unsigned, unsigned x, int d) {
  int lane = threadIdx.x % 32;
  return host::meet(x)[lane >= d ? lane - d : lane];
}
inline unsigned __shfl_sync(unsigned, unsigned x, int from) { return host::meet(x)[from]; }
inline unsigned __ballot_sync(unsigned, bool x) {
  const unsigned* all = host::meet(x);
  unsigned mask = 0;
  for (int i = 0; i < 32; i++) mask |= all[i] << i;
  return mask;
}
inline unsigned __reduce_add_sync(unsigned, unsigned x) {
  const unsigned* all = host::meet(x);
  unsigned sum = 0;
  for (int i = 0; i < 32; i++) sum += all[i];
  return sum;
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  const unsigned* all = host::meet(x);
  unsigned top = 0;
  for (int i = 0; i < 32; i++) top = all[i] > top ? all[i] : top;
  return top;
}
inline unsigned __reduce_min_sync(unsigned, unsigned x) { return ~__reduce_max_sync(0, ~x); }
inline unsigned atomicAdd(unsigned* at, unsigned x) { unsigned old = *at; *at += x; return old; }
inline unsigned atomicMax(unsigned* at, unsigned x) { unsigned old = *at; if (x > old) *at = x; return old; }
inline unsigned atomicMin(unsigned* at, unsigned x) { unsigned old = *at; if (x < old) *at = x; return old; }
inline unsigned atomicOr(unsigned* at, unsigned x) { unsigned old = *at; *at |= x; return old; }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return x ? std::countr_zero((unsigned)x) + 1 : 0; }
inline int __clz(int x) { return std::countl_zero((unsigned)x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __saturatef(float x) { return std::fmin(std::fmax(x, 0.0f), 1.0f); } // NaN becomes 0
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

// Shared memory starts as garbage in every block, as it does on a device.
template <class Kernel, class... Args>
void on_host(unsigned grid, unsigned block, unsigned order, Kernel kernel, Args... args) {
  std::mt19937 rng(order);
  gridDim = {grid};
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
    memset(memory, 0xa5, sizeof memory);
    host::fibers = std::vector<host::Fiber>(block);
    host::warps = std::vector<host::Warp>(block / 32);
    host::waiting = 0, host::barriers = 0;
    host::body = [&] { kernel(args...); };
    std::vector<host::Fiber*> turn;
    std::vector<bool> asleep(block / 32);
    for (unsigned t = 0; t < block; t++) {
      host::Fiber& fiber = host::fibers[t];
      fiber.id = t;
      fiber.stack.resize(STACK_BYTES);
      getcontext(&fiber.context);
      fiber.context.uc_stack = {.ss_sp = fiber.stack.data(), .ss_flags = 0, .ss_size = fiber.stack.size()};
      makecontext(&fiber.context, host::enter, 0);
      turn.push_back(&fiber);
    }
    while (!turn.empty()) {
      for (size_t i = 0; i < asleep.size(); i++) asleep[i] = rng() % 4 != 0;
      for (size_t i = turn.size() - 1; i > 0; i--) std::swap(turn[i], turn[rng() % (i + 1)]);
      for (host::Fiber* fiber : turn) {
        if (asleep[fiber->id / 32]) continue;
        host::current = fiber;
        swapcontext(&host::scheduler, &fiber->context);
      }
      std::erase_if(turn, [](host::Fiber* fiber) { return fiber->done; });
    }
  }
}
