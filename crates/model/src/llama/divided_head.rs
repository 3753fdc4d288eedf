//! The objective of a language model whose vocabulary is divided: each rank has some of the words.
//!
//! The ranks share three numbers for each row and its largest output. So no rank ever has all outputs of a row.

use std::ops::Range;

use paceline_kernels::divided::{self, OF_ROW, SumOfParts};
use paceline_kernels::linear::{self, Activation};
use paceline_kernels::linear_cross_entropy::chunk_rows;
use paceline_memory::Tensor;

use super::head;
use crate::layers::part_of;
use crate::{Batch, Context, Objective, ParamId, PartExchange, Result, Saved, UnitId};

/// Like [`LanguageModelHead`](head::LanguageModelHead). The input are the rows of this rank, if rows are divided.
#[derive(Clone, Debug)]
pub(super) struct DividedHead {
    /// `None` if the weights are those of the embedding.
    pub unit: Option<UnitId>,
    /// (vocabulary / parts, width), of all parts.
    pub weights: Vec<ParamId>,
    /// The words of all parts.
    pub vocab: usize,
}

/// A chunk of rows, with the outputs of this rank's parts.
struct HeadRows {
    rows: Range<usize>,
    /// The exponentials of the outputs of each part.
    outputs: Vec<Tensor>,
    of_rows: Tensor,
    most: Tensor,
    labels: Tensor,
}

impl DividedHead {
    fn words_of(&self, part: usize) -> Range<usize> {
        let own = self.vocab / self.weights.len();
        part * own..(part + 1) * own
    }

    /// Computes a chunk of rows of `all`, and what the ranks share of them.
    fn chunk(
        &self,
        cx: &mut Context,
        all: &Tensor,
        targets: &Tensor,
        rows: Range<usize>,
    ) -> Result<HeadRows> {
        let (x, labels) = (part_of(all, &rows)?, targets.slice(rows.clone())?);
        let most = cx.wide_activation([rows.len()])?;
        let (mut outputs, own) = (Vec::new(), cx.divided().own());
        for part in own.clone() {
            let z = cx.wide_activation([rows.len(), self.words_of(part).len()])?;
            let weight = cx.param(self.weights[part])?;
            linear::forward(cx.compute, &x, &weight, None, Activation::None, &z)?;
            divided::largest_outputs(cx.compute, &z, outputs.is_empty(), &most)?;
            outputs.push(z);
        }
        cx.exchange(PartExchange::Max(&most))?;
        let mut sum = SumOfParts::new(own.len());
        for (z, part) in outputs.iter().zip(own) {
            let of_rows = cx.wide_activation([rows.len(), OF_ROW])?;
            let words = (self.words_of(part), self.vocab);
            divided::exponentials(cx.compute, z, (&most, &labels), words, &of_rows)?;
            sum.push(cx.compute, of_rows)?;
        }
        let of_rows = sum.finish().expect("a rank has a part");
        cx.exchange(PartExchange::Sum(&of_rows))?;
        Ok(HeadRows { rows, outputs, of_rows, most, labels })
    }

    /// The gradients of a chunk's input, and of the weights.
    fn differentiate_chunk(
        &self,
        cx: &mut Context,
        HeadRows { rows, outputs, of_rows, labels, .. }: HeadRows,
        all: &Tensor,
        d_input: &Tensor,
        scale: f64,
    ) -> Result<()> {
        let (x, own) = (part_of(all, &rows)?, cx.divided().own());
        let mut sum = SumOfParts::new(own.len());
        for (z, part) in outputs.into_iter().zip(own) {
            let id = self.weights[part];
            let of = (&of_rows, &labels);
            divided::head_gradient(cx.compute, &z, of, self.words_of(part), scale)?;
            if cx.trains(id) {
                let (d_weight, accumulate) = (cx.grad(id)?, cx.accumulates(id) || rows.start > 0);
                linear::backward_weight(cx.compute, &x, &z, &d_weight, None, accumulate)?;
            }
            let d_x = cx.wide_activation(x.shape())?;
            linear::backward_input(cx.compute, &cx.param(id)?, &z, &d_x)?;
            sum.push(cx.compute, d_x)?;
        }
        let d_x = sum.finish().expect("a rank has a part");
        Ok(cx.compute.copy(&d_x, &part_of(d_input, &rows)?)?)
    }

    fn chunks(&self, rows: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let len = chunk_rows(rows, self.words_of(0).len()).max(1);
        // A batch without rows has a chunk too, which clears the gradients.
        (0..rows.max(1)).step_by(len).map(move |begin| begin..rows.min(begin + len))
    }
}

impl Objective for DividedHead {
    fn unit(&self) -> Option<UnitId> {
        self.unit
    }

    fn has_parameters(&self) -> bool {
        true
    }

    fn tied(&self) -> Option<ParamId> {
        self.unit.is_none().then_some(self.weights[0])
    }

    fn classifies(&self) -> bool {
        true
    }

    fn count(&self, batch: &Batch) -> Result<usize> {
        head::count(batch)
    }

    fn count_of_all(&self, batch: &Batch, num_samples: usize) -> Option<usize> {
        head::count_of_all(batch, num_samples)
    }

    fn reads_lengths(&self) -> bool {
        true
    }

    fn evaluate(&self, cx: &mut Context, output: &Tensor, sums: &Tensor) -> Result<()> {
        let all = cx.gather_rows(output.clone())?;
        let targets = head::targets(cx)?;
        let targets = targets.view([targets.num_elems()])?;
        for rows in self.chunks(all.dims()[0]) {
            let HeadRows { of_rows, most, labels, .. } = self.chunk(cx, &all, &targets, rows)?;
            divided::losses(cx.compute, &of_rows, (&most, &labels), sums)?;
        }
        Ok(())
    }

    fn differentiate(
        &self,
        cx: &mut Context,
        output: &Tensor,
        scale: f64,
        sums: &Tensor,
        _put_off: Option<&mut Saved>,
    ) -> Result<Tensor> {
        let all = cx.gather_rows(output.clone())?;
        let targets = head::targets(cx)?;
        let targets = targets.view([targets.num_elems()])?;
        // The gradient of a row takes the place of the row, if that is a copy.
        let is_copy = all.dtype() == cx.wide_dtype() && !all.buffer().is_same(output.buffer());
        let d_all = if is_copy { all.clone() } else { cx.wide_activation(all.shape())? };
        for rows in self.chunks(all.dims()[0]) {
            let chunk = self.chunk(cx, &all, &targets, rows)?;
            let of = (&chunk.most, &chunk.labels);
            divided::losses(cx.compute, &chunk.of_rows, of, sums)?;
            self.differentiate_chunk(cx, chunk, &all, &d_all, scale)?;
        }
        drop(all);
        for part in
            cx.divided().own().filter(|part| cx.trains(self.weights[*part])).collect::<Vec<_>>()
        {
            cx.gradient_ready(self.weights[part])?;
        }
        let d_output = cx.sum_rows(d_all, true)?;
        cx.retyped(d_output, output.dtype())
    }
}
