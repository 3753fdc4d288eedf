//! The index by vector instructions: AVX2 looks at 32 bytes at a time.
//!
//! Input and output are those of [`Index`]. This module only knows how to tell what the bytes of a block are.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::index::{BLOCK_BYTES, Classes, Index};

/// A processor that has the instructions.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    /// `None` if this processor does not have them.
    pub(super) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("popcnt");
        has_all.then_some(Self(()))
    }

    /// See [`Index::read`].
    pub(super) fn read(self, index: &mut Index, bytes: &[u8], start: usize) {
        // SAFETY: only `detect` makes a value of this type, and only if the processor has all the
        // instructions for which the function is compiled.
        unsafe { read(index, bytes, start) }
    }
}

#[target_feature(enable = "avx2,bmi1,popcnt")]
fn read(index: &mut Index, bytes: &[u8], start: usize) {
    index.read_by(bytes, start, |block| classes(block));
}

/// The same as [`Classes::of`].
#[target_feature(enable = "avx2,bmi1,popcnt")]
#[inline]
fn classes(block: &[u8; BLOCK_BYTES]) -> Classes {
    let (halves, _) = block.as_chunks::<32>();
    // SAFETY: each load reads the 32 bytes of `half`, and it needs no alignment.
    let load = |half: &[u8; 32]| unsafe { _mm256_loadu_si256(half.as_ptr().cast()) };
    let [low, high] = [load(&halves[0]), load(&halves[1])];
    let equal = |bytes, byte: u8| _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(byte as i8));
    let any = |a, b| _mm256_or_si256(a, b);
    // One bit per byte: the highest one.
    let bits = |low, high| {
        let [low, high] = [low, high].map(|half| _mm256_movemask_epi8(half) as u32);
        u64::from(high) << 32 | u64::from(low)
    };
    let blank = |bytes| {
        let spaces = any(equal(bytes, b' '), equal(bytes, b'\t'));
        any(spaces, any(equal(bytes, b'\n'), equal(bytes, b'\r')))
    };
    let structure = |bytes| {
        // Brackets and braces differ in one bit.
        let either = any(bytes, _mm256_set1_epi8(0x20));
        let brackets = any(equal(either, b'{'), equal(either, b'}'));
        any(brackets, any(equal(bytes, b','), equal(bytes, b':')))
    };
    Classes {
        quote: bits(equal(low, b'"'), equal(high, b'"')),
        backslash: bits(equal(low, b'\\'), equal(high, b'\\')),
        blank: bits(blank(low), blank(high)),
        structure: bits(structure(low), structure(high)),
    }
}
