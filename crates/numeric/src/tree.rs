//! The shape of the tree in which values are combined: those of ranks, of micro-batches, of the rows of a norm.
//!
//! The tree over `n` leaves is balanced and keeps their order. Its left half has the largest power of two
//! below `n` leaves, its right half has the rest, and both halves are divided in the same way:
//! `x0 + x1`, `(x0 + x1) + x2`, `(x0 + x1) + (x2 + x3)`, `((x0 + x1) + (x2 + x3)) + x4`, ...
//!
//! A *node* of the tree is a range of leaves that are combined before any other leaf is. It begins at a
//! multiple of a power of two and has as many leaves as that power, fewer only at the end of the tree.
//! The tree is evaluated with a stack, as a binary counter counts: each value is pushed, and then the two
//! topmost values are merged as long as they are the halves of a node.
//!
//! Input: ranges of leaves. Output: nodes, and the number of merges after each. This module does not know the
//! values, nor how they are merged: each loop keeps its own stack, since loops are compiled for vector instructions.

use std::ops::Range;

/// The most merges that a leaf passes through in the tree over `count` leaves: the number of binary digits of `count - 1`.
/// The stack holds at most this many values and the one that was pushed last.
pub const fn height(count: usize) -> usize {
    count.next_power_of_two().ilog2() as usize
}

/// The number of merges after leaf `index` has been pushed, if it is not the last one.
#[inline(always)]
pub fn merges_before_last(index: usize) -> usize {
    (index + 1).trailing_zeros() as usize
}

/// The number of merges after leaf `index` of `count` has been pushed.
#[inline(always)]
pub fn merges_after(index: usize, count: usize) -> usize {
    if index + 1 == count {
        // The stack holds one value for each binary digit of `index`, and the last value.
        index.count_ones() as usize
    } else {
        merges_before_last(index)
    }
}

/// Whether these are the merges of a tree whose values are single leaves.
pub fn are_of_leaves(merges: &[u8]) -> bool {
    let mut indexed = merges.iter().enumerate();
    indexed.all(|(index, &times)| usize::from(times) == merges_after(index, merges.len()))
}

/// The largest nodes with a whole power of two of leaves within a range of leaves, in order. They are nodes however many
/// leaves follow. A node is given as `(level, number)` and has the leaves from `number << level` to `(number + 1) << level`.
/// There are at most two of each level.
pub fn largest_nodes(mut leaves: Range<usize>) -> impl Iterator<Item = (u32, usize)> {
    std::iter::from_fn(move || {
        let level = leaves.start.trailing_zeros().min(leaves.len().checked_ilog2()?);
        let number = leaves.start >> level;
        leaves.start += 1 << level;
        Some((level, number))
    })
}

/// The fewest nodes of the tree over `count` leaves that together have exactly these leaves, in order. If each
/// of several hosts has the same power of two of ranks, the ranks of a host are a single node.
pub fn nodes(count: usize, leaves: Range<usize>) -> Vec<Range<usize>> {
    debug_assert!(leaves.end <= count, "{leaves:?} of {count}");
    // The tree is a complete one that is cut off after its last leaf, and so are its last nodes.
    let end = if leaves.end == count { count.next_power_of_two() } else { leaves.end };
    let nodes = largest_nodes(leaves.start..end)
        .map(|(level, number)| number << level..count.min((number + 1) << level));
    nodes.take_while(|node| node.start < count).collect()
}

/// The number of merges after each of these nodes, which follow each other and have all `count` leaves.
pub fn merges(count: usize, nodes: &[Range<usize>]) -> Vec<u8> {
    let mut stack: Vec<Range<usize>> = Vec::new();
    let merges_after = |node: &Range<usize>| {
        let mut times = 0;
        let mut top = node.clone();
        while let Some(left) = stack.pop_if(|left| are_halves(count, left, &top)) {
            top = left.start..top.end;
            times += 1;
        }
        stack.push(top);
        times
    };
    nodes.iter().map(merges_after).collect()
}

/// Divides `leaves` among `ranks`, so that each rank has a node and the tree over the sums of the ranks is the tree over the
/// leaves. Shares are equal if there are `ranks` times a power of two of leaves. `None` if a rank would get no leaf, which
/// never happens if `leaves` is a power of two and at least `ranks`.
pub fn shares(leaves: usize, ranks: usize) -> Option<Vec<Range<usize>>> {
    fn divide(leaves: Range<usize>, ranks: usize, shares: &mut Vec<Range<usize>>) -> Option<()> {
        if ranks > leaves.len() {
            return None;
        }
        if ranks == 1 {
            shares.push(leaves);
            return Some(());
        }
        let half = |count: usize| count.next_power_of_two() / 2;
        let middle = leaves.start + half(leaves.len());
        divide(leaves.start..middle, half(ranks), shares)?;
        divide(middle..leaves.end, ranks - half(ranks), shares)
    }
    let mut shares = Vec::with_capacity(ranks.min(leaves));
    (ranks > 0).then(|| divide(0..leaves, ranks, &mut shares)).flatten()?;
    Some(shares)
}

/// Whether two adjacent ranges are the halves of a node.
fn are_halves(count: usize, left: &Range<usize>, right: &Range<usize>) -> bool {
    let size = left.len();
    size.is_power_of_two()
        && left.start.is_multiple_of(2 * size)
        && right.end == count.min(left.start + 2 * size)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All nodes of the tree over these ranks, by its definition.
    fn all_nodes(ranks: Range<usize>) -> Vec<Range<usize>> {
        let mut nodes = vec![ranks.clone()];
        if ranks.len() > 1 {
            let middle = ranks.start + ranks.len().next_power_of_two() / 2;
            nodes.extend(all_nodes(ranks.start..middle));
            nodes.extend(all_nodes(middle..ranks.end));
        }
        nodes
    }

    #[test]
    fn ranks_of_a_host_are_few_nodes() {
        let of = |world, ranks| {
            let nodes = nodes(world, ranks);
            nodes.iter().map(|node| (node.start, node.end)).collect::<Vec<_>>()
        };
        assert_eq!(of(8, 4..8), [(4, 8)]);
        assert_eq!(of(9, 3..6), [(3, 4), (4, 6)]);
        assert_eq!(of(9, 6..9), [(6, 8), (8, 9)]);
        assert_eq!(of(7, 4..7), [(4, 7)]);
        assert_eq!(of(5, 0..5), [(0, 5)]);
        assert_eq!(of(6, 3..6), [(3, 4), (4, 6)]);
    }

    #[test]
    fn nodes_are_those_of_the_tree_and_as_few_as_can_be() {
        for world in 1..=64 {
            let of_tree = all_nodes(0..world);
            for start in 0..world {
                for end in start + 1..=world {
                    let found = nodes(world, start..end);
                    assert!(
                        found.iter().all(|node| of_tree.contains(node)),
                        "{found:?} of {world}"
                    );
                    let ranks: Vec<usize> = found.iter().cloned().flatten().collect();
                    assert_eq!(ranks, (start..end).collect::<Vec<_>>());
                    // No larger node of the tree lies within the range.
                    let is_maximal = |node: &Range<usize>| {
                        !of_tree.iter().any(|other| {
                            other.start >= start
                                && other.end <= end
                                && other.len() > node.len()
                                && other.start <= node.start
                                && other.end >= node.end
                        })
                    };
                    assert!(
                        found.iter().all(is_maximal),
                        "{found:?} for {start}..{end} of {world}"
                    );
                }
            }
        }
    }

    #[test]
    fn merges_build_the_tree() {
        for world in 1..=64 {
            let of_tree = all_nodes(0..world);
            for local in (1..=world).filter(|local| world.is_multiple_of(*local)) {
                let hosts = (0..world / local).map(|host| host * local..(host + 1) * local);
                let nodes: Vec<_> = hosts.flat_map(|ranks| nodes(world, ranks)).collect();
                let mut stack: Vec<Range<usize>> = Vec::new();
                for (node, times) in nodes.iter().zip(merges(world, &nodes)) {
                    assert!(stack.len() <= height(world), "{world}, {local} on each host");
                    let mut top = node.clone();
                    for _ in 0..times {
                        top = stack.pop().unwrap().start..top.end;
                        assert!(of_tree.contains(&top), "{top:?} of {world}, {local} on each host");
                    }
                    stack.push(top);
                }
                assert_eq!((stack.len(), stack[0].clone()), (1, 0..world));
            }
            let leaves: Vec<_> = (0..world).map(|rank| rank..rank + 1).collect();
            assert!(are_of_leaves(&merges(world, &leaves)));
        }
        assert!(!are_of_leaves(&merges(6, &[0..2, 2..3, 3..4, 4..6])));
    }

    #[test]
    fn shares_keep_the_tree() {
        for leaves in 1..=64 {
            let of_tree = all_nodes(0..leaves);
            for ranks in 1..=leaves {
                let Some(shares) = shares(leaves, ranks) else {
                    assert!(!leaves.is_power_of_two(), "{leaves} on {ranks}");
                    continue;
                };
                assert_eq!(shares.len(), ranks);
                let all: Vec<usize> = shares.iter().cloned().flatten().collect();
                assert_eq!(all, (0..leaves).collect::<Vec<_>>());
                // Each node of the tree over the ranks is one of the tree over the leaves.
                for node in all_nodes(0..ranks) {
                    let whole = shares[node.start].start..shares[node.end - 1].end;
                    assert!(of_tree.contains(&whole), "{node:?} of {ranks}, {leaves} leaves");
                }
                if leaves.is_multiple_of(ranks) && (leaves / ranks).is_power_of_two() {
                    assert!(shares.iter().all(|share| share.len() * ranks == leaves));
                }
            }
            assert_eq!(shares(leaves, leaves + 1), None);
        }
        assert_eq!(shares(8, 3), Some(vec![0..2, 2..4, 4..8]));
        assert_eq!(shares(9, 4), None);
        assert_eq!(shares(1, 0), None);
    }
}
