//! The reduction loops, compiled once for each element type, operation and vector level.
//!
//! Inputs are combined block by block, as the tree of [`tree`]. Two inputs need one loop, which also finishes the result.
//! More are combined in the first-level cache (`leaves.rs`), and the block is then finished.
//!
//! Input: a task with addresses. Output: its results in memory. This module does not choose the vector
//! level.

use std::mem::MaybeUninit;
use std::slice::{from_raw_parts, from_raw_parts_mut};

use paceline_numeric::{SimdLevel, tree};

use super::element::{Reduce, SimdLane, Term};
use super::leaves::{Room, Slots, TreeInputs, block_elems, combine_block};
use super::task::{ReduceOp, ReduceTask, Reduction};

/// The most elements of a block.
pub(super) const BLOCK: usize = 1024;

/// A block on the stack, aligned so that no vector crosses a cache line.
#[repr(align(64))]
pub(super) struct StackBlock<T>(pub(super) [T; BLOCK]);

pub(super) type Running<T> = <<T as Reduce>::SimdLane as SimdLane>::Running;

/// # Safety
///
/// As for the method of [`Reduction`] that makes the task, with `T` of the reduction's element type;
/// the processor has `level`.
pub(super) unsafe fn perform<T: Reduce>(
    level: SimdLevel,
    &Reduction { op, ranks, .. }: &Reduction,
    task: ReduceTask,
    elems: usize,
) {
    // SAFETY: as required of the caller; each arm passes the task on unchanged.
    unsafe {
        match op {
            ReduceOp::Sum => perform_at::<T, _, _>(level, task, elems, Term::add, unchanged),
            ReduceOp::Mean if ranks.is_power_of_two() && ranks <= 128 => {
                let log2 = ranks.trailing_zeros();
                let finish = |x: Running<T>| x.divide_by_power(log2);
                perform_at::<T, _, _>(level, task, elems, Term::add, finish);
            }
            ReduceOp::Mean => {
                let finish = |x: Running<T>| x.divide(ranks);
                perform_at::<T, _, _>(level, task, elems, Term::add, finish);
            }
            ReduceOp::Min => perform_at::<T, _, _>(level, task, elems, Term::smaller, unchanged),
            ReduceOp::Max => perform_at::<T, _, _>(level, task, elems, Term::larger, unchanged),
            ReduceOp::Product => {
                perform_at::<T, _, _>(level, task, elems, Term::multiply, unchanged)
            }
        }
    }
}

/// How a running result is finished that needs nothing more. Closures with the same text would be compiled again.
#[inline(always)]
fn unchanged<R>(x: R) -> R {
    x
}

/// # Safety
///
/// As for [`perform`].
unsafe fn perform_at<T: Reduce, F, G>(
    level: SimdLevel,
    task: ReduceTask,
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
        unsafe fn $name<T: Reduce, F, G>(task: ReduceTask, elems: usize, combine: F, finish: G)
        where
            F: Fn(Running<T>, Running<T>) -> Running<T> + Copy,
            G: Fn(Running<T>) -> Running<T> + Copy,
        {
            // SAFETY: as required of the caller.
            unsafe { perform_by::<T, F, G>(SimdLevel::$level, task, elems, combine, finish) }
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
unsafe fn perform_by<T: Reduce, F, G>(
    level: SimdLevel,
    task: ReduceTask,
    elems: usize,
    combine: F,
    finish: G,
) where
    F: Fn(Running<T>, Running<T>) -> Running<T> + Copy,
    G: Fn(Running<T>) -> Running<T> + Copy,
{
    let (source, outputs): (_, &[*mut u8]) = match task {
        ReduceTask::Run { inputs: &[a, b], outputs: &[x, y] }
            if !T::IS_CONVERTED && a == x.cast_const() && b == y.cast_const() =>
        {
            // SAFETY: as required of the caller; in place, the two regions are distinct outputs.
            return unsafe { pair_in_place::<T, F, G>(x, y, elems, combine, finish) };
        }
        ReduceTask::Run { inputs, outputs } => (TreeInputs::Leaves(inputs), outputs),
        ReduceTask::Partial { inputs, .. } => (TreeInputs::Leaves(inputs), &[]),
        // Values that are leaves, and need no conversion.
        ReduceTask::Complete { nodes, merges, outputs }
            if is_running::<T>() && tree::are_of_leaves(merges) =>
        {
            (TreeInputs::Leaves(nodes), outputs)
        }
        ReduceTask::Complete { nodes, merges, outputs } => {
            (TreeInputs::Nodes(nodes, merges), outputs)
        }
    };
    let mut slots = MaybeUninit::<Slots<T>>::uninit();
    let slots = match source.count() {
        1 => &mut [],
        _ => slots
            .write([const { StackBlock([T::SimdLane::RUNNING_ZERO; BLOCK]) }; _])
            .as_mut_slice(),
    };
    let mut room = Room::<T>::EMPTY;
    let scratch = room.scratch();
    let block_elems = block_elems::<T>(source.addresses().len());
    let blocks =
        (0..elems).step_by(block_elems).map(|start| (start, block_elems.min(elems - start)));
    if let ReduceTask::Partial { running, .. } = task {
        for (start, size) in blocks {
            // SAFETY: the block lies within the running result, which overlaps no input. Otherwise as required of the caller.
            unsafe {
                let to = from_raw_parts_mut(running.cast::<Running<T>>().add(start), size);
                combine_block::<T, F>(level, source, start, to, slots, scratch, combine);
            }
        }
        return;
    }
    let Some((&first, others)) = outputs.split_first() else { return };
    let is_apart = !source.addresses().contains(&first.cast_const());
    let pair = match source {
        TreeInputs::Leaves(&[a, b]) if is_apart && !T::IS_CONVERTED => Some((a, b)),
        _ => None,
    };
    let StackBlock(sum) = &mut StackBlock([T::SimdLane::RUNNING_ZERO; BLOCK]);
    for (start, size) in blocks {
        // SAFETY: the block lies within the output.
        let to = unsafe { first.cast::<T>().add(start) };
        if let Some((a, b)) = pair {
            // SAFETY: these are blocks of the inputs and of an output apart from them, and the type is its own lane.
            unsafe {
                let input =
                    |at: *const u8| from_raw_parts(at.cast::<T::SimdLane>().add(start), size);
                let to = from_raw_parts_mut(to.cast::<T::SimdLane>(), size);
                for ((to, x), y) in to.iter_mut().zip(input(a)).zip(input(b)) {
                    *to = T::SimdLane::narrow(finish(combine(x.widen(), y.widen())));
                }
            }
        } else if is_apart && is_running::<T>() {
            // SAFETY: the block of the output is apart from the inputs, and has the running type.
            unsafe {
                let to = from_raw_parts_mut(to.cast::<Running<T>>(), size);
                combine_block::<T, F>(level, source, start, to, slots, scratch, combine);
                to.iter_mut().for_each(|x| *x = finish(*x));
            }
        } else {
            let sum = &mut sum[..size];
            // SAFETY: as required of the caller. An output at the same address as an input is written only after all inputs of
            // the block have been read.
            unsafe {
                combine_block::<T, F>(level, source, start, sum, slots, scratch, combine);
                T::store(level, sum, from_raw_parts_mut(to, size), finish);
            }
        }
        for other in others {
            // SAFETY: these are blocks of two distinct outputs.
            unsafe { to.copy_to_nonoverlapping(other.cast::<T>().add(start), size) };
        }
    }
}

/// Whether values are combined in the type itself.
const fn is_running<T: Reduce>() -> bool {
    size_of::<T>() == size_of::<Running<T>>()
}

/// Reduces the data of two ranks in place, in one pass that reads and writes both.
///
/// # Safety
///
/// As for [`perform`]; the regions are distinct, and the type is its own lane.
#[inline(always)]
unsafe fn pair_in_place<T: Reduce, F, G>(
    first: *mut u8,
    second: *mut u8,
    elems: usize,
    combine: F,
    finish: G,
) where
    F: Fn(Running<T>, Running<T>) -> Running<T>,
    G: Fn(Running<T>) -> Running<T>,
{
    // SAFETY: these are two distinct regions that nobody else touches, as required of the caller.
    let (a, b) = unsafe {
        let a = from_raw_parts_mut(first.cast::<T::SimdLane>(), elems);
        (a, from_raw_parts_mut(second.cast::<T::SimdLane>(), elems))
    };
    for (x, y) in a.iter_mut().zip(b) {
        let result = T::SimdLane::narrow(finish(combine(x.widen(), y.widen())));
        *x = result;
        *y = result;
    }
}
