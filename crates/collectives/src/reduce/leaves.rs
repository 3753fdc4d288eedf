//! The loops that combine up to eight inputs in one pass, the whole tree in registers.
//!
//! Each number of inputs has a loop of its own, so the compiler sees the tree and vectorizes it. The loops are
//! compiled once for each element type, operation and vector level, whatever becomes of their results: they
//! are most of what there is to compile.
//!
//! Input: a block of each input. Output: a block of running results, finished in the same loop if the caller says how.

use std::slice::from_raw_parts;

use paceline_numeric::SimdLevel;

use super::blocks::{BLOCK, Running};
use super::element::{Reduce, Value};

/// The most inputs that are combined in one pass.
pub(super) const GROUP: usize = 8;

/// ScratchBlocks for the blocks of a group whose elements are converted before they are combined.
#[repr(align(64))]
pub(super) struct ScratchBlocks<T: Reduce>([T::Value; 2 * BLOCK]);

impl<T: Reduce> ScratchBlocks<T> {
    pub(super) const EMPTY: Self = Self([T::Value::ZERO; 2 * BLOCK]);

    /// No room at all for elements that are not converted: then the compiler leaves the memory out.
    #[inline(always)]
    pub(super) fn scratch(&mut self) -> &mut [T::Value] {
        if T::IS_CONVERTED { &mut self.0 } else { &mut [] }
    }
}

/// Elements of a block of `T` for this many inputs: few enough that the results and the converted inputs
/// leave room in the first-level cache.
pub(super) const fn block_elems<T: Reduce>(num_inputs: usize) -> usize {
    if T::IS_CONVERTED && num_inputs > 2 {
        return 2 * BLOCK / GROUP;
    }
    let elems = 4096 / size_of::<Running<T>>();
    if elems < BLOCK { elems } else { BLOCK }
}

/// The value of the tree over the given values.
macro_rules! tree {
    ($f:ident; $a:expr) => { $a };
    ($f:ident; $a:expr, $b:expr) => { $f($a, $b) };
    ($f:ident; $a:expr, $b:expr, $c:expr) => { $f($f($a, $b), $c) };
    ($f:ident; $a:expr, $b:expr, $c:expr, $d:expr) => { $f($f($a, $b), $f($c, $d)) };
    ($f:ident; $a:expr, $b:expr, $c:expr, $d:expr, $($rest:expr),+) => {
        $f(tree!($f; $a, $b, $c, $d), tree!($f; $($rest),+))
    };
}

macro_rules! pass {
    ($name:ident: $($x:ident)+) => {
        /// `to = finish(tree(inputs))`.
        #[inline(always)]
        #[allow(clippy::too_many_arguments, reason = "slices that are arguments are known to lie apart")]
        #[allow(clippy::needless_range_loop, reason = "the index is that of several slices")]
        #[allow(unused_variables, reason = "a single input is not combined")]
        fn $name<A: Value>(
            to: &mut [A::Running],
            $($x: &[A],)+
            combine: impl Fn(A::Running, A::Running) -> A::Running,
            finish: impl Fn(A::Running) -> A::Running,
        ) {
            let len = to.len();
            $(let $x = &$x[..len];)+
            for i in 0..len {
                to[i] = finish(tree!(combine; $($x[i].widen()),+));
            }
        }
    };
}
pass!(pass1: a);
pass!(pass2: a b);
pass!(pass3: a b c);
pass!(pass4: a b c d);
pass!(pass5: a b c d e);
pass!(pass6: a b c d e f);
pass!(pass7: a b c d e f g);
pass!(pass8: a b c d e f g h);

/// Combines one to eight inputs: the elements from `start` on, as many as `to` has room for.
///
/// # Safety
///
/// The inputs are valid for these elements and aligned for `T`, and nobody writes to them. There are at
/// least one and at most [`GROUP`] of them. `to` overlaps none. It has at most [`block_elems`] elements. The
/// processor has `level`.
#[inline(always)]
pub(super) unsafe fn combine_leaves<T: Reduce>(
    level: SimdLevel,
    inputs: &[*const u8],
    start: usize,
    to: &mut [Running<T>],
    scratch: &mut [T::Value],
    combine: impl Fn(Running<T>, Running<T>) -> Running<T>,
    finish: impl Fn(Running<T>) -> Running<T>,
) {
    // SAFETY: as required of the caller.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => {
                avx512::<T, _, _>(inputs, start, to, scratch, combine, finish);
            }
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => avx2::<T, _, _>(inputs, start, to, scratch, combine, finish),
            _ => portable::<T, _, _>(inputs, start, to, scratch, combine, finish),
        }
    }
}

macro_rules! at_level {
    ($name:ident, $level:ident $(, $features:literal)?) => {
        /// # Safety
        ///
        /// As for [`combine_leaves`], at this level.
        #[inline(never)]
        $(#[cfg(target_arch = "x86_64")] #[target_feature(enable = $features)])?
        unsafe fn $name<
            T: Reduce,
            F: Fn(Running<T>, Running<T>) -> Running<T>,
            G: Fn(Running<T>) -> Running<T>,
        >(
            inputs: &[*const u8],
            start: usize,
            to: &mut [Running<T>],
            scratch: &mut [T::Value],
            combine: F,
            finish: G,
        ) {
            let level = SimdLevel::$level;
            // SAFETY: as required of the caller.
            unsafe { load_and_combine::<T>(level, inputs, start, to, scratch, combine, finish) }
        }
    };
}
at_level!(portable, Portable);
at_level!(avx2, Avx2, "avx2");
at_level!(avx512, Avx512, "avx512f,avx512bw,avx512dq,avx512vl");

/// # Safety
///
/// As for [`combine_leaves`].
#[inline(always)]
unsafe fn load_and_combine<T: Reduce>(
    level: SimdLevel,
    inputs: &[*const u8],
    start: usize,
    to: &mut [Running<T>],
    scratch: &mut [T::Value],
    combine: impl Fn(Running<T>, Running<T>) -> Running<T>,
    finish: impl Fn(Running<T>) -> Running<T>,
) {
    let size = to.len();
    let room = if inputs.len() <= 2 { BLOCK } else { 2 * BLOCK / GROUP };
    let mut rooms = scratch.chunks_exact_mut(room);
    macro_rules! load_and_pass {
        ($pass:ident: $($x:ident)+) => {{
            let [$($x),+] = *inputs else { return };
            $(
                // SAFETY: as required of the caller.
                let block = unsafe { from_raw_parts($x.cast::<T>().add(start), size) };
                let converted = match rooms.next() {
                    Some(room) => &mut room[..size],
                    None => &mut [],
                };
                let $x = T::load(level, block, converted);
            )+
            $pass(to, $($x,)+ combine, finish)
        }};
    }
    match inputs.len() {
        1 => load_and_pass!(pass1: a),
        2 => load_and_pass!(pass2: a b),
        3 => load_and_pass!(pass3: a b c),
        4 => load_and_pass!(pass4: a b c d),
        5 => load_and_pass!(pass5: a b c d e),
        6 => load_and_pass!(pass6: a b c d e f),
        7 => load_and_pass!(pass7: a b c d e f g),
        8 => load_and_pass!(pass8: a b c d e f g h),
        count => unreachable!("{count} inputs in a group"),
    }
}
