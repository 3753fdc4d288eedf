//! The norm of gradients that are divided among the ranks.

use std::ops::Range;

use paceline_collectives::Group;
use paceline_kernels::norm;
use paceline_kernels::norm::tree::{ROW_ELEMS, RowTree, TreeNode};

use paceline_model::Owned;

use crate::{Replica, Result};

/// A node of the tree over all rows: its level, its place there, and its sums.
type Sent = (u32, usize, [f64; ROW_ELEMS]);

/// The norm of all gradients. Each rank of `group` owns a part of them, and each stage of a pipeline has its own. The squares are
/// added up as a tree over all rows. Each rank sends the largest nodes of this tree within its part. So the norm has the
/// same bits however the gradients are divided. A rank that owns all gradients computes it alone.
///
/// Bytes sent: about 140 per node, and at most two nodes of each level of the tree for each owned range.
pub fn over(group: &Group, replica: &Replica) -> Result<f64> {
    let layout = replica.whole_layout();
    let rows = norm::RowRanges::new(layout.trained().map(|(_, param)| param.range()));
    let mut own: Vec<Sent> = Vec::new();
    for (owned, whole) in in_whole_model(replica) {
        let range = rows.within(&whole);
        let grads = replica.storage.grads().slice(owned)?;
        let is_everything = range.len() == rows.count();
        let squares = norm::squares(&replica.compute, &grads, whole.start, &rows, range)?;
        let tree = squares.read()?;
        if is_everything {
            return Ok(tree.total().sqrt());
        }
        own.extend(tree.nodes().iter().map(|node| (node.level, node.index, node.sum)));
    }
    let mut all = own;
    // Either all ranks of the group own their whole stage, or none does.
    if replica.owned.grads != Owned::everything(&replica.model).grads {
        all = group.all_gather_object(&all)?.into_iter().flatten().collect();
    }
    if let Some(stages) = &replica.pipeline.ranks {
        all = stages.all_gather_object(&all)?.into_iter().flatten().collect();
    }
    if let Some(ranks) = &replica.tensor {
        all = ranks.all_gather_object(&all)?.into_iter().flatten().collect();
    }
    all.sort_unstable_by_key(|(level, index, _)| index << level);
    let mut tree = RowTree::default();
    for (level, index, sum) in all {
        tree.push(TreeNode { level, index, sum });
    }
    Ok(tree.total().sqrt())
}

/// The gradients that this rank owns, as elements of its own storage and of the whole model's.
fn in_whole_model(replica: &Replica) -> Vec<(Range<usize>, Range<usize>)> {
    let owned = &replica.owned.grads;
    if replica.pipeline.ranks.is_none() && replica.tensor.is_none() {
        return owned.iter().map(|range| (range.clone(), range.clone())).collect();
    }
    let (here, whole) = (replica.model.layout.params(), replica.whole_layout());
    let mut parts = Vec::new();
    for (here, whole) in here.iter().zip(whole.params()).filter(|(here, _)| replica.counts(here)) {
        for range in owned {
            let own = range.start.max(here.range().start)..range.end.min(here.range().end);
            if !own.is_empty() {
                let at = |place: usize| whole.start + place - here.start;
                parts.push((own.clone(), at(own.start)..at(own.end)));
            }
        }
    }
    parts
}
