//! Which rank has which stages.

/// The stages of each rank. Stages are numbered in the order of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    ranks: usize,
    chunks: usize,
    order: StageOrder,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StageOrder {
    /// From the last rank to the first one: rank 0 has the stages 0, p, 2p and so on.
    Loop,
    /// From the last rank back: with two stages each, rank 0 has the first and the last one.
    V,
}

impl Placement {
    /// One stage on each rank.
    pub const fn line(ranks: usize) -> Self {
        Self::looped(ranks, 1)
    }

    /// `chunks` stages on each rank. After the last rank comes the first one again.
    pub const fn looped(ranks: usize, chunks: usize) -> Self {
        Self { ranks, chunks, order: StageOrder::Loop }
    }

    /// Two stages on each rank. After the last rank comes the same one again, and then the one before it.
    pub const fn v(ranks: usize) -> Self {
        Self { ranks, chunks: 2, order: StageOrder::V }
    }

    /// The number of ranks.
    pub const fn ranks(&self) -> usize {
        self.ranks
    }

    /// The number of stages of a rank.
    pub const fn chunks(&self) -> usize {
        self.chunks
    }

    /// The number of stages of all ranks.
    pub const fn stages(&self) -> usize {
        self.ranks * self.chunks
    }

    /// The stage that a rank runs as its `chunk`-th one in a forward pass.
    pub const fn stage(&self, rank: usize, chunk: usize) -> usize {
        match (self.order, chunk % 2) {
            (StageOrder::V, 1) => 2 * self.ranks - 1 - rank,
            _ => chunk * self.ranks + rank,
        }
    }

    /// As which of its rank's stages a stage runs.
    pub const fn chunk(&self, stage: usize) -> usize {
        stage / self.ranks
    }

    /// The rank of a stage.
    pub const fn rank(&self, stage: usize) -> usize {
        match self.order {
            StageOrder::V if stage >= self.ranks => 2 * self.ranks - 1 - stage,
            _ => stage % self.ranks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_stages_are_each_others_inverse() {
        for placement in [Placement::line(3), Placement::looped(3, 4), Placement::v(3)] {
            let mut stages = Vec::new();
            for rank in 0..3 {
                let own = (0..placement.chunks()).map(|chunk| placement.stage(rank, chunk));
                let own: Vec<usize> = own.collect();
                assert!(own.iter().all(|stage| placement.rank(*stage) == rank), "{placement:?}");
                assert!(own.is_sorted(), "{placement:?}");
                assert!(own.iter().map(|stage| placement.chunk(*stage)).eq(0..own.len()));
                stages.extend(own);
            }
            stages.sort_unstable();
            assert!(stages.into_iter().eq(0..placement.stages()), "{placement:?}");
        }
        assert_eq!((Placement::v(4).stage(0, 1), Placement::v(4).rank(4)), (7, 3));
    }
}
