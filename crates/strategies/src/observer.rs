//! Digests of the tensors of a step, by which two layouts of ranks can be compared tensor by tensor.
//!
//! Input: tensors, when the passes have computed them. Output: a record of each, with the number of its micro-batch among those of all
//! ranks. This file does not know what other ranks have.

use std::ops::Range;

use paceline_kernels::digest::{Digest, digest};
use paceline_kernels::{Compute, cast, elementwise};
use paceline_memory::{Category, DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::Result;

/// The phases of a step, in their order. Those before `Reduced` are parts of the pass of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// The batch.
    Input,
    /// Outputs of blocks.
    Forward,
    /// The gradient of the last output.
    Loss,
    /// Gradients of the inputs of blocks.
    Backward,
    /// Gradients of parameters, before they are added up.
    Gradient,
    /// Gradients of parameters, over all micro-batches and ranks.
    Reduced,
    /// The norm of the gradients.
    Norm,
    /// Parameters and running statistics after the step.
    Weights,
}

impl Phase {
    /// Whether each micro-batch has tensors of its own.
    pub fn is_of_micro_batch(self) -> bool {
        self < Self::Reduced
    }
}

/// The digest of a tensor, or of the part of it that a rank holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Digested {
    /// The phase.
    pub phase: Phase,
    /// The micro-batch, counted over all ranks; 0 after the passes.
    pub micro_batch: usize,
    /// The same, counted on the rank.
    pub own: usize,
    /// Its number in the phase, in the order of computation.
    pub order: usize,
    /// The block or the parameter.
    pub name: String,
    /// The shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The elements of the part.
    pub part: Range<usize>,
    /// The digest, which adds up over parts.
    pub digest: [u64; 2],
    /// The type, as in safetensors, and the bytes of the part; empty unless its values are wanted.
    pub values: (String, Vec<u8>),
}

impl Digested {
    /// The name of the tensor in a run, as in `2:0:forward:conv1`: step, micro-batch, phase and name.
    pub fn place(&self, step: u64) -> String {
        let Self { phase, micro_batch, name, .. } = self;
        format!("{step}:{micro_batch}:{}:{name}", format!("{phase:?}").to_lowercase())
    }
}

/// Takes the digests of one rank.
#[derive(Debug)]
pub struct Observer {
    /// The place of a tensor whose values are kept too.
    wanted: String,
    /// The micro-batches of this rank among all, if the data alone cut them. Otherwise each rank has as many.
    share: Option<Range<usize>>,
    /// The number of ranks over which gradients are averaged. Until then they are larger by this factor.
    num_averaged: usize,
    step: u64,
    /// The micro-batch of the current pass: its number on this rank and among all.
    at: Option<(usize, usize)>,
    found: Vec<Digested>,
}

impl Observer {
    /// An observer that keeps the values of one tensor. `share` has the micro-batches of this rank, if the data alone cut them;
    /// gradients are averaged over `num_averaged` ranks.
    pub fn new(wanted: String, share: Option<Range<usize>>, num_averaged: usize) -> Self {
        Self { wanted, share, num_averaged, step: 0, at: None, found: Vec::new() }
    }

    /// Begins a step, counted from 1.
    pub fn begin_step(&mut self, step: u64) {
        (self.step, self.at) = (step, None);
        self.found.clear();
    }

    /// The tensors of the step.
    pub fn take(&mut self) -> Vec<Digested> {
        self.found.split_off(0)
    }

    /// Begins a pass of micro-batch `at` of the `count` of this rank, if it has samples.
    pub(crate) fn begin_pass(&mut self, at: Option<usize>, count: usize, rank: usize) {
        self.at = at.map(|at| match &self.share {
            // A rank with fewer than others has empty ones before them.
            Some(share) => (at, share.end + at - count),
            None => (at, rank * count + at),
        });
    }

    /// Adds a tensor, by its number and name in the phase, or the part of it that begins at an element of its shape. Waits for the
    /// device.
    pub fn add(
        &mut self,
        compute: &Compute,
        phase: Phase,
        (order, name): (usize, &str),
        (shape, start): (&[usize], usize),
        tensor: &Tensor,
    ) -> Result<()> {
        let at = if phase.is_of_micro_batch() { self.at } else { Some((0, 0)) };
        let Some((own, micro_batch)) = at else { return Ok(()) };
        let is_scaled = (Phase::Loss..=Phase::Gradient).contains(&phase) && self.num_averaged > 1;
        let tensor = match is_scaled.then(|| divided(compute, tensor, self.num_averaged)) {
            Some(divided) => divided?,
            None => tensor.clone(),
        };
        let Digest { sum, by_row } = digest(compute, &tensor, start)?;
        let mut observed = Digested {
            phase,
            micro_batch,
            own,
            order,
            name: name.to_owned(),
            shape: shape.to_vec(),
            part: start..start + tensor.num_elems(),
            digest: [sum, by_row],
            values: (format!("{:?}", tensor.dtype()), Vec::new()),
        };
        if observed.place(self.step) == self.wanted {
            observed.values.1 = tensor.to_host()?.as_bytes().read::<u8>()?.to_vec();
        }
        self.found.push(observed);
        Ok(())
    }
}

/// A copy, divided by a number of ranks.
fn divided(compute: &Compute, tensor: &Tensor, ranks: usize) -> Result<Tensor> {
    let new = |dtype| compute.allocator.tensor(dtype, tensor.shape(), Category::Workspace);
    let copy = new(tensor.dtype())?;
    if let DType::F16 | DType::BF16 = tensor.dtype() {
        let wide = new(DType::F32)?;
        cast::widen(compute, tensor, &wide)?;
        elementwise::divide(compute, &wide, ranks as f64)?;
        cast::narrow(compute, &wide, &copy)?;
    } else {
        compute.copy(tensor, &copy)?;
        elementwise::divide(compute, &copy, ranks as f64)?;
    }
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use paceline_memory::Allocator;

    use super::*;

    #[test]
    fn micro_batches_are_counted_over_all_ranks() {
        let number = |share: Option<Range<usize>>, at, count| {
            let mut observer = Observer::new("digests".into(), share, 1);
            observer.begin_pass(Some(at), count, 2);
            observer.at
        };
        assert_eq!(number(None, 1, 3), Some((1, 7)));
        // This rank has two, and others have four: its own come last.
        assert_eq!(number(Some(4..6), 2, 4), Some((2, 4)));
        assert_eq!(number(Some(4..6), 3, 4), Some((3, 5)));
    }

    #[test]
    fn gradients_of_several_ranks_are_as_those_of_one() {
        let compute = Compute::new(1, Allocator::new()).unwrap();
        let tensor = |dtype, factor: f32| {
            let wide = compute.allocator.tensor(DType::F32, [3], Category::Workspace).unwrap();
            wide.write::<f32>().unwrap().copy_from_slice(&[1.5, -0.25, 3.0].map(|x| x * factor));
            if dtype == DType::F32 {
                return wide;
            }
            let narrow = compute.allocator.tensor(dtype, [3], Category::Workspace).unwrap();
            cast::narrow(&compute, &wide, &narrow).unwrap();
            narrow
        };
        for dtype in [DType::F32, DType::BF16] {
            let found = [1, 4].map(|ranks| {
                let mut observer = Observer::new("1:0:backward:x".into(), None, ranks);
                observer.begin_step(1);
                observer.begin_pass(Some(0), 1, 0);
                let (shape, of) = ((&[3][..], 0), tensor(dtype, ranks as f32));
                observer.add(&compute, Phase::Backward, (0, "x"), shape, &of).unwrap();
                observer.add(&compute, Phase::Forward, (0, "x"), shape, &of).unwrap();
                observer.take()
            });
            let [one, four] = &found;
            assert_eq!((one[0].digest, &one[0].values), (four[0].digest, &four[0].values));
            assert_ne!(one[1].digest, four[1].digest);
            assert!(!one[0].values.1.is_empty() && one[1].values.1.is_empty());
        }
    }
}
