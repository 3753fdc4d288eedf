// Optimizer steps: a thread for four parameters, with the processor's operations in its order. Those that end with `from` read the
// numbers of the step from memory, in the same order.

template <typename T>
__device__ __forceinline__ void sgd(T* p, const T* g, T* v, T factor, T lr, T momentum, T weight_decay, u64 n) {
    at_places(n, [=](u64 i) {
        T param = p[i];
        T step = factor * g[i] + weight_decay * param;
        if (v) {
            step = momentum * v[i] + step;
            v[i] = step;
        }
        p[i] = param - lr * step;
    });
}

template <typename T>
__device__ __forceinline__ void adamw(
    T* p, const T* g, T* m, T* v, T factor, T beta1, T rest1, T beta2, T rest2, T eps, T shrink, T rate, T root, u64 n) {
    at_places(n, [=](u64 i) {
        T gradient = factor * g[i];
        T first = beta1 * m[i] + rest1 * gradient;
        T second = beta2 * v[i] + rest2 * (gradient * gradient);
        m[i] = first;
        v[i] = second;
        p[i] = p[i] * shrink - rate * first / (sqrt(second) * root + eps);
    });
}

#define SGD_MEMORY(T) T *__restrict__ p, const T *__restrict__ g, T *__restrict__ v
#define ADAMW_MEMORY(T) T *__restrict__ p, const T *__restrict__ g, T *__restrict__ m, T *__restrict__ v
#define FOR_REAL(T)                                                                                                      \
    extern "C" __global__ void sgd_##T(SGD_MEMORY(T), T factor, T lr, T momentum, T weight_decay, u64 n) {               \
        sgd(p, g, v, factor, lr, momentum, weight_decay, n);                                                             \
    }                                                                                                                    \
    extern "C" __global__ void sgd_from_##T(SGD_MEMORY(T), const T* of, u64 n) {                                         \
        sgd(p, g, v, of[0], of[1], of[2], of[3], n);                                                                     \
    }                                                                                                                    \
    extern "C" __global__ void adamw_##T(ADAMW_MEMORY(T), T factor, T beta1, T rest1, T beta2, T rest2, T eps, T shrink, \
                                         T rate, T root, u64 n) {                                                        \
        adamw(p, g, m, v, factor, beta1, rest1, beta2, rest2, eps, shrink, rate, root, n);                               \
    }                                                                                                                    \
    extern "C" __global__ void adamw_from_##T(ADAMW_MEMORY(T), const T* of, u64 n) {                                     \
        adamw(p, g, m, v, of[0], of[1], of[2], of[3], of[4], of[5], of[6], of[7], of[8], n);                             \
    }
REAL_TYPES(FOR_REAL)
