// Attention over a paged KV cache, without copies of keys and values.
//
// Long sequences are split at fixed places, so that a result does not depend on what else is computed.
#pragma once
#include <memory>
#include "attention_block.h"

constexpr long SPLIT = 1024;        // keys of a task

struct Pages {
  const int64_t* page;  // of one sequence
  long size;
  // The slots of n keys.
  inline void slots(long key, int n, int64_t* slot) const {
    long p = key / size, at = key % size;
    for (int k = 0; k < n; k++) {
      slot[k] = page[p] * size + at;
      if (++at == size) p++, at = 0;
    }
  }
};

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

template <class T> struct Storage {  // of keys or of values, [S, G, dims] with strides
  const T* at;
  long ld, head;
  const T* row(int64_t slot, long g) const { return at + slot * ld + g * head; }
};

// q [T, H, D], key storage [S, G, D], value storage [S, G, V], out [T, H, V]
template <class T> class Attention {
 public:
  Attention(const Sequences& s, const Selection& selection, const AttentionShape& a, const T* q, long ldq, Storage<T> key,
            Storage<T> value, T* out)
      : s(s), selection(selection), a(a), q(q), ldq(ldq), key(key), value(value), out(out) {
    group = a.H / a.G;
    long parts = (group + MAX_ROWS - 1) / MAX_ROWS;
    part_heads = (group + parts - 1) / parts;
    plan(parts);
    sums.reset(new float[partial * row_capacity() * (padded(a.V) + 2)]);
  }
  void run() {
    parallel((long)tasks.size(), work, [&](long i) { attend(tasks[i]); });
    if (partial) parallel((long)tasks.size(), work / SPLIT * 4, [&](long i) { merge(tasks[i]); });
  }

 private:
  // Some queries of sequence b, and a part of its keys, in `heads` key heads from g on; of a key head
  // with very many query heads a part of these.
  struct Task { long b, g, heads, part, query, queries, split, splits, at; };

  Sequences s;
  Selection selection;
  AttentionShape a;
  const T* q;
  long ldq;
  Storage<T> key, value;
  T* out;
  long group, part_heads, partial = 0;  // splits that leave partial sums
  double work = 0;
  std::vector<Task> tasks;
  std::unique_ptr<float[]> sums;

  long query_block() const { return std::max<long>(1, MAX_ROWS / group); }
  long row_capacity() const { return std::min<long>(MAX_ROWS, query_block() * part_heads); }

  void plan(long parts) {
    long splits_in_all = 0;
    auto for_queries = [&](auto each) {
      for (long b = 0; b < s.count; b++)
        for (long i = 0; i < s.queries[b]; i += query_block()) {
          long n = std::min(query_block(), s.queries[b] - i), seen = s.keys[b] - s.queries[b] + i + n;
          each(b, i, n, seen, std::max(1L, (seen + SPLIT - 1) / SPLIT));  // one also without keys
        }
    };
    for_queries([&](long, long, long n, long seen, long splits) {
      work += (double)n * seen * a.H * (a.D + a.V);
      splits_in_all += splits;
    });
    for_queries([&](long b, long i, long n, long, long splits) {
      // The key heads of a token lie together: few rows take them all, if that leaves enough tasks.
      long heads = n * group <= FEW_ROWS && splits_in_all >= ENOUGH ? a.G : 1;
      for (long g = 0; g < a.G; g += heads)
        for (long part = 0; part < parts; part++) {
          for (long z = 0; z < splits; z++) tasks.push_back({b, g, heads, part, i, n, z, splits, partial + z * heads});
          if (splits > 1) partial += splits * heads;
        }
    });
  }
  static constexpr long ENOUGH = 8;

  long heads_of(const Task& t) const { return std::min(group, (t.part + 1) * part_heads) - t.part * part_heads; }
  int rows_of(const Task& t) const { return (int)(t.queries * heads_of(t)); }
  // Of a row in key head g: its token and query head, as [T, H].
  long place(const Task& t, long g, long row) const {
    long heads = heads_of(t);
    return (s.query[t.b] + t.query + row / heads) * a.H + g * group + t.part * part_heads + row % heads;
  }
  float* sum_of(const Task& t, long split, long g, long row) const {
    long index = (t.at + (split - t.split) * t.heads + g - t.g) * row_capacity() + row;
    return sums.get() + index * (padded(a.V) + 2);
  }

  // Of each query a word for every block of keys: those it attends to.
  void selected_bits(const Task& t, std::vector<uint64_t>& bits) const {
    long words = s.keys[t.b] / KEYS + 1;
    bits.assign(t.queries * words, 0);
    for (long query = 0; query < t.queries; query++) {
      const int32_t* index = selection.index + (s.query[t.b] + t.query + query) * selection.K;
      uint64_t* to = bits.data() + query * words;
      if (index[0] < 0) std::fill(to, to + words, ~uint64_t(0));
      for (long j = 0; j < selection.K && index[j] >= 0; j++) {
        long at = index[j] - selection.first_key[t.b];
        to[at / KEYS] |= uint64_t(1) << at % KEYS;
      }
    }
  }

  // Calls attend(g, block, next, n, from, to, selected) for every block of keys that some row attends to.
  template <class F> void for_blocks(const Task& t, F attend) const {
    thread_local std::vector<uint64_t> bits;
    if (selection.index) selected_bits(t, bits);
    int rows = rows_of(t), from[MAX_ROWS], to[MAX_ROWS];
    Block<T> block, next;
    int64_t slot[2 * KEYS];  // of this block and of the next
    uint64_t selected[MAX_ROWS];
    long past = s.keys[t.b] - s.queries[t.b] + t.query, words = s.keys[t.b] / KEYS + 1, heads = heads_of(t);
    long first = t.split * SPLIT, last = std::min(past + t.queries, first + SPLIT);
    if (a.window) first = std::max(first, (past + 1 - a.window) / KEYS * KEYS);
    Pages pages{s.page + t.b * s.pages, s.page_size};
    bool asked = false;  // for the first block; each block asks for the one after it
    for (long k0 = std::max(0L, first); k0 < last; k0 += KEYS) {
      int n = (int)std::min<long>(KEYS, last - k0);
      if (selection.index) {
        uint64_t any = 0;
        for (int r = 0; r < rows; r++) any |= selected[r] = bits[r / heads * words + k0 / KEYS];
        if (!any) continue;
      }
      for (int r = 0; r < rows; r++) {
        long seen = past + r / heads + 1;
        to[r] = (int)std::min<long>(n, seen - k0);
        from[r] = a.window ? (int)std::max<long>(0, seen - a.window - k0) : 0;
      }
      int both = (int)std::min<long>(rows > FEW_ROWS ? n : 2 * KEYS, last - k0);
      pages.slots(k0, both, slot);
      find(slot, n, t.g, block);
      for (int k = 0; k < n && rows <= FEW_ROWS && !asked; k++) prefetch_row(block.key[k], a.D), prefetch_row(block.value[k], a.V);
      asked = true;
      for (long g = t.g; g < t.g + t.heads; g++) {
        bool last_head = g + 1 == t.g + t.heads, more = rows <= FEW_ROWS && (!last_head || both > n);
        if (more && !last_head) find(slot, n, g + 1, next);
        if (more && last_head) find(slot + n, both - n, t.g, next);
        attend(g, block, more ? &next : nullptr, n, from, to, selection.index ? selected : nullptr);
        if (!last_head) more ? (void)(block = next) : find(slot, n, g + 1, block);
      }
    }
  }
  // The keys and values in n slots; the last one stands for those that a block lacks.
  void find(const int64_t* slot, int n, long g, Block<T>& block) const {
    for (int k = 0; k < KEYS; k++) {
      int64_t at = slot[std::min(k, n - 1)];
      block.key[k] = key.row(at, g), block.value[k] = value.row(at, g);
    }
  }

  void attend(const Task& t) {
    thread_local std::vector<Rows> of_heads;
    of_heads.resize(std::max<long>((long)of_heads.size(), t.heads));
    int rows = rows_of(t);
    auto query = [&](long g) {
      return [this, &t, g](int r) {
        long at = place(t, g, r);
        return q + at / a.H * ldq + at % a.H * a.D;
      };
    };
    for (long i = 0; i < t.heads; i++) of_heads[i].reset(a, rows);
    if (!attend_by_tiles(t, of_heads[0], query(t.g))) {
      for (long i = 0; i < t.heads; i++) of_heads[i].template take_queries<T>(a, rows, query(t.g + i));
      for_blocks(t, [&](long g, auto&&... block) { attend_block<T>(of_heads[g - t.g], rows, a, block...); });
    }
    for (long g = t.g; g < t.g + t.heads; g++)
      for (int r = 0; r < rows; r++) leave(t, g, r, of_heads[g - t.g]);
  }
  template <class F> bool attend_by_tiles(const Task& t, Rows& mine, F query) {
#if defined(__AMX_BF16__)
    int rows = rows_of(t);
    if constexpr (sizeof(T) == 2)
      if (rows > FEW_ROWS && amx_attention_suits(a.D, a.V)) {
        thread_local AmxRows amx;
        Tiles shape(AMX_ROWS);
        amx.take_queries(rows, a.D, query);
        for_blocks(t, [&](long, const Block<T>& block, const Block<T>*, auto... seen) {
          amx_block(amx, rows, a.D, a.V, a.scale, key.ld, block.key, block.value, seen..., mine.top, mine.total, mine.out.data());
        });
        for (int r = 0; r < rows; r++) mine.top[r] *= 0.693147181f;  // was a power of two
        return true;
      }
#endif
    return false;
  }
  // The result of a row, or its partial sums.
  void leave(const Task& t, long g, int r, const Rows& mine) {
    long V = padded(a.V);
    const float* from = mine.out.data() + r * V;
    if (t.splits > 1) {
      float* sum = sum_of(t, t.split, g, r);
      sum[0] = mine.top[r], sum[1] = mine.total[r];
      memcpy(sum + 2, from, V * sizeof(float));
      return;
    }
    for (long v = 0; v < a.V; v += LANES)
      store_some(out + place(t, g, r) * a.V + v, load(from + v) / std::max(mine.total[r], 1e-30f), (int)std::min<long>(LANES, a.V - v));
  }
  void merge(const Task& t) {
    if (t.splits == 1 || t.split) return;
    for (long g = t.g; g < t.g + t.heads; g++)
      for (int r = 0; r < rows_of(t); r++) {
        float top = -INFINITY, total = 0;
        for (long z = 0; z < t.splits; z++) top = std::max(top, sum_of(t, z, g, r)[0]);
        for (long z = 0; z < t.splits; z++) total += sum_of(t, z, g, r)[1] * std::exp(sum_of(t, z, g, r)[0] - top);
        for (long v = 0; v < a.V; v += LANES) {
          vec y = {};
          for (long z = 0; z < t.splits; z++) y += load(sum_of(t, z, g, r) + 2 + v) * std::exp(sum_of(t, z, g, r)[0] - top);
          store_some(out + place(t, g, r) * a.V + v, y / total, (int)std::min<long>(LANES, a.V - v));
        }
      }
  }
};
