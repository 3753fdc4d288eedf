//! The norm of gradients of which each rank holds a part.

use paceline_collectives::Group;
use paceline_kernels::norm;
use paceline_kernels::norm::tree::{Node, ROW_ELEMS, RowTree};

use crate::{Replica, Result};

/// The norm of all gradients, of which each rank of `group` owns a part. The squares are added up as a tree over all rows.
/// Each rank sends the largest nodes of this tree that lie within its part. So the norm has the same bits however the
/// gradients are divided. A rank that owns all gradients computes the norm alone.
///
/// Bytes sent: about 140 per node, and at most two nodes of each level of the tree for each owned range.
pub fn over(group: &Group, replica: &Replica) -> Result<f64> {
    let rows = norm::RowRanges::new(replica.model.layout.trained().map(|(_, param)| param.range()));
    let mut own = Vec::new();
    for owned in &replica.owned.grads {
        let range = rows.within(owned);
        let grads = replica.storage.grads().slice(owned.clone())?;
        let start = owned.start;
        let is_everything = range.len() == rows.count();
        let squares = norm::squares(&replica.compute, &grads, start, &rows, range)?;
        let tree = squares.read()?;
        if is_everything {
            return Ok(tree.total().sqrt());
        }
        own.extend(tree.nodes().iter().map(|node| (node.level, node.index, node.sum)));
    }
    let mut all: Vec<(u32, usize, [f64; ROW_ELEMS])> =
        group.all_gather_object(&own)?.into_iter().flatten().collect();
    all.sort_unstable_by_key(|(level, index, _)| index << level);
    let mut tree = RowTree::default();
    for (level, index, sum) in all {
        tree.push(Node { level, index, sum });
    }
    Ok(tree.total().sqrt())
}
