// Products on tensor cores: 16 x 16 by 16 x 8 numbers of 16 bits, summed in f32 (PTX ISA, "Matrix Fragments for mma.m16n8k16").
//
// Lane 4 g + t of a warp has of a, rows g and g + 8 and columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, two to a register; of b,
// which comes by its columns, these rows of column g; and of the result, columns 2 t and 2 t + 1 of rows g and g + 8. All lanes
// of a warp take part in each call. Needs compute capability 8.0: on older cards these functions end the kernel, so the other
// kernels of a source can be used there.
#if __CUDA_ARCH__ >= 800
#define ON_TENSOR_CORES(...) __VA_ARGS__
#else
#define ON_TENSOR_CORES(...) __trap()
#endif

// Numbers of the fragments of 8 x 8 results: 2 of row g, then 2 of row g + 8.
typedef f32 Sums[4];

template <typename S> struct Tensor;
template <> struct Tensor<bf16> {
    // All bits of the exponents of two numbers.
    enum : u32 { EXPONENTS = 0x7f807f80u };
    // sums += a b.
    static __device__ __forceinline__ void multiply(Sums& sums, const u32 (&a)[4], u32 b0, u32 b1) {
        ON_TENSOR_CORES(asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)));
    }
    // Two numbers, rounded; the first one is in the low half.
    static __device__ __forceinline__ u32 pair(f32 first, f32 second) {
        u32 bits = 0;
        ON_TENSOR_CORES(asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first)));
        return bits;
    }
};
template <> struct Tensor<f16> {
    enum : u32 { EXPONENTS = 0x7c007c00u };
    static __device__ __forceinline__ void multiply(Sums& sums, const u32 (&a)[4], u32 b0, u32 b1) {
        ON_TENSOR_CORES(asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)));
    }
    static __device__ __forceinline__ u32 pair(f32 first, f32 second) {
        u32 bits = 0;
        ON_TENSOR_CORES(asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first)));
        return bits;
    }
};

// An f32 that tensor cores multiply with 10 bits of mantissa, in products of 16 x 8 by 8 x 8 numbers (PTX ISA, "Matrix Fragments
// for mma.m16n8k8"). The fragments are those of 16 bits with a number in place of a pair.
struct tf32 { f32 number; };
template <> struct As<tf32> {
    typedef f32 Real;
    static __device__ __forceinline__ tf32 store(f32 x) { return tf32{x}; }
};
template <> struct Tensor<tf32> {
    static __device__ __forceinline__ void multiply(Sums& sums, const u32 (&a)[4], u32 b0, u32 b1) {
        ON_TENSOR_CORES(asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)));
    }
    // The nearest number with 10 bits of mantissa; halfway cases go away from zero.
    static __device__ __forceinline__ u32 rounded(u32 x) {
        u32 bits = 0;
        ON_TENSOR_CORES(asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(__uint_as_float(x))));
        return bits;
    }
};

// Four matrices of 8 x 8 numbers from shared memory: lane 8 i + j has the address of row j of matrix i, a multiple of 16 bytes.
template <typename S> __device__ __forceinline__ u32 shared_address(const S* at) {
    u64 address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(at));
    return (u32)address;
}
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}
template <typename S> __device__ __forceinline__ void load_matrices(u32 (&to)[4], const S* at) { load_matrices(to, shared_address(at)); }
template <typename S> __device__ __forceinline__ void load_transposed(u32 (&to)[4], const S* at) {
    load_transposed(to, shared_address(at));
}
