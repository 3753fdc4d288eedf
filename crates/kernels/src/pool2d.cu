// Pools of images. They have the processor's bits.
//
// Images are those of channels that lie next to each other; planes are images of one channel.

// The sizes of an image, the windows, and rows and columns of the result.
struct Pool { u32 height, width, channels, window, stride, rows, columns; };

// A thread for each element of the output: its window's largest value, and where that is.
template <typename S> __global__ void pool(const S* x, S* y, u8* winners, Pool sizes, u64 n) {
    auto [height, width, channels, window, stride, rows, columns] = sizes;
    u64 at = place();
    if (at >= n) return;
    u32 c = at % channels;
    u64 rest = at / channels;
    u32 j = rest % columns;
    rest /= columns;
    u32 i = rest % rows;
    u64 image = rest / rows;
    const S* first = x + ((image * height + (u64)i * stride) * width + (u64)j * stride) * channels + c;
    S most = *first;
    u32 winner = 0;
    for (u32 place = 1; place < window * window; ++place) {
        S value = first[((u64)(place / window) * width + place % window) * channels];
        auto candidate = load(value);
        bool wins = candidate > load(most) || candidate != candidate;
        most = wins ? value : most;
        winner = wins ? place : winner;
    }
    y[at] = most;
    winners[at] = winner;
}

// A thread for each element of the input: the gradients of the windows that it has won, in order.
template <typename S> __global__ void pool_backward(const u8* winners, const S* dy, S* dx, Pool sizes, u64 n) {
    auto [height, width, channels, window, stride, rows, columns] = sizes;
    u64 at = place();
    if (at >= n) return;
    u32 c = at % channels;
    u64 rest = at / channels;
    u32 x = rest % width;
    rest /= width;
    u32 y = rest % height;
    u64 image = rest / height;
    u32 first_row = y < window ? 0 : (y - window) / stride + 1, last_row = y / stride;
    u32 first_column = x < window ? 0 : (x - window) / stride + 1, last_column = x / stride;
    typename As<S>::Real sum = 0;
    for (u32 i = first_row; i <= last_row && i < rows; ++i) {
        for (u32 j = first_column; j <= last_column && j < columns; ++j) {
            u64 out = ((image * rows + i) * columns + j) * channels + c;
            if (winners[out] == (y - i * stride) * window + (x - j * stride)) sum = sum + load(dy[out]);
        }
    }
    dx[at] = As<S>::store(sum);
}
