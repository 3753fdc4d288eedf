//! The kernels of a language model with activations of bf16 or f16, against f64 formulas of the same numbers.
//!
//! Inputs are numbers that these have, so what is off comes from the kernels: f32 arithmetic, and one rounding of each result
//! that is stored in 16 bits. Outputs are poisoned before.
#![allow(clippy::duplicate_mod, reason = "the same tests for two types")]

#[path = "halves"]
mod of_bf16 {
    use half::bf16 as Half;

    #[path = "language_model.rs"]
    mod tests;
}

#[path = "halves"]
mod of_f16 {
    use half::f16 as Half;

    #[path = "language_model.rs"]
    mod tests;
}
