// A decoder layer, of latent attention (MLA or DSA) or of grouped-query attention, in one call: the
// kernels of its parts one after the other, with intermediate results where the next one finds them.
//
// Names as in the model: T tokens, D hidden, H heads, N nope, R rope and V value dims, Q query latent,
// L latent rank, C = L + R latent KV entry, I index dim. Of grouped-query attention: G key heads.
#pragma once
#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "index_topk.h"

// Dimensions and packed weights, of type W, of a layer. Fields in the order of `LayerWeights` in Python. A count
// of 0: the layer has none of it.
template <class T, class W> struct LayerWeights {
  long hidden, heads, nope, rope, value, q_rank, kv_rank, index_heads, index_dim, topk;
  long inner, experts, active, expert_inner, interleaved, index_interleaved, normalize, kv_heads, head_dim, window;
  float eps, q_eps, kv_eps, index_eps, scale, index_scale, router_scale;
  const T *attention_norm, *q_norm, *kv_norm, *index_norm, *index_bias, *qkv_bias, *o_bias, *mlp_norm;
  const T *key_up, *value_up;
  const float *index_weights, *router, *router_bias;
  const W *q_a, *q_b, *kv_a, *o, *index_query, *index_key, *qkv;
  const W *gate_up, *down, *expert_gate_up, *expert_down;
};

// What all layers of a step share: the sequences, the slots of the new tokens, angles and selected keys.
struct LayerStep {
  long tokens, sequences;
  const int64_t *query, *queries, *keys, *page;
  long pages, page_size;
  const int64_t* slot;
  const float *cos, *sin;
  int32_t* selected;  // [tokens, topk] of the last layer with an indexer; a null pointer: all keys are seen
};

// Memory for intermediate results, kept by each thread.
template <class T, int which> inline T* scratch(long elements) {
  thread_local std::vector<T> memory;
  if ((long)memory.size() < elements) memory.resize(elements);
  return memory.data();
}

// out = x + y
template <class T> inline void add(long M, long D, const T* x, const T* y, T* out) {
  for_rows(M, D, [&](long m) {
    for (long d = m * D; d < (m + 1) * D; d += LANES) {
      int some = (int)std::min<long>(LANES, (m + 1) * D - d);
      store_some(out + d, load_some(x + d, some) + load_some(y + d, some), some);
    }
  });
}

// Of each token: its KV entry and index key to the cache, and its absorbed query [H, C]. Selects keys.
template <class T, class W>
T* layer_queries(const LayerWeights<T, W>& w, const LayerStep& s, const T* x, T* entries, T* index_keys) {
  long M = s.tokens, D = w.hidden, Q = w.q_rank, L = w.kv_rank, R = w.rope, C = L + R, I = w.index_dim, P = R / 2;
  long N = w.nope, head = N + R, index_width = w.index_heads * I;
  T *latent = scratch<T, 0>(M * Q), *row = scratch<T, 1>(M * C), *index_key = scratch<T, 2>(M * I);
  T *query = scratch<T, 3>(M * w.heads * head), *absorbed = scratch<T, 4>(M * w.heads * C);
  T* index_query = scratch<T, 5>(M * index_width);
  bool scores = w.index_heads && s.selected;
  linear(M, Q, D, x, D, w.q_a, NO_BIAS<T>, latent, Q);
  linear(M, C, D, x, D, w.kv_a, NO_BIAS<T>, row, C);
  if (w.index_heads) linear(M, I, D, x, D, w.index_key, NO_BIAS<T>, index_key, I);
  for_rows(M, Q + C + I, [&](long m) {
    const float *cos = s.cos + m * P, *sin = s.sin + m * P;
    rms_norm_row(Q, latent + m * Q, w.q_norm, w.q_eps, latent + m * Q);
    T *from = row + m * C, *entry = entries + s.slot[m] * C;
    rms_norm_row(L, from, w.kv_norm, w.kv_eps, entry);
    memcpy(entry + L, from + L, R * sizeof(T));
    rotate(entry + L, cos, sin, P, w.interleaved);
    if (!w.index_heads) return;
    T* key = index_keys + s.slot[m] * I;
    layer_norm_row(I, index_key + m * I, w.index_norm, w.index_bias, w.index_eps, key);
    rotate(key, cos, sin, P, w.index_interleaved);
  });
  linear(M, w.heads * head, Q, latent, Q, w.q_b, NO_BIAS<T>, query, w.heads * head);
  linear_stack(w.heads, M, L, N, query, w.heads * head, head, w.key_up, absorbed, w.heads * C, C);
  if (scores) linear(M, index_width, Q, latent, Q, w.index_query, NO_BIAS<T>, index_query, index_width);
  for_rows(M, w.heads * R + index_width, [&](long m) {
    const float *cos = s.cos + m * P, *sin = s.sin + m * P;
    for (long h = m * w.heads; h < (m + 1) * w.heads; h++) {
      memcpy(absorbed + h * C + L, query + h * head + N, R * sizeof(T));
      rotate(absorbed + h * C + L, cos, sin, P, w.interleaved);
    }
    for (long h = 0; scores && h < w.index_heads; h++)
      rotate(index_query + m * index_width + h * I, cos, sin, P, w.index_interleaved);
  });
  if (scores) {
    float* weight = scratch<float, 10>(M * w.index_heads);
    linear_fp32<T>(M, w.index_heads, D, x, D, w.index_weights, weight);
    for (long i = 0; i < M * w.index_heads; i++) weight[i] *= w.index_scale;
    Sequences all{s.sequences, s.query, s.queries, s.keys, s.page, s.pages, s.page_size};
    index_topk<T>(all, w.index_heads, I, index_query, weight, index_keys, w.topk, s.selected);
  }
  return absorbed;
}

// Attention in latent space [T, H, L] to the selected keys, or to all.
template <class T, class W> T* layer_attention(const LayerWeights<T, W>& w, const LayerStep& s, const T* absorbed, const T* entries) {
  long M = s.tokens, C = w.kv_rank + w.rope, K = w.topk;
  T* out = scratch<T, 0>(M * w.heads * w.kv_rank);
  Sequences of{s.sequences, s.query, s.queries, s.keys, s.page, s.pages, s.page_size};
  if (s.selected && K) {  // each query becomes a sequence of its selected keys
    int64_t *slot = scratch<int64_t, 0>(M * K), *size = scratch<int64_t, 1>(3 * M);
    for (long b = 0; b < s.sequences; b++) {
      Pages pages{s.page + b * s.pages, s.page_size};
      for (long m = s.query[b]; m < s.query[b] + s.queries[b]; m++) {
        long n = 0;
        for (; n < K && s.selected[m * K + n] >= 0; n++) pages.slots(s.selected[m * K + n], 1, slot + m * K + n);
        size[m] = m, size[M + m] = 1, size[2 * M + m] = n;
      }
    }
    of = {M, size, size + M, size + 2 * M, slot, K, 1};
  }
  Attention<T>(of, {nullptr, 0, nullptr}, {w.heads, 1, C, w.kv_rank, w.scale, 0}, absorbed, w.heads * C,
               {entries, C, C}, {entries, C, C}, out)
      .run();
  return out;
}

// Grouped-query attention [T, D]: rotated keys and values go to the cache first.
template <class T, class W> void gqa(const LayerWeights<T, W>& w, const LayerStep& s, const T* x, T* keys, T* values, T* out) {
  long M = s.tokens, D = w.hidden, H = w.heads, G = w.kv_heads, dim = w.head_dim, width = (H + 2 * G) * dim;
  T *qkv = scratch<T, 0>(M * width), *query = scratch<T, 1>(M * H * dim), *found = scratch<T, 2>(M * H * dim);
  linear(M, width, D, x, D, w.qkv, w.qkv_bias, qkv, width);
  rope_and_cache<T>(M, H, G, dim, qkv, s.cos, s.sin, dim / 2, w.interleaved, s.slot, query, keys, values);
  Sequences of{s.sequences, s.query, s.queries, s.keys, s.page, s.pages, s.page_size};
  Attention<T>(of, {nullptr, 0, nullptr}, {H, G, dim, dim, w.scale, w.window}, query, H * dim, {keys, G * dim, dim},
               {values, G * dim, dim}, found)
      .run();
  linear(M, D, H * dim, found, H * dim, w.o, w.o_bias, out, D);
}

// Latent attention [T, D].
template <class T, class W> void mla(const LayerWeights<T, W>& w, const LayerStep& s, const T* x, T* entries, T* index_keys, T* out) {
  long M = s.tokens, D = w.hidden, L = w.kv_rank, V = w.value;
  const T* absorbed = layer_queries(w, s, x, entries, index_keys);
  const T* found = layer_attention(w, s, absorbed, entries);
  T* values = scratch<T, 3>(M * w.heads * V);
  linear_stack(w.heads, M, V, L, found, w.heads * L, L, w.value_up, values, w.heads * V, V);
  linear(M, D, w.heads * V, values, w.heads * V, w.o, NO_BIAS<T>, out, D);
}

// MLP or mixture of experts with its shared experts; out is not x.
template <class T, class W> void layer_mlp(const LayerWeights<T, W>& w, long M, const T* x, T* out) {
  long D = w.hidden, E = w.experts, K = w.active;
  T *inner = scratch<T, 1>(M * w.inner), *shared = out;
  if (E) {
    float *logits = scratch<float, 10>(M * E), *score = scratch<float, 11>(M * E), *weight = scratch<float, 12>(M * K);
    int64_t* expert = scratch<int64_t, 0>(M * K);
    linear_fp32<T>(M, E, D, x, D, w.router, logits);
    route(M, E, K, logits, w.router_bias, w.normalize, w.router_scale, score, expert, weight);
    experts(M, D, w.expert_inner, E, K, x, D, expert, weight, w.expert_gate_up, w.expert_down, out);
    shared = scratch<T, 2>(M * D);
  }
  if (!w.inner) return;
  gate_up(M, w.inner, D, x, D, w.gate_up, inner, w.inner);
  linear(M, D, w.inner, inner, w.inner, w.down, NO_BIAS<T>, shared, D);
  if (E) add(M, D, out, shared, out);
}

// `cached` and `cached_too` are KV entries and index keys, or keys and values.
template <class T, class W> void decoder_layer(const LayerWeights<T, W>& w, const LayerStep& s, T* cached, T* cached_too, const T* x, T* out) {
  long M = s.tokens, D = w.hidden;
  T *normed = scratch<T, 6>(M * D), *y = scratch<T, 7>(M * D);
  rms_norm<T>(M, D, x, D, w.attention_norm, w.eps, normed, D);
  if (w.kv_heads) gqa(w, s, normed, cached, cached_too, y);
  else mla(w, s, normed, cached, cached_too, y);
  add(M, D, x, y, out);
  rms_norm<T>(M, D, out, D, w.mlp_norm, w.eps, normed, D);
  layer_mlp(w, M, normed, y);
  add(M, D, out, y, out);
}
