// Exact, deterministic top-k of the visible part of every row; the contract is in __init__.py.
//
// One block a row of L visible entries, of which K < L are kept:
//   1. Candidates. L <= WHOLE: the whole row, in shared memory. Longer: a strided sample gives a value `lo` a little
//      below the K-th largest, and one pass over the row marks in a bitmap what is not below it. Where the sample hits
//      the same value twice, which may be a plateau, the pass marks what is greater and counts what is equal. A poor
//      guess is corrected once by the count it gave; after that the K-th value itself is found by radix passes.
//   2. The K-th value among the candidates, by one histogram of equal steps between their smallest and largest: steps,
//      not digits, since the scores of a row share a few exponents, and a hot bin is a queue of atomics. Few entries in
//      its bin are ranked; many are a plateau, or else radix passes tell them apart.
//   3. All that is greater and the first that are equal are written in the order of the row.
// Shared-memory atomics run in any order, but only sets and counts come out of them, so the answer is always the same.
//
// -0.0 equals 0.0, NaN equals -inf. Where bits of entries are compared they are unsigned keys in the order of the floats.
// No header is included: NVRTC compiles this file as it is.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef THREADS
#define THREADS 512
#endif
#ifndef LONG
#define LONG 1 // 0: no row is longer than WHOLE; then more blocks share a multiprocessor
#endif
constexpr int WARPS = THREADS / 32;
constexpr int WHOLE = 8192;            // rows up to here are candidates as they are
constexpr int CAP = 8192;              // candidates of a longer row; K is at most half of it
constexpr int ROOM = LONG ? 2 * CAP : WHOLE; // shared-memory words: a whole row, or candidates and their positions
constexpr int DIGIT = 11, BINS = 1 << DIGIT;
constexpr int FEW = 32;                // entries that are ranked by comparing each with each
constexpr u32 ALL = 0xffffffffu;

struct Shared {
  float buf[ROOM]; // entries, as `tidy` leaves them; or, behind those, positions
  u32 hist[2][BINS];
  float few[FEW];
  u32 part[32], low[32], high[32];
  u32 bin, above, inside, listed, least, greater, same, equal;
  float value, unused[3];
};
extern __shared__ uint4 memory[]; // one Shared, then the bitmap
static_assert(sizeof(Shared) % 16 == 0, "the bitmap begins on a whole uint4");

// By name, not by argument: a function that is not inlined must see that this is shared memory.
__device__ __forceinline__ Shared& shared() { return *(Shared*)memory; }
__device__ __forceinline__ u32* bitmap() { return (u32*)(memory + sizeof(Shared) / 16); }

__device__ __forceinline__ float lowest() { return __int_as_float((int)0xff800000); }

__device__ __forceinline__ float tidy(float x) { return fmaxf(x, lowest()) + 0.0f; } // no NaN, no -0.0

__device__ __forceinline__ u32 key_of(float tidied) {
  int i = __float_as_int(tidied);
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

struct Kth { // the K-th largest, how many entries are greater, and how many equal it
  float value;
  u32 greater, equal;
};

// By radix passes, whatever the entries are: the n of s.buf or, given x, those of x.
__device__ __noinline__ Kth by_digits(const float* x, int n, u32 need) {
  Shared& s = shared();
  for (int i = threadIdx.x; i < BINS / 4; i += THREADS) ((uint4*)s.hist[0])[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  u32 prefix = 0, greater = 0;
  int shift = 32;
  for (int now = 0; shift > 0; now ^= 1) {
    int digit = min(shift, DIGIT), over = shift;
    shift -= digit;
    u32 mask = (1u << digit) - 1;
    for (int i = threadIdx.x; i < n; i += THREADS) {
      u32 key = key_of(x ? tidy(x[i]) : s.buf[i]);
      if (above(key, over) == prefix) atomicAdd(&s.hist[now][(key >> shift) & mask], 1u);
    }
    __syncthreads();
    find_bin(now, need - greater);
    greater += s.above;
    prefix = prefix << digit | s.bin;
  }
  return {float_of(prefix), greater, s.inside};
}

// The smallest and largest entry this thread has seen.
struct Range {
  float low = -lowest(), high = lowest();
  __device__ __forceinline__ float widen(float x) {
    low = fminf(low, x), high = fmaxf(high, x);
    return x;
  }
};

// Never falls as x rises, whatever the scale (not negative) and the shift are: the order of bins is an order of entries.
// 2^23 makes a whole number of what is added to it, more cheaply than a conversion.
__device__ __forceinline__ u32 bin_of(float x, float scale, float shift) {
  float share = __saturatef(__fmaf_rn(x, scale, shift));
  return (u32)__float_as_int(__fmaf_rn(share, (float)(BINS - 1), 8388608.0f)) & (BINS - 1);
}

// The need-th largest of the entries s.buf[0, n), which the threads have seen between them.
__device__ __noinline__ Kth kth(int n, u32 need, Range seen) {
  Shared& s = shared();
  int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  u32 low = __reduce_min_sync(ALL, key_of(seen.low)), high = __reduce_max_sync(ALL, key_of(seen.high));
  if (lane == 0) s.low[warp] = low, s.high[warp] = high;
  if (t == 0) s.listed = 0, s.least = ALL, s.same = 0;
  for (int i = t; i < BINS / 4; i += THREADS) ((uint4*)s.hist[0])[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  low = __reduce_min_sync(ALL, lane < WARPS ? s.low[lane] : ALL);
  high = __reduce_max_sync(ALL, lane < WARPS ? s.high[lane] : 0);
  float scale = __fdividef(1.0f, float_of(high) - float_of(low)), shift = -float_of(low) * scale;
#pragma unroll 4
  for (int i = t; i < n; i += THREADS) atomicAdd(&s.hist[0][bin_of(s.buf[i], scale, shift)], 1u);
  __syncthreads();
  find_bin(0, need);
  u32 bin = s.bin, over = s.above, inside = s.inside;
  float least = -lowest();
#pragma unroll 4
  for (int i = t; i < n; i += THREADS) {
    float x = s.buf[i];
    if (bin_of(x, scale, shift) == bin) {
      least = fminf(least, x);
      if (inside <= FEW) s.few[atomicAdd(&s.listed, 1u)] = x;
    }
  }
  if (inside > FEW) { // a plateau, most likely, with nothing below it or nothing at all beside it
    low = __reduce_min_sync(ALL, key_of(least));
    if (lane == 0) atomicMin(&s.least, low);
    __syncthreads();
    least = float_of(s.least);
    u32 equal = 0;
    for (int i = t; i < n; i += THREADS) equal += s.buf[i] == least;
    equal = __reduce_add_sync(ALL, equal);
    if (lane == 0) atomicAdd(&s.same, equal);
    __syncthreads();
    equal = s.same, over += inside - equal;
    return need > over ? Kth{least, over, equal} : by_digits(nullptr, n, need);
  }
  __syncthreads();
  if (t < inside) {
    u32 greater = over, equal = 0;
    for (u32 j = 0; j < inside; j++) greater += s.few[j] > s.few[t], equal += s.few[j] == s.few[t];
    if (greater < need && need <= greater + equal) s.value = s.few[t], s.greater = greater, s.same = equal;
  }
  __syncthreads();
  return {s.value, s.greater, s.same};
}

// Of the entries s.buf[0, n) all that are greater than k's and the first that equal it, in their order, K together:
// where they stand in the row goes to `out`. Entry i stands at place[i] or, without `place`, at i.
__device__ __forceinline__ void write(int n, int K, Kth k, const u32* place, int* out, int start) {
  Shared& s = shared();
  constexpr int WORDS = CAP / 32;
  static_assert(WHOLE <= CAP && WORDS <= THREADS && WORDS <= BINS / 2, "a word a thread, where histograms were");
  u32 *over = s.hist[0], *same = s.hist[0] + WORDS, *before = s.hist[1], need = K - k.greater;
  int t = threadIdx.x, lane = t & 31, words = (n + 31) / 32;
#pragma unroll 4
  for (int i0 = t & ~31; i0 < n; i0 += THREADS) {
    float x = s.buf[min(i0 + lane, n - 1)];
    u32 a = __ballot_sync(ALL, i0 + lane < n && x > k.value), b = __ballot_sync(ALL, i0 + lane < n && x == k.value);
    if (lane == 0) over[i0 >> 5] = a, same[i0 >> 5] = b;
  }
  __syncthreads();
  u32 total, both = t < words ? (u32)__popc(over[t]) << 16 | (u32)__popc(same[t]) : 0; // neither passes 2^16
  both = exclusive(both, total);
  if (t < words) before[t] = both;
  __syncthreads();
#pragma unroll 4
  for (int i0 = t & ~31; i0 < n; i0 += THREADS) {
    int i = i0 + lane, word = i0 >> 5;
    u32 a = over[word], b = same[word], behind = (1u << lane) - 1;
    u32 equal = (before[word] & 0xffffu) + __popc(b & behind);
    bool taken = a >> lane & 1 || (b >> lane & 1 && equal < need);
    u32 at = (before[word] >> 16) + __popc(a & behind) + min(equal, need);
    if (taken) out[at] = (place ? (int)place[i] : i) + start;
  }
}

// Which of four entries belong to the candidates, as bits; adds to `equal` those that equal the floor.
template <bool TIES> __device__ __forceinline__ u32 sift(float4 v, float floor, u32& equal) {
  if (!TIES) return (v.x >= floor) | (v.y >= floor) << 1 | (v.z >= floor) << 2 | (v.w >= floor) << 3;
  equal += (fmaxf(v.x, lowest()) == floor) + (fmaxf(v.y, lowest()) == floor) + (fmaxf(v.z, lowest()) == floor) +
           (fmaxf(v.w, lowest()) == floor);
  return (v.x > floor) | (v.y > floor) << 1 | (v.z > floor) << 2 | (v.w > floor) << 3;
}

// One pass over the row. Candidates are marked: entry i by bit i + shift, where four entries that are read at once have
// four bits of one word. With TIES they are the entries greater than the floor, and those equal to it are counted in
// s.equal; without, the entries not less than the floor, which is not -inf.
template <bool TIES> __device__ __noinline__ void pass(const float* x, int L, int shift, float floor) {
  constexpr int AHEAD = 4;                         // loads in flight a thread
  u32 *bits = bitmap(), equal = 0;
  int head = -shift & 3, fours = (L - head) / 4, whole = fours / (THREADS * AHEAD) * (THREADS * AHEAD), i = threadIdx.x;
  const float4* x4 = (const float4*)(x + head);
  int first = (head + shift) / 4, to = 4 * ((first + i) & 7); // in fours: the first one, and this thread's bits of a word
  for (; i < whole; i += THREADS * AHEAD) {
    float4 v[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) v[j] = x4[i + j * THREADS];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      u32 hits = sift<TIES>(v[j], floor, equal);
      if (hits) atomicOr(&bits[(first + i + j * THREADS) >> 3], hits << to);
    }
  }
  for (; i < fours; i += THREADS) {
    u32 hits = sift<TIES>(x4[i], floor, equal);
    if (hits) atomicOr(&bits[(first + i) >> 3], hits << to);
  }
  int rest = L - head - 4 * fours;                 // the few entries around the whole fours
  if (threadIdx.x < head + rest) {
    i = threadIdx.x < head ? threadIdx.x : 4 * fours + threadIdx.x;
    float4 alone = {x[i], __int_as_float(0x7fc00000), __int_as_float(0x7fc00000), __int_as_float(0x7fc00000)};
    u32 more = 0, hit = sift<TIES>(alone, floor, more);
    if (hit) atomicOr(&bits[(i + shift) >> 5], 1u << ((i + shift) & 31));
    if (TIES) equal += fmaxf(x[i], lowest()) == floor;
  }
  if (TIES) {
    equal = __reduce_add_sync(ALL, equal);
    if ((threadIdx.x & 31) == 0 && equal) atomicAdd(&shared().equal, equal);
  }
  __syncthreads();
}

// Mark the first `need` entries equal to `value`, in the order of the row.
__device__ __forceinline__ void mark_first(const float* x, int L, int shift, float value, u32 need) {
  u32 *bits = bitmap(), taken = 0;
  for (int i0 = 0; i0 < L && taken < need; i0 += THREADS * 4) {
    int i = i0 + 4 * threadIdx.x;
    u32 same = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) same |= (u32)(i + j < L && tidy(x[i + j]) == value) << j;
    u32 total, before = taken + exclusive(__popc(same), total);
    u32 room = need > before ? need - before : 0;
    while ((u32)__popc(same) > room) same ^= 1u << (31 - __clz((int)same));
    for (; same; same &= same - 1) {
      int bit = i + shift + __ffs((int)same) - 1;
      atomicOr(&bits[bit >> 5], 1u << (bit & 31));
    }
    taken += total;
    __syncthreads();
  }
}

// The words of the bitmap that belong to this thread's warp.
struct Stretch {
  int begin, end;
  __device__ __forceinline__ Stretch(int words) {
    int per = (words + WARPS - 1) / WARPS, warp = threadIdx.x >> 5;
    begin = min(warp * per, words), end = min(begin + per, words);
  }
};

// How many bits are set; s.part says how many by warp.
__device__ __forceinline__ u32 count_bits(int words) {
  Shared& s = shared();
  int lane = threadIdx.x & 31;
  Stretch mine(words);
  u32 sum = 0;
  for (int i = mine.begin + lane; i < mine.end; i += 32) sum += __popc(bitmap()[i]);
  sum = __reduce_add_sync(ALL, sum);
  if (lane == 0) s.part[threadIdx.x >> 5] = sum;
  __syncthreads();
  return __reduce_add_sync(ALL, lane < WARPS ? s.part[lane] : 0);
}

// After count_bits: the positions of the set bits, ascending, to `to`.
__device__ __forceinline__ void unpack(int words, int shift, u32* to) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Stretch mine(words);
  u32 at = __reduce_add_sync(ALL, lane < warp ? shared().part[lane] : 0);
  for (int i0 = mine.begin; i0 < mine.end; i0 += 32) {
    u32 word = i0 + lane < mine.end ? bitmap()[i0 + lane] : 0, many = __popc(word), run = inclusive(many);
    u32 next = at + run - many;
    for (; word; word &= word - 1) to[next++] = (i0 + lane) * 32 + __ffs((int)word) - 1 - shift;
    at += __shfl_sync(ALL, run, 31);
  }
  __syncthreads();
}

__device__ __forceinline__ void keep_of_row(const float* x, int L, int K, int* out, int start) {
  Shared& s = shared();
  Range seen;
#pragma unroll 8
  for (int i = threadIdx.x; i < L; i += THREADS) s.buf[i] = seen.widen(tidy(x[i]));
  write(L, K, kth(L, K, seen), nullptr, out, start);
}

// The want-th largest of a sample, which is read in fours: memory hands out no less.
__device__ __forceinline__ Kth guess(const float* x, int stride, int samples, u32 want) {
  Range seen;
  for (int i = threadIdx.x; i < samples; i += THREADS) {
    shared().buf[i] = seen.widen(tidy(x[(i64)(i & ~3) * stride + (i & 3)]));
  }
  return kth(samples, want, seen);
}

__device__ __forceinline__ void keep_of_long_row(const float* x, int L, int K, int* out, int start) {
  Shared& s = shared();
  int t = threadIdx.x, shift = (int)((u64)x & 15) / 4, words = (L + shift + 31) / 32;
  // Sample so many that the number of candidates comes out between K and CAP for all but about 1 in 10,000 rows.
  float hoped = K <= CAP / 4 ? 24.0f : 96.0f; // of the K largest in the sample
  int samples = min(max((int)(hoped * L / K), 512), 4096), stride = L / samples;
  float expected = __fdividef((float)K * samples, (float)L);
  u32 want = (u32)(expected + 4.0f * expected * rsqrtf(expected) + 2.0f), n;
  float lo;
  for (int attempt = 0;; attempt++) {
    for (int i = t; i < words; i += THREADS) bitmap()[i] = 0;
    if (t == 0) s.equal = 0;
    bool sampled = attempt < 2;
    Kth k = sampled ? guess(x, stride, samples, want) : by_digits(x, L, K);
    lo = k.value;
    if (sampled && k.equal == 1 && lo > lowest()) pass<false>(x, L, shift, lo);
    else pass<true>(x, L, shift, lo);
    n = count_bits(words);
    u32 enough = n + s.equal;
    if (n <= CAP && enough >= K) break;
    __syncthreads();
    float right = 0.5f * (K + CAP), got = n > CAP ? n : max(enough, 1u);
    u32 better = (u32)__fdividef(want * right, got);
    want = n > CAP ? max(min(better, want - 1), 1u) : min(max(better, want + 1), (u32)samples);
  }
  if (n < K) {
    __syncthreads();
    mark_first(x, L, shift, lo, K - n);
    count_bits(words);
  }
  u32* place = (u32*)s.buf + CAP;
  unpack(words, shift, place);
  if (n <= K) {
    for (int i = t; i < K; i += THREADS) out[i] = (int)place[i] + start;
    return;
  }
  Range seen;
#pragma unroll 4
  for (int i = t; i < n; i += THREADS) s.buf[i] = seen.widen(tidy(x[place[i]]));
  write(n, K, kth(n, K, seen), place, out, start);
}

// score [rows, stride] fp32; visible [rows]; start [rows] or null, added to every index; out [rows, K].
extern "C" __global__ void __launch_bounds__(THREADS, (LONG ? 1024 : 1536) / THREADS)
topk_rows(const float* score, i64 stride, const int* visible, const int* start, int* out, int K) {
  int row = gridDim.x - 1 - blockIdx.x; // a causal block ends with its longest rows: those first
  int L = visible[row], from = start ? start[row] : 0;
  const float* x = score + row * stride;
  out += (i64)row * K;
  if (L <= K) {
    for (int i = threadIdx.x; i < K; i += THREADS) out[i] = i < L ? from + i : -1;
  } else if (!LONG || L <= WHOLE) {
    keep_of_row(x, L, K, out, from);
  } else {
    keep_of_long_row(x, L, K, out, from);
  }
}
