//! Advice for synthetic steps.

use paceline_analysis::advice::blame::Slowest;
use paceline_analysis::advice::observed::{RankStep, Seen};
use paceline_analysis::advice::{Account, Means};
use paceline_model::{Init, LayoutBuilder};

use super::*;

const MIB: usize = 1 << 20;
const STEPS: usize = 40;

fn layout() -> Layout {
    let mut builder = LayoutBuilder::new();
    for at in 0..4 {
        let mut unit = builder.unit(format!("u{at}"));
        unit.param("weight", [MIB / 4], Init::Constant(0.0));
    }
    builder.finish(1)
}

/// A run of two ranks, each with four gradients of 1 MiB.
#[derive(Clone, Debug)]
struct Run {
    kind: Advice,
    caps: BucketCaps,
    ms_per_mib: f64,
    /// By how many milliseconds each rank is late, step by step.
    late: fn(usize) -> [f64; 2],
    /// How much longer than on the link an operation takes, step by step.
    more_ms: fn(usize) -> f64,
    /// Milliseconds for converting a bucket of 1 MiB in one direction.
    convert_ms: f64,
    backward_ms: f64,
}

const ONE: BucketCaps = BucketCaps { first_bytes: MIB, bytes: MIB };
const ALL: BucketCaps = BucketCaps { first_bytes: 4 * MIB, bytes: 4 * MIB };

impl Run {
    fn new(kind: Advice, caps: BucketCaps, ms_per_mib: f64) -> Self {
        Self {
            kind,
            caps,
            ms_per_mib,
            late: |_| [0.0; 2],
            more_ms: |_| 0.0,
            convert_ms: 0.0,
            backward_ms: 40.0,
        }
    }

    /// A step: the gradients are final after each quarter of the backward pass, which begins at 10 ms. Then the optimizer
    /// takes 5 ms.
    fn step(&self, number: usize) -> Seen {
        let late = (self.late)(number);
        let plan = paceline_strategies::plan_buckets(&layout(), 4, self.caps);
        let ready =
            |rank: usize, at: usize| 10.0 + late[rank] + self.backward_ms / 4.0 * (4 - at) as f64;
        let is_blocking = self.kind == Advice::UseBuckets;
        let mut ranks: Vec<RankStep> = [0, 1]
            .map(|rank| RankStep {
                backward: [10.0 + late[rank], ready(rank, 0)],
                ready: [3, 2, 1, 0].map(|at| ready(rank, at)).into(),
                ..RankStep::default()
            })
            .into();
        let loss = |rank: usize| 10.0 + late[rank];
        let bucket = |first: usize| {
            move |rank: usize| if is_blocking { ready(rank, 0) } else { ready(rank, first) }
        };
        // The loss and the buckets: when each rank submits them, and their MiB.
        let mut ops = vec![([0, 1].map(loss), 0.0)];
        for of in &plan {
            ops.push(([0, 1].map(bucket(of.params[0].0)), of.params.len() as f64));
        }
        let mut free = f64::NEG_INFINITY;
        for (submitted, num_mib) in ops {
            let started = submitted.map(|at| free.max(at));
            let present = started[0].max(started[1]);
            free = present + self.ms_per_mib * num_mib + (self.more_ms)(number);
            for (rank, of) in ranks.iter_mut().enumerate() {
                of.ops.push([submitted[rank], started[rank], present, free]);
                of.waiting += (present - started[rank].max(of.backward[1])).max(0.0);
            }
        }
        let exposed = |rank: &RankStep| (free - rank.backward[1]).max(0.0);
        let mean = |part: &dyn Fn(&RankStep) -> f64| ranks.iter().map(part).sum::<f64>() / 2.0;
        Seen {
            is_alike: true,
            exposed: mean(&exposed),
            waiting: mean(&|rank| rank.waiting),
            ranks,
            ..Seen::default()
        }
    }

    fn observed(&self) -> Observed {
        let num_buckets = paceline_strategies::plan_buckets(&layout(), 4, self.caps).len();
        let mib = 4 / num_buckets * MIB;
        Observed {
            steps: (0..STEPS).map(|number| self.step(number)).collect(),
            gradients: vec![3, 2, 1, 0],
            bytes: [0].into_iter().chain((0..num_buckets).map(|_| mib as u64)).collect(),
            bucket_ops: (1..=num_buckets).collect(),
            blocking_ops: Vec::new(),
        }
    }

    fn anatomy(&self, observed: &Observed) -> Anatomy {
        let mean =
            |part: fn(&Seen) -> f64| observed.steps.iter().map(part).sum::<f64>() / STEPS as f64;
        let waits =
            [0, 1].map(|rank| observed.steps.iter().map(|of| of.ranks[rank].waiting).sum::<f64>());
        let rank = usize::from(waits[1] < waits[0]);
        let cost_ms = (waits[0] - waits[1]).abs() / STEPS as f64;
        let is_last = |of: &&Seen| of.ranks[rank].waiting < of.ranks[1 - rank].waiting;
        let steps_pct = observed.steps.iter().filter(is_last).count() as f64 * 100.0 / STEPS as f64;
        Anatomy {
            means: Means {
                wall_ms: 15.0 + self.backward_ms + mean(|of| of.exposed),
                exposed_ms: mean(|of| of.exposed),
                exposed_wait_ms: mean(|of| of.waiting),
                communication_ms: 4.0 * self.ms_per_mib,
                ..Means::default()
            },
            slowest: Some(Slowest { rank, steps_pct, cost_ms }),
            ..Anatomy::default()
        }
    }

    fn told(&self) -> Told {
        self.told_of(&self.observed())
    }

    fn told_of(&self, observed: &Observed) -> Told {
        let anatomy = self.anatomy(observed);
        self.told_with(&anatomy, observed)
    }

    fn told_with(&self, anatomy: &Anatomy, observed: &Observed) -> Told {
        let ms_per_mib = self.ms_per_mib;
        let per_elem = self.convert_ms / (MIB as f64 / 4.0);
        let told = advice(Situation {
            strategy: if self.kind == Advice::UseBuckets { "simple_ddp" } else { "ddp" },
            kind: self.kind,
            caps: self.caps,
            anatomy,
            observed,
            moments: &[],
            layout: &layout(),
            link: Some((Box::new(move |bytes| ms_per_mib * bytes as f64 / MIB as f64), false)),
            conversion: &|| Some(Conversion { narrow_ms: per_elem, widen_ms: per_elem }),
        });
        let told = told.expect("a run with communication is told something");
        let Account { exposed_ms, waiting_ms, removed_ms, remains_ms, .. } = told.account;
        let sum = waiting_ms + removed_ms + remains_ms;
        assert!((sum - exposed_ms).abs() < 1e-9, "{sum} of {exposed_ms}: {}", told.text);
        assert!(remains_ms >= -1e-9 || self.kind == Advice::CompareWithDdp, "{}", told.text);
        told
    }
}

/// Pseudo-random numbers from 0 to 1, a sequence for each seed.
fn noise(number: usize, seed: usize) -> f64 {
    let x = (number * 31 + seed * 1009 + 7).wrapping_mul(2_654_435_761) % (1 << 32);
    (x.wrapping_mul(40_503) >> 8) as f64 % 1000.0 / 1000.0
}

#[test]
fn what_a_run_is_told() {
    let all = [
        Run::new(Advice::ChooseBuckets, ALL, 8.0),
        Run { convert_ms: 0.5, ..Run::new(Advice::ChooseBuckets, ONE, 8.0) },
        Run { convert_ms: 0.5, ..Run::new(Advice::ChooseBuckets, ONE, 20.0) },
        Run::new(Advice::UseBuckets, ONE, 8.0),
        Run::new(Advice::ChooseBuckets, ONE, 0.1),
        Run { convert_ms: 9.0, ..Run::new(Advice::ChooseBuckets, ONE, 8.0) },
        Run { late: |_| [0.0, 12.0], ..Run::new(Advice::ChooseBuckets, ONE, 2.0) },
        Run::new(Advice::ShardWith("sharded1"), ONE, 8.0),
    ];
    let all: Vec<String> = all.iter().map(|run| format!("{}.", run.told().text)).collect();
    insta::assert_snapshot!(all.join("\n"));
}

#[test]
fn converting_is_taken_off_what_half_the_bytes_gain() {
    // 80 ms of communication from 20 ms on. Half of it: 40 ms.
    let gain = |convert_ms: f64| {
        let told = Run { convert_ms, ..Run::new(Advice::ChooseBuckets, ONE, 20.0) }.told();
        assert_eq!(told.account.remedy.as_deref(), Some("`--strategy bf16`"), "{}", told.text);
        assert!(told.text.ends_with("It changes the weights"), "{}", told.text);
        let Account { gain, costs_ms, removed_ms, .. } = told.account;
        let gain = gain.unwrap();
        assert!((removed_ms - costs_ms - gain.ms).abs() < 1e-9, "{}", told.text);
        gain.ms
    };
    assert!((gain(0.0) - 40.0).abs() < 1e-9);
    // The buckets leave at 21, 32, 43 and 54 ms. The last one arrives at 64 and is widened, where before it arrived at 100.
    assert!((gain(1.0) - 35.0).abs() < 1e-9);
}

#[test]
fn a_gain_that_the_spread_hides_is_not_promised() {
    // In most steps one bucket of 32 ms is exposed whole. In a quarter the operation was over at once, so other buckets
    // gain nothing.
    let run = Run {
        more_ms: |number| if number % 4 == 0 { -32.0 } else { 0.0 },
        ..Run::new(Advice::ChooseBuckets, ALL, 8.0)
    };
    let told = run.told();
    assert!(!told.text.contains("--bucket-cap-mb"), "{}", told.text);
    let steady = Run::new(Advice::ChooseBuckets, ALL, 8.0).told();
    let gain = steady.account.gain.unwrap();
    assert!(steady.text.contains("`--bucket-cap-mb 1 --first-bucket-mb 1`"), "{}", steady.text);
    assert_eq!((gain.ms, gain.low_ms, gain.high_ms), (24.0, 24.0, 24.0));
}

#[test]
fn a_rank_that_is_late_in_each_step_is_not_hidden_by_other_buckets() {
    // The ranks are late in turns. By their means, gradients would be final 3 ms before any bucket can leave.
    let turns = Run {
        late: |number| if number % 2 == 0 { [0.0, 6.0] } else { [6.0, 0.0] },
        ..Run::new(Advice::ChooseBuckets, ALL, 8.0)
    };
    let gain = turns.told().account.gain.unwrap();
    assert!((gain.ms - 24.0).abs() < 1e-9, "{gain:?}");
}

#[test]
fn runs_that_differ_by_noise_are_told_the_same() {
    let runs = [
        Run { convert_ms: 0.5, ..Run::new(Advice::ChooseBuckets, ONE, 12.0) },
        Run { convert_ms: 0.5, ..Run::new(Advice::ChooseBuckets, ALL, 4.0) },
    ];
    for run in runs {
        let remedies = [1, 2, 3, 4, 5, 6].map(|seed| {
            let mut observed = run.observed();
            for (number, step) in observed.steps.iter_mut().enumerate() {
                // Each rank is late by up to 2 ms, and each operation by up to 1 ms.
                let seed = 10 * seed;
                let late = [noise(number, seed), noise(number, seed + 1)].map(|of| 2.0 * of);
                let slow = noise(number, seed + 2);
                for (rank, late) in step.ranks.iter_mut().zip(late) {
                    rank.backward.iter_mut().for_each(|at| *at += late);
                    rank.ready.iter_mut().for_each(|at| *at += late);
                    rank.ops.iter_mut().for_each(|op| {
                        *op = [op[0] + late, op[1] + late, op[2] + 2.0, op[3] + 2.0 + slow]
                    });
                }
            }
            run.told_of(&observed).account.remedy.expect("a remedy")
        });
        assert!(remedies.iter().all(|of| *of == remedies[0]), "{remedies:?}");
    }
}

#[test]
fn waiting_is_named_where_it_is_the_largest_part() {
    let late = |late: fn(usize) -> [f64; 2]| {
        Run { late, ..Run::new(Advice::ChooseBuckets, ONE, 2.0) }.told()
    };
    let slow = late(|_| [0.0, 12.0]);
    assert_eq!(slow.account.remedy.as_deref(), Some("waiting"));
    assert!(slow.text.contains("waiting is for rank 1: look at what else"), "{}", slow.text);
    assert!(
        slow.text.ends_with("take about 10.00 ms less (10.00 to 10.00 in 8 of 10 steps)"),
        "{}",
        slow.text
    );
    // A rank that is late in most steps is to blame, but nothing is promised.
    let mostly = late(|number| if number % 7 == 0 { [0.0, 0.0] } else { [0.0, 12.0] });
    assert!(mostly.text.ends_with("its share of the data"), "{}", mostly.text);
    // Where the ranks are late in turns, no rank is to blame.
    let turns = late(|number| if number % 2 == 0 { [0.0, 12.0] } else { [12.0, 0.0] });
    assert!(turns.text.contains("take turns at being late"), "{}", turns.text);
}

#[test]
fn a_replay_that_misses_more_than_it_promises_is_silent() {
    // Only the last operation takes 30 ms longer than the link: the model has the usual extra time.
    let run = Run::new(Advice::ChooseBuckets, ONE, 8.0);
    let mut observed = run.observed();
    for step in &mut observed.steps {
        step.exposed += 30.0;
        step.ranks.iter_mut().for_each(|rank| rank.ops[4][3] += 30.0);
    }
    let told = run.told_of(&observed);
    assert_eq!(told.account.gain, None, "{}", told.text);
    assert!(
        told.text.ends_with("look for what else uses the cores or the network"),
        "{}",
        told.text
    );
}

#[test]
fn a_gain_that_the_noise_between_runs_hides_is_not_promised() {
    let run = Run::new(Advice::ChooseBuckets, ALL, 8.0);
    let observed = run.observed();
    let told = |apart_ms: f64| {
        let mut anatomy = run.anatomy(&observed);
        anatomy.means.apart_ms = Some(apart_ms);
        run.told_with(&anatomy, &observed)
    };
    let seen = told(2.0);
    let gain = seen.account.gain.unwrap().ms;
    assert!(
        seen.text.contains("Two runs like this one differ by at least 2.00 ms"),
        "{}",
        seen.text
    );
    let hidden = told(gain + 1.0);
    assert_eq!((hidden.account.gain, hidden.account.remedy), (None, None), "{}", hidden.text);
    assert!(hidden.text.contains("than two runs like this one differ"), "{}", hidden.text);
}

#[test]
fn averages_half_as_often_do_not_wait_less() {
    let mut run = Run::new(Advice::AverageLess { every: 2 }, ONE, 8.0);
    run.backward_ms = 4.0;
    let mut observed = run.observed();
    for (number, step) in observed.steps.iter_mut().enumerate() {
        (step.exposed, step.waiting) = if number % 2 == 0 { (0.0, 0.0) } else { (40.0, 8.0) };
    }
    let told = run.told_of(&observed);
    let account = &told.account;
    assert_eq!((account.exposed_ms, account.waiting_ms), (20.0, 4.0));
    assert_eq!(account.gain.unwrap().ms, 8.0, "{}", told.text);
    assert!(told.text.contains("`--sync-every 4`"), "{}", told.text);
    assert!(told.text.ends_with("It changes the weights"), "{}", told.text);
}

#[test]
fn what_operations_usually_take_longer_is_a_cost() {
    // The extra time over the link is a cost of each operation.
    let run = Run { more_ms: |_| 0.5, ..Run::new(Advice::ChooseBuckets, ONE, 8.0) };
    let cost = cost_of(&run.observed(), Some(Box::new(|bytes| 8.0 * bytes as f64 / MIB as f64)));
    assert!((cost(2 * MIB as u64) - 16.5).abs() < 1e-9);
}

#[test]
fn statistics_of_batch_norms_are_a_cause_of_their_own() {
    // The passes wait 5 ms in the forward pass, and 6 ms in the backward pass, after the first gradient.
    let run = Run::new(Advice::ChooseBuckets, ALL, 1.0);
    let mut observed = run.observed();
    observed.bytes.extend([0, 0]);
    observed.blocking_ops = vec![2, 3];
    for step in &mut observed.steps {
        step.exposed += 11.0;
        for rank in &mut step.ranks {
            let moved = |at: f64| if at > 20.0 { at + 6.0 } else { at };
            rank.ready.iter_mut().for_each(|at| *at = moved(*at));
            rank.backward[1] += 6.0;
            rank.ops[1].iter_mut().for_each(|at| *at += 6.0);
            rank.ops.extend([[3.0, 3.0, 3.0, 8.0], [22.0, 22.0, 22.0, 28.0]]);
        }
    }
    let cost: Cost = Box::new(|bytes| if bytes == 0 { 5.5 } else { bytes as f64 / MIB as f64 });
    let passes =
        Passes::measured(&observed, plan(&layout(), ALL), Some(LOSS_BYTES), &*cost).unwrap();
    let gain = passes.without_blocking().unwrap();
    assert!((gain.ms - 10.5).abs() < 1e-9, "{gain:?}");
    assert_eq!(without_blocking(&observed).unwrap().ms, 11.0);
    let gathering = Run::new(Advice::ChooseGathers { prefetch: None }, ALL, 1.0);
    let told = gathering.told_of(&observed);
    assert!(told.text.contains("`--sync-batch-norm`"), "{}", told.text);
    assert!(told.text.ends_with("It changes the weights"), "{}", told.text);
}

#[test]
fn compression_pays_on_slow_links_only() {
    let told = |exposed: f64, sync: f64, ms_per_mib: f64| {
        let run =
            Run { backward_ms: 40.0 + sync, ..Run::new(Advice::CompareWithDdp, ONE, ms_per_mib) };
        let mut observed = run.observed();
        for step in &mut observed.steps {
            (step.exposed, step.sync) = (exposed, sync);
            for rank in &mut step.ranks {
                // Each bucket is compressed once it is final: a quarter of the time for each.
                for (at, ready) in rank.ready.iter_mut().enumerate() {
                    *ready = 10.0 + 10.0 * (at + 1) as f64 + sync / 4.0 * at as f64;
                    rank.ops[at + 1][0] = *ready + sync / 4.0;
                }
                rank.backward[1] = 50.0 + sync;
                // Operations take no longer than on the link.
                for at in 0..rank.ops.len() {
                    let free = if at > 0 { rank.ops[at - 1][3] } else { 0.0 };
                    let begin = free.max(rank.ops[at][0]);
                    let num_mib = if at > 0 { 1.0 } else { 0.0 };
                    rank.ops[at][3] = begin + ms_per_mib * num_mib;
                }
            }
        }
        let mut anatomy = run.anatomy(&observed);
        anatomy.means.sync_ms = sync;
        run.told_with(&anatomy, &observed)
    };
    // 1 ms per MiB: whole gradients leave the last bucket exposed, 1 ms. Compression takes 4 ms.
    let fast = told(2.0, 4.0, 1.0);
    let gain = fast.account.gain.unwrap();
    assert!((gain.ms - 5.0).abs() < 1e-9 && fast.account.removed_ms == 1.0, "{}", fast.text);
    // Even where next to nothing is exposed.
    let hidden = told(0.5, 8.0, 0.1);
    assert!((hidden.account.gain.unwrap().ms - 8.4).abs() < 1e-9, "{}", hidden.text);
    // 20 ms per MiB: without compression, 80 ms of communication begin at 20 ms, and the pass ends at 50 ms.
    let slow = told(10.0, 4.0, 20.0);
    assert_eq!(slow.account.gain, None);
    assert!(
        slow.text.contains("about 50.00 would be exposed, and the step would take 36.00 ms"),
        "{}",
        slow.text
    );
}
