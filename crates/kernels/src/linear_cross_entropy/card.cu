// The loss of a linear layer's outputs, row by row: the products around it are those of the library.

// The label of a row without a target.
enum : i64 { IGNORED = -100 };

// The state of a thread for a row: the largest of its elements, the place where it is first, and the sum of
// exp(element - largest).
template <typename Real> struct Softmax {
    Real largest, sum;
    u64 place;

    static __device__ Real lowest() { return -(Real)__int_as_float(0x7f800000); }

    __device__ Softmax() : largest(lowest()), sum(0), place(~0ull) {}

    __device__ void take(Real x, u64 at) {
        bool is_larger = x > largest;
        Real most = is_larger ? x : largest;
        place = is_larger ? at : place;
        rescale(most);
        sum += x == lowest() ? (Real)0 : exponential(x - most);
    }

    static __device__ Real exponential(Real x) { return power(x * to_base_2<Real>()); }
    __device__ void rescale(Real most) {
        sum *= largest == most ? (Real)1 : exponential(largest - most);
        largest = most;
    }
};

template <typename Real> __device__ Real larger(Real x, Real y) { return y > x ? y : x; }

// Where the gradient goes.
enum : u32 { NOWHERE, ROUNDED, IN_PLACE };

// A block for each row of z (rows, classes): the gradient of scale times the loss takes the place of z, and is stored rounded if
// `rounded` is given, or only that. mark is 0 for an ignored row, else 1, and 3 if the label has the largest output.
template <typename S, typename Real = typename As<S>::Real>
__global__ void row_losses(const i64* labels, u64 classes, f64 scale, u32 gradient, Real* all_z, S* all_rounded,
                           f64* losses, i32* marks) {
    __shared__ Real maxima[32], of_warps[32];
    Real* z = all_z + blockIdx.x * classes;
    S* rounded = all_rounded ? all_rounded + blockIdx.x * classes : 0;
    i64 label = labels[blockIdx.x];
    if (label == IGNORED) {
        if (threadIdx.x == 0) marks[blockIdx.x] = 0;
        if (gradient == NOWHERE) return;
        for (u64 j = threadIdx.x; j < classes; j += blockDim.x) {
            if (gradient == IN_PLACE) z[j] = 0;
            if (rounded) rounded[j] = As<S>::store(0);
        }
        return;
    }
    u32 warps = blockDim.x / 32;
    Softmax<Real> own;
    const Real* at = z + threadIdx.x;
    for (u64 j = threadIdx.x; j < classes; j += blockDim.x, at += blockDim.x) own.take(*at, j);
    Real most = own.largest, largest = most;
    for (u32 mask = 16; mask > 0; mask /= 2) most = larger(most, __shfl_xor_sync(~0u, most, mask));
    if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = most;
    // A label that is no class has no output.
    bool is_class = label >= 0 && (u64)label < classes;
    Real of_label = is_class ? z[label] : (Real)__int_as_float(0x7fffffff);
    __syncthreads();
    most = maxima[0];
    for (u32 warp = 1; warp < warps; ++warp) most = larger(most, maxima[warp]);
    own.rescale(most);
    Real sum = own.sum;
    for (u32 mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    // The label is right if its output is the first of the largest ones.
    int is_behind = __syncthreads_or(largest == most && own.place < (u64)label);
    sum = of_warps[0];
    for (u32 warp = 1; warp < warps; ++warp) sum += of_warps[warp];
    if (threadIdx.x == 0) {
        losses[blockIdx.x] = (f64)(log(sum) + most - of_label);
        bool is_correct = of_label == most && !is_behind && sum == sum;
        marks[blockIdx.x] = is_correct ? 3 : 1;
    }
    if (gradient == NOWHERE) return;
    Real factor = is_class ? (Real)scale / sum : of_label;
    for (u64 j = threadIdx.x; j < classes; j += blockDim.x) {
        Real x = Softmax<Real>::exponential(z[j] - most) * factor;
        if (j == (u64)label) x -= (Real)scale;
        if (gradient == IN_PLACE) z[j] = x;
        if (rounded) rounded[j] = As<S>::store(x);
    }
}

// One block of 256 threads. Each sums every 256th row, in order; these sums are added in pairs.
__global__ void add_losses(const f64* losses, const i32* marks, u64 rows, f64* sums) {
    __shared__ f64 parts[3][256];
    f64 loss = 0, correct = 0, count = 0;
    for (u64 row = threadIdx.x; row < rows; row += 256) {
        if (marks[row] == 0) continue;
        loss += losses[row];
        correct += marks[row] / 2;
        count += 1;
    }
    parts[0][threadIdx.x] = loss;
    parts[1][threadIdx.x] = correct;
    parts[2][threadIdx.x] = count;
    for (u32 half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x >= half) continue;
        for (u32 k = 0; k < 3; ++k) parts[k][threadIdx.x] += parts[k][threadIdx.x + half];
    }
    if (threadIdx.x == 0) {
        for (u32 k = 0; k < 3; ++k) sums[k] += parts[k][0];
    }
}

__global__ void ignore_padding(const i64* labels, const i64* lengths, u64 seq, i64* real, u64 n) {
    u64 i = place();
    if (i < n) real[i] = (i64)(i % seq) < lengths[i / seq] ? labels[i] : IGNORED;
}
