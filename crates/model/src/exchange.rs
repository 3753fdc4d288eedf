//! The exchanges of a pass between the ranks that divide the layers.
//!
//! Input: matrices of which each rank has some rows, or a part of a sum. Output: all rows, or the whole sum. The code that runs the
//! pass communicates ([`PassHooks::start_exchange`](crate::PassHooks::start_exchange)); with one rank, nothing is exchanged.

use std::ops::Range;

use paceline_kernels::divided::SumOfParts;
use paceline_kernels::{cast, elementwise};
use paceline_memory::{DType, Tensor};

use crate::{Batch, Context, Divided, ParamId, Result};

/// An exchange among the ranks that divide the layers. Rows are divided in the order of the ranks.
#[derive(Clone, Copy, Debug)]
pub enum PartExchange<'a> {
    /// Brings the rows of all ranks together.
    Gather {
        /// Those of this rank.
        own: &'a Tensor,
        /// Those of all ranks.
        all: &'a Tensor,
    },
    /// Adds up the ranks' tensors as a tree, and gives each rank its rows of the sum.
    Scatter {
        /// The part of this rank's sum that its parts have made.
        sum: &'a Tensor,
        /// This rank's rows.
        own: &'a Tensor,
    },
    /// Adds up the ranks' tensors as a tree, in place.
    Sum(&'a Tensor),
    /// The largest of the ranks' numbers, in place.
    Max(&'a Tensor),
}

impl Context<'_> {
    /// How layers are divided, and the parts of this rank.
    pub fn divided(&self) -> Divided {
        self.storage.layout().divided()
    }

    /// The rows of the matrices that layers pass on: one for each token, or for each sample. Errors without a batch.
    fn num_rows(&self) -> Result<usize> {
        let inputs = self.batch(Batch::INPUTS)?;
        Ok(if inputs.dtype() == DType::I64 { inputs.num_elems() } else { inputs.dims()[0] })
    }

    /// All rows of a matrix (rows, columns) of which this rank has its own. The same matrix unless rows are divided.
    pub(crate) fn gather_rows(&mut self, own: Tensor) -> Result<Tensor> {
        let all = self.start_gather(&own)?;
        if all.is_some() {
            self.hooks.finish_exchange()?;
        }
        Ok(all.unwrap_or(own))
    }

    /// All rows of a matrix of which each rank may have its own: the layers know whether rows are divided there, and who looks at a layer's
    /// output does not.
    pub(crate) fn all_rows(&mut self, matrix: &Tensor) -> Result<Tensor> {
        let divided = self.divided();
        if divided.ranks == 1 || !divided.by_rows {
            return Ok(matrix.clone());
        }
        // Of very few rows, one rank may have all where they are divided too.
        let (is_part, lacks) =
            (matrix.dims()[0] < self.num_rows()?, self.scratch(DType::F32, [1])?);
        lacks.overwrite::<f32, _>(|lacks| lacks[0] = f32::from(u8::from(is_part)))?;
        self.exchange(PartExchange::Max(&lacks))?;
        let is_divided = lacks.to_host()?.read::<f32>()?[0] > 0.0;
        if is_divided { self.gather_rows(matrix.clone()) } else { Ok(matrix.clone()) }
    }

    /// Starts to bring all rows together. `None` unless rows are divided.
    pub(crate) fn start_gather(&mut self, own: &Tensor) -> Result<Option<Tensor>> {
        let divided = self.divided();
        if divided.ranks == 1 || !divided.by_rows {
            return Ok(None);
        }
        let all = self.scratch(own.dtype(), [self.num_rows()?, own.dims()[1]])?;
        self.hooks.start_exchange(PartExchange::Gather { own, all: &all })?;
        Ok(Some(all))
    }

    /// The sum of the ranks' matrices (rows, columns): the rows of this rank if rows are divided there, and all otherwise.
    pub(crate) fn sum_rows(&mut self, sum: Tensor, by_rows: bool) -> Result<Tensor> {
        let own = self.start_sum(sum, by_rows)?;
        self.finish_exchange()?;
        Ok(own)
    }

    /// Starts to add up the ranks' matrices.
    pub(crate) fn start_sum(&mut self, sum: Tensor, by_rows: bool) -> Result<Tensor> {
        let divided = self.divided();
        if divided.ranks == 1 {
            return Ok(sum);
        }
        if !by_rows || !divided.by_rows {
            self.hooks.start_exchange(PartExchange::Sum(&sum))?;
            return Ok(sum);
        }
        let rows = divided.rows(self.num_rows()?);
        let own = self.scratch(sum.dtype(), [rows.len(), sum.dims()[1]])?;
        self.hooks.start_exchange(PartExchange::Scatter { sum: &sum, own: &own })?;
        Ok(own)
    }

    /// Waits until the exchange that was started first is over.
    pub(crate) fn finish_exchange(&mut self) -> Result<()> {
        if self.divided().ranks == 1 { Ok(()) } else { self.hooks.finish_exchange() }
    }

    /// The largest numbers, or the sums, over the ranks that divide the layers, in place.
    pub(crate) fn exchange(&mut self, of: PartExchange) -> Result<()> {
        if self.divided().ranks > 1 {
            self.hooks.start_exchange(of)?;
        }
        self.finish_exchange()
    }

    /// Writes the gradient of a parameter that is a sum over rows, and announces it. `of_rows` writes the sum over some of the rows that
    /// this rank has (`begin..end`) to a tensor, or adds to it. Where layers are divided, the rows are added up in as many runs.
    /// It has `own_rows` of them, and `by_rows` says whether rows are divided here.
    pub(crate) fn gradient_over_rows(
        &mut self,
        id: ParamId,
        (own_rows, by_rows): (usize, bool),
        of_rows: impl Fn(&Self, Range<usize>, &Tensor, bool) -> Result<()>,
    ) -> Result<()> {
        let (grad, accumulate, divided) = (self.grad(id)?, self.accumulates(id), self.divided());
        if divided.parts == 1 {
            of_rows(self, 0..own_rows, &grad, accumulate)?;
            return self.gradient_ready(id);
        }
        let divided = Divided { by_rows: divided.by_rows && by_rows, ..divided };
        let (rows, runs) = (self.num_rows()?, divided.runs(self.num_rows()?));
        let begin = divided.rows(rows).start;
        let mut sum =
            SumOfParts::new(if divided.by_rows { divided.own().len() } else { divided.parts });
        for run in runs {
            let of_run = self.scratch(grad.dtype(), grad.shape())?;
            of_rows(self, run.start - begin..run.end - begin, &of_run, false)?;
            sum.push(self.compute, of_run)?;
        }
        let sum = sum.finish().expect("layers have parts");
        if divided.by_rows {
            self.exchange(PartExchange::Sum(&sum))?;
        }
        if accumulate {
            elementwise::add(self.compute, &sum, &grad)?;
        } else {
            self.compute.copy(&sum, &grad)?;
        }
        self.gradient_ready(id)
    }

    /// The same numbers in another floating-point type, of 16 bits or the type [`Context::wide_dtype`].
    pub(crate) fn retyped(&self, tensor: Tensor, dtype: DType) -> Result<Tensor> {
        if tensor.dtype() == dtype {
            return Ok(tensor);
        }
        let retyped = self.scratch(dtype, tensor.shape())?;
        cast::narrow(self.compute, &tensor, &retyped)?;
        Ok(retyped)
    }
}
