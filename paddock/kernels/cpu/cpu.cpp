// Entry points of the CPU kernels, one for each dtype, some also with 8-bit weights. Pointers, sizes and
// strides (in elements) come from Python, which checks them.
#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "index_topk.h"
#include "decoder_layer.h"
#include "attention_training.h"

#define FOR_BOTH(DEFINE) DEFINE(f32, float) DEFINE(bf16, bf16)
#define FOR_BOTH_WEIGHTS(DEFINE) \
  DEFINE(f32, float, float) DEFINE(bf16, bf16, bf16) DEFINE(f32_int8, float, int8) DEFINE(bf16_int8, bf16, int8)

extern "C" {
void set_threads(int threads) { Pool::get().resize(threads); }

#define LINEAR(name, T, W)                                                                                       \
  void linear_##name(long M, long N, long K, const T* x, long ldx, const W* w, const T* bias, T* out,            \
                     long ldo) {                                                                                 \
    linear(M, N, K, x, ldx, w, bias, out, ldo);                                                                  \
  }                                                                                                              \
  void linear_to_f32_##name(long M, long N, long K, const T* x, long ldx, const W* w, const T* bias, float* out, \
                           long ldo) {                                                                           \
    linear(M, N, K, x, ldx, w, bias, out, ldo);                                                                  \
  }                                                                                                              \
  void gate_up_##name(long M, long F, long K, const T* x, long ldx, const W* w, T* out, long ldo) {              \
    gate_up(M, F, K, x, ldx, w, out, ldo);                                                                       \
  }                                                                                                              \
  void experts_##name(long tokens, long D, long F, long E, long K, const T* x, long ldx, const int64_t* expert,  \
                      const float* weight, const W* gate_up, const W* down, T* out) {                            \
    experts(tokens, D, F, E, K, x, ldx, expert, weight, gate_up, down, out);                                     \
  }                                                                                                              \
  void decoder_layer_##name(const LayerWeights<T, W>* weights, const LayerStep* step, T* cached, T* cached_too,  \
                            const T* x, T* out) {                                                                \
    decoder_layer(*weights, *step, cached, cached_too, x, out);                                                  \
  }
FOR_BOTH_WEIGHTS(LINEAR)

#define ELEMENTWISE(name, T)                                                                                     \
  void rms_norm_##name(long M, long D, const T* x, long ldx, const T* weight, float eps, T* out, long ldo) {     \
    rms_norm<T>(M, D, x, ldx, weight, eps, out, ldo);                                                            \
  }                                                                                                              \
  void rope_##name(long M, long H, long D, const T* x, long ldx, long ldh, T* out, long first, const float* cos, \
                   const float* sin, long P, int interleaved) {                                                  \
    rope<T>(M, H, D, x, ldx, ldh, out, first, cos, sin, P, interleaved);                                         \
  }
#define ROPE_AND_CACHE(name, T)                                                                                  \
  void rope_and_cache_##name(long M, long H, long G, long D, const T* qkv, const float* cos, const float* sin,   \
                             long P, int interleaved, const int64_t* slot, T* query, T* key, T* value) {         \
    rope_and_cache<T>(M, H, G, D, qkv, cos, sin, P, interleaved, slot, query, key, value);                       \
  }
FOR_BOTH(ELEMENTWISE)
FOR_BOTH(ROPE_AND_CACHE)

#define ATTENTION(name, T)                                                                                       \
  void attention_##name(long B, const int64_t* query, const int64_t* queries, const int64_t* keys,               \
                        const int64_t* page, long pages, long page_size, const int32_t* index, long K,           \
                        const int64_t* first_key, long H, long G, long D, long V, float scale,                   \
                        long window, const T* q, long ldq, const T* k, long ldk, long key_head,                  \
                        const T* v, long ldv, long value_head, T* out) {                                         \
    Attention<T>({B, query, queries, keys, page, pages, page_size}, {index, K, first_key},                       \
                 {H, G, D, V, scale, window}, q, ldq, {k, ldk, key_head}, {v, ldv, value_head}, out)             \
        .run();                                                                                                  \
  }
FOR_BOTH(ATTENTION)

#define PLAIN(name, T)                                                                                           \
  void linear_stack_##name(long H, long M, long N, long K, const T* x, long ldx, long x_head, const T* w,        \
                           T* out, long ldo, long out_head) {                                                    \
    linear_stack(H, M, N, K, x, ldx, x_head, w, out, ldo, out_head);                                             \
  }                                                                                                              \
  void linear_fp32_##name(long M, long N, long K, const T* x, long ldx, const float* w, float* out) {            \
    linear_fp32<T>(M, N, K, x, ldx, w, out);                                                                     \
  }                                                                                                              \
  void index_topk_##name(long B, const int64_t* query, const int64_t* queries, const int64_t* keys,              \
                         const int64_t* page, long pages, long page_size, long H, long D, const T* q,            \
                         const float* weight, const T* key, long k, int32_t* index) {                            \
    index_topk<T>({B, query, queries, keys, page, pages, page_size}, H, D, q, weight, key, k, index);            \
  }
FOR_BOTH(PLAIN)

#define LAYER_NORM(name, T)                                                                                      \
  void layer_norm_##name(long M, long D, const T* x, long ldx, const T* weight, const T* bias, float eps,        \
                         T* out, long ldo) {                                                                     \
    layer_norm<T>(M, D, x, ldx, weight, bias, eps, out, ldo);                                                    \
  }
FOR_BOTH(LAYER_NORM)

#define TRAINING(name, T)                                                                                        \
  void weight_grad_##name(long rows, long N, long K, const T* dy, long ldy, const T* x, long ldx, float* out,    \
                          int add) {                                                                             \
    weight_grad<T>(rows, N, K, dy, ldy, x, ldx, out, add);                                                       \
  }                                                                                                              \
  void swiglu_##name(long M, long F, const T* gate, long ldg, const T* up, long ldu, T* out) {                   \
    swiglu<T>(M, F, gate, ldg, up, ldu, out);                                                                    \
  }                                                                                                              \
  void swiglu_grad_##name(long M, long F, const T* dy, const T* gate, long ldg, const T* up, long ldu, T* dgate, \
                          T* dup, long ldd) {                                                                    \
    swiglu_grad<T>(M, F, dy, gate, ldg, up, ldu, dgate, dup, ldd);                                               \
  }                                                                                                              \
  void rms_norm_grad_##name(long M, long D, const T* dy, long ldy, const T* x, long ldx, const T* weight,        \
                            float eps, T* dx, float* parts) {                                                    \
    rms_norm_grad<T>(M, D, dy, ldy, x, ldx, weight, eps, dx, parts);                                             \
  }                                                                                                              \
  void cross_entropy_##name(long R, long V, const float* logits, const int64_t* target,                          \
                            float inverse_temperature, float* nll, T* grad) {                                    \
    cross_entropy<T>(R, V, logits, target, inverse_temperature, nll, grad);                                      \
  }
#define ATTENTION_TRAINING(name, T)                                                                              \
  void causal_attention_##name(long B, const int64_t* start, const int64_t* length, long H, long G, long D,      \
                               long V, float scale, const T* q, const T* k, const T* v, T* out, float* lse) {    \
    causal_attention<T>({B, start, length}, {H, G, D, V, scale, 0}, q, k, v, out, lse);                          \
  }                                                                                                              \
  void causal_attention_grad_##name(long B, const int64_t* start, const int64_t* length, long H, long G, long D, \
                                    long V, float scale, const T* q, const T* k, const T* v, const T* out,       \
                                    const float* lse, const T* dout, T* dq, float* dk, float* dv) {              \
    causal_attention_grad<T>({B, start, length}, {H, G, D, V, scale, 0}, q, k, v, out, lse, dout, dq, dk, dv);   \
  }
FOR_BOTH(TRAINING)
FOR_BOTH(ATTENTION_TRAINING)

void route_experts(long tokens, long E, long K, const float* logits, const float* bias, int normalize, float scale,
                   float* score, int64_t* expert, float* weight) {
  route(tokens, E, K, logits, bias, normalize, scale, score, expert, weight);
}
}
