//! The fully connected layer with tensors of bf16 or f16, against sums in f64 of the same numbers.
#![allow(clippy::duplicate_mod, reason = "the same tests for two types")]

#[path = "halves"]
mod of_bf16 {
    use half::bf16 as Half;
    type Other = half::f16;

    #[path = "linear.rs"]
    mod tests;
}

#[path = "halves"]
mod of_f16 {
    use half::f16 as Half;
    type Other = half::bf16;

    #[path = "linear.rs"]
    mod tests;
}
