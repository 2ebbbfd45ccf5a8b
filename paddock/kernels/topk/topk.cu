// Exact, deterministic top-k of the visible part of every row; the contract is in __init__.py.
//
// One block a row of L visible entries, of which K < L are kept:
//   1. Candidates. L <= ROOM: the whole row, in shared memory. Longer: a strided sample gives a value `lo` a little
//      below the K-th largest, and one pass over the row keeps what is greater and counts what is equal. A poor guess is
//      corrected once by the count it gave; after that the K-th value itself is found by radix passes over the row.
//   2. The K-th value among the candidates, by histograms of 11 bits, until the bin that holds it has few entries.
//   3. A bitmap over the row says who is kept. Of the entries in that last bin the best are ranked (value, then index);
//      a long run of equal values is instead walked from the row's beginning until enough of them are kept.
//   4. Popcounts and a prefix sum place the set bits: ascending.
// Shared-memory atomics run in any order, but only sets and counts come out of them, so the answer is always the same.
//
// Entries are compared as unsigned keys in the order of the floats: -0.0 equals 0.0, NaN equals -inf.
// No header is included: NVRTC compiles this file as it is.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef THREADS
#define THREADS 512
#endif
constexpr int WARPS = THREADS / 32;
constexpr int ROOM = 8192;      // shared-memory words for a whole row, or for candidates and their positions
constexpr int CAP = ROOM / 2;   // candidates of a longer row; K may not exceed it
constexpr int DIGIT = 11, BINS = 1 << DIGIT;
constexpr int FEW = 256;        // entries that are ranked by comparing each with each
constexpr int SAMPLED_K = 2048; // above it the window between K and CAP is too narrow for a guess
constexpr u32 ALL = 0xffffffffu;
constexpr u32 LOWEST = 0x007fffffu; // the key of -inf

struct Shared {
  u32 buf[ROOM];
  u32 hist[2][BINS];
  u32 part[32];
  u32 kept, equal, bin, above, inside, top, listed, unused;
};
extern __shared__ uint4 memory[]; // one Shared, then the bitmap
static_assert(sizeof(Shared) % 16 == 0, "the bitmap begins on a whole uint4");

// By name, not by argument: a function that is not inlined must see that this is shared memory.
__device__ __forceinline__ Shared& shared() { return *(Shared*)memory; }
__device__ __forceinline__ u32* bitmap() { return (u32*)(memory + sizeof(Shared) / 16); }

__device__ __forceinline__ float lowest() { return __int_as_float((int)0xff800000); }

__device__ __forceinline__ u32 key_of(float x) {
  x = fmaxf(x, lowest()) + 0.0f; // NaN becomes -inf, -0.0 becomes 0.0
  int i = __float_as_int(x);
  return (u32)(i ^ ((i >> 31) | (int)0x80000000));
}

__device__ __forceinline__ float float_of(u32 key) {
  return __int_as_float((int)(key & 0x80000000u ? key ^ 0x80000000u : ~key));
}

__device__ __forceinline__ u32 inclusive(u32 x) { // prefix sum within a warp
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    u32 y = __shfl_up_sync(ALL, x, d);
    if (lane >= d) x += y;
  }
  return x;
}

// Sum of `mine` over the threads before this one, and over all. A barrier must follow before the next call.
__device__ __forceinline__ u32 exclusive(u32 mine, u32& total) {
  Shared& s = shared();
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u32 run = inclusive(mine);
  if (lane == 31) s.part[warp] = run;
  __syncthreads();
  u32 part = lane < WARPS ? s.part[lane] : 0;
  total = __reduce_add_sync(ALL, part);
  return __reduce_add_sync(ALL, lane < warp ? part : 0) + run - mine;
}

// The bin of the need-th largest entry: sets bin, above (entries in higher bins) and inside (entries in it).
// Clears the other histogram on the way.
__device__ __forceinline__ void find_bin(int now, u32 need) {
  Shared& s = shared();
  constexpr int PER = BINS / THREADS, QUADS = PER / 4;
  static_assert(PER % 4 == 0, "a thread reads its bins in fours");
  int t = threadIdx.x;
  const uint4* hist = (const uint4*)s.hist[now];
  u32 count[PER], sum = 0; // from the highest bin down
#pragma unroll
  for (int i = 0; i < QUADS; i++) {
    uint4 four = hist[(THREADS - t) * QUADS - 1 - i];
    count[4 * i] = four.w, count[4 * i + 1] = four.z, count[4 * i + 2] = four.y, count[4 * i + 3] = four.x;
    sum += four.x + four.y + four.z + four.w;
  }
  u32 total, before = exclusive(sum, total);
#pragma unroll
  for (int i = 0; i < PER; i++) {
    if (before < need && before + count[i] >= need) {
      s.bin = BINS - 1 - (t * PER + i), s.above = before, s.inside = count[i];
    }
    before += count[i];
  }
  for (int i = t; i < BINS / 4; i += THREADS) ((uint4*)s.hist[now ^ 1])[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
}

__device__ __forceinline__ u32 above(u32 key, int shift) { return (u32)((u64)key >> shift); } // shift may be 32

struct Found {
  u32 prefix; // the need-th largest entry e has above(e, shift) == prefix
  int shift;
  u32 need;   // how many of the entries with this prefix belong to the largest
  u32 count;  // how many entries have this prefix
};

// Narrow down the need-th largest of n keys, each below 2^width, until at most `enough` share its prefix.
// The keys are s.buf[i] - base or, given x, those of x[i]. Not inlined: four copies of it would crowd the instruction cache.
__device__ __noinline__ Found select(const float* x, u32 base, int n, int width, u32 need, u32 enough) {
  Shared& s = shared();
  for (int i = threadIdx.x; i < BINS / 4; i += THREADS) ((uint4*)s.hist[0])[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  Found f = {0, width, need, (u32)n};
  for (int now = 0; f.shift > 0 && f.count > enough; now ^= 1) {
    int digit = min(f.shift, DIGIT), over = f.shift;
    f.shift -= digit;
    u32 mask = (1u << digit) - 1;
    for (int i = threadIdx.x; i < n; i += THREADS) {
      u32 key = x ? key_of(x[i]) : s.buf[i] - base;
      if (above(key, over) == f.prefix) atomicAdd(&s.hist[now][(key >> f.shift) & mask], 1u);
    }
    __syncthreads();
    find_bin(now, f.need);
    f.need -= s.above;
    f.count = s.inside;
    f.prefix = f.prefix << digit | s.bin;
  }
  return f;
}

__device__ __forceinline__ void put(bool taken, u32 at, float x, int i) {
  Shared& s = shared();
  if (taken && at < CAP) s.buf[at] = key_of(x), s.buf[CAP + at] = (u32)i;
}

// Entries i, ..., i + 3 of the row, the next four in the next lane, and so on: those greater than `floor` become
// candidates. Returns how many equal it.
__device__ __forceinline__ u32 sift(float4 v, int i, float floor) {
  Shared& s = shared();
  u32 ma = __ballot_sync(ALL, v.x > floor), mb = __ballot_sync(ALL, v.y > floor);
  u32 mc = __ballot_sync(ALL, v.z > floor), md = __ballot_sync(ALL, v.w > floor);
  if (ma | mb | mc | md) {
    u32 lane = threadIdx.x & 31, before = (1u << lane) - 1, at = 0;
    // One atomic a warp: single ones on the same word would queue up.
    if (lane == 0) at = atomicAdd(&s.kept, (u32)(__popc(ma) + __popc(mb) + __popc(mc) + __popc(md)));
    at = __shfl_sync(ALL, at, 0);
    put(v.x > floor, at + __popc(ma & before), v.x, i);
    put(v.y > floor, (at += __popc(ma)) + __popc(mb & before), v.y, i + 1);
    put(v.z > floor, (at += __popc(mb)) + __popc(mc & before), v.z, i + 2);
    put(v.w > floor, (at += __popc(mc)) + __popc(md & before), v.w, i + 3);
  }
  return (fmaxf(v.x, lowest()) == floor) + (fmaxf(v.y, lowest()) == floor) + (fmaxf(v.z, lowest()) == floor) +
         (fmaxf(v.w, lowest()) == floor);
}

// One pass over the row: entries greater than lo become candidates (any order), entries equal to it are counted.
__device__ __noinline__ void pass(const float* x, int L, u32 lo) {
  Shared& s = shared();
  constexpr int AHEAD = 4;                         // loads in flight a thread
  float floor = float_of(lo);
  int head = (int)((16 - ((u64)x & 15)) & 15) / 4; // entries before the first 16-byte boundary
  int fours = (L - head) / 4, whole = fours / (THREADS * AHEAD) * (THREADS * AHEAD), i = threadIdx.x;
  const float4* x4 = (const float4*)(x + head);
  u32 equal = 0;
  for (; i < whole; i += THREADS * AHEAD) {
    float4 v[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) v[j] = x4[i + j * THREADS];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) equal += sift(v[j], head + 4 * (i + j * THREADS), floor);
  }
  for (; (i & ~31) < fours; i += THREADS) {        // the same for all lanes of a warp
    float4 v = i < fours ? x4[i] : make_float4(lowest(), lowest(), lowest(), lowest());
    u32 same = sift(v, head + 4 * i, floor);
    if (i < fours) equal += same;
  }
  int rest = L - head - 4 * fours;                 // the few entries around the whole fours
  if (threadIdx.x < head + rest) {
    i = threadIdx.x < head ? threadIdx.x : 4 * fours + threadIdx.x;
    if (x[i] > floor) put(true, atomicAdd(&s.kept, 1u), x[i], i);
    else equal += fmaxf(x[i], lowest()) == floor;
  }
  equal = __reduce_add_sync(ALL, equal);
  if ((threadIdx.x & 31) == 0 && equal) atomicAdd(&s.equal, equal);
  __syncthreads();
}

// Candidates of a long row: at most CAP entries greater than the returned lo, which with those equal to lo make K.
__device__ __forceinline__ u32 candidates(const float* x, int L, int K) {
  Shared& s = shared();
  int t = threadIdx.x;
  // Sample so many that the number of candidates comes out between K and CAP for all but about 1 in 1000 rows.
  int samples = min(max((int)((float)L * K / 65536.0f) + 1, 512), ROOM), stride = L / samples;
  float expected = __fdividef((float)K * samples, (float)L);
  u32 want = (u32)(expected + 3.2f * expected * rsqrtf(expected) + 2.0f);
  for (int attempt = 0;; attempt++) {
    Found f;
    if (K <= SAMPLED_K && attempt < 2) {
      for (int i = t; i < samples; i += THREADS) s.buf[i] = key_of(x[(i64)i * stride]);
      // A crowded prefix may be a plateau: then the guess must be its exact value.
      f = select(nullptr, 0, samples, 32, want, 8);
    } else {
      f = select(x, 0, L, 32, K, 0);
    }
    u32 lo = max(f.prefix << f.shift, LOWEST);
    pass(x, L, lo);
    u32 kept = s.kept, enough = kept + s.equal;
    if (kept <= CAP && enough >= K) return lo;
    __syncthreads();
    if (t == 0) s.kept = 0, s.equal = 0;
    float right = 0.5f * (K + CAP), got = kept > CAP ? kept : max(enough, 1u);
    u32 better = (u32)__fdividef(want * right, got);
    want = kept > CAP ? max(min(better, want - 1), 1u) : min(max(better, want + 1), (u32)samples);
  }
}

// Keep the first `need` entries equal to `value`, in the order of the row.
template <class Key>
__device__ __forceinline__ void keep_first(Key key, int L, u32 value, u32 need) {
  u32* bits = bitmap();
  u32 taken = 0;
  for (int i0 = 0; i0 < L && taken < need; i0 += THREADS * 4) {
    int i = i0 + 4 * threadIdx.x;
    u32 same = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) same |= (u32)(i + j < L && key(i + j) == value) << j;
    u32 total, before = taken + exclusive(__popc(same), total);
    u32 room = need > before ? need - before : 0;
    while ((u32)__popc(same) > room) same ^= 1u << (31 - __clz((int)same));
    if (same) atomicOr(&bits[i >> 5], same << (i & 31));
    taken += total;
    __syncthreads();
  }
}

// The entries with the last prefix, ranked by value and then by index: the best `need` are kept.
__device__ __forceinline__ void keep_best(u32 count, u32 need) {
  Shared& s = shared();
  u32* bits = bitmap();
  const u32 *key = s.hist[0], *at = s.hist[0] + FEW;
  for (u32 i = threadIdx.x; i < count; i += THREADS) {
    u32 rank = 0;
    for (u32 j = 0; j < count && need < count; j++) rank += key[j] > key[i] || (key[j] == key[i] && at[j] < at[i]);
    if (rank < need) atomicOr(&bits[at[i] >> 5], 1u << (at[i] & 31));
  }
}

__device__ __forceinline__ void list(u32 key, int i) {
  Shared& s = shared();
  u32 at = atomicAdd(&s.listed, 1u);
  s.hist[0][at] = key, s.hist[0][FEW + at] = (u32)i;
}

// The whole row is in s.buf.
__device__ __forceinline__ void keep_of_row(int L, int K) {
  Shared& s = shared();
  u32* bits = bitmap();
  Found f = select(nullptr, 0, L, 32, K, FEW);
  bool few = f.count <= FEW;
  for (int i0 = threadIdx.x & ~31; i0 < L; i0 += THREADS) {
    int i = i0 + (threadIdx.x & 31);
    u32 k = i < L ? s.buf[i] : 0, high = above(k, f.shift);
    u32 word = __ballot_sync(ALL, i < L && high > f.prefix);
    if (i == i0) bits[i >> 5] = word;
    if (few && i < L && high == f.prefix) list(k, i);
  }
  __syncthreads();
  if (few) keep_best(f.count, f.need);
  else keep_first([&](int i) { return s.buf[i]; }, L, f.prefix, f.need);
}

__device__ __forceinline__ void keep_of_candidates(const float* x, int L, int K) {
  Shared& s = shared();
  u32* bits = bitmap();
  int t = threadIdx.x, words = (L + 31) / 32;
  for (int i = t; i < words; i += THREADS) bits[i] = 0;
  u32 lo = candidates(x, L, K);
  int n = s.kept;
  u32 value = lo, need = K - n;
  bool few = false;
  Found f = {0, 32, 0, 0};
  if (n >= K) {
    u32 top = 0;
    for (int i = t; i < n; i += THREADS) top = max(top, s.buf[i]);
    top = __reduce_max_sync(ALL, top);
    if ((t & 31) == 0) atomicMax(&s.top, top);
    __syncthreads();
    // Digits of the distance from lo: candidates share sign and exponent, and one hot bin would queue up.
    f = select(nullptr, lo, n, 32 - __clz((int)((s.top - lo) | 1)), K, FEW);
    value = lo + f.prefix, need = f.need, few = f.count <= FEW;
  }
  bool all = n < K;
  for (int i = t; i < n; i += THREADS) {
    u32 k = s.buf[i], at = s.buf[CAP + i], high = above(k - lo, f.shift);
    if (all || high > f.prefix) atomicOr(&bits[at >> 5], 1u << (at & 31));
    else if (few && high == f.prefix) list(k, (int)at);
  }
  __syncthreads();
  if (few) keep_best(f.count, need);
  else if (need) keep_first([&](int i) { return key_of(x[i]); }, L, value, need);
}

// Write the positions of the set bits in ascending order.
__device__ __forceinline__ void place(int L, int K, int* out, int start) {
  Shared& s = shared();
  u32* bits = bitmap();
  int t = threadIdx.x, lane = t & 31, warp = t >> 5, words = (L + 31) / 32;
  int per = (words + WARPS - 1) / WARPS, begin = min(warp * per, words), end = min(begin + per, words);
  u32 sum = 0;
  for (int i = begin + lane; i < end; i += 32) sum += __popc(bits[i]);
  sum = __reduce_add_sync(ALL, sum);
  if (lane == 0) s.part[warp] = sum;
  __syncthreads();
  u32 at = __reduce_add_sync(ALL, lane < warp ? s.part[lane] : 0);
  for (int i0 = begin; i0 < end; i0 += 32) {
    u32 word = i0 + lane < end ? bits[i0 + lane] : 0, many = __popc(word), run = inclusive(many);
    u32 to = at + run - many;
    for (; word; word &= word - 1) s.buf[to++] = (i0 + lane) * 32 + __ffs((int)word) - 1;
    at += __shfl_sync(ALL, run, 31);
  }
  __syncthreads();
  for (int i = t; i < K; i += THREADS) out[i] = (int)s.buf[i] + start;
}

// score [rows, stride] fp32; visible [rows]; start [rows] or null, added to every index; out [rows, K].
extern "C" __global__ void __launch_bounds__(THREADS, THREADS == 512 ? 3 : 1024 / THREADS)
topk_rows(const float* score, i64 stride, const int* visible, const int* start, int* out, int K) {
  int row = gridDim.x - 1 - blockIdx.x, t = threadIdx.x; // a causal block ends with its longest rows: those first
  int L = visible[row];
  if (L <= K) {
    int from = start ? start[row] : 0;
    for (int i = t; i < K; i += THREADS) out[(i64)row * K + i] = i < L ? from + i : -1;
    return;
  }
  const float* x = score + row * stride;
  Shared& s = shared();
  if (L <= ROOM) {
#pragma unroll 8
    for (int i = t; i < L; i += THREADS) s.buf[i] = key_of(x[i]);
  }
  if (t == 0) s.kept = 0, s.equal = 0, s.top = 0, s.listed = 0; // seen by all after the first barrier of select
  if (L <= ROOM) keep_of_row(L, K);
  else keep_of_candidates(x, L, K);
  __syncthreads();
  place(L, K, out + (i64)row * K, start ? start[row] : 0);
}
