//! The guarantee of the sampler: every sample occurs once, and all ranks together read what one rank would.

use std::ops::Range;
use std::slice::from_ref;

use paceline_data::{Position, SampleCounts, SampleOrder, Sampler, ShareIter};

const SHUFFLED: SampleOrder = SampleOrder::Shuffled { seed: 42 };

fn sampler(len: usize, batch: usize, rank: usize, world: usize, order: SampleOrder) -> Sampler {
    Sampler::new(len, batch, rank, world, order).unwrap()
}

#[test]
fn the_ranks_together_read_what_a_single_process_reads() {
    for order in [SampleOrder::Sequential, SHUFFLED] {
        for len in [1, 2, 7, 10, 64, 97] {
            for global_batch in [1, 3, 8, 10, 64, 200] {
                for world in [1, 2, 3, 4, 8, 13] {
                    compare(len, global_batch, world, order);
                }
            }
        }
    }
}

fn compare(len: usize, global_batch: usize, world: usize, order: SampleOrder) {
    let case = format!("{len} samples by {global_batch} on {world} ranks, {order:?}");
    let single = sampler(len, global_batch, 0, 1, order);
    let ranks: Vec<_> = (0..world).map(|r| sampler(len, global_batch, r, world, order)).collect();
    let single_plan = single.epoch(5);
    let plans: Vec<_> = ranks.iter().map(|rank| rank.epoch(5)).collect();

    let mut seen = Vec::new();
    for batch in 0..single.batches_per_epoch() {
        let whole = single_plan.batch(batch).unwrap();
        let shares: Vec<_> = plans.iter().map(|plan| plan.batch(batch).unwrap()).collect();
        let together: Vec<u32> = shares.iter().flat_map(|share| share.indices).copied().collect();
        assert_eq!(together, whole.indices, "{case}");
        assert_eq!(whole.indices.len(), whole.global_count, "{case}");
        assert!(shares.iter().all(|share| share.global_count == whole.global_count), "{case}");

        let sizes: Vec<usize> = shares.iter().map(|share| share.indices.len()).collect();
        assert!(sizes.is_sorted_by(|a, b| a >= b), "{case}: {sizes:?}");
        assert!(sizes[0] - sizes[world - 1] <= 1, "{case}: {sizes:?}");
        for (rank, &size) in ranks.iter().zip(&sizes) {
            assert!(size <= rank.local_batch_max(), "{case}: {sizes:?}");
            assert!(batch > 0 || size == rank.local_batch_max(), "{case}: {sizes:?}");
        }
        seen.extend(together);
    }
    assert!(single_plan.batch(single.batches_per_epoch()).is_none(), "{case}");
    seen.sort_unstable();
    assert_eq!(seen, (0..len as u32).collect::<Vec<_>>(), "{case}");
}

#[test]
fn the_last_ranks_get_nothing_when_the_tail_is_short() {
    // 10 samples in batches of 4: the third batch has 2 samples for 4 ranks.
    let sizes = |rank| {
        let plan = sampler(10, 4, rank, 4, SHUFFLED).epoch(0);
        (0..3).map(|batch| plan.batch(batch).unwrap().indices.len()).collect::<Vec<_>>()
    };
    assert_eq!([sizes(0), sizes(1)], [[1, 1, 1], [1, 1, 1]]);
    assert_eq!([sizes(2), sizes(3)], [[1, 1, 0], [1, 1, 0]]);
    assert_eq!(sampler(10, 4, 0, 4, SHUFFLED).epoch(0).batch(2).unwrap().global_count, 2);
}

/// Checks the samples before each batch of an epoch, which begins with these. Returns those before the next one.
fn counted(sampler: &Sampler, epoch: u64, mut counts: SampleCounts, case: &str) -> SampleCounts {
    let plan = sampler.epoch(epoch);
    for batch in 0..sampler.batches_per_epoch() {
        let position = Position { epoch, batch };
        assert_eq!(sampler.samples_before(position), counts, "{case}: {position:?}");
        let share = plan.batch(batch).unwrap();
        counts.own += share.indices.len() as u64;
        counts.all += share.global_count as u64;
    }
    counts
}

#[test]
fn the_samples_before_a_position_are_those_of_all_batches_before_it() {
    for (len, global_batch, world) in [(10, 4, 1), (10, 4, 4), (97, 8, 3), (5, 64, 2), (64, 8, 2)] {
        for (rank, max_batches) in [(0, usize::MAX), (world - 1, usize::MAX), (world - 1, 1)] {
            let sampler = sampler(len, global_batch, rank, world, SHUFFLED);
            let sampler = sampler.with_max_batches(max_batches).unwrap();
            let mut counts = SampleCounts::default();
            for epoch in 0..3 {
                let case = format!("{len} by {global_batch}, rank {rank} of {world}");
                counts = counted(&sampler, epoch, counts, &case);
                // The end of an epoch is the start of the next. Larger batch numbers count as the end.
                for batch in [sampler.batches_per_epoch(), usize::MAX] {
                    assert_eq!(sampler.samples_before(Position { epoch, batch }), counts);
                }
            }
        }
    }
}

#[test]
fn the_order_depends_on_seed_and_epoch_alone() {
    let order = |order, epoch| {
        let plan = sampler(1000, 1000, 0, 1, order).epoch(epoch);
        plan.batch(0).unwrap().indices.to_vec()
    };
    assert_eq!(order(SampleOrder::Sequential, 3), (0..1000).collect::<Vec<_>>());
    assert_eq!(order(SHUFFLED, 3), order(SHUFFLED, 3));
    assert_ne!(order(SHUFFLED, 3), order(SHUFFLED, 4));
    assert_ne!(order(SHUFFLED, 3), order(SampleOrder::Shuffled { seed: 43 }, 3));
    assert_ne!(order(SHUFFLED, 0), order(SampleOrder::Sequential, 0));
}

#[test]
fn a_cap_shortens_and_never_lengthens() {
    let capped =
        |max_batches| sampler(10, 4, 0, 1, SHUFFLED).with_max_batches(max_batches).unwrap();
    assert_eq!([1, 2, 3, 100].map(|cap| capped(cap).batches_per_epoch()), [1, 2, 3, 3]);
    let (plan, whole) = (capped(2).epoch(0), capped(100).epoch(0));
    assert_eq!(plan.batch(1), whole.batch(1));
    assert_eq!(plan.batch(2), None);
    assert!(whole.batch(2).is_some());
}

#[test]
fn senseless_settings_are_refused() {
    let refused = |len, global_batch, rank, world| {
        Sampler::new(len, global_batch, rank, world, SHUFFLED).unwrap_err().to_string()
    };
    assert_eq!(refused(0, 1, 0, 1), "the number of samples must be from 1 to 2^32 - 1, got 0");
    assert_eq!(refused(1, 0, 0, 1), "the global batch must be at least 1, got 0");
    assert_eq!(refused(1, 1, 0, 0), "the world size must be at least 1, got 0");
    assert_eq!(refused(1, 1, 2, 2), "the rank must be below the world size 2, got 2");
    assert_eq!(
        sampler(1, 1, 0, 1, SHUFFLED).with_max_batches(0).unwrap_err().to_string(),
        "the number of batches per epoch must be at least 1, got 0"
    );
}

#[test]
fn the_samples_before_a_position_are_right_for_unequal_shares_of_steps() {
    // 5 samples on 2 ranks in steps of 2 batches: rank 0 has 3 of each batch, and 6 of a step.
    let first = sampler(40, 5, 0, 2, SHUFFLED).with_steps_of(2).unwrap();
    let position = Position { epoch: 0, batch: 2 };
    assert_eq!(first.samples_before(position), SampleCounts { own: 6, all: 10 });
    for (len, global_batch, world, of_step) in
        [(40, 5, 2, 2), (43, 5, 2, 2), (50, 7, 3, 4), (29, 3, 2, 3), (11, 2, 3, 2), (9, 5, 2, 4)]
    {
        for (rank, max_batches) in (0..world).flat_map(|rank| [(rank, usize::MAX), (rank, 3)]) {
            let sampler = sampler(len, global_batch, rank, world, SHUFFLED);
            let sampler = sampler.with_steps_of(of_step).unwrap();
            let sampler = sampler.with_max_batches(max_batches).unwrap();
            let mut counts = SampleCounts::default();
            for epoch in 0..2 {
                let case = format!("{len} by {global_batch} x {of_step}, {rank} of {world}");
                counts = counted(&sampler, epoch, counts, &case);
            }
        }
    }
}

#[test]
fn ranks_and_batches_of_a_step_are_exchangeable() {
    for (len, of_step) in [(64, 8), (97, 12), (30, 12), (5, 8)] {
        // The same parts, as ranks, as batches and as both.
        let parts = |world: usize, batches: usize| {
            let mut steps: Vec<Vec<Vec<u32>>> = Vec::new();
            for rank in 0..world {
                let sampler = sampler(len, of_step / batches, rank, world, SHUFFLED);
                let sampler = sampler.with_steps_of(batches).unwrap();
                let plan = sampler.epoch(2);
                let counts = counted(&sampler, 0, SampleCounts::default(), "a step");
                for batch in 0..sampler.batches_per_epoch() {
                    let share = plan.batch(batch).unwrap();
                    assert!(share.indices.len() <= sampler.local_batch_max());
                    steps.resize(steps.len().max(batch / batches + 1), Vec::new());
                    steps[batch / batches].push(share.indices.to_vec());
                }
                assert_eq!(counts.all, len as u64);
            }
            steps
        };
        let as_ranks = parts(4, 1);
        let full = len / of_step;
        for (world, batches) in [(2, 2), (1, 4)] {
            let steps = parts(world, batches);
            // The last step may have fewer batches.
            assert_eq!(steps[..full], as_ranks[..full], "{len} by {of_step}: {world} ranks");
            assert_eq!(steps.concat().concat(), as_ranks.concat().concat());
        }
    }
}

/// Lengths without an order of their own.
fn lengths(len: usize) -> Vec<u32> {
    (0..len as u32).map(|index| 1 + index.wrapping_mul(2_654_435_761) % 100).collect()
}

#[test]
fn lengths_change_the_order_and_nothing_else() {
    for order in [SampleOrder::Sequential, SHUFFLED] {
        for (len, global_batch, world) in [(1, 4, 2), (97, 8, 3), (1000, 8, 4), (1003, 2, 3)] {
            for steps in [1, 3] {
                let case = format!("{len} by {global_batch} on {world}, {steps}, {order:?}");
                let of_rank = |rank| {
                    let sampler = sampler(len, global_batch, rank, world, order);
                    sampler.with_steps_of(steps).unwrap()
                };
                let by_length = |rank| of_rank(rank).with_lengths(lengths(len)).unwrap().epoch(5);
                let plans: Vec<_> =
                    (0..world).map(|r| (of_rank(r).epoch(5), by_length(r))).collect();
                let mut seen: Vec<u32> = Vec::new();
                for batch in 0..of_rank(0).batches_per_epoch() {
                    for (plain, sorted) in &plans {
                        let (plain, sorted) =
                            (plain.batch(batch).unwrap(), sorted.batch(batch).unwrap());
                        assert_eq!(plain.indices.len(), sorted.indices.len(), "{case}");
                        assert_eq!(plain.global_count, sorted.global_count, "{case}");
                        seen.extend(sorted.indices);
                    }
                }
                seen.sort_unstable();
                assert_eq!(seen, (0..len as u32).collect::<Vec<_>>(), "{case}");
            }
        }
    }
}

#[test]
fn batches_have_samples_of_like_length() {
    let (len, batch, all) = (1003, 8, lengths(1003));
    // The tokens that batches have when each is padded to its longest sample.
    let padded = |sampler: &Sampler, epoch| -> u32 {
        let plan = sampler.epoch(epoch);
        let of_batch = |at| -> u32 {
            let indices = plan.batch(at).unwrap().indices;
            let lengths = indices.iter().map(|index| all[*index as usize]);
            lengths.clone().max().unwrap() * indices.len() as u32
        };
        (0..sampler.batches_per_epoch()).map(of_batch).sum()
    };
    let plain = sampler(len, batch, 0, 1, SHUFFLED);
    let sorted = plain.clone().with_lengths(all.clone()).unwrap();
    let tokens: u32 = all.iter().sum();
    for epoch in 0..3 {
        let extra = |sampler| padded(sampler, epoch) - tokens;
        // A window has 400 samples with 100 lengths: a batch of 8 spans about 2 lengths instead of about 80.
        assert!(extra(&sorted) * 10 < extra(&plain), "{} {}", extra(&sorted), extra(&plain));
    }
    let order = |sampler: &Sampler, epoch| {
        let plan = sampler.epoch(epoch);
        (0..125).flat_map(|at| plan.batch(at).unwrap().indices.to_vec()).collect::<Vec<_>>()
    };
    assert_eq!(order(&sorted, 1), order(&sorted, 1));
    assert_ne!(order(&sorted, 1), order(&sorted, 2));
    let firsts: Vec<u32> = order(&sorted, 0).chunks(8).map(|step| all[step[0] as usize]).collect();
    assert!(!firsts[..50].is_sorted_by(|a, b| a >= b), "steps come in a random order: {firsts:?}");

    let error = plain.with_lengths(vec![1; 5]).unwrap_err().to_string();
    assert_eq!(error, "the number of lengths must be 1003, got 5");
}

/// The micro-batches of a batch on these ranks, in order. Each rank reads as many shares as every other one.
fn micro_batches(len: usize, shares: &[Range<usize>], start: Position) -> Vec<Vec<Vec<u32>>> {
    let mut batches: Vec<Vec<Vec<u32>>> = Vec::new();
    for (rank, own) in shares.iter().enumerate() {
        let sampler = sampler(len, 24, rank, shares.len(), SHUFFLED);
        let sampler = sampler.with_micro_batches(shares).unwrap();
        let most = sampler.shares_per_batch();
        let mut before = sampler.samples_before(start);
        let mut iter = ShareIter::new(sampler.clone(), start, 2).unwrap();
        let mut read = Vec::new();
        while let Some((position, share)) = iter.next() {
            let at = read.len() % most;
            read.push(share.indices.to_vec());
            assert!(share.indices.len() <= sampler.local_batch_max());
            assert!(at >= most - own.len() || share.indices.is_empty(), "{own:?} of {shares:?}");
            assert!(at == 0 || share.global_count == 0);
            before.own += share.indices.len() as u64;
            before.all += share.global_count as u64;
            let after = Position { epoch: position.epoch, batch: position.batch + 1 };
            assert!(at + 1 < most || sampler.samples_before(after) == before, "{position:?}");
        }
        batches.resize(read.len() / most, Vec::new());
        for (batch, shares) in batches.iter_mut().zip(read.chunks(most)) {
            batch.extend_from_slice(&shares[most - own.len()..]);
        }
    }
    batches
}

#[test]
fn micro_batches_follow_from_the_data_alone() {
    let whole = 0..8;
    let shares: [&[Range<usize>]; 4] = [
        from_ref(&whole),
        &[0..4, 4..8],
        &[0..2, 2..4, 4..8],
        &[0..1, 1..2, 2..3, 3..4, 4..6, 6..8],
    ];
    for len in [1, 5, 24, 71, 72] {
        let expected = micro_batches(len, shares[0], Position::default());
        let sizes = |batch: &Vec<Vec<u32>>| batch.iter().map(Vec::len).collect::<Vec<_>>();
        assert!(len < 24 || sizes(&expected[0]) == [3; 8]);
        let per_epoch = len.div_ceil(24);
        assert_eq!(expected.len(), 2 * per_epoch);
        let mut seen: Vec<u32> =
            expected[per_epoch..].iter().flatten().flatten().copied().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..len as u32).collect::<Vec<_>>());
        for shares in shares {
            assert_eq!(
                micro_batches(len, shares, Position::default()),
                expected,
                "{len}, {shares:?}"
            );
            // Another layout goes on in the middle of an epoch.
            let found = micro_batches(len, shares, Position { epoch: 0, batch: per_epoch / 2 });
            assert_eq!(found, expected[per_epoch / 2..], "{len}, {shares:?}");
        }
    }
    let two = |shares: &[Range<usize>]| sampler(9, 4, 1, 2, SHUFFLED).with_micro_batches(shares);
    assert!(two(from_ref(&(0..4))).is_err() && two(&[0..4, 4..4]).is_err());
}
