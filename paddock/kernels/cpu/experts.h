// Routed experts: rows are gathered by expert, multiplied, and summed for each token.
#pragma once
#include <vector>
#include "elementwise.h"
#include "linear.h"

// Rows of the routing [T, K] in the order of their experts.
struct ByExpert {
  std::vector<long> start, row;  // where an expert's rows begin; t * K + k of each
  ByExpert(long E, long R, const int64_t* expert) : start(E + 1), row(R) {
    for (long r = 0; r < R; r++) start[expert[r] + 1]++;
    for (long e = 0; e < E; e++) start[e + 1] += start[e];
    std::vector<long> next(start.begin(), start.end() - 1);
    for (long r = 0; r < R; r++) row[next[expert[r]]++] = r;
  }
};

// y[t] = sum_k weight[t, k] * down[e] (silu(gate[e] x[t]) * up[e] x[t]),  e = expert[t, k]
template <class T, class W>
void experts(long tokens, long D, long F, long E, long K, const T* x, long ldx, const int64_t* expert,
             const float* weight, const W* gate_up, const W* down, T* out) {
  long R = tokens * K, inner_panels = (F + PANEL - 1) / PANEL, out_panels = (D + PANEL - 1) / PANEL;
  ByExpert order(E, R, expert);
  std::vector<long> used;
  for (long e = 0; e < E; e++)
    if (order.start[e] < order.start[e + 1]) used.push_back(e);
  std::vector<T> gathered(R * D), inner(R * F);
  std::vector<float> answer(R * D);
  std::vector<long> at(R);  // of row t * K + k among the sorted ones
  for (long r = 0; r < R; r++) {
    at[order.row[r]] = r;
    memcpy(gathered.data() + r * D, x + order.row[r] / K * ldx, D * sizeof(T));
  }
  double work = 1.0 * R * D * F;
  // Calls tile(e, p, row, rows, next) for every panel of every expert that has rows; `next` as in for_panels.
  auto for_tiles = [&](long panels, long inputs, double work, auto tile) {
    parallel((long)used.size() * panels, work, [&](long task) {
      long e = used[task / panels], first = order.start[e];
      by_tiles<W>(order.start[e + 1] - first, inputs, [&](long m, long rows) {
        tile(e, task % panels, first + m, rows, m ? -1 : following(task % panels, panels));
      });
    });
  };
  for_tiles(inner_panels, D, 2 * work, [&](long e, long p, long row, long rows, long next) {
    long size = 2 * panel_size<W>(D);
    const W* both = gate_up + e * inner_panels * size;
    gate_up_panel(gathered.data() + row * D, D, rows, both + p * size, D, inner.data() + row * F + p * PANEL, F, F - p * PANEL,
                  next < 0 ? nullptr : both + next * size);
  });
  for_tiles(out_panels, F, work, [&](long e, long p, long row, long rows, long next) {
    float sums[MAX_TILE * PANEL];
    long size = panel_size<W>(F);
    const W* weight = down + e * out_panels * size;
    panel_sums(inner.data() + row * F, F, rows, weight + p * size, F, sums, next < 0 ? nullptr : weight + next * size);
    for_outputs(rows, D - p * PANEL, [&](long r, long v, int some) {
      store_some(answer.data() + (row + r) * D + p * PANEL + v, load(sums + r * PANEL + v), some);
    });
  });
  for_rows(tokens, K * D, [&](long t) {
    for (long d = 0; d < D; d += LANES) {
      int some = (int)std::min<long>(LANES, D - d);
      vec y = {};
      for (long k = 0; k < K; k++) y += load_some(answer.data() + at[t * K + k] * D + d, some) * weight[t * K + k];
      store_some(out + t * D + d, y, some);
    }
  });
}

// Sigmoid scores [T, E], the K best by score plus bias, ascending, and their weights. Of equal scores
// the lowest index wins.
inline void route(long tokens, long E, long K, const float* logits, const float* bias, int normalize, float scale,
                  float* score, int64_t* expert, float* weight) {
  std::vector<float> biased(E);
  std::vector<int64_t> order(E);
  for (long t = 0; t < tokens; t++) {
    float* s = score + t * E;
    for (long e = 0; e < E; e += LANES) {
      int some = (int)std::min<long>(LANES, E - e);
      store_some(s + e, 1.0f / (1.0f + exp(-load_some(logits + t * E + e, some))), some);
    }
    for (long e = 0; e < E; e++) {
      biased[e] = std::isnan(s[e] + bias[e]) ? -INFINITY : s[e] + bias[e];
      order[e] = e;
    }
    auto better = [&](int64_t a, int64_t b) { return biased[a] != biased[b] ? biased[a] > biased[b] : a < b; };
    if (K < E) std::nth_element(order.begin(), order.begin() + K, order.end(), better);
    std::sort(order.begin(), order.begin() + K);
    float total = 0;
    for (long k = 0; k < K; k++) total += s[order[k]];
    for (long k = 0; k < K; k++) {
      expert[t * K + k] = order[k];
      float w = normalize ? s[order[k]] / (total + 1e-20f) : s[order[k]];
      weight[t * K + k] = w * scale;
    }
  }
}
