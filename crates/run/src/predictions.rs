//! The class that a model predicts for each sample of a test set.
//!
//! Input: the logits of the samples that a rank evaluates. Output: a file with a row for each sample, in the order of the test set
//! and the same for any number of ranks; and how often each class is taken for each. This file does not know how logits are
//! computed.

use std::path::Path;

use paceline_collectives::ReduceOp;
use paceline_data::ShareIter;
use paceline_failure::outputs::write_stated_bytes;
use paceline_failure::{Failure, Result};
use paceline_host::disk::Disk;
use paceline_host::text::{line_width, say};
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::Batch;
use paceline_strategies::Replica;
use paceline_table::fitted::fitted;
use paceline_table::table::{csv_lines, csv_text};

/// A table of more classes is in files alone.
const MOST_SHOWN: usize = 10;
/// The columns: label, predicted class, probability.
const COLUMNS: usize = 3;

/// The predictions for a test set.
#[derive(Debug)]
pub struct Predictions {
    /// (samples, 3) of f64. A rank writes the rows of its samples. All others are zero until the ranks add up.
    rows: Tensor,
    num_classes: usize,
}

impl Predictions {
    /// For a test set of this many samples.
    pub fn new(samples: usize) -> Result<Self> {
        let shape = [samples, COLUMNS];
        let rows = Allocator::new().tensor(DType::F64, shape, Category::Workspace)?;
        rows.fill_zero()?;
        Ok(Self { rows, num_classes: 0 })
    }

    /// Adds this rank's share of the next batch of `shares`.
    pub(crate) fn add(
        &mut self,
        shares: &mut ShareIter,
        batch: &Batch,
        logits: Option<Tensor>,
    ) -> Result<()> {
        let (Some(logits), Some(labels)) = (logits, batch.on_host(Batch::TARGETS)) else {
            let problem = "--predictions: the objective of this model gives no logits";
            return Err(Failure::Run(problem.into()));
        };
        self.num_classes = logits.dims()[1];
        let (labels, mut rows) = (labels.read::<i64>()?, self.rows.write::<f64>()?);
        let indices = shares.next().map_or(&[][..], |(_, share)| share.indices);
        let found = likeliest(&logits)?.into_iter().zip(labels.iter()).zip(indices);
        for (((class, probabilities), label), index) in found {
            let row = [*label as f64, class as f64, probabilities[class]];
            rows[*index as usize * COLUMNS..][..COLUMNS].copy_from_slice(&row);
        }
        Ok(())
    }

    /// Gives all ranks all rows.
    pub(crate) fn share(&self, replica: &Replica) -> Result<()> {
        if !replica.counts_samples() {
            // Another rank has the same.
            self.rows.fill_zero()?;
        }
        replica.world.all_reduce(&self.rows, ReduceOp::Sum)?;
        Ok(())
    }

    /// Writes the file, and prints how often each class is taken for each, which it returns: rows of labels, columns of
    /// predictions. Classes may have names.
    pub(crate) fn report(&self, file: &Path, names: &[String]) -> Result<Vec<Vec<u64>>> {
        let name = |class: usize| names.get(class).cloned().unwrap_or_else(|| class.to_string());
        let mut confusions = vec![vec![0; self.num_classes]; self.num_classes];
        let head = ["index", "label", "predicted", "probability"].map(str::to_owned).to_vec();
        let rows = self.rows.read::<f64>()?;
        let rows = rows.chunks_exact(COLUMNS).enumerate().map(|(index, row)| {
            let classes @ [label, class] = [row[0] as usize, row[1] as usize];
            confusions[label][class] += 1;
            let [label, class] = classes.map(|class| csv_text(&name(class)));
            vec![index.to_string(), label, class, format!("{:.6}", row[2])]
        });
        let text = csv_lines(std::iter::once(head).chain(rows));
        write_stated_bytes(&Disk::default(), file, text.as_bytes())?;
        if self.num_classes <= MOST_SHOWN {
            let line = |first: String, others: Vec<String>| [vec![first], others].concat();
            let head = line("label".into(), (0..self.num_classes).map(name).collect());
            let counts = confusions
                .iter()
                .enumerate()
                .map(|(label, row)| line(name(label), row.iter().map(u64::to_string).collect()));
            let lines: Vec<Vec<String>> = counts.collect();
            say("Predicted classes, by label:");
            say(&fitted(&head, &lines, |at| at == 0, line_width()));
        }
        Ok(confusions)
    }
}

/// For each row of logits, f32 (n, classes): the likeliest class, the first of several, and the probabilities of all classes.
/// They are NaN if the logits are.
pub fn likeliest(logits: &Tensor) -> Result<Vec<(usize, Vec<f64>)>> {
    let num_classes = logits.dims()[1];
    let logits = logits.read::<f32>()?;
    let of_row = |row: &[f32]| {
        let larger = |best: usize, at: usize| if row[at] > row[best] { at } else { best };
        let class = (1..row.len()).fold(0, larger);
        let exps: Vec<f64> = row.iter().map(|x| f64::from(x - row[class]).exp()).collect();
        let total: f64 = exps.iter().sum();
        (class, exps.iter().map(|exp| exp / total).collect())
    };
    Ok(logits.chunks_exact(num_classes.max(1)).map(of_row).collect())
}
