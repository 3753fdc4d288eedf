//! The shape of the tree in which the values of the ranks are combined.
//!
//! The tree over `n` ranks is balanced and keeps their order. Its left half has the largest power of two
//! below `n` ranks, its right half has the rest, and both halves are divided in the same way:
//! `x0 + x1`, `(x0 + x1) + x2`, `(x0 + x1) + (x2 + x3)`, `((x0 + x1) + (x2 + x3)) + x4`, ...
//!
//! A *node* of the tree is a range of ranks that are combined before any other rank is. It begins at a
//! multiple of a power of two and has as many ranks as that power, fewer only at the end of the tree.
//! The tree is evaluated with a stack, as a binary counter counts: each value is pushed, and then the two
//! topmost values are merged as long as they are the halves of a node.
//!
//! Input: ranges of ranks. Output: nodes, and the number of merges after each. This module knows nothing of
//! values.

use std::ops::Range;

/// The number of merges after value `index` of `count` has been pushed, if each value is a single leaf.
#[inline(always)]
pub(super) fn merges_after(index: usize, count: usize) -> usize {
    if index + 1 == count {
        // The stack holds one value for each binary digit of `index`, and the last value.
        index.count_ones() as usize
    } else {
        (index + 1).trailing_zeros() as usize
    }
}

/// Whether these are the merges of a tree whose values are single leaves.
pub(super) fn are_of_leaves(merges: &[u8]) -> bool {
    let mut indexed = merges.iter().enumerate();
    indexed.all(|(index, &times)| usize::from(times) == merges_after(index, merges.len()))
}

/// The fewest nodes of the tree over `world` ranks that together have exactly these ranks, in order. If each
/// of several hosts has the same power of two of ranks, the ranks of a host are a single node.
pub(crate) fn nodes(world: usize, ranks: Range<usize>) -> Vec<Range<usize>> {
    debug_assert!(ranks.end <= world, "{ranks:?} of {world}");
    let mut nodes = Vec::new();
    let mut start = ranks.start;
    while start < ranks.end {
        // The largest aligned range that stays among these ranks. At the end of the tree it may be cut off.
        let end = |size: usize| world.min(start + size);
        let mut size = 1;
        while start.is_multiple_of(2 * size)
            && end(size) < end(2 * size)
            && end(2 * size) <= ranks.end
        {
            size *= 2;
        }
        nodes.push(start..end(size));
        start = end(size);
    }
    nodes
}

/// The number of merges after each of these nodes, which follow each other and have all `world` ranks.
pub(crate) fn merges(world: usize, nodes: &[Range<usize>]) -> Vec<u8> {
    let mut stack: Vec<Range<usize>> = Vec::new();
    let merges_after = |node: &Range<usize>| {
        let mut times = 0;
        let mut top = node.clone();
        while let Some(left) = stack.pop_if(|left| are_halves(world, left, &top)) {
            top = left.start..top.end;
            times += 1;
        }
        stack.push(top);
        times
    };
    nodes.iter().map(merges_after).collect()
}

/// Whether two ranges, of which the second follows the first, are the halves of a node.
fn are_halves(world: usize, left: &Range<usize>, right: &Range<usize>) -> bool {
    let size = left.len();
    size.is_power_of_two()
        && left.start.is_multiple_of(2 * size)
        && right.end == world.min(left.start + 2 * size)
}

#[cfg(all(test, not(loom)))]
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
}
