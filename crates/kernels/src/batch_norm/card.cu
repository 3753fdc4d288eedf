// Batch normalization, with the processor's bits: sums over blocks of rows, and then over the blocks, in order.

// The statistics and parameters of all channels.
template <typename R> struct Norm {
    const f64* moments;
    const R *weights, *biases;
    f64 eps;
    u32 channels, with_relu;
};

// The numbers of the formulas for a channel.
template <typename R> struct Channel {
    R mean, mean_rest, inv_std, weight, bias;
    bool with_relu;

    __device__ Channel(const Norm<R>& norm, u32 c) {
        f64 exact = norm.moments[1 + c];
        mean = (R)exact;
        mean_rest = (R)(exact - (f64)mean);
        inv_std = (R)(1.0 / sqrt(norm.moments[1 + norm.channels + c] + norm.eps));
        weight = norm.weights[c];
        bias = norm.biases[c];
        with_relu = norm.with_relu;
    }

    __device__ R x_hat(R x) const { return ((x - mean) - mean_rest) * inv_std; }
    __device__ R z(R x_hat) const { return x_hat * weight + bias; }
    __device__ bool is_cut(R z) const { return with_relu && z <= R(0); }
};

// A thread for each channel and block of rows (blockIdx.y): the sums of the values and of their squares.
template <typename S>
__global__ void norm_sums(const S* x, f64* blocks, u32 channels, u64 rows, u32 rows_of_block) {
    u32 c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    u64 row = (u64)blockIdx.y * rows_of_block, end = row + rows_of_block < rows ? row + rows_of_block : rows;
    f64 sum = 0, squares = 0;
    for (; row < end; ++row) {
        f64 value = load(x[row * channels + c]);
        sum = sum + value;
        squares = squares + value * value;
    }
    blocks[(u64)blockIdx.y * 2 * channels + c] = sum;
    blocks[(u64)blockIdx.y * 2 * channels + channels + c] = squares;
}

// The same for dz and dz * x_hat.
template <typename S, typename R = typename As<S>::Real>
__global__ void norm_gradient_sums(const S* x, const S* dy, Norm<R> norm, f64* blocks, u64 rows, u32 rows_of_block) {
    u32 c = blockIdx.x * blockDim.x + threadIdx.x, channels = norm.channels;
    if (c >= channels) return;
    Channel<R> channel(norm, c);
    u64 row = (u64)blockIdx.y * rows_of_block, end = row + rows_of_block < rows ? row + rows_of_block : rows;
    f64 sum = 0, with_x_hat = 0;
    for (; row < end; ++row) {
        R x_hat = channel.x_hat(load(x[row * channels + c]));
        f64 dz = channel.is_cut(channel.z(x_hat)) ? 0.0 : (f64)load(dy[row * channels + c]);
        sum = sum + dz;
        with_x_hat = with_x_hat + dz * (f64)x_hat;
    }
    blocks[(u64)blockIdx.y * 2 * channels + c] = sum;
    blocks[(u64)blockIdx.y * 2 * channels + channels + c] = with_x_hat;
}

// A thread for each sum: over the blocks, in order. The first one also says how many values there are, if `count` is there.
__global__ void norm_add_blocks(const f64* blocks, f64* sums, f64* count, u32 len, u32 num_blocks, f64 rows) {
    u32 at = place();
    if (at == 0 && count) *count = rows;
    if (at >= len) return;
    f64 sum = 0;
    for (u32 block = 0; block < num_blocks; ++block) sum = sum + blocks[(u64)block * len + at];
    sums[at] = sum;
}

__global__ void norm_moments(const f64* sums, f64* moments, u32 channels) {
    u32 c = place();
    f64 count = sums[0];
    if (c == 0) moments[0] = count;
    if (c >= channels) return;
    bool has_values = count > 0;
    f64 mean = has_values ? sums[1 + c] / count : 0;
    f64 variance = has_values ? sums[1 + channels + c] / count - mean * mean : 0;
    moments[1 + c] = mean;
    moments[1 + channels + c] = variance < 0 ? 0 : variance;
}

template <typename R>
__global__ void norm_running_moments(const R* mean, const R* var, f64* moments, u32 channels) {
    u32 c = place();
    if (c == 0) moments[0] = __longlong_as_double(0x7ff0000000000000ll);
    if (c >= channels) return;
    moments[1 + c] = mean[c];
    moments[1 + channels + c] = var[c];
}

template <typename R>
__global__ void norm_update_running(const f64* moments, R* mean, R* var, f64 momentum, u32 channels) {
    u32 c = place();
    f64 count = moments[0];
    if (c >= channels || count < 2) return;
    f64 old = 1.0 - momentum;
    mean[c] = (R)(old * (f64)mean[c] + momentum * (1.0 * moments[1 + c]));
    var[c] = (R)(old * (f64)var[c] + momentum * (count / (count - 1.0) * moments[1 + channels + c]));
}

// A thread for each element.
template <typename S, typename R = typename As<S>::Real>
__global__ void norm_normalize(const S* x, Norm<R> norm, S* y, u64 n) {
    u64 i = place();
    if (i >= n) return;
    Channel<R> channel(norm, i % norm.channels);
    R z = channel.z(channel.x_hat(load(x[i])));
    y[i] = As<S>::store(channel.is_cut(z) ? R(0) : z);
}

template <typename S, typename R = typename As<S>::Real>
__global__ void norm_backward_input(const S* x, const S* dy, Norm<R> norm, const f64* gradient_sums, S* dx, u64 n) {
    u64 i = place();
    if (i >= n) return;
    u32 c = i % norm.channels;
    Channel<R> channel(norm, c);
    R x_hat = channel.x_hat(load(x[i]));
    R dz = channel.is_cut(channel.z(x_hat)) ? R(0) : load(dy[i]);
    f64 count = norm.moments[0];
    R mean_dz = (R)(gradient_sums[c] / count), mean_dz_x_hat = (R)(gradient_sums[norm.channels + c] / count);
    R centered = dz - mean_dz - x_hat * mean_dz_x_hat;
    dx[i] = As<S>::store(channel.weight * channel.inv_std * centered);
}

template <typename R>
__global__ void norm_backward_weight(const f64* gradient_sums, R* d_weight, R* d_bias, u32 accumulate, u32 channels) {
    u32 c = place();
    if (c >= channels) return;
    R of_bias = (R)gradient_sums[c], of_weight = (R)gradient_sums[channels + c];
    d_bias[c] = accumulate ? d_bias[c] + of_bias : of_bias;
    d_weight[c] = accumulate ? d_weight[c] + of_weight : of_weight;
}
