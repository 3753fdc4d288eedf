// The gated activation. A thread has a column of every `runs`th row.
template <typename S>
__global__ void swiglu(const S* gate_up, S* y, u32 columns, u64 rows, u64 runs) {
    typedef typename As<S>::Real Real;
    u64 i = place(), row = i / columns;
    if (row >= runs) return;
    for (gate_up += row * columns + i, y += i; row < rows; row += runs, gate_up += 2 * runs * columns, y += runs * columns) {
        Real g = load(gate_up[0]), u = load(gate_up[columns]);
        *y = As<S>::store(g / (Real(1) + fast_exp(-g)) * u);
    }
}

template <typename S>
__global__ void swiglu_backward(
    const S* gate_up, const S* dy, S* d_gate_up, u32 columns, u64 rows, u64 runs) {
    typedef typename As<S>::Real Real;
    u64 i = place(), row = i / columns;
    if (row >= runs) return;
    u64 at = row * columns + i;
    for (dy += i; row < rows; row += runs, at += 2 * runs * columns, dy += runs * columns) {
        Real g = load(gate_up[at]), u = load(gate_up[at + columns]), d = load(*dy);
        Real s = Real(1) / (Real(1) + fast_exp(-g));
        d_gate_up[at] = As<S>::store(d * u * s * (Real(1) + g * (Real(1) - s)));
        d_gate_up[at + columns] = As<S>::store(d * g * s);
    }
}
