//! Convolutions and pools whose images are bf16 or f16, against the plain implementation in f64 on the same rounded operands.

mod common;

mod of_bf16 {
    use half::bf16 as Half;
    type Other = half::f16;
    include!("halves/images.rs");
}

mod of_f16 {
    use half::f16 as Half;
    type Other = half::bf16;
    include!("halves/images.rs");
}
