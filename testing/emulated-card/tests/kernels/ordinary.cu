// Ordinary kernels, for tests of the interpreter: what each computes is said again in Rust beside its test.
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
typedef long long i64;
#define KERNEL extern "C" __global__ void
#define INLINE __device__ __forceinline__

INLINE float from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }
INLINE u16 to_bf16(float x) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
INLINE u32 to_bf16x2(float high, float low) {
    u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r;
}
INLINE float from_f16(u16 bits) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits)); return r; }
INLINE u16 to_f16(float x) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }

// A sum over the block whose order depends only on its size.
INLINE float block_sum(float v, float* shared) {
    for (int o = 16; o > 0; o >>= 1) v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, o));
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
    __syncthreads();
    u32 warps = blockDim.x >> 5;
    v = threadIdx.x < warps ? shared[threadIdx.x] : 0.0f;
    if (threadIdx.x < 32) {
        for (int o = 16; o > 0; o >>= 1) v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, o));
        if (threadIdx.x == 0) shared[0] = v;
    }
    __syncthreads();
    return shared[0];
}

KERNEL tree_mean(const float* a, const float* b, const float* c, const float* d, float* out, u32 n) {
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        out[i] = __fdiv_rn(__fadd_rn(__fadd_rn(a[i], b[i]), __fadd_rn(c[i], d[i])), 4.0f);
}

KERNEL rms_norm(const float* x, const float* w, float eps, u16* y, float* scales, u32 columns) {
    __shared__ float shared[32];
    const float* row = x + (u64)blockIdx.x * columns;
    float sum = 0.0f;
    for (u32 j = threadIdx.x; j < columns; j += blockDim.x) sum = __fmaf_rn(row[j], row[j], sum);
    sum = block_sum(sum, shared);
    float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)columns), eps)));
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    for (u32 j = threadIdx.x; j < columns; j += blockDim.x)
        y[(u64)blockIdx.x * columns + j] = to_bf16(__fmul_rn(__fmul_rn(row[j], scale), w[j]));
}

KERNEL softmax(const float* x, float* y, u32 columns) {
    __shared__ float shared[32];
    const float* row = x + (u64)blockIdx.x * columns;
    float sum = 0.0f;
    for (u32 j = threadIdx.x; j < columns; j += blockDim.x) sum += expf(row[j]);
    sum = block_sum(sum, shared);
    for (u32 j = threadIdx.x; j < columns; j += blockDim.x) y[(u64)blockIdx.x * columns + j] = __expf(row[j]) / sum;
}

// Rows by vectors of four into shared memory, columns out of it.
KERNEL transpose(const float4* in, float* out, u32 rows, u32 columns) {
    __shared__ float tile[32][33];
    u32 r = blockIdx.y * 32 + threadIdx.y, c = blockIdx.x * 32 + threadIdx.x * 4;
    if (r < rows && c < columns) {
        float4 v = in[((u64)r * columns + c) / 4];
        float* t = &tile[threadIdx.y][threadIdx.x * 4];
        t[0] = v.x; t[1] = v.y; t[2] = v.z; t[3] = v.w;
    }
#ifndef PLANT_RACE
    __syncthreads();
#endif
    c = blockIdx.x * 32 + threadIdx.y;
    for (u32 k = 0; k < 4; ++k) {
        r = blockIdx.y * 32 + threadIdx.x * 4 + k;
        if (r < rows && c < columns) out[(u64)c * rows + r] = tile[threadIdx.x * 4 + k][threadIdx.y];
    }
}

// d (16 x 8, f32) = a (16 x 16, rows) b (16 x 8, columns), one warp.
KERNEL tensor_core(const u32* a, const u32* b, float* d) {
    u32 g = threadIdx.x >> 2, t = threadIdx.x & 3;
    u32 a0 = a[g * 8 + t], a1 = a[(g + 8) * 8 + t], a2 = a[g * 8 + t + 4], a3 = a[(g + 8) * 8 + t + 4];
    u32 b0 = b[g * 8 + t], b1 = b[g * 8 + t + 4];
    float d0, d1, d2, d3;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d0), "=f"(d1), "=f"(d2), "=f"(d3) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
    d[g * 8 + t * 2] = d0; d[g * 8 + t * 2 + 1] = d1;
    d[(g + 8) * 8 + t * 2] = d2; d[(g + 8) * 8 + t * 2 + 1] = d3;
}

// Every lane's value once more by the functions of the math library, 24 results a thread.
KERNEL functions(const float* x, float* out, u32 n) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i], *o = out + i;
    o[0 * n] = expf(v); o[1 * n] = logf(fabsf(v)); o[2 * n] = tanhf(v); o[3 * n] = erff(v);
    o[4 * n] = sinf(v); o[5 * n] = cosf(v); o[6 * n] = powf(fabsf(v), 1.5f); o[7 * n] = rsqrtf(fabsf(v));
    o[8 * n] = exp2f(v); o[9 * n] = log1pf(fabsf(v)); o[10 * n] = expm1f(v); o[11 * n] = cbrtf(v);
    o[12 * n] = floorf(v); o[13 * n] = rintf(v); o[14 * n] = truncf(v); o[15 * n] = roundf(v);
    o[16 * n] = fmodf(v, 0.3f); o[17 * n] = (float)sqrt((double)fabsf(v)); o[18 * n] = (float)exp((double)v);
    o[19 * n] = (float)log((double)fabsf(v)); o[20 * n] = fminf(v, 0.25f); o[21 * n] = copysignf(2.0f, v);
    o[22 * n] = __sinf(v); o[23 * n] = (float)exp2((double)v);
}

// Integers of every size: the results are folded into one number a thread.
KERNEL integers(const u32* x, u64* out, u32 n) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 a = x[i], b = x[(i + 1) % n];
    u64 h = 0;
    auto fold = [&](u64 v) { h = (h ^ v) * 0x100000001b3ull + (h >> 29); };
    fold(a + b); fold(a * b); fold((int)a / (int)(b | 1)); fold(a % (b | 1)); fold((u64)a * b);
    fold((u64)((i64)(int)a * (int)b)); fold(__umulhi(a, b)); fold((u32)__mulhi((int)a, (int)b));
    fold(__umul64hi((u64)a << 20 | b, (u64)b << 13 | a)); fold(a >> (b & 31)); fold((u32)((int)a >> (b & 31)));
    fold(__popc(a)); fold(__clz(b)); fold(__ffs(a)); fold(__brev(a)); fold(__popcll((u64)a << 32 | b));
    fold(__byte_perm(a, b, 0x5140)); fold(__funnelshift_l(a, b, b & 31)); fold(min((int)a, (int)b)); fold(max(a, b));
    fold((a & 0x0ff0) | (~b & 0xf00f) ^ (a << 3)); fold((u8)(a + b)); fold((u16)(a * 3)); fold((u64)(i64)(signed char)a);
    fold((u64)(i64)(short)b); fold((u32)abs((int)a)); fold(((u64)a << 32 | b) / (a | 1)); fold(((u64)b << 32 | a) % 1000003);
    fold((a >> 5) & 0x3ff); fold((u32)(((int)(a << 7)) >> 22)); fold(a == b); fold((u64)(a < b ? (i64)-1 : 7));
    switch (a & 7) {
        case 0: h += 11; break; case 1: h ^= b; break; case 2: h *= 3; break; case 3: h -= a; break;
        case 4: h += b * 5; break; case 5: h ^= 0x55; break; default: h = ~h;
    }
    out[i] = h;
}

// Conversions: one value as every type and back.
KERNEL conversions(const float* x, double* out, u32 n) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i] * 1000.0f;
    double* o = out + i;
    o[0 * n] = (double)(int)v; o[1 * n] = (double)(u32)fabsf(v); o[2 * n] = (double)(i64)(v * 1e6f);
    o[3 * n] = from_bf16(to_bf16(v)); o[4 * n] = from_f16(to_f16(v)); o[5 * n] = (double)__float2int_rn(v);
    o[6 * n] = (double)__double2float_rn(v / 3.0); o[7 * n] = (double)__double2float_rz(v / 3.0);
    o[8 * n] = (double)(float)(i64)(v * 1e12f); o[9 * n] = (double)(signed char)(int)v; o[10 * n] = fma((double)v, 1e-3, 2.0);
    o[11 * n] = (double)__uint2float_rz(0xffffffffu - (u32)fabsf(v)); o[12 * n] = (double)__float2int_rd(v);
    u32 pair = to_bf16x2(v, -v);
    o[13 * n] = from_bf16((u16)pair) + 2.0 * from_bf16((u16)(pair >> 16)); o[14 * n] = (double)__saturatef(v);
    o[15 * n] = (double)__fadd_rd(v, 1e-3f);
}

// Loss of rows with a gradient, as a training step has it: bytes as labels, f64 sums, atomics.
KERNEL histogram(const u8* labels, const float* weights, u32* counts, float* sums, double* total, u64* seen, u32 n) {
    __shared__ u32 local[16];
    if (threadIdx.x < 16) local[threadIdx.x] = 0;
    __syncthreads();
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        atomicAdd(&local[labels[i] & 15], 1u);
        atomicAdd(&sums[labels[i] & 15], weights[i]);
        atomicAdd(total, (double)weights[i]);
        atomicMax(&seen[0], (u64)i);
        u64 old = seen[1], assumed;
        do { assumed = old; old = atomicCAS(&seen[1], assumed, assumed + 1); } while (assumed != old);
    }
    __syncthreads();
    if (threadIdx.x < 16) atomicAdd(&counts[threadIdx.x], local[threadIdx.x]);
}

__constant__ float table[4] = {1.0f, -2.0f, 0.5f, 8.0f};
__device__ u32 launches;

// Module variables, local arrays, dynamic shared memory, votes and barriers that count.
KERNEL odds_and_ends(const u32* x, float* out, u32* votes, u32 n) {
    extern __shared__ u32 dynamic[];
    u32 t = threadIdx.x;
    float stack[9];
    for (u32 k = 0; k < 9; ++k) stack[(k * 4) % 9] = (float)(x[t] + k);
    dynamic[t] = x[t];
    u32 odd = __syncthreads_count(x[t] & 1);
    u32 reversed = dynamic[blockDim.x - 1 - t];
    int any = __syncthreads_or(reversed == x[n - 1]);
    out[t] = table[x[t] & 3] * stack[x[t] % 9] + (float)odd + (any ? 0.5f : 0.0f);
    votes[t * 4] = __ballot_sync(0xffffffffu, x[t] > 7);
    votes[t * 4 + 1] = __any_sync(0xffffffffu, x[t] == 3) + 2 * __all_sync(0xffffffffu, x[t] < 100);
    u32 v = __shfl_up_sync(0xffffffffu, x[t], 3, 8);
    votes[t * 4 + 2] = v * 1000 + __shfl_down_sync(0xffffffffu, x[t], 5);
    u32 active = 0;
    if (t & 1) active = __popc(__activemask());
    votes[t * 4 + 3] = __shfl_sync(0xffffffffu, active, 1);
    if (t == 0) atomicAdd(&launches, 1u);
    __threadfence();
    if (t == 0) out[n] = (float)launches;
}
