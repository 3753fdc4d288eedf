// Losses. Rows and elements are summed in f64, in an order that depends on their number alone.

// A warp for each row: its loss and whether it is right go to `of_rows`, its gradient to `d_logits`, if that is there. A label
// that is no class makes the loss and the gradient of its row NaN.
template <typename S, typename R = typename As<S>::Real>
__global__ void cross_entropy(
    const S* logits, const i64* labels, S* d_logits, f64* of_rows, R scale, u32 classes, u64 rows) {
    u64 row = place() / 32;
    u32 lane = threadIdx.x % 32;
    if (row >= rows) return;
    const S* x = logits + row * classes;
    i64 label = labels[row];
    // The first of the largest logits, or the first NaN.
    u32 best = 0xffffffffu;
    R largest = 0;
    for (u32 j = lane; j < classes; j += 32) {
        R value = load(x[j]);
        bool is_better = best == 0xffffffffu || value > largest || (value != value && largest == largest);
        if (is_better) {
            best = j;
            largest = value;
        }
    }
    for (int step = 16; step > 0; step >>= 1) {
        u32 other = __shfl_xor_sync(0xffffffffu, best, step);
        R value = __shfl_xor_sync(0xffffffffu, largest, step);
        bool other_nan = value != value, own_nan = largest != largest;
        bool is_tie = (other_nan && own_nan) || value == largest;
        bool is_better = other != 0xffffffffu &&
            (best == 0xffffffffu || (is_tie ? other < best : (value > largest && !own_nan) || (other_nan && !own_nan)));
        if (is_better) {
            best = other;
            largest = value;
        }
    }
    R total = 0;
    for (u32 j = lane; j < classes; j += 32) total = total + exp(load(x[j]) - largest);
    total = sum_of_warp(total);
    bool is_class = label >= 0 && label < (i64)classes;
    R broken = (R)__longlong_as_double(0x7ff8000000000000ll);
    if (lane == 0) {
        R loss = is_class ? log(total) + largest - load(x[label]) : broken;
        of_rows[2 * row] = loss;
        of_rows[2 * row + 1] = is_class && (i64)best == label && largest == largest;
    }
    if (!d_logits) return;
    for (u32 j = lane; j < classes; j += 32) {
        R target = (i64)j == label ? 1 : 0;
        R d = (exp(load(x[j]) - largest) / total - target) * scale;
        d_logits[row * classes + j] = As<S>::store(is_class ? d : broken);
    }
}

// One block: adds what the rows have left to the sums.
__global__ void add_rows(const f64* of_rows, f64* sums, u64 rows) {
    f64 loss = 0, correct = 0;
    for (u64 row = threadIdx.x; row < rows; row += blockDim.x) {
        loss = loss + of_rows[2 * row];
        correct = correct + of_rows[2 * row + 1];
    }
    loss = sum_of_block(loss);
    correct = sum_of_block(correct);
    if (threadIdx.x == 0) {
        sums[0] = sums[0] + loss;
        sums[1] = sums[1] + correct;
        sums[2] = sums[2] + (f64)rows;
    }
}

// Each block leaves the sum of the squares that it has met.
template <typename S, typename R = typename As<S>::Real>
__global__ void mse(const S* x, const R* t, S* d_input, f64* of_blocks, R factor, u64 n) {
    f64 sum = 0;
    for (u64 i = place(); i < n; i += (u64)gridDim.x * blockDim.x) {
        R difference = load(x[i]) - t[i];
        if (d_input) d_input[i] = As<S>::store(difference * factor);
        sum = sum + (f64)difference * (f64)difference;
    }
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) of_blocks[blockIdx.x] = sum;
}

// One block: adds what the blocks have left, over the number of columns, to the sums.
__global__ void add_blocks(const f64* of_blocks, f64* sums, u32 blocks, f64 columns, f64 rows) {
    f64 sum = 0;
    for (u32 block = threadIdx.x; block < blocks; block += blockDim.x) sum = sum + of_blocks[block];
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) {
        sums[0] = sums[0] + sum / columns;
        sums[2] = sums[2] + rows;
    }
}
