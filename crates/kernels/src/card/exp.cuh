// e to the power of x, with the processor's bits in f32 (see exp.rs), and to the last bit or two in f64.

__device__ __forceinline__ float fast_exp(float x) {
    const float round = 12582912.0f;
    float shifted = x * 1.44269504f + round, n = shifted - round;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.98756910e-4f;
    p = p * r + 1.39819990e-3f;
    p = p * r + 8.33345200e-3f;
    p = p * r + 4.16657960e-2f;
    p = p * r + 1.66666650e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    float y = __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
    if (x < -87.33654f) y = 0;
    return x <= 88.72283f ? y : x * __int_as_float(0x7f800000);
}

__device__ __forceinline__ double fast_exp(double x) { return exp(x); }

// log2(e), and ln(2).
template <typename Real> __device__ Real to_base_2() { return (Real)1.4426950408889634; }
template <typename Real> __device__ Real to_base_e() { return (Real)0.6931471805599453; }

// 2 to the power of x: in f32 within 2 units of the last place, and zero below the normal numbers.
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ double power(double x) { return exp2(x); }
