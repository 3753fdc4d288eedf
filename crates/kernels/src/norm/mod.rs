//! The norm of gradients, for gradient clipping.
//!
//! The squares are summed as a tree over rows of 16 elements ([`tree`]), in f64. The rows are those of the parameters without
//! padding, so no bit of the sum depends on padding, ranks, threads or vector instructions. The sum stays in a tensor until it
//! is read.

pub mod tree;

use std::marker::PhantomData;

pub(crate) static CARD: KernelSource =
    KernelSource::new("norm/squares.cu", include_str!("squares.cu"), &[NUMBERS]);
use std::ops::Range;
use std::sync::Arc;

use paceline_cuda::kernel::In;
use paceline_cuda::{Grid, KernelSource};
use paceline_memory::{Category, DType, Device, Tensor};
use paceline_numeric::tree::largest_nodes;

use self::tree::{Lanes, ROW_ELEMS, RowTree, TreeNode, added};
use crate::card::NUMBERS;
use crate::simd::vectorized;
use crate::stored::dispatch;
use crate::threads::batches;
use crate::{Compute, Op, Processor, Real, Result, read, scratch, write};

/// Rows of a block, a node of the tree that one thread computes.
const BLOCK_ROWS: usize = 1 << BLOCK_LEVEL;
const BLOCK_LEVEL: u32 = 8;

/// Rows that are squared and added without a look at their places.
const RUN_ROWS: usize = 1 << RUN_LEVEL;
const RUN_LEVEL: u32 = 5;

/// Where rows lie in a flat tensor: the parameters one after the other, each in rows of 16 elements, of which the last
/// one may be shorter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowRanges {
    /// The first row of each parameter, and its elements in the tensor. Shared, so that a clone costs nothing.
    pieces: Arc<[(usize, Range<usize>)]>,
    count: usize,
}

impl RowRanges {
    /// The rows of parameters that have these elements in the tensor.
    pub fn new(parameters: impl IntoIterator<Item = Range<usize>>) -> Self {
        let mut count = 0;
        let piece = |elems: Range<usize>| {
            let first = count;
            count += elems.len().div_ceil(ROW_ELEMS);
            (first, elems)
        };
        let pieces = parameters.into_iter().map(piece).collect();
        Self { pieces, count }
    }

    /// The number of rows.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The rows of the parameters, or parts of them, that lie within these elements of the tensor. The elements begin and
    /// end where rows do, or outside of the parameters.
    pub fn within(&self, elems: &Range<usize>) -> Range<usize> {
        let row_at = |elem: usize| {
            let at = self.pieces.partition_point(|(_, piece)| piece.end <= elem);
            let Some((first, piece)) = self.pieces.get(at) else { return self.count };
            first + elem.saturating_sub(piece.start).div_ceil(ROW_ELEMS)
        };
        row_at(elems.start)..row_at(elems.end)
    }

    /// The elements of the rows in `range` that lie in one piece, from the first of them on.
    fn run(&self, range: &Range<usize>) -> Range<usize> {
        let at = self.pieces.partition_point(|(first, _)| *first <= range.start) - 1;
        let (first, elems) = &self.pieces[at];
        let start = elems.start + (range.start - first) * ROW_ELEMS;
        start..elems.end.min(start + range.len() * ROW_ELEMS)
    }
}

/// The sum of the squares of a run of rows, in memory of the device until [`Squares::read`].
#[derive(Clone, Debug)]
pub struct Squares {
    rows: Range<usize>,
    nodes: Tensor,
}

impl Squares {
    /// The sums over the largest nodes of the tree within the rows, in order: f64 (nodes, 16). Which nodes these are
    /// follows from the rows alone, see [`largest_nodes`].
    pub fn nodes(&self) -> &Tensor {
        &self.nodes
    }

    /// Reads the sums.
    pub fn read(&self) -> Result<RowTree> {
        let nodes = self.nodes.to_host()?;
        let sums = nodes.read::<f64>()?;
        let mut tree = RowTree::default();
        for ((level, index), sum) in
            largest_nodes(self.rows.clone()).zip(sums.as_chunks::<ROW_ELEMS>().0)
        {
            tree.push(TreeNode { level, index, sum: *sum });
        }
        Ok(tree)
    }
}

/// The sum of the squares of the rows in `range`. f32 and f64, squared and summed in f64. The first element of `tensor` is
/// element `start` of what the rows are about.
pub fn squares(
    compute: &Compute,
    tensor: &Tensor,
    start: usize,
    rows: &RowRanges,
    range: Range<usize>,
) -> Result<Squares> {
    let op = Op::new("squares").elementwise([2, tensor.num_elems()]);
    let shape = [largest_nodes(range.clone()).count(), ROW_ELEMS];
    let nodes = compute.allocator.tensor(DType::F64, shape, Category::Workspace)?;
    let (num_runs, tables) = match compute.device() {
        Device::Cuda => {
            let (num_runs, values) = tables_of(rows, &range, start);
            let table =
                compute.allocator.tensor(DType::I64, [values.len()], Category::Workspace)?;
            table.overwrite::<i64, _>(|to| to.copy_from_slice(&values))?;
            (num_runs, Some(table))
        }
        Device::Cpu | Device::Meta | Device::Sim => (blocks_of(&range).len(), None),
    };
    dispatch!(op.name, tensor.dtype(), T: f32 | f64 => {
        let operands = (
            read::<T>("tensor", tensor, tensor.shape()),
            write::<f64>("nodes", &nodes, shape),
            scratch::<f64>(num_runs * ROW_ELEMS),
            tables.as_ref().map(|table| read::<i64>("rows", table, table.shape())),
        );
        let (rows, range) = (rows.clone(), range.clone());
        let (num_pieces, num_nodes) = (rows.pieces.len(), shape[0]);
        compute.launch_with_card(op, operands, move |cpu, operands| {
            let (elems, nodes, sums, _) = operands;
            let tree = of_range(cpu, ElemRun { elems, start }, &rows, range, sums)?;
            for (sum, node) in nodes.as_chunks_mut::<ROW_ELEMS>().0.iter_mut().zip(tree.nodes()) {
                *sum = node.sum;
            }
            Ok(())
        }, move |card, (elems, nodes, sums, tables)| {
            let pieces = tables.unwrap_or(In::NONE);
            let of_nodes: In<i64> = In(pieces.0 + (num_pieces * 3 * size_of::<i64>()) as u64, PhantomData);
            let (num_pieces, num_nodes) = (num_pieces as u32, num_nodes as u32);
            // SAFETY: the tables say which elements of the tensor are rows, and there are 16 sums for each run and node.
            unsafe {
                let arguments = (elems, pieces, num_pieces, of_nodes, num_nodes, sums);
                card.launch(CARD.of::<T>("squares_of_runs"), arguments, Grid::blocks(num_runs as u32, Grid::BLOCK))?;
                let arguments = (sums.as_in(), of_nodes, nodes);
                card.launch(CARD.kernel("squares_of_nodes"), arguments, Grid::blocks(num_nodes, Grid::BLOCK))
            }
        })
    })?;
    Ok(Squares { rows: range, nodes })
}

/// For a card's kernels: the number of runs of at most [`BLOCK_ROWS`] rows in which it computes the nodes, and two tables. The
/// first has for each piece its first row, its first element and the element after it, counted from `start`; the second for each
/// node its first run, its first row and its number of rows.
fn tables_of(rows: &RowRanges, range: &Range<usize>, start: usize) -> (usize, Vec<i64>) {
    let from_start = |elem: usize| elem as i64 - start as i64;
    let pieces = rows.pieces.iter();
    let mut values: Vec<i64> = pieces
        .flat_map(|(first, elems)| [*first as i64, from_start(elems.start), from_start(elems.end)])
        .collect();
    let mut num_runs = 0;
    for (level, index) in largest_nodes(range.clone()) {
        values.extend([num_runs as i64, (index << level) as i64, 1i64 << level]);
        num_runs += (1usize << level).div_ceil(BLOCK_ROWS);
    }
    (num_runs, values)
}

/// Elements that follow each other, and the place of the first one.
#[derive(Clone, Copy)]
struct ElemRun<'a, T> {
    elems: &'a [T],
    start: usize,
}

impl<T> ElemRun<'_, T> {
    fn slice(&self, start: usize, len: usize) -> &[T] {
        &self.elems[start - self.start..][..len]
    }
}

/// The blocks that lie within a range of rows.
fn blocks_of(rows: &Range<usize>) -> Range<usize> {
    rows.start.div_ceil(BLOCK_ROWS)..rows.end / BLOCK_ROWS
}

/// The whole blocks of the range are divided among the threads. The rows before and after them come one by one.
fn of_range<T: Real>(
    cpu: &Processor,
    x: ElemRun<T>,
    rows: &RowRanges,
    range: Range<usize>,
    sums: &mut [f64],
) -> Result<RowTree> {
    let run = |x: &[T], sum: &mut Lanes| vectorized!(cpu.simd, run_of::<T>, x, sum);
    let blocks = blocks_of(&range);
    let mut tree = RowTree::default();
    if blocks.is_empty() {
        push_rows(&mut tree, x, rows, range, run);
        return Ok(tree);
    }
    push_rows(&mut tree, x, rows, range.start..blocks.start * BLOCK_ROWS, run);
    let parts = batches(cpu, sums, ROW_ELEMS, blocks.len());
    cpu.threads.for_each(parts, |(first, sums)| {
        for (at, sum) in sums.as_chunks_mut::<ROW_ELEMS>().0.iter_mut().enumerate() {
            let block = blocks.start + first + at;
            let mut tree = RowTree::default();
            let range = block * BLOCK_ROWS..(block + 1) * BLOCK_ROWS;
            push_rows(&mut tree, x, rows, range, run);
            *sum = tree.nodes()[0].sum;
        }
    });
    for (index, sum) in blocks.clone().zip(sums.as_chunks::<ROW_ELEMS>().0) {
        tree.push(TreeNode { level: BLOCK_LEVEL, index, sum: *sum });
    }
    push_rows(&mut tree, x, rows, blocks.end * BLOCK_ROWS..range.end, run);
    Ok(tree)
}

fn push_rows<T: Real>(
    tree: &mut RowTree,
    x: ElemRun<T>,
    rows: &RowRanges,
    mut range: Range<usize>,
    run: impl Fn(&[T], &mut Lanes),
) {
    while !range.is_empty() {
        let elems = rows.run(&range);
        let mut sum = [0.0; ROW_ELEMS];
        let (level, num_rows) =
            if range.start.is_multiple_of(RUN_ROWS) && elems.len() >= RUN_ROWS * ROW_ELEMS {
                run(x.slice(elems.start, RUN_ROWS * ROW_ELEMS), &mut sum);
                (RUN_LEVEL, RUN_ROWS)
            } else {
                let len = elems.len().min(ROW_ELEMS);
                for (sum, x) in sum.iter_mut().zip(x.slice(elems.start, len)) {
                    *sum = x.to_f64() * x.to_f64();
                }
                (0, 1)
            };
        tree.push(TreeNode { level, index: range.start >> level, sum });
        range.start += num_rows;
    }
}

/// The sum of the squares of [`RUN_ROWS`] whole rows.
#[inline(always)]
fn run_of<T: Real>(x: &[T], sum: &mut Lanes) {
    let (rows, _) = x.as_chunks::<ROW_ELEMS>();
    let mut quarters = [[0.0; ROW_ELEMS]; 4];
    for (sum, rows) in quarters.iter_mut().zip(rows.as_chunks::<8>().0) {
        let [a, b, c, d, e, f, g, h] = rows;
        let pair = |left: &[T; ROW_ELEMS], right: &[T; ROW_ELEMS]| -> Lanes {
            std::array::from_fn(|lane| {
                let (left, right) = (left[lane].to_f64(), right[lane].to_f64());
                left * left + right * right
            })
        };
        *sum = added(&added(&pair(a, b), &pair(c, d)), &added(&pair(e, f), &pair(g, h)));
    }
    let [a, b, c, d] = &quarters;
    *sum = added(&added(a, b), &added(c, d));
}
