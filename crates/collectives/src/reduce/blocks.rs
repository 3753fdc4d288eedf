//! The reduction loops, compiled once for each element type, operation and vector level.
//!
//! Two inputs are combined in one pass. More inputs are combined block by block: the running result of a
//! block stays in the first-level cache while the inputs are added to it one after the other.
//!
//! Input: a task with addresses. Output: its results in memory. This module does not choose the vector
//! level.

use std::slice::{from_raw_parts, from_raw_parts_mut};

use super::element::{Lane, Number, Reduce};
use super::level::Level;
use super::task::{ReduceOp, Reduction, Task};

/// The most elements of a block.
const BLOCK: usize = 1024;

/// Elements of a block of `T`: few enough that four blocks leave room in the first-level cache.
const fn block_elems<T: Reduce>() -> usize {
    let elems = 4096 / size_of::<Running<T>>();
    if elems < BLOCK { elems } else { BLOCK }
}

/// A block on the stack, aligned so that no vector crosses a cache line.
#[repr(align(64))]
struct Block<T>([T; BLOCK]);

type Running<T> = <<T as Reduce>::Lane as Lane>::Running;

/// # Safety
///
/// As for the method of [`Reduction`] that makes the task, with `T` of the reduction's element type;
/// the processor has `level`.
#[inline(always)]
pub(super) unsafe fn perform<T: Reduce>(
    level: Level,
    &Reduction { op, ranks, .. }: &Reduction,
    task: Task,
    elems: usize,
) {
    // SAFETY: as required of the caller; each arm passes the task on unchanged.
    unsafe {
        match op {
            ReduceOp::Sum => perform_by::<T>(level, task, elems, Number::add, |x| x),
            ReduceOp::Mean if ranks.is_power_of_two() && ranks <= 128 => {
                let log2 = ranks.trailing_zeros();
                perform_by::<T>(level, task, elems, Number::add, |x| x.divide_by_power(log2));
            }
            ReduceOp::Mean => {
                perform_by::<T>(level, task, elems, Number::add, |x| x.divide(ranks));
            }
            ReduceOp::Min => perform_by::<T>(level, task, elems, Number::smaller, |x| x),
            ReduceOp::Max => perform_by::<T>(level, task, elems, Number::larger, |x| x),
            ReduceOp::Product => perform_by::<T>(level, task, elems, Number::multiply, |x| x),
        }
    }
}

/// # Safety
///
/// As for [`perform`].
#[inline(always)]
unsafe fn perform_by<T: Reduce>(
    level: Level,
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
                let finish = |x, y| Lane::narrow(finish(combine(Lane::widen(x), Lane::widen(y))));
                pair_in_place::<T>(x, y, elems, finish);
            }
            Task::Run { inputs, outputs } => {
                run::<T>(level, inputs, outputs, elems, combine, finish);
            }
            Task::Accumulate { fresh, inputs, running } => {
                accumulate::<T>(level, fresh, inputs, running, elems, combine);
            }
            Task::Finish { running, outputs } => {
                finish_all::<T>(level, running, outputs, elems, finish);
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
    combine: impl Fn(T::Lane, T::Lane) -> T::Lane,
) {
    // SAFETY: these are two distinct regions that nobody else touches, as required of the caller.
    let (a, b) = unsafe {
        let a = from_raw_parts_mut(first.cast::<T::Lane>(), elems);
        (a, from_raw_parts_mut(second.cast::<T::Lane>(), elems))
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
    level: Level,
    inputs: &[*const u8],
    outputs: &[*mut u8],
    elems: usize,
    combine: impl Fn(Running<T>, Running<T>) -> Running<T> + Copy,
    finish: impl Fn(Running<T>) -> Running<T> + Copy,
) {
    let last = |x| T::Lane::narrow(finish(x));
    let mut scratch = [const { Block([T::Lane::ZERO; BLOCK]) }; 2];
    let [Block(scratch), Block(other)] = &mut scratch;
    let Block(sum) = &mut Block([T::Lane::RUNNING_ZERO; BLOCK]);
    let mut target = Target::<T>::new(inputs, outputs);
    for start in (0..elems).step_by(block_elems::<T>()) {
        let size = block_elems::<T>().min(elems - start);
        let (scratch, other, sum) = (&mut scratch[..size], &mut other[..size], &mut sum[..size]);
        // SAFETY: this is a block of an input. An output at the same address is written only after all inputs
        // of the block have been read.
        let input = |at: *const u8| unsafe { from_raw_parts(at.cast::<T>().add(start), size) };
        // SAFETY: the block lies within the outputs.
        let lanes = unsafe { target.lanes(start, size) };
        match *inputs {
            [] => {}
            [only] => map(lanes, T::load(level, input(only), scratch), |x| last(x.widen())),
            [a, b] => {
                let (a, b) = (T::load(level, input(a), scratch), T::load(level, input(b), other));
                map2(lanes, a, b, |x, y| last(combine(x.widen(), y.widen())));
            }
            [a, b, ref middle @ .., end] => {
                let (a, b) = (T::load(level, input(a), scratch), T::load(level, input(b), other));
                map2(sum, a, b, |x, y| combine(x.widen(), y.widen()));
                for &next in middle {
                    update(sum, T::load(level, input(next), scratch), |x, y| combine(x, y.widen()));
                }
                let end = T::load(level, input(end), scratch);
                map2(lanes, sum, end, |x, y| last(combine(x, y.widen())));
            }
        }
        // SAFETY: the lanes of this block have just been filled; all its inputs have been read.
        unsafe { target.write(level, start, size) };
    }
}

/// # Safety
///
/// As for [`Reduction::accumulate`].
#[inline(always)]
unsafe fn accumulate<T: Reduce>(
    level: Level,
    fresh: bool,
    inputs: &[*const u8],
    running: *mut u8,
    elems: usize,
    combine: impl Fn(Running<T>, Running<T>) -> Running<T> + Copy,
) {
    let mut scratch = [const { Block([T::Lane::ZERO; BLOCK]) }; 2];
    let [Block(scratch), Block(other)] = &mut scratch;
    for start in (0..elems).step_by(block_elems::<T>()) {
        let size = block_elems::<T>().min(elems - start);
        let (scratch, other) = (&mut scratch[..size], &mut other[..size]);
        // SAFETY: this is a block of an input, to which nobody writes.
        let input = |at: *const u8| unsafe { from_raw_parts(at.cast::<T>().add(start), size) };
        // SAFETY: this is a block of the running result, which overlaps no input.
        let sum = unsafe { from_raw_parts_mut(running.cast::<Running<T>>().add(start), size) };
        let rest = match *inputs {
            [only] if fresh => {
                map(sum, T::load(level, input(only), scratch), |x| x.widen());
                &[]
            }
            [a, b, ref rest @ ..] if fresh => {
                let (a, b) = (T::load(level, input(a), scratch), T::load(level, input(b), other));
                map2(sum, a, b, |x, y| combine(x.widen(), y.widen()));
                rest
            }
            _ => inputs,
        };
        for &next in rest {
            update(sum, T::load(level, input(next), scratch), |x, y| combine(x, y.widen()));
        }
    }
}

/// # Safety
///
/// As for [`Reduction::finish`].
#[inline(always)]
unsafe fn finish_all<T: Reduce>(
    level: Level,
    running: *const u8,
    outputs: &[*mut u8],
    elems: usize,
    finish: impl Fn(Running<T>) -> Running<T> + Copy,
) {
    let mut target = Target::<T>::new(&[running], outputs);
    for start in (0..elems).step_by(block_elems::<T>()) {
        let size = block_elems::<T>().min(elems - start);
        // SAFETY: the block lies within the outputs.
        let lanes = unsafe { target.lanes(start, size) };
        // SAFETY: this is a block of the running result, to which nobody writes while it is read.
        let running = unsafe { from_raw_parts(running.cast::<Running<T>>().add(start), size) };
        map(lanes, running, |x| T::Lane::narrow(finish(x)));
        // SAFETY: the lanes of this block have just been filled from the running result.
        unsafe { target.write(level, start, size) };
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
    lanes: Block<T::Lane>,
}

impl<'a, T: Reduce> Target<'a, T> {
    /// `sources` are the addresses that the results are computed from.
    #[inline(always)]
    fn new(sources: &[*const u8], outputs: &'a [*mut u8]) -> Self {
        let over_source = outputs.first().is_none_or(|first| sources.contains(&first.cast_const()));
        let is_indirect = T::IS_CONVERTED || over_source;
        Self { outputs, is_indirect, lanes: Block([T::Lane::ZERO; BLOCK]) }
    }

    /// The memory for the results of the `size` elements from `start` on.
    ///
    /// # Safety
    ///
    /// The outputs are valid for these elements, and nobody else touches them. The first output overlaps no
    /// source, unless it begins at a source's address. `size` is at most [`BLOCK`].
    #[inline(always)]
    unsafe fn lanes(&mut self, start: usize, size: usize) -> &mut [T::Lane] {
        match self.outputs {
            // SAFETY: this is a block of an output that is not a source, and the type is its own lane.
            [first, ..] if !self.is_indirect => unsafe {
                from_raw_parts_mut(first.cast::<T::Lane>().add(start), size)
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
    unsafe fn write(&mut self, level: Level, start: usize, size: usize) {
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

/// `to = f(to, a)`.
#[inline(always)]
fn update<A: Copy, R: Copy>(to: &mut [R], a: &[A], f: impl Fn(R, A) -> R) {
    for (to, &x) in to.iter_mut().zip(a) {
        *to = f(*to, x);
    }
}
