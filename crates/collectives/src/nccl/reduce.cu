// The reduction of the ranks' parts, which lie one behind the other: in the order of the tree over the ranks, with the
// processor's operations, so that the bits are those of every other transport.

enum Op { SUM, MEAN, MIN, MAX, PRODUCT };

// The type in which values are combined.
template <typename S> struct Running { typedef S Type; };
template <> struct Running<f16> { typedef f32 Type; };
template <> struct Running<bf16> { typedef f32 Type; };

template <typename S> __device__ __forceinline__ S widen(S x) { return x; }
__device__ __forceinline__ f32 widen(f16 x) { return load(x); }
__device__ __forceinline__ f32 widen(bf16 x) { return load(x); }
template <typename S> __device__ __forceinline__ S narrow(typename Running<S>::Type x) { return x; }
template <> __device__ __forceinline__ f16 narrow<f16>(f32 x) { return As<f16>::store(x); }
template <> __device__ __forceinline__ bf16 narrow<bf16>(f32 x) { return As<bf16>::store(x); }

// Sums and products of integers wrap.
__device__ __forceinline__ f32 add(f32 a, f32 b) { return a + b; }
__device__ __forceinline__ f64 add(f64 a, f64 b) { return a + b; }
template <typename I> __device__ __forceinline__ I add(I a, I b) { return (I)((u64)a + (u64)b); }
__device__ __forceinline__ f32 multiply(f32 a, f32 b) { return a * b; }
__device__ __forceinline__ f64 multiply(f64 a, f64 b) { return a * b; }
template <typename I> __device__ __forceinline__ I multiply(I a, I b) { return (I)((u64)a * (u64)b); }

template <typename T> __device__ __forceinline__ T divide(T all, u32 ranks) { return all / (T)ranks; }
// The number of ranks may be no byte.
__device__ __forceinline__ u8 divide(u8 all, u32 ranks) { return (u8)(all / ranks); }

// A value that is not equal to itself is NaN, which stays.
template <typename T> __device__ __forceinline__ T combine(u32 op, T left, T right) {
    if (op == MIN) return right < left || right != right ? right : left;
    if (op == MAX) return right > left || right != right ? right : left;
    return op == PRODUCT ? multiply(left, right) : add(left, right);
}

template <typename S> __global__ void reduce_tree(const S* parts, S* result, u64 elems, u32 ranks, u32 op) {
    typedef typename Running<S>::Type T;
    u64 i = place();
    if (i >= elems) return;
    // As a binary counter counts: each value is merged with those on the stack that are the other halves of its nodes. There
    // are at most 1024 ranks.
    T stack[11];
    u32 depth = 0;
    for (u32 rank = 0; rank < ranks; ++rank) {
        T value = widen(parts[rank * elems + i]);
        u32 merges = rank + 1 == ranks ? __popc(rank) : __ffs(rank + 1) - 1;
        for (; merges > 0; --merges) value = combine(op, stack[--depth], value);
        stack[depth++] = value;
    }
    T all = stack[0];
    result[i] = narrow<S>(op == MEAN ? divide(all, ranks) : all);
}
