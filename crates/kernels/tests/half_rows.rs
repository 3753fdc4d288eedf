//! Batch normalization, element-wise operations and losses on tensors of bf16 or f16, against f64 on the same numbers.

mod of_bf16 {
    use half::bf16 as Half;
    include!("halves/rows.rs");
}

mod of_f16 {
    use half::f16 as Half;
    include!("halves/rows.rs");
}
