//! Kernels for the tests: compiled by NVRTC if it is there, otherwise stored PTX.
#![allow(dead_code)]

pub mod bench;
pub mod cuda;
pub mod library;
pub mod nvrtc;

use std::path::PathBuf;

/// A file of this crate's tests.
pub fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

/// A CUDA source of the tests.
pub fn source(name: &str) -> String {
    std::fs::read_to_string(path("kernels").join(name)).expect("source")
}

/// PTX that NVRTC 13.0.88 once made of a source of the tests.
pub fn stored_ptx(name: &str) -> String {
    std::fs::read_to_string(path("ptx").join(name)).expect("stored PTX")
}

/// Repeatable numbers in [-1, 1).
pub fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}
