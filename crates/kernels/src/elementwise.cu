// Element-wise operations: a thread for four elements. They have the processor's bits.

template <typename S> __global__ void relu(const S* __restrict__ x, S* __restrict__ y, u64 n) {
    at_places(n, [=](u64 i) {
        S own = x[i];
        auto value = load(own);
        bool passes = value > 0 || value != value;
        y[i] = passes ? own : As<S>::store(0);
    });
}

template <typename S>
__global__ void relu_backward(const S* __restrict__ y, const S* __restrict__ dy, S* __restrict__ dx, u64 n) {
    at_places(n, [=](u64 i) {
        S own = dy[i];
        dx[i] = load(y[i]) == 0 ? As<S>::store(0) : own;
    });
}

template <typename S> __global__ void add(const S* __restrict__ x, S* __restrict__ y, u64 n) {
    at_places(n, [=](u64 i) { y[i] = As<S>::store(load(x[i]) + load(y[i])); });
}

template <typename R> __global__ void divide(R* x, f64 divisor, u64 n) {
    at_places(n, [=](u64 i) { x[i] = x[i] / (R)divisor; });
}
