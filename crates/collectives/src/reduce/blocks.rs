//! The reduction loops, compiled once for each element type, operation and vector level.
//!
//! Inputs are combined block by block, as the tree of [`tree`]: two in a loop that also finishes the result, up
//! to eight in one pass (`leaves.rs`), more in groups of eight, each of which is a node of the tree. The
//! running results are blocks in the first-level cache, where they are merged and finished.
//!
//! Input: a task with addresses. Output: its results in memory. This module does not choose the vector
//! level.

use std::slice::{from_raw_parts, from_raw_parts_mut};

use paceline_numeric::{SimdLevel, tree};

use super::element::{Number, Reduce, Value};
use super::leaves::{GROUP, ScratchBlocks, block_elems, combine_leaves};
use super::task::{ReduceOp, Reduction, Task};

/// The most elements of a block.
pub(super) const BLOCK: usize = 1024;

/// The most results of groups on the stack.
const GROUP_SLOTS: usize = tree::height(crate::MAX_RANKS.div_ceil(GROUP)) + 1;

/// The most results of nodes on the stack.
const NODE_SLOTS: usize = tree::height(crate::MAX_RANKS) + 1;

/// A block on the stack, aligned so that no vector crosses a cache line.
#[repr(align(64))]
pub(super) struct Block<T>(pub(super) [T; BLOCK]);

/// The type in which elements of `T` are combined.
pub(super) type Running<T> = <<T as Reduce>::Value as Value>::Running;

/// # Safety
///
/// As for the method of [`Reduction`] that makes the task, with `T` of the reduction's element type;
/// the processor has `level`.
pub(super) unsafe fn perform<T: Reduce>(
    level: SimdLevel,
    &Reduction { op, ranks, .. }: &Reduction,
    task: Task,
    elems: usize,
) {
    // SAFETY: as required of the caller; each arm passes the task on unchanged.
    unsafe {
        match op {
            ReduceOp::Sum => perform_at::<T, _, _>(level, task, elems, Number::add, unchanged),
            ReduceOp::Mean if ranks.is_power_of_two() && ranks <= 128 => {
                let log2 = ranks.trailing_zeros();
                let finish = |x: Running<T>| x.divide_by_power(log2);
                perform_at::<T, _, _>(level, task, elems, Number::add, finish);
            }
            ReduceOp::Mean => {
                let finish = |x: Running<T>| x.divide(ranks);
                perform_at::<T, _, _>(level, task, elems, Number::add, finish);
            }
            ReduceOp::Min => perform_at::<T, _, _>(level, task, elems, Number::smaller, unchanged),
            ReduceOp::Max => perform_at::<T, _, _>(level, task, elems, Number::larger, unchanged),
            ReduceOp::Product => {
                perform_at::<T, _, _>(level, task, elems, Number::multiply, unchanged)
            }
        }
    }
}

/// How a running result is finished that needs nothing more. A function and not a closure: closures with the same text
/// would be compiled again.
#[inline(always)]
fn unchanged<R>(x: R) -> R {
    x
}

/// # Safety
///
/// As for [`perform`].
unsafe fn perform_at<T: Reduce, F, G>(
    level: SimdLevel,
    task: Task,
    elems: usize,
    combine: F,
    finish: G,
) where
    F: Fn(Running<T>, Running<T>) -> Running<T> + Copy,
    G: Fn(Running<T>) -> Running<T> + Copy,
{
    // SAFETY: as required of the caller.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => avx512::<T, F, G>(task, elems, combine, finish),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => avx2::<T, F, G>(task, elems, combine, finish),
            _ => portable::<T, F, G>(task, elems, combine, finish),
        }
    }
}

/// A function for each level and operation, and not one for all operations: a build without optimization gives every
/// inlined loop blocks of its own, and those of all operations together would overflow the stack of a thread.
macro_rules! at_level {
    ($name:ident, $level:ident $(, $features:literal)?) => {
        /// # Safety
        ///
        /// As for [`perform`], at this level.
        #[inline(never)]
        $(#[cfg(target_arch = "x86_64")] #[target_feature(enable = $features)])?
        unsafe fn $name<T: Reduce, F, G>(task: Task, elems: usize, combine: F, finish: G)
        where
            F: Fn(Running<T>, Running<T>) -> Running<T> + Copy,
            G: Fn(Running<T>) -> Running<T> + Copy,
        {
            // SAFETY: as required of the caller.
            unsafe { perform_by::<T>(SimdLevel::$level, task, elems, combine, finish) }
        }
    };
}
at_level!(portable, Portable);
at_level!(avx2, Avx2, "avx2");
at_level!(avx512, Avx512, "avx512f,avx512bw,avx512dq,avx512vl");

/// # Safety
///
/// As for [`perform`].
#[inline(always)]
unsafe fn perform_by<T: Reduce>(
    level: SimdLevel,
    task: Task,
    elems: usize,
    combine: impl Fn(Running<T>, Running<T>) -> Running<T> + Copy,
    finish: impl Fn(Running<T>) -> Running<T> + Copy,
) {
    // SAFETY: as required of the caller; in place, the two regions are distinct outputs.
    unsafe {
        match task {
            Task::Run { inputs: &[a, b], outputs: &[x, y] }
                if !T::IS_CONVERTED && a == x.cast_const() && b == y.cast_const() =>
            {
                let finish =
                    |x, y| Value::narrow(finish(combine(Value::widen(x), Value::widen(y))));
                pair_in_place::<T>(x, y, elems, finish);
            }
            Task::Run { inputs, outputs } => {
                run::<T>(level, inputs, outputs, elems, combine, finish);
            }
            Task::Partial { inputs, running } => {
                partial::<T>(level, inputs, running, elems, combine);
            }
            // Values that are leaves, and need no conversion.
            Task::Complete { nodes, merges, outputs }
                if size_of::<T>() == size_of::<Running<T>>() && tree::are_of_leaves(merges) =>
            {
                run::<T>(level, nodes, outputs, elems, combine, finish);
            }
            Task::Complete { nodes, merges, outputs } => {
                complete::<T>(level, nodes, merges, outputs, elems, combine, finish);
            }
        }
    }
}

/// Reduces the data of two ranks in place, in one pass that reads and writes both.
///
/// # Safety
///
/// As for [`perform`]; the regions are distinct, and the type is its own lane.
#[inline(always)]
unsafe fn pair_in_place<T: Reduce>(
    first: *mut u8,
    second: *mut u8,
    elems: usize,
    combine: impl Fn(T::Value, T::Value) -> T::Value,
) {
    // SAFETY: these are two distinct regions that nobody else touches, as required of the caller.
    let (a, b) = unsafe {
        let a = from_raw_parts_mut(first.cast::<T::Value>(), elems);
        (a, from_raw_parts_mut(second.cast::<T::Value>(), elems))
    };
    for (x, y) in a.iter_mut().zip(b) {
        let result = combine(*x, *y);
        *x = result;
        *y = result;
    }
}

/// # Safety
///
/// As for [`Reduction::run`].
#[inline(always)]
unsafe fn run<T: Reduce>(
    level: SimdLevel,
    inputs: &[*const u8],
    outputs: &[*mut u8],
    elems: usize,
    combine: impl Fn(Running<T>, Running<T>) -> Running<T> + Copy,
    finish: impl Fn(Running<T>) -> Running<T> + Copy,
) {
    let last = |x| T::Value::narrow(finish(x));
    let mut room = ScratchBlocks::<T>::EMPTY;
    let scratch = room.scratch();
    let mut target = Target::<T>::new(inputs, outputs);
    let block_elems = block_elems::<T>(inputs.len());
    if let [a, b] = *inputs {
        let (first, second) = scratch.split_at_mut(scratch.len() / 2);
        for start in (0..elems).step_by(block_elems) {
            let size = block_elems.min(elems - start);
            // SAFETY: this is a block of an input. An output at the same address is written only after all
            // inputs of the block have been read.
            let input = |at: *const u8| unsafe { from_raw_parts(at.cast::<T>().add(start), size) };
            // SAFETY: the block lies within the outputs.
            let lanes = unsafe { target.lanes(start, size) };
            let a = T::load(level, input(a), first.get_mut(..size).unwrap_or_default());
            let b = T::load(level, input(b), second.get_mut(..size).unwrap_or_default());
            map2(lanes, a, b, |x, y| last(combine(x.widen(), y.widen())));
            // SAFETY: the lanes of this block have just been filled; all its inputs have been read.
            unsafe { target.write(level, start, size) };
        }
        return;
    }
    if inputs.len() <= GROUP {
        let Block(sum) = &mut Block([T::Value::RUNNING_ZERO; BLOCK]);
        for start in (0..elems).step_by(block_elems) {
            let size = block_elems.min(elems - start);
            // SAFETY: as above. If lanes have the size of running values, both are the type itself.
            unsafe {
                let lanes = target.lanes(start, size);
                if size_of::<T>() == size_of::<Running<T>>() {
                    let to = from_raw_parts_mut(lanes.as_mut_ptr().cast(), size);
                    combine_leaves::<T>(level, inputs, start, to, scratch, combine, finish);
                } else {
                    let sum = &mut sum[..size];
                    combine_leaves::<T>(level, inputs, start, sum, scratch, combine, finish);
                    map(lanes, sum, T::Value::narrow);
                }
                target.write(level, start, size);
            }
        }
        return;
    }
    let mut slots = [const { Block([T::Value::RUNNING_ZERO; BLOCK]) }; GROUP_SLOTS];
    for start in (0..elems).step_by(block_elems) {
        let size = block_elems.min(elems - start);
        // SAFETY: as above.
        unsafe {
            combine_groups::<T>(level, inputs, start, size, &mut slots, scratch, combine);
            let [Block(left), Block(right), ..] = &slots;
            let lanes = target.lanes(start, size);
            map2(lanes, &left[..size], &right[..size], |x, y| last(combine(x, y)));
            target.write(level, start, size);
        }
    }
}

/// # Safety
///
/// As for [`Reduction::partial`].
#[inline(always)]
unsafe fn partial<T: Reduce>(
    level: SimdLevel,
    inputs: &[*const u8],
    running: *mut u8,
    elems: usize,
    combine: impl Fn(Running<T>, Running<T>) -> Running<T> + Copy,
) {
    let mut room = ScratchBlocks::<T>::EMPTY;
    let scratch = room.scratch();
    let block_elems = block_elems::<T>(inputs.len());
    let running = running.cast::<Running<T>>();
    if inputs.len() <= GROUP {
        for start in (0..elems).step_by(block_elems) {
            let size = block_elems.min(elems - start);
            // SAFETY: the block lies within the inputs and the running result, which overlap nowhere.
            unsafe {
                let to = from_raw_parts_mut(running.add(start), size);
                combine_leaves::<T>(level, inputs, start, to, scratch, combine, unchanged);
            }
        }
        return;
    }
    let mut slots = [const { Block([T::Value::RUNNING_ZERO; BLOCK]) }; GROUP_SLOTS];
    for start in (0..elems).step_by(block_elems) {
        let size = block_elems.min(elems - start);
        // SAFETY: as above.
        unsafe {
            combine_groups::<T>(level, inputs, start, size, &mut slots, scratch, combine);
            let [Block(left), Block(right), ..] = &slots;
            let to = from_raw_parts_mut(running.add(start), size);
            map2(to, &left[..size], &right[..size], combine);
        }
    }
}

/// Combines more inputs than a group has, but for the last merge: the two halves of the tree are then in the
/// first two slots.
///
/// # Safety
///
/// The inputs are valid for the `size` elements from `start` on and aligned for `T`, and nobody writes to
/// them. `size` is at most [`block_elems`].
#[inline(always)]
unsafe fn combine_groups<T: Reduce>(
    level: SimdLevel,
    inputs: &[*const u8],
    start: usize,
    size: usize,
    slots: &mut [Block<Running<T>>; GROUP_SLOTS],
    scratch: &mut [T::Value],
    combine: impl Fn(Running<T>, Running<T>) -> Running<T> + Copy,
) {
    let num_groups = inputs.len().div_ceil(GROUP);
    let mut depth = 0;
    for (index, group) in inputs.chunks(GROUP).enumerate() {
        let to = &mut slots[depth].0[..size];
        // SAFETY: as required of the caller.
        unsafe { combine_leaves::<T>(level, group, start, to, scratch, combine, unchanged) };
        depth += 1;
        let is_kept = usize::from(index + 1 == num_groups);
        for _ in 0..tree::merges_after(index, num_groups) - is_kept {
            depth -= 1;
            merge(slots, depth, size, combine);
        }
    }
}

/// # Safety
///
/// As for [`Reduction::complete`].
#[inline(always)]
unsafe fn complete<T: Reduce>(
    level: SimdLevel,
    nodes: &[*const u8],
    merges: &[u8],
    outputs: &[*mut u8],
    elems: usize,
    combine: impl Fn(Running<T>, Running<T>) -> Running<T> + Copy,
    finish: impl Fn(Running<T>) -> Running<T> + Copy,
) {
    let last = |x| T::Value::narrow(finish(x));
    let mut target = Target::<T>::new(nodes, outputs);
    let block_elems = block_elems::<T>(0);
    if let [only] = *nodes {
        for start in (0..elems).step_by(block_elems) {
            let size = block_elems.min(elems - start);
            // SAFETY: the block lies within the node, to which nobody writes while it is read, and within
            // the outputs.
            unsafe {
                let node = from_raw_parts(only.cast::<Running<T>>().add(start), size);
                map(target.lanes(start, size), node, last);
                target.write(level, start, size);
            }
        }
        return;
    }
    let mut slots = [const { Block([T::Value::RUNNING_ZERO; BLOCK]) }; NODE_SLOTS];
    for start in (0..elems).step_by(block_elems) {
        let size = block_elems.min(elems - start);
        let mut depth = 0;
        for (index, (&node, &times)) in nodes.iter().zip(merges).enumerate() {
            // SAFETY: the block lies within the node, to which nobody writes while it is read.
            let node = unsafe { from_raw_parts(node.cast::<Running<T>>().add(start), size) };
            slots[depth].0[..size].copy_from_slice(node);
            depth += 1;
            let is_last = u8::from(index + 1 == nodes.len());
            for _ in 0..times - is_last {
                depth -= 1;
                merge(&mut slots, depth, size, combine);
            }
        }
        let [Block(left), Block(right), ..] = &slots;
        // SAFETY: the block lies within the outputs, and has been read from all nodes.
        unsafe {
            let lanes = target.lanes(start, size);
            map2(lanes, &left[..size], &right[..size], |x, y| last(combine(x, y)));
            target.write(level, start, size);
        }
    }
}

/// Where results go: each block is filled with lanes and then written to every output.
///
/// A function that takes the loop as a closure would be shorter. But a large closure is not inlined, and
/// then it is not compiled to the vector instructions of its caller.
struct Target<'a, T: Reduce> {
    outputs: &'a [*mut u8],
    /// Whether a block is filled on the stack first, because its sources lie where it will be written, or
    /// because its lanes have a different type than the output.
    is_indirect: bool,
    lanes: Block<T::Value>,
}

impl<'a, T: Reduce> Target<'a, T> {
    /// `sources` are the addresses that the results are computed from.
    #[inline(always)]
    fn new(sources: &[*const u8], outputs: &'a [*mut u8]) -> Self {
        let over_source = outputs.first().is_none_or(|first| sources.contains(&first.cast_const()));
        let is_indirect = T::IS_CONVERTED || over_source;
        Self { outputs, is_indirect, lanes: Block([T::Value::ZERO; BLOCK]) }
    }

    /// The memory for the results of the `size` elements from `start` on.
    ///
    /// # Safety
    ///
    /// The outputs are valid for these elements, and nobody else touches them. The first output overlaps no
    /// source, unless it begins at a source's address. `size` is at most [`BLOCK`].
    #[inline(always)]
    unsafe fn lanes(&mut self, start: usize, size: usize) -> &mut [T::Value] {
        match self.outputs {
            // SAFETY: this is a block of an output that is not a source, and the type is its own lane.
            [first, ..] if !self.is_indirect => unsafe {
                from_raw_parts_mut(first.cast::<T::Value>().add(start), size)
            },
            _ => &mut self.lanes.0[..size],
        }
    }

    /// Writes the lanes of a block to every output.
    ///
    /// # Safety
    ///
    /// As for [`Target::lanes`]; the outputs are distinct, and nobody borrows the sources.
    #[inline(always)]
    unsafe fn write(&mut self, level: SimdLevel, start: usize, size: usize) {
        let Some((first, others)) = self.outputs.split_first() else { return };
        // SAFETY: the block lies within the output.
        let first = unsafe { first.cast::<T>().add(start) };
        if self.is_indirect {
            // SAFETY: this is a block of the output, which nobody borrows.
            T::store(level, &self.lanes.0[..size], unsafe { from_raw_parts_mut(first, size) });
        }
        for other in others {
            // SAFETY: these are blocks of two distinct outputs.
            unsafe { first.copy_to_nonoverlapping(other.cast::<T>().add(start), size) };
        }
    }
}

/// `to = f(a)`.
#[inline(always)]
fn map<A: Copy, R>(to: &mut [R], a: &[A], f: impl Fn(A) -> R) {
    for (to, &x) in to.iter_mut().zip(a) {
        *to = f(x);
    }
}

/// `to = f(a, b)`.
#[inline(always)]
fn map2<A: Copy, B: Copy, R>(to: &mut [R], a: &[A], b: &[B], f: impl Fn(A, B) -> R) {
    for ((to, &x), &y) in to.iter_mut().zip(a).zip(b) {
        *to = f(x, y);
    }
}

/// Merges slot `right` into the one before it.
#[inline(always)]
fn merge<R: Copy>(slots: &mut [Block<R>], right: usize, size: usize, combine: impl Fn(R, R) -> R) {
    let (before, from) = slots.split_at_mut(right);
    let (left, right) = (&mut before[right - 1].0[..size], &from[0].0[..size]);
    for (x, &y) in left.iter_mut().zip(right) {
        *x = combine(*x, y);
    }
}
