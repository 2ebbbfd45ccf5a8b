// Causal attention within whole documents and its gradients. A task is one head of one document, in
// float32; scores exist for one block of queries and keys at a time.
#pragma once
#include "training.h"

constexpr long QUERIES = 8 * ROWS;  // of a block

inline long whole_panels(long dims) { return (dims + PANEL - 1) / PANEL * PANEL; }

// out (+)= a b: a [rows, depth], b [depth, width], width a multiple of a panel
inline void times(long rows, const float* a, long lda, const float* b, long depth, long width, float* out, bool add) {
  for (long c = 0; c < width; c += COLUMNS * LANES)
    by_rows(rows, [&](auto R, long r) {
      vec acc[R][COLUMNS] = {};
      float* to = out + r * width + c;
      if (add)
        for (int i = 0; i < R; i++)
          for (int v = 0; v < COLUMNS; v++) acc[i][v] = load(to + i * width + v * LANES);
      multiply<R>(a + r * lda, lda, b + c, width, depth, acc);
      for (int i = 0; i < R; i++)
        for (int v = 0; v < COLUMNS; v++) store(to + i * width + v * LANES, acc[i][v]);
    });
}
// out += a^T b: a [depth, PANEL] of which `rows` columns are taken, b [depth, width]
inline void transposed_times(long rows, const float* a, const float* b, long depth, long width, float* out) {
  for (long c = 0; c < width; c += COLUMNS * LANES)
    by_rows(rows, [&](auto R, long r) {
      vec acc[R][COLUMNS];
      float* to = out + r * width + c;
      for (int i = 0; i < R; i++)
        for (int v = 0; v < COLUMNS; v++) acc[i][v] = load(to + i * width + v * LANES);
      outer<R>(a + r, PANEL, b + c, width, depth, acc);
      for (int i = 0; i < R; i++)
        for (int v = 0; v < COLUMNS; v++) store(to + i * width + v * LANES, acc[i][v]);
    });
}

// n rows of one head as floats, padded with zeros to whole panels
struct HeadRows {
  std::vector<float> at;
  long width = 0;
  template <class T> void read(long n, long dims, const T* from, long ld) {
    width = whole_panels(dims);
    at.resize(n * width);
    for (long i = 0; i < n; i++)
      for (long d = 0; d < width; d += LANES)
        store(row(i) + d, d < dims ? load_some(from + i * ld + d, (int)std::min<long>(LANES, dims - d)) : vec{});
  }
  void zero(long n, long dims) { width = whole_panels(dims), at.assign(n * width, 0.0f); }
  template <class T> void write(long n, long dims, T* to, long ld) {
    for (long i = 0; i < n; i++)
      for_vectors(dims, [&](long d, int some) { store_some(to + i * ld + d, load(row(i) + d), some); });
  }
  float* row(long i) { return at.data() + i * width; }
};

// The transpose of every 64 rows: [n / 64][dims][64]
struct HeadPanels {
  std::vector<float> at;
  long width = 0;
  void read(long n, HeadRows& rows) {
    width = rows.width;
    at.assign((n + PANEL - 1) / PANEL * PANEL * width, 0.0f);
    for (long k = 0; k < n; k += LANES)
      for (long d = 0; d < width; d += LANES) {
        vec tile[LANES] = {};
        for (long i = 0; i < std::min<long>(LANES, n - k); i++) tile[i] = load(rows.row(k + i) + d);
        transpose(tile);
        for (long i = 0; i < LANES; i++) store(panel(k) + (d + i) * PANEL + k % PANEL, tile[i]);
      }
  }
  float* panel(long key) { return at.data() + key / PANEL * PANEL * width; }
};

struct Documents {
  long count;
  const int64_t *start, *length;
};

// Calls head(b, h) for all heads of all documents.
template <class F> inline void for_heads(const Documents& documents, long H, long dims, F head) {
  double work = 0;
  for (long b = 0; b < documents.count; b++) work += (double)documents.length[b] * documents.length[b] * H * dims;
  parallel(documents.count * H, work, [&](long task) { head(task / H, task % H); });
}

// q [T, H, D], k [T, G, D], v [T, G, V] -> out [T, H, V], log-sum-exp of the scores [T, H]
template <class T>
void causal_attention(const Documents& documents, const AttentionShape& a, const T* q, const T* k, const T* v, T* out, float* lse) {
  for_heads(documents, a.H, a.D + a.V, [&](long b, long h) {
    thread_local HeadRows query, key, value, result;
    thread_local HeadPanels key_T;
    float score[QUERIES * PANEL], top[QUERIES], total[QUERIES];
    long n = documents.length[b], first = documents.start[b], g = h / (a.H / a.G);
    query.read(n, a.D, q + (first * a.H + h) * a.D, a.H * a.D);
    key.read(n, a.D, k + (first * a.G + g) * a.D, a.G * a.D);
    value.read(n, a.V, v + (first * a.G + g) * a.V, a.G * a.V);
    key_T.read(n, key);
    result.zero(n, a.V);
    for (long q0 = 0; q0 < n; q0 += QUERIES) {
      long rows = std::min(QUERIES, n - q0);
      std::fill(top, top + rows, -INFINITY), std::fill(total, total + rows, 0.0f);
      for (long k0 = 0; k0 < q0 + rows; k0 += PANEL) {
        times(rows, query.row(q0), query.width, key_T.panel(k0), a.D, PANEL, score, false);
        for (long r = 0; r < rows; r++) {
          float* row = score + r * PANEL;
          long seen = std::max(0L, std::min<long>(PANEL, q0 + r + 1 - k0));
          std::fill(row + seen, row + PANEL, -INFINITY);
          vec most = splat(-INFINITY), sums = {};
          for (long c = 0; c < PANEL; c += LANES) most = max(most, load(row + c));
          float highest = std::max(top[r], largest(most) * a.scale), shrink = std::exp(top[r] - highest);
          for (long c = 0; c < PANEL; c += LANES) {
            vec p = exp(load(row + c) * a.scale - highest);
            store(row + c, p);
            sums += p;
          }
          total[r] = total[r] * shrink + sum(sums), top[r] = highest;
          if (shrink != 1.0f)
            for (long c = 0; c < result.width; c += LANES) store(result.row(q0 + r) + c, load(result.row(q0 + r) + c) * shrink);
        }
        times(rows, score, PANEL, value.row(k0), std::min<long>(PANEL, n - k0), value.width, result.row(q0), true);
      }
      for (long r = 0; r < rows; r++) {
        for (long c = 0; c < result.width; c += LANES) store(result.row(q0 + r) + c, load(result.row(q0 + r) + c) / total[r]);
        lse[(first + q0 + r) * a.H + h] = top[r] + std::log(total[r]);
      }
    }
    result.write(n, a.V, out + (first * a.H + h) * a.V, a.H * a.V);
  });
}

// Gradients of q, and of k and v for every query head [T, H, D], [T, H, V] in float32
template <class T>
void causal_attention_grad(const Documents& documents, const AttentionShape& a, const T* q, const T* k, const T* v,
                           const T* out, const float* lse, const T* dout, T* dq, float* dk, float* dv) {
  for_heads(documents, a.H, 2.5 * (a.D + a.V), [&](long b, long h) {
    thread_local HeadRows query, key, value, above, dquery, dkey, dvalue;
    thread_local HeadPanels key_T, value_T;
    thread_local std::vector<float> delta;
    float weight[QUERIES * PANEL], dscore[QUERIES * PANEL];
    long n = documents.length[b], first = documents.start[b], g = h / (a.H / a.G), head = first * a.H + h;
    query.read(n, a.D, q + head * a.D, a.H * a.D);
    key.read(n, a.D, k + (first * a.G + g) * a.D, a.G * a.D);
    value.read(n, a.V, v + (first * a.G + g) * a.V, a.G * a.V);
    above.read(n, a.V, dout + head * a.V, a.H * a.V);
    key_T.read(n, key), value_T.read(n, value);
    dquery.zero(n, a.D), dkey.zero(n, a.D), dvalue.zero(n, a.V);
    delta.resize(n);
    for (long i = 0; i < n; i++) {
      vec products = {};
      const T* row = out + (head + i * a.H) * a.V;
      for_vectors(a.V, [&](long d, int some) { products += load_some(row + d, some) * load(above.row(i) + d); });
      delta[i] = sum(products);
    }
    for (long k0 = 0; k0 < n; k0 += PANEL) {
      long keys = std::min<long>(PANEL, n - k0);
      for (long q0 = k0 / QUERIES * QUERIES; q0 < n; q0 += QUERIES) {
        long rows = std::min(QUERIES, n - q0);
        times(rows, query.row(q0), query.width, key_T.panel(k0), a.D, PANEL, weight, false);
        times(rows, above.row(q0), above.width, value_T.panel(k0), a.V, PANEL, dscore, false);
        for (long r = 0; r < rows; r++) {
          long seen = std::max(0L, std::min<long>(keys, q0 + r + 1 - k0));
          float row_lse = lse[(first + q0 + r) * a.H + h];
          float *p = weight + r * PANEL, *s = dscore + r * PANEL;
          for (long c = 0; c < PANEL; c += LANES) store(p + c, exp(load(p + c) * a.scale - row_lse));
          std::fill(p + seen, p + PANEL, 0.0f);
          for (long c = 0; c < PANEL; c += LANES) store(s + c, load(p + c) * (load(s + c) - delta[q0 + r]) * a.scale);
        }
        transposed_times(keys, weight, above.row(q0), rows, above.width, dvalue.row(k0));
        transposed_times(keys, dscore, query.row(q0), rows, query.width, dkey.row(k0));
        times(rows, dscore, PANEL, key.row(k0), keys, key.width, dquery.row(q0), true);
      }
    }
    dquery.write(n, a.D, dq + head * a.D, a.H * a.D);
    dkey.write(n, a.D, dk + head * a.D, a.H * a.D);
    dvalue.write(n, a.V, dv + head * a.V, a.H * a.V);
  });
}
