//! Kernels of operations on rows.

use paceline_cuda::kernel::{In, Out, Wide};

use super::{EXP, NUMBERS};

paceline_cuda::kernels! {
    ROWS = "rows.cu", include_str!("rows.cu"), [NUMBERS, EXP];
    fn swiglu<S: f32 | f64 | f16 | bf16>(gate_up: In<S>, y: Out<S>, columns: u32, rows: u64, runs: u64);
    fn swiglu_backward<S: f32 | f64 | f16 | bf16>(
        gate_up: In<S>, dy: In<S>, d_gate_up: Out<S>, columns: u32, rows: u64, runs: u64,
    );
    fn rms_norm<S: f32 | f64 | f16 | bf16>(
        x: In<Wide<S>>, w: In<Wide<S>>, eps: Wide<S>, y: Out<S>, r: Out<Wide<S>>, columns: u32, rows: u64,
    );
    fn rms_norm_backward_input<S: f32 | f64 | f16 | bf16>(
        x: In<Wide<S>>, w: In<Wide<S>>, r: In<Wide<S>>, dy: In<S>, dx: Out<Wide<S>>, columns: u32, rows: u64,
    );
    fn rms_norm_backward_weight<S: f32 | f64 | f16 | bf16>(
        x: In<Wide<S>>, r: In<Wide<S>>, dy: In<S>, of_runs: Out<Wide<S>>, columns: u32, rows: u64, rows_of_run: u32,
    );
    fn embedding<S: f32 | f64 | f16 | bf16>(ids: In<i64>, table: In<S>, output: Out<S>, len: u64, width: u32);
    fn embedding_backward<S: f32 | f64 | f16 | bf16>(
        ids: In<i64>, d_output: In<S>, d_table: Out<S>, count: u64, len: u64, width: u32,
    );
    fn last_rows(ids: In<i64>, lengths: In<i64>, rows: Out<i64>, count: u64, seq: u64, has_pad: u32, pad: i64);
    fn add_runs<R: f32 | f64>(of_runs: In<R>, sums: Out<R>, columns: u32, runs: u32, accumulate: u32);
}
