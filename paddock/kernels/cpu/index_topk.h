// Index scores of the lightning indexer and the top-k keys of each query.
#pragma once
#include "attention.h"

// Integers in the order of floats that are not NaN; -0 is 0.
inline int32_t ordered(float x) {
  int32_t bits;
  x += 0.0f, memcpy(&bits, &x, sizeof bits);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

// The k best of `n` scores, ascending; of equal scores the lowest index wins, NaN counts as -inf.
// Fewer than k: all, padded with -1. The worst of them is found by bisection: a branch for every score, as in sorting,
// would be mispredicted half of the time.
inline void best(const float* score, long n, long k, int32_t* found, std::vector<int32_t>& key) {
  if (n <= k) {
    for (long i = 0; i < k; i++) found[i] = i < n ? (int32_t)i : -1;
    return;
  }
  key.resize(n);
  for (long i = 0; i < n; i++) key[i] = ordered(score[i] == score[i] ? score[i] : -INFINITY);
  int64_t low = *std::min_element(key.begin(), key.end()), high = (int64_t)*std::max_element(key.begin(), key.end()) + 1;
  long at_least = n;  // keys of `low` or more: k or more of them; of `high` or more: fewer
  while (at_least > k && high - low > 1) {
    int32_t middle = (int32_t)((low + high) >> 1), count = 0;
    for (long i = 0; i < n; i++) count += key[i] >= middle;
    if (count >= k) low = middle, at_least = count; else high = middle;
  }
  long kept = 0, dropped = at_least - k;  // the last of those that are equal to `low`
  for (long i = n; dropped && i-- > 0;)
    if (key[i] == low) key[i] = INT32_MIN, dropped--;
  for (long i = 0; i < n && kept < k; i++) found[kept] = (int32_t)i, kept += key[i] >= low;
}

// score[s] = sum_h weight[h] * relu(query[h] . key[s]); query [N, H, D], weight [N, H] -> index [N, k]
template <class T>
void index_topk(const Sequences& s, long H, long D, const T* q, const float* weight, const T* key, long k, int32_t* index) {
  struct Task { long b, query, queries; };
  long block = std::max<long>(1, MAX_ROWS / H);
  std::vector<Task> tasks;
  double work = 0;
  for (long b = 0; b < s.count; b++)
    for (long i = 0; i < s.queries[b]; i += block) {
      tasks.push_back({b, i, std::min(block, s.queries[b] - i)});
      work += (double)tasks.back().queries * s.keys[b] * H * D;
    }
  parallel((long)tasks.size(), work, [&](long i) {
    thread_local std::vector<float> rows, dot, key_T, score;
    thread_local std::vector<int32_t> ordered_keys;
    rows.resize(std::max<long>(MAX_ROWS, block * H) * padded(D)), dot.resize(std::max<long>(MAX_ROWS, block * H) * KEYS);
    key_T.resize(D * KEYS);
    const T* keys[KEYS];
    int64_t slot[KEYS];
    const Task& t = tasks[i];
      long first = s.query[t.b] + t.query, past = s.keys[t.b] - s.queries[t.b] + t.query, last = past + t.queries;
      int n_rows = (int)(t.queries * H);
      for (long r = 0; r < n_rows; r++)
        for (long d = 0; d < D; d += LANES)
          store(rows.data() + r * padded(D) + d, load_some(q + (first * H + r) * D + d, (int)std::min<long>(LANES, D - d)));
      score.assign(t.queries * last, 0.0f);
      Pages pages{s.page + t.b * s.pages, s.page_size};
      for (long k0 = 0; k0 < last; k0 += KEYS) {
        int n = (int)std::min<long>(KEYS, last - k0);
        pages.slots(k0, n, slot);
        for (int j = 0; j < n; j++) keys[j] = key + slot[j] * D;
        key_dots(rows.data(), n_rows, D, keys, n, key_T.data(), dot.data());
        for (long query = 0; query < t.queries; query++)
          for (long h = 0; h < H; h++) {
            const float* row = dot.data() + (query * H + h) * KEYS;
            float w = weight[(first + query) * H + h], *to = score.data() + query * last + k0;
            for (int j = 0; j < n; j++) to[j] += w * std::max(row[j], 0.0f);
          }
      }
      for (long query = 0; query < t.queries; query++)
        best(score.data() + query * last, past + query + 1, k, index + (first + query) * k, ordered_keys);
  });
}
