//! A sum over rows as a balanced binary tree. Any part of it can be computed apart from the others.
//!
//! The tree is that of [`paceline_numeric::tree`], with the rows as leaves. Whoever holds some of the rows adds up the
//! nodes that lie within them, and the nodes of all holders together give the sum, with the same bits however the rows are
//! divided. This file does not know what the rows are.

/// Elements of a row.
pub const ROW_ELEMS: usize = 16;

/// A sum over rows, element by element.
pub type Lanes = [f64; ROW_ELEMS];

/// The sum over the rows from `index << level` to `(index + 1) << level`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TreeNode {
    /// The logarithm of the number of rows.
    pub level: u32,
    /// The number of the node among those of its level.
    pub index: usize,
    /// The sum over its rows.
    pub sum: Lanes,
}

/// The sums over the [`largest_nodes`](paceline_numeric::tree::largest_nodes) within a run of rows, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowTree(Vec<TreeNode>);

impl RowTree {
    /// Adds a node, which begins where the last one ended.
    pub fn push(&mut self, node: TreeNode) {
        let mut node = node;
        // A node of an odd number is the right half of the next larger node.
        while node.index % 2 == 1
            && let Some(left) = self.0.last()
            && left.level == node.level
        {
            let sum = added(&left.sum, &node.sum);
            node = TreeNode { level: node.level + 1, index: node.index / 2, sum };
            self.0.pop();
        }
        self.0.push(node);
    }

    /// The nodes, at most two of each level.
    pub fn nodes(&self) -> &[TreeNode] {
        &self.0
    }

    /// The sum over all rows and all their elements. The nodes must begin at row 0.
    pub fn total(&self) -> f64 {
        let rows = self.0.iter().rev().map(|node| node.sum);
        let lanes = rows.reduce(|right, left| added(&left, &right));
        lanes.map_or(0.0, |lanes| lanes.iter().sum())
    }
}

#[inline(always)]
pub(super) fn added(left: &Lanes, right: &Lanes) -> Lanes {
    std::array::from_fn(|lane| left[lane] + right[lane])
}

#[cfg(test)]
mod tests {
    use paceline_numeric::tree::largest_nodes;

    use super::*;

    /// Rows whose sums depend on the order of addition.
    fn row(index: usize) -> Lanes {
        std::array::from_fn(|lane| {
            let x = ((index * 31 + lane * 17) % 101) as f64 / 7.0;
            x * 10f64.powi((index % 3) as i32)
        })
    }

    fn naive(rows: std::ops::Range<usize>) -> Lanes {
        match rows.len() {
            1 => row(rows.start),
            len => {
                let left = len.next_power_of_two() / 2;
                let middle = rows.start + left;
                added(&naive(rows.start..middle), &naive(middle..rows.end))
            }
        }
    }

    fn tree(rows: std::ops::Range<usize>) -> RowTree {
        let mut tree = RowTree::default();
        rows.for_each(|index| tree.push(TreeNode { level: 0, index, sum: row(index) }));
        tree
    }

    #[test]
    fn the_tree_has_the_largest_power_of_two_on_the_left() {
        for len in 1..70 {
            let want: f64 = naive(0..len).iter().sum();
            assert_eq!(tree(0..len).total(), want, "{len} rows");
        }
        assert_eq!(RowTree::default().total(), 0.0);
    }

    #[test]
    fn the_nodes_of_a_run_follow_from_its_ends() {
        for start in 0..70 {
            for end in start..70 {
                let tree = tree(start..end);
                let nodes: Vec<_> =
                    tree.nodes().iter().map(|node| (node.level, node.index)).collect();
                assert_eq!(largest_nodes(start..end).collect::<Vec<_>>(), nodes, "{start}..{end}");
            }
        }
    }

    #[test]
    fn parts_of_any_length_give_the_same_bits() {
        let whole = tree(0..67);
        for first in 0..=67 {
            for second in first..=67 {
                let mut joined = RowTree::default();
                for part in [tree(0..first), tree(first..second), tree(second..67)] {
                    assert!(part.nodes().len() <= 14, "{} nodes", part.nodes().len());
                    part.nodes().iter().for_each(|node| joined.push(*node));
                }
                assert_eq!(joined, whole, "parts end at {first} and {second}");
            }
        }
        // The order matters: a running sum gives other bits.
        let running = (1..67).fold(row(0), |sum, index| added(&sum, &row(index)));
        assert_ne!(running, naive(0..67));
    }
}
