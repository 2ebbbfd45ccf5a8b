// Attention over a paged KV cache, without copies of keys and values.
//
// Queries of one sequence and the heads that share a key head are the rows of small products with
// blocks of keys. Softmax is taken block by block. Long sequences are split at fixed places, so that
// a result does not depend on what else is computed.
#pragma once
#include <vector>
#include "attention_amx.h"
#include "linear.h"

constexpr int KEYS = 64;            // of a block
constexpr long SPLIT = 1024;        // keys of a task
constexpr int FEW_ROWS = 8;         // up to here keys are read once in place, without transposing them
constexpr int MAX_ROWS = 48;        // of a task

struct Pages {
  const int64_t* page;  // of one sequence
  long size;
  inline int64_t slot(long key) const { return size == 1 ? page[key] : page[key / size] * size + key % size; }
};

struct AttentionShape { long H, G, D, V; float scale; long window; };

inline long padded(long dims) { return (dims + LANES - 1) / LANES * LANES; }

// scores[r][j] = q[r] . key[j] for R rows, padded with zeros, and 4 keys
template <int R, class T> inline void dots(const float* q, long D, const T* const* key, float* scores, long lds) {
  vec acc[R][4] = {};
  long ldq = padded(D);
  auto add = [&](long d, auto read) {
    vec k[4];
    for (int j = 0; j < 4; j++) k[j] = read(key[j] + d);
    for (int r = 0; r < R; r++) {
      vec a = load(q + r * ldq + d);
      for (int j = 0; j < 4; j++) acc[r][j] += a * k[j];
    }
  };
  long d = 0;
  for (; d + LANES <= D; d += LANES) add(d, [](const T* p) { return load(p); });
  if (d < D) add(d, [&](const T* p) { return load_some(p, (int)(D - d)); });
  for (int r = 0; r < R; r++) {
    four dot = sum_four(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    memcpy(scores + r * lds, dot.at, sizeof dot);
  }
}

// A product with a small float32 weight as it is, such as a router's: x is widened first.
template <class T> void linear_fp32(long M, long N, long K, const T* x, long ldx, const float* w, float* out) {
  parallel((M + ROWS - 1) / ROWS, (double)M * N * K, [&](long task) {
    thread_local std::vector<float> wide;
    wide.resize(ROWS * padded(K));
    float found[ROWS * 4];
    long m0 = task * ROWS, rows = std::min<long>(ROWS, M - m0);
    for (long r = 0; r < rows; r++)
      for (long k = 0; k < K; k += LANES)
        store(wide.data() + r * padded(K) + k, load_some(x + (m0 + r) * ldx + k, (int)std::min<long>(LANES, K - k)));
    for (long n = 0; n < N; n += 4) {
      const float* four[4];
      for (int j = 0; j < 4; j++) four[j] = w + std::min(n + j, N - 1) * K;
      by_rows(rows, [&](auto R, long r) { dots<R>(wide.data() + r * padded(K), K, four, found + r * 4, 4); });
      for (long r = 0; r < rows; r++)
        memcpy(out + (m0 + r) * N + n, found + r * 4, std::min<long>(4, N - n) * sizeof(float));
    }
  });
}

// acc[r][v] += sum_k p[r, k] * value[k][v] over rows of values that lie apart
template <int R, int C, class T>
inline void weigh(const float* p, const T* const* value, long col, int some, int n, float* out, long ldo) {
  vec acc[R][C];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < C; v++) acc[r][v] = load(out + r * ldo + col + v * LANES);
  for (int k = 0; k < n; k++) {
    vec b[C];
    for (int v = 0; v < C; v++) b[v] = C > 1 ? load(value[k] + col + v * LANES) : load_some(value[k] + col, some);
    for (int r = 0; r < R; r++) {
      vec a = splat(p[r * KEYS + k]);
      for (int v = 0; v < C; v++) acc[r][v] += a * b[v];
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < C; v++) store(out + r * ldo + col + v * LANES, acc[r][v]);
}

// The rows of one task: scaled queries, running maximum, sum and weighted values.
struct Rows {
  std::vector<float> q, scores, out, key_T;
  float top[MAX_ROWS], total[MAX_ROWS];
#if defined(__AMX_BF16__)
  AmxRows amx;
#endif
};

// scores[r][k] = q[r] . key[k] for n keys; rows of scores have KEYS columns
template <class T>
void key_dots(const float* q, int rows, long D, const T* const* key, int n, float* key_T, float* scores) {
  if (rows <= FEW_ROWS) {
    const T* four[4];
    for (int j = 0; j < n; j += 4) {
      for (int i = 0; i < 4; i++) four[i] = key[std::min(j + i, n - 1)];
      by_rows(rows, [&](auto R, long r) { dots<R>(q + r * padded(D), D, four, scores + r * KEYS + j, KEYS); });
    }
    return;
  }
  for (int k = 0; k < n; k += LANES)
    for (long d = 0; d < D; d += LANES) {
      vec tile[LANES] = {};
      int some = (int)std::min<long>(LANES, D - d);
      for (int i = 0; i < std::min(LANES, n - k); i++) tile[i] = load_some(key[k + i] + d, some);
      transpose(tile);
      for (int i = 0; i < some; i++) store(key_T + (d + i) * KEYS + k, tile[i]);
    }
  for (int c = 0; c < KEYS / LANES && c * LANES < n; c += COLUMNS)
    by_rows(rows, [&](auto R, long r) {
      vec acc[R][COLUMNS] = {};
      multiply<R>(q + r * padded(D), padded(D), key_T + c * LANES, KEYS, D, acc);
      for (int i = 0; i < R; i++)
        for (int v = 0; v < COLUMNS; v++) store(scores + (r + i) * KEYS + (c + v) * LANES, acc[i][v]);
    });
}

template <class T>
void attend_block(Rows& s, int rows, const AttentionShape& a, const T* const* key, const T* const* value, int n,
                  const int* seen_from, const int* seen_to, const uint64_t* selected) {
  key_dots(s.q.data(), rows, a.D, key, n, s.key_T.data(), s.scores.data());
  long V = padded(a.V);
  for (int r = 0; r < rows; r++) {
    float* score = s.scores.data() + r * KEYS;
    for (int k = 0; k < std::min(seen_from[r], n); k++) score[k] = -INFINITY;
    for (int k = std::max(0, seen_to[r]); k < (n + LANES - 1) / LANES * LANES; k++) score[k] = -INFINITY;
    if (selected)
      for (int k = 0; k < n; k++)
        if (!(selected[r] >> k & 1)) score[k] = -INFINITY;
    vec most = splat(-INFINITY);
    for (int k = 0; k < n; k += LANES) most = max(most, load(score + k));
    float top = std::max(s.top[r], largest(most));
    if (top == -INFINITY) {  // nothing seen yet
      memset(score, 0, KEYS * sizeof(float));
      continue;
    }
    vec total = {};
    for (int k = 0; k < n; k += LANES) {
      vec p = exp(load(score + k) - top);
      store(score + k, p);
      total += p;
    }
    float shrink = std::exp(s.top[r] - top);
    s.total[r] = s.total[r] * shrink + sum(total);
    s.top[r] = top;
    if (shrink != 1.0f)
      for (long v = 0; v < V; v += LANES) store(s.out.data() + r * V + v, load(s.out.data() + r * V + v) * shrink);
  }
  long col = 0;
  for (; col + COLUMNS * LANES <= a.V; col += COLUMNS * LANES)
    by_rows(rows, [&](auto R, long r) { weigh<R, COLUMNS>(s.scores.data() + r * KEYS, value, col, LANES, n, s.out.data() + r * V, V); });
  for (; col < a.V; col += LANES)
    by_rows(rows, [&](auto R, long r) {
      weigh<R, 1>(s.scores.data() + r * KEYS, value, col, (int)std::min<long>(LANES, a.V - col), n, s.out.data() + r * V, V);
    });
}

// Keys that each query attends to, numbered from a sequence's `first_key`; none: all that it sees.
struct Selection {
  const int32_t* index;  // [T, K], -1 for none; a null pointer: all queries attend to all keys
  long K;
  const int64_t* first_key;
};

struct Sequences {
  long count;
  const int64_t *query, *queries, *keys;  // first row of its queries, how many, keys the last one sees
  const int64_t* page;                    // [count, pages]
  long pages, page_size;
};

// q [T, H, D], key storage [S, G, D] and value storage [S, G, V] with strides, out [T, H, V]
template <class T>
void attention(const Sequences& s, const Selection& selection, const AttentionShape& a, const T* q, long ldq, const T* key, long ldk, long key_head,
               const T* value, long ldv, long value_head, T* out) {
  long group = a.H / a.G, D = padded(a.D), V = padded(a.V);
  long block = std::max<long>(1, MAX_ROWS / group);  // queries of a task
  long head_parts = (group + MAX_ROWS - 1) / MAX_ROWS, part_heads = (group + head_parts - 1) / head_parts;
  struct Task { long b, g, part, query, queries, split, splits, at; };
  std::vector<Task> tasks;
  long partial = 0;  // splits that leave partial sums, and where
  double work = 0;
  for (long b = 0; b < s.count; b++)
    for (long i = 0; i < s.queries[b]; i += block) {
      long n = std::min(block, s.queries[b] - i), seen = s.keys[b] - s.queries[b] + i + n;
      long splits = std::max(1L, (seen + SPLIT - 1) / SPLIT);  // one also for a query without keys
      work += (double)n * seen * a.H * (a.D + a.V);
      for (long g = 0; g < a.G; g++)
        for (long part = 0; part < head_parts; part++) {
          for (long z = 0; z < splits; z++) tasks.push_back({b, g, part, i, n, z, splits, partial + z});
          if (splits > 1) partial += splits;
        }
    }
  std::vector<float> sums(partial * MAX_ROWS * (V + 2));
  auto rows_of = [&](const Task& t) { return t.queries * (std::min(group, (t.part + 1) * part_heads) - t.part * part_heads); };
  auto place = [&](const Task& t, long row, long& token, long& head) {
    long heads = std::min(group, (t.part + 1) * part_heads) - t.part * part_heads;
    token = s.query[t.b] + t.query + row / heads;
    head = t.g * group + t.part * part_heads + row % heads;
  };
  parallel((long)tasks.size(), work, [&](long i) {
    thread_local Rows mine;
    thread_local std::vector<uint64_t> bits;  // of each query, a word for every block of keys
    mine.q.resize(MAX_ROWS * D), mine.scores.resize(MAX_ROWS * KEYS), mine.out.resize(MAX_ROWS * V);
    mine.key_T.resize(a.D * KEYS);
    int from[MAX_ROWS], to[MAX_ROWS];
    const T *keys[KEYS], *values[KEYS];
    uint64_t selected[MAX_ROWS];
    const Task& t = tasks[i];
      int rows = (int)rows_of(t);
      long words = s.keys[t.b] / KEYS + 1;
      if (selection.index) {
        bits.assign(t.queries * words, 0);
        for (long query = 0; query < t.queries; query++) {
          const int32_t* index = selection.index + (s.query[t.b] + t.query + query) * selection.K;
          uint64_t* to = bits.data() + query * words;
          if (index[0] < 0) std::fill(to, to + words, ~uint64_t(0));
          for (long j = 0; j < selection.K && index[j] >= 0; j++) {
            long key_index = index[j] - selection.first_key[t.b];
            to[key_index / KEYS] |= uint64_t(1) << key_index % KEYS;
          }
        }
      }
      long past = s.keys[t.b] - s.queries[t.b] + t.query, token, head;
      Pages pages{s.page + t.b * s.pages, s.page_size};
      auto query = [&](int r) {
        place(t, r, token, head);
        return q + token * ldq + head * a.D;
      };
      std::fill(mine.top, mine.top + MAX_ROWS, -INFINITY), std::fill(mine.total, mine.total + MAX_ROWS, 0.0f);
      std::fill(mine.out.begin(), mine.out.end(), 0.0f);
      long first = t.split * SPLIT, last = std::min(past + t.queries, first + SPLIT);
      if (a.window) first = std::max(first, (past + 1 - a.window) / KEYS * KEYS);
      // Calls attend(n, selection) for every block of keys that some row attends to.
      auto for_blocks = [&](auto attend) {
        for (long k0 = std::max(0L, first); k0 < last; k0 += KEYS) {
          int n = (int)std::min<long>(KEYS, last - k0);
          if (selection.index) {
            uint64_t any = 0;
            for (int r = 0; r < rows; r++) any |= selected[r] = bits[r / (rows / t.queries) * words + k0 / KEYS];
            if (!any) continue;
          }
          for (int k = 0; k < n; k++) {
            int64_t slot = pages.slot(k0 + k);
            keys[k] = key + slot * ldk + t.g * key_head, values[k] = value + slot * ldv + t.g * value_head;
          }
          for (int r = 0; r < rows; r++) {
            long seen = past + r / (rows / t.queries) + 1;
            to[r] = (int)std::min<long>(n, seen - k0);
            from[r] = a.window ? (int)std::max<long>(0, seen - a.window - k0) : 0;
          }
          attend(n, selection.index ? selected : nullptr);
        }
      };
      bool tiles = false;
#if defined(__AMX_BF16__)
      if constexpr (sizeof(T) == 2) tiles = amx_attention_suits(a.D, a.V);
      if constexpr (sizeof(T) == 2) if (tiles) {
        Tiles shape(AMX_ROWS);
        mine.amx.take_queries(rows, a.D, query);
        for_blocks([&](int n, const uint64_t* some) {
          amx_block(mine.amx, rows, a.D, a.V, a.scale, ldk, keys, values, n, from, to, some, mine.top, mine.total, mine.out.data());
        });
      }
#endif
      if (!tiles) {
        for (int r = 0; r < rows; r++) {
          const T* row = query(r);
          for (long d = 0; d < a.D; d += LANES)
            store(mine.q.data() + r * D + d, load_some(row + d, (int)std::min<long>(LANES, a.D - d)) * a.scale);
        }
        for_blocks([&](int n, const uint64_t* some) { attend_block(mine, rows, a, keys, values, n, from, to, some); });
      }
      for (int r = 0; r < rows; r++) {
        if (t.splits > 1) {
          float* sum = sums.data() + (t.at * MAX_ROWS + r) * (V + 2);
          sum[0] = mine.top[r], sum[1] = mine.total[r];
          memcpy(sum + 2, mine.out.data() + r * V, V * sizeof(float));
        } else {
          place(t, r, token, head);
          for (long v = 0; v < a.V; v += LANES)
            store_some(out + (token * a.H + head) * a.V + v, load(mine.out.data() + r * V + v) / std::max(mine.total[r], 1e-30f),
                       (int)std::min<long>(LANES, a.V - v));
        }
      }
  });
  if (!partial) return;
  parallel((long)tasks.size(), work / SPLIT * 4, [&](long i) {
      const Task& t = tasks[i];
      if (t.splits == 1 || t.split) return;
      long token, head;
      for (int r = 0; r < (int)rows_of(t); r++) {
        auto sum = [&](long z) { return sums.data() + ((t.at + z) * MAX_ROWS + r) * (V + 2); };
        float top = -INFINITY, total = 0;
        for (long z = 0; z < t.splits; z++) top = std::max(top, sum(z)[0]);
        for (long z = 0; z < t.splits; z++) total += sum(z)[1] * std::exp(sum(z)[0] - top);
        place(t, r, token, head);
        for (long v = 0; v < a.V; v += LANES) {
          vec y = {};
          for (long z = 0; z < t.splits; z++) y += load(sum(z) + 2 + v) * std::exp(sum(z)[0] - top);
          store_some(out + (token * a.H + head) * a.V + v, y / total, (int)std::min<long>(LANES, a.V - v));
        }
      }
  });
}
