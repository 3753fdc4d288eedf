// An element-wise function: `value` and `derivatives` are stated before this text.

// Up to 8 parameters, which belong to the columns, and their gradients.
struct Addresses { u64 params[8], gradients[8]; };
// The function's numbers.
struct Settings { f64 of[4]; };

template <typename R> __device__ __forceinline__ void fetch(const Addresses& from, u32 count, u64 column, R* to) {
    #pragma unroll
    for (u32 k = 0; k < 8; ++k) if (k < count) to[k] = ((const R*)from.params[k])[column];
}

// The values, or with `dy` the gradients of `x`.
template <typename S> __global__ void function_apply(
    const S* __restrict__ x, const S* __restrict__ dy, S* __restrict__ y, Addresses at, u32 count, Settings settings, u64 columns, u64 n) {
    typedef typename As<S>::Real R;
    at_places(n, [=](u64 i) {
        R params[8], by_params[8];
        fetch(at, count, i % columns, params);
        R own = load(x[i]);
        y[i] = As<S>::store(dy ? derivatives<R>(own, params, settings.of, by_params) * load(dy[i]) : value<R>(own, params, settings.of));
    });
}

// Gradients of the parameters, row by row: a thread for each column. Bit k of `adds` says whether gradient k is added to.
template <typename S> __global__ void function_gradients(
    const S* x, const S* dy, Addresses at, u32 count, u32 adds, Settings settings, u64 columns, u64 n) {
    typedef typename As<S>::Real R;
    u64 column = place();
    if (column >= columns) return;
    R params[8], by_params[8], sums[8];
    fetch(at, count, column, params);
    #pragma unroll
    for (u32 k = 0; k < 8; ++k) if (k < count) sums[k] = adds >> k & 1 ? ((const R*)at.gradients[k])[column] : R(0);
    for (u64 i = column; i < n; i += columns) {
        derivatives<R>(load(x[i]), params, settings.of, by_params);
        R slope = load(dy[i]);
        #pragma unroll
        for (u32 k = 0; k < 8; ++k) if (k < count) sums[k] += by_params[k] * slope;
    }
    #pragma unroll
    for (u32 k = 0; k < 8; ++k) if (k < count) ((R*)at.gradients[k])[column] = sums[k];
}
