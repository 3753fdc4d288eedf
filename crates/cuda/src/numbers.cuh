// Numbers as they lie in memory, and the types in which kernels compute with them. In front of every source.
//
// Sums and products are rounded as on the processor: the compiler contracts nothing (see the options of paceline-cuda).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;
typedef float f32;
typedef double f64;

// Numbers of 16 bits, as bits.
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

__device__ __forceinline__ float load(float x) { return x; }
__device__ __forceinline__ double load(double x) { return x; }
__device__ __forceinline__ float load(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float load(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// The nearest value of the type; halfway cases go to the even one. NaN stays NaN, with its sign.
template <typename S> struct As;
template <> struct As<float> {
    typedef float Real;
    static __device__ __forceinline__ float store(float x) { return x; }
};
template <> struct As<double> {
    typedef double Real;
    static __device__ __forceinline__ double store(double x) { return x; }
};
template <> struct As<bf16> {
    typedef float Real;
    static __device__ __forceinline__ bf16 store(float x) {
        u32 bits = __float_as_uint(x);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{(u16)((bits >> 16) | 0x40u)};
        return bf16{(u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
    }
};
template <> struct As<f16> {
    typedef float Real;
    static __device__ __forceinline__ f16 store(float x) {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
        return f16{bits};
    }
};

// Numbers side by side, which are read and written in one access.
template <typename S, u32 SIZE> struct __align__(SIZE * sizeof(S)) Pack {
    enum : u32 { COUNT = SIZE };
    S of[SIZE];
};

// The place of this thread among all of a grid of one axis.
__device__ __forceinline__ u64 place() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }

// Calls f with the places of this thread below n, of a grid of one axis: four, a block's width apart, so that their numbers are on the
// way at the same time. For that the compiler has to know that no element is both read and written (`__restrict__`).
template <typename F> __device__ __forceinline__ void at_places(u64 n, F f) {
    u64 first = (u64)blockIdx.x * blockDim.x * 4 + threadIdx.x, last = first + 3 * blockDim.x;
    if (last < n) {
        #pragma unroll
        for (u32 k = 0; k < 4; ++k) f(first + k * blockDim.x);
    } else {
        for (u64 i = first; i < n; i += blockDim.x) f(i);
    }
}

// a b + c, rounded once.
__device__ __forceinline__ float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return __fma_rn(a, b, c); }
