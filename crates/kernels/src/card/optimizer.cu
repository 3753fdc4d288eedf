// Optimizer steps: a thread for four parameters, with the processor's operations in its order. Those that end with `from` read the
// numbers of the step from memory, in the same order.

template <typename T> struct Sgd { T factor, lr, momentum, weight_decay; };
template <typename T> struct AdamW { T factor, beta1, rest1, beta2, rest2, eps, shrink, rate, root; };

template <typename T> __device__ __forceinline__ void step(T* p, const T* g, T* v, const Sgd<T>& of, u64 n) {
    at_places(n, [=](u64 i) {
        T param = p[i];
        T step = of.factor * g[i] + of.weight_decay * param;
        if (v) {
            step = of.momentum * v[i] + step;
            v[i] = step;
        }
        p[i] = param - of.lr * step;
    });
}

template <typename T> __device__ __forceinline__ void step(T* p, const T* g, T* m, T* v, const AdamW<T>& of, u64 n) {
    at_places(n, [=](u64 i) {
        T gradient = of.factor * g[i];
        T first = of.beta1 * m[i] + of.rest1 * gradient;
        T second = of.beta2 * v[i] + of.rest2 * (gradient * gradient);
        m[i] = first;
        v[i] = second;
        p[i] = p[i] * of.shrink - of.rate * first / (sqrt(second) * of.root + of.eps);
    });
}

template <typename T>
__global__ void sgd(T* __restrict__ p, const T* __restrict__ g, T* __restrict__ v, Sgd<T> of, u64 n) {
    step(p, g, v, of, n);
}
template <typename T>
__global__ void sgd_from(T* __restrict__ p, const T* __restrict__ g, T* __restrict__ v, const Sgd<T>* of, u64 n) {
    step(p, g, v, *of, n);
}
template <typename T>
__global__ void adamw(T* __restrict__ p, const T* __restrict__ g, T* __restrict__ m, T* __restrict__ v, AdamW<T> of, u64 n) {
    step(p, g, m, v, of, n);
}
template <typename T>
__global__ void adamw_from(T* __restrict__ p, const T* __restrict__ g, T* __restrict__ m, T* __restrict__ v,
                           const AdamW<T>* of, u64 n) {
    step(p, g, m, v, *of, n);
}
