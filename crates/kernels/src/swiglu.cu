// The gated activation. A thread has a column of every `runs`th row, or if IS_WIDE, all columns of 16 bytes.
template <typename S, bool IS_WIDE>
__global__ void swiglu(const S* gate_up, S* y, u32 columns, u64 rows, u64 runs) {
    typedef typename As<S>::Real Real;
    typedef Pack<S, IS_WIDE ? 16 / sizeof(S) : 1> Run;
    u64 i = place() * Run::COUNT, row = i / columns;
    if (row >= runs) return;
    for (gate_up += row * columns + i, y += i; row < rows; row += runs, gate_up += 2 * runs * columns, y += runs * columns) {
        Run gate = *(const Run*)gate_up, up = *(const Run*)(gate_up + columns), result;
        #pragma unroll
        for (u32 k = 0; k < Run::COUNT; ++k) {
            Real g = load(gate.of[k]), u = load(up.of[k]);
            result.of[k] = As<S>::store(g / (Real(1) + fast_exp(-g)) * u);
        }
        *(Run*)y = result;
    }
}

template <typename S, bool IS_WIDE>
__global__ void swiglu_backward(
    const S* gate_up, const S* dy, S* d_gate_up, u32 columns, u64 rows, u64 runs) {
    typedef typename As<S>::Real Real;
    typedef Pack<S, IS_WIDE ? 16 / sizeof(S) : 1> Run;
    u64 i = place() * Run::COUNT, row = i / columns;
    if (row >= runs) return;
    u64 at = row * columns + i;
    for (dy += i; row < rows; row += runs, at += 2 * runs * columns, dy += runs * columns) {
        Run gate = *(const Run*)(gate_up + at), up = *(const Run*)(gate_up + at + columns), d_output = *(const Run*)dy, d_gate, d_up;
        #pragma unroll
        for (u32 k = 0; k < Run::COUNT; ++k) {
            Real g = load(gate.of[k]), u = load(up.of[k]), d = load(d_output.of[k]);
            Real s = Real(1) / (Real(1) + fast_exp(-g));
            d_gate.of[k] = As<S>::store(d * u * s * (Real(1) + g * (Real(1) - s)));
            d_up.of[k] = As<S>::store(d * g * s);
        }
        *(Run*)(d_gate_up + at) = d_gate;
        *(Run*)(d_gate_up + at + columns) = d_up;
    }
}
