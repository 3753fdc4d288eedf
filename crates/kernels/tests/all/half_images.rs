//! Convolutions and pools whose images are bf16 or f16, against the plain implementation in f64 on the same rounded operands.
#![allow(clippy::duplicate_mod, reason = "the same tests for two types")]

#[path = "halves"]
mod of_bf16 {
    use half::bf16 as Half;
    type Other = half::f16;

    #[path = "images.rs"]
    mod tests;
}

#[path = "halves"]
mod of_f16 {
    use half::f16 as Half;
    type Other = half::bf16;

    #[path = "images.rs"]
    mod tests;
}
