// Optimizer steps: a thread for four parameters, with the processor's operations in its order. Those that end with `from` read the
// numbers of the step from memory, in the same order.

template <typename R> struct Sgd { R factor, lr, momentum, weight_decay; };
template <typename R> struct AdamW { R factor, beta1, rest1, beta2, rest2, eps, shrink, rate, root; };

template <typename R> __device__ __forceinline__ void step(R* p, const R* g, R* v, const Sgd<R>& of, u64 n) {
    at_places(n, [=](u64 i) {
        R param = p[i];
        R step = of.factor * g[i] + of.weight_decay * param;
        if (v) {
            step = of.momentum * v[i] + step;
            v[i] = step;
        }
        p[i] = param - of.lr * step;
    });
}

template <typename R> __device__ __forceinline__ void step(R* p, const R* g, R* m, R* v, const AdamW<R>& of, u64 n) {
    at_places(n, [=](u64 i) {
        R gradient = of.factor * g[i];
        R first = of.beta1 * m[i] + of.rest1 * gradient;
        R second = of.beta2 * v[i] + of.rest2 * (gradient * gradient);
        m[i] = first;
        v[i] = second;
        p[i] = p[i] * of.shrink - of.rate * first / (sqrt(second) * of.root + of.eps);
    });
}

template <typename R>
__global__ void sgd(R* __restrict__ p, const R* __restrict__ g, R* __restrict__ v, Sgd<R> of, u64 n) {
    step(p, g, v, of, n);
}
template <typename R>
__global__ void sgd_from(R* __restrict__ p, const R* __restrict__ g, R* __restrict__ v, const R* numbers, u64 n) {
    step(p, g, v, *(const Sgd<R>*)numbers, n);
}
template <typename R>
__global__ void adamw(R* __restrict__ p, const R* __restrict__ g, R* __restrict__ m, R* __restrict__ v, AdamW<R> of, u64 n) {
    step(p, g, m, v, of, n);
}
template <typename R>
__global__ void adamw_from(R* __restrict__ p, const R* __restrict__ g, R* __restrict__ m, R* __restrict__ v,
                           const R* numbers, u64 n) {
    step(p, g, m, v, *(const AdamW<R>*)numbers, n);
}
