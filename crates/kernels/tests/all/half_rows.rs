//! Batch normalization, element-wise operations and losses on tensors of bf16 or f16, against f64 on the same numbers.
#![allow(clippy::duplicate_mod, reason = "the same tests for two types")]

#[path = "halves"]
mod of_bf16 {
    use half::bf16 as Half;

    #[path = "rows.rs"]
    mod tests;
}

#[path = "halves"]
mod of_f16 {
    use half::f16 as Half;

    #[path = "rows.rs"]
    mod tests;
}
