//! The loops that combine a block of all inputs: up to four in one pass, with the whole tree in registers, and more in groups of
//! four, each a node of the tree.
//!
//! Each number of inputs has a loop of its own, so the compiler sees the tree and vectorizes it. The loops are
//! compiled once for each element type, operation and vector level.
//!
//! Input: a block of each input. Output: a block of running results.

use std::slice::from_raw_parts;

use paceline_numeric::{SimdLevel, tree};

use super::blocks::{BLOCK, Running, StackBlock};
use super::element::{Reduce, SimdLane};

/// The most inputs that are combined in one pass.
const GROUP: usize = 4;

/// Running results of nodes of the tree.
pub(super) type Slots<T> = [StackBlock<Running<T>>; tree::height(crate::MAX_RANKS) + 1];

#[derive(Clone, Copy)]
pub(super) enum TreeInputs<'a> {
    /// The elements of each rank.
    Leaves(&'a [*const u8]),
    /// Running results of nodes, and the number of merges after each.
    Nodes(&'a [*const u8], &'a [u8]),
}

impl<'a> TreeInputs<'a> {
    pub(super) fn addresses(self) -> &'a [*const u8] {
        match self {
            TreeInputs::Leaves(all) | TreeInputs::Nodes(all, _) => all,
        }
    }

    /// How many values are put on the stack of the tree.
    pub(super) fn count(self) -> usize {
        match self {
            TreeInputs::Leaves(all) => all.len().div_ceil(GROUP),
            TreeInputs::Nodes(all, _) => all.len(),
        }
    }
}

/// Room for the blocks of a group whose elements are converted before they are combined.
#[repr(align(64))]
pub(super) struct Room<T: Reduce>([T::SimdLane; 2 * BLOCK]);

impl<T: Reduce> Room<T> {
    pub(super) const EMPTY: Self = Self([T::SimdLane::ZERO; 2 * BLOCK]);

    /// No room for elements that are not converted: then the compiler leaves the memory out.
    #[inline(always)]
    pub(super) fn scratch(&mut self) -> &mut [T::SimdLane] {
        if T::IS_CONVERTED { &mut self.0 } else { &mut [] }
    }
}

/// Elements of a block of `T` for this many inputs: few enough that results and converted inputs
/// fit in the first-level cache.
pub(super) const fn block_elems<T: Reduce>(num_inputs: usize) -> usize {
    if T::IS_CONVERTED && num_inputs > 2 {
        return 2 * BLOCK / GROUP;
    }
    let elems = 4096 / size_of::<Running<T>>();
    if elems < BLOCK { elems } else { BLOCK }
}

/// The value of the tree over the given values.
macro_rules! tree {
    ($f:ident; $a:expr) => {
        $a
    };
    ($f:ident; $a:expr, $b:expr) => {
        $f($a, $b)
    };
    ($f:ident; $a:expr, $b:expr, $c:expr) => {
        $f($f($a, $b), $c)
    };
    ($f:ident; $a:expr, $b:expr, $c:expr, $d:expr) => {
        $f($f($a, $b), $f($c, $d))
    };
}

macro_rules! pass {
    ($name:ident: $($x:ident)+) => {
        /// `to = tree(inputs)`.
        #[inline(always)]
        #[allow(clippy::needless_range_loop, reason = "the index is that of several slices")]
        #[allow(unused_variables, reason = "a single input is not combined")]
        fn $name<A: SimdLane>(
            to: &mut [A::Running],
            $($x: &[A],)+
            combine: impl Fn(A::Running, A::Running) -> A::Running,
        ) {
            let len = to.len();
            $(let $x = &$x[..len];)+
            for i in 0..len {
                to[i] = tree!(combine; $($x[i].widen()),+);
            }
        }
    };
}
pass!(pass1: a);
pass!(pass2: a b);
pass!(pass3: a b c);
pass!(pass4: a b c d);

/// Combines all inputs, or nodes, of a block: the elements from `start` on, as many as `to` has room for.
///
/// # Safety
///
/// The inputs are valid for these elements and aligned for their type, and nobody writes to them. `to` does not overlap them,
/// and has at most [`block_elems`] elements. `slots` are there unless there is only one value. The processor has `level`.
#[inline(always)]
pub(super) unsafe fn combine_block<T: Reduce, F>(
    level: SimdLevel,
    source: TreeInputs,
    start: usize,
    to: &mut [Running<T>],
    slots: &mut [StackBlock<Running<T>>],
    scratch: &mut [T::SimdLane],
    combine: F,
) where
    F: Fn(Running<T>, Running<T>) -> Running<T> + Copy,
{
    // SAFETY: as required of the caller.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => avx512::<T, F>(source, start, to, slots, scratch, combine),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => avx2::<T, F>(source, start, to, slots, scratch, combine),
            _ => portable::<T, F>(source, start, to, slots, scratch, combine),
        }
    }
}

macro_rules! at_level {
    ($name:ident, $level:ident $(, $features:literal)?) => {
        /// # Safety
        ///
        /// As for [`combine_block`], at this level.
        #[inline(never)]
        $(#[cfg(target_arch = "x86_64")] #[target_feature(enable = $features)])?
        unsafe fn $name<T: Reduce, F>(
            source: TreeInputs,
            start: usize,
            to: &mut [Running<T>],
            slots: &mut [StackBlock<Running<T>>],
            scratch: &mut [T::SimdLane],
            combine: F,
        ) where
            F: Fn(Running<T>, Running<T>) -> Running<T> + Copy,
        {
            let level = SimdLevel::$level;
            // SAFETY: as required of the caller.
            unsafe { evaluate::<T, F>(level, source, start, to, slots, scratch, combine) }
        }
    };
}
at_level!(portable, Portable);
at_level!(avx2, Avx2, "avx2");
at_level!(avx512, Avx512, "avx512f,avx512bw,avx512dq,avx512vl");

/// Evaluates the tree with a stack.
///
/// # Safety
///
/// As for [`combine_block`].
#[inline(always)]
unsafe fn evaluate<T: Reduce, F>(
    level: SimdLevel,
    source: TreeInputs,
    start: usize,
    to: &mut [Running<T>],
    slots: &mut [StackBlock<Running<T>>],
    scratch: &mut [T::SimdLane],
    combine: F,
) where
    F: Fn(Running<T>, Running<T>) -> Running<T> + Copy,
{
    let (size, count) = (to.len(), source.count());
    let mut depth = 0;
    for index in 0..count {
        let slot = if count == 1 { &mut *to } else { &mut slots[depth].0[..size] };
        let merges = match source {
            TreeInputs::Leaves(all) => {
                let group = &all[index * GROUP..all.len().min((index + 1) * GROUP)];
                // SAFETY: as required of the caller.
                unsafe { load_and_combine::<T>(level, group, start, slot, scratch, combine) };
                tree::merges_after(index, count)
            }
            TreeInputs::Nodes(all, merges) => {
                // SAFETY: the block lies within the node, to which nobody writes while it is read.
                let node =
                    unsafe { from_raw_parts(all[index].cast::<Running<T>>().add(start), size) };
                slot.copy_from_slice(node);
                usize::from(merges[index])
            }
        };
        depth += 1;
        // The last merge goes where the result belongs.
        let is_last = usize::from(index + 1 == count);
        for _ in is_last..merges {
            depth -= 1;
            let (before, from) = slots.split_at_mut(depth);
            let (left, right) = (&mut before[depth - 1].0[..size], &from[0].0[..size]);
            left.iter_mut().zip(right).for_each(|(x, &y)| *x = combine(*x, y));
        }
    }
    if let [StackBlock(left), StackBlock(right), ..] = slots
        && count > 1
    {
        for ((to, &x), &y) in to.iter_mut().zip(&left[..size]).zip(&right[..size]) {
            *to = combine(x, y);
        }
    }
}

/// Combines one to four inputs.
///
/// # Safety
///
/// As for [`combine_block`].
#[inline(always)]
unsafe fn load_and_combine<T: Reduce>(
    level: SimdLevel,
    inputs: &[*const u8],
    start: usize,
    to: &mut [Running<T>],
    scratch: &mut [T::SimdLane],
    combine: impl Fn(Running<T>, Running<T>) -> Running<T>,
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
            $pass(to, $($x,)+ combine)
        }};
    }
    match inputs.len() {
        1 => load_and_pass!(pass1: a),
        2 => load_and_pass!(pass2: a b),
        3 => load_and_pass!(pass3: a b c),
        4 => load_and_pass!(pass4: a b c d),
        count => unreachable!("{count} inputs in a group"),
    }
}
