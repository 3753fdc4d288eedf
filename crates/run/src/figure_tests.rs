//! The rules by which figures combine ranks, from reports of two ranks that differ in everything.
//!
//! Each expected number is worked out by hand, and no other rule gives it.

use std::sync::Arc;
use std::time::Duration;

use paceline_checkpoint::progress::{EpochSums, Evaluation, TestResult};
use paceline_collectives::{Group, Transport};
use paceline_kernels::Compute;
use paceline_memory::Allocator;
use paceline_model::Layout;
use paceline_observe::figures::event::{Event, StepDone};
use paceline_observe::figures::facts::{Facts, Outcome};
use paceline_observe::figures::figure::{Figure, Source};
use paceline_observe::figures::table::{TABLE, find};
use paceline_observe::insight::memory::Needs;
use paceline_observe::record::card_use::CardUse;
use paceline_observe::record::rank_report::RankReport;
use paceline_observe::record::ranks::Ranks;
use paceline_observe::record::steps::StepLog;
use paceline_observe::record::times::StepTimes;
use paceline_settings::config::TrainConfig;
use paceline_settings::spec::RunSpec;
use paceline_strategies::StepLoss;
use paceline_trace::{Span, SpanTrack};
use serde_json::Value;

use crate::resolve::resolve_inputs;

const ALL: [Ranks; 9] = [
    Ranks::First,
    Ranks::Same,
    Ranks::Mean,
    Ranks::MeanOfSamples,
    Ranks::SlowestOfStep,
    Ranks::SlowestRank,
    Ranks::Max,
    Ranks::Sum,
    Ranks::Each,
];

/// Whether two rules are the same for a figure: for one number of each rank, some have the same value.
fn is_alike(rule: Ranks, other: Ranks) -> bool {
    let kind = |rule| match rule {
        Ranks::First | Ranks::Same => 0,
        Ranks::Max | Ranks::SlowestRank => 1,
        other => 2 + other as usize,
    };
    kind(rule) == kind(other)
}

fn loss(samples: usize, mean: f64, correct: f64) -> StepLoss {
    StepLoss {
        loss: mean,
        correct,
        count: samples,
        samples,
        own_tokens: 2 * samples,
        is_shared: false,
        local_sum: mean * samples as f64,
        stops: false,
        regroups: false,
    }
}

/// A rank with these steps: the time of the step and the wait for data, in milliseconds, and whose other numbers are
/// multiples of `factor`.
fn report(steps: [(u64, u64); 3], factor: u64) -> RankReport {
    let mut log = StepLog::default();
    for (number, (step, data)) in steps.into_iter().enumerate() {
        let ms = |ms| ms * 1_000_000;
        let times = StepTimes {
            step: ms(step),
            data: ms(data),
            forward: ms(factor),
            exposed: ms(2 * factor),
            hidden: ms(factor),
            communicating: ms(factor * factor + 1),
            ..StepTimes::default()
        };
        log.push(number as u64, &times, &loss(100, 1.0, 0.0));
    }
    let mut report = RankReport {
        steps: log,
        resident_bytes: 10 * factor,
        dropped_spans: 7 * factor,
        peak_flops_per_s: 1e12 * factor as f64,
        ..RankReport::default()
    };
    report.alike.num_unlike = factor;
    let mut card = CardUse::default();
    card.add(Ok(10 * factor as u32), Ok(30 * factor));
    report.card = Some(card);
    report.memory.peak_bytes = [("total".to_owned(), 5 * factor)].into();
    report
}

fn config() -> (TrainConfig, Arc<Layout>) {
    let settings = [("model", "mlp"), ("input-dim", "8"), ("hidden-dim", "8"), ("nproc", "2")];
    let spec = settings.iter().fold(RunSpec::default(), |spec, (key, value)| spec.with(key, value));
    let spec = spec.with("output-dim", 4).with("transport", "thread");
    let (config, data) = resolve_inputs(&spec, None).unwrap();
    let model = config.model.build(data.train.as_ref(), 2).unwrap();
    (config, model.layout)
}

fn outcome() -> Outcome {
    Outcome {
        regroups: Default::default(),
        transport: Transport::Thread,
        link: None,
        params: 100,
        num_steps: 3,
        stopped_after: None,
        trained: None,
        has_classes: false,
        predicted: Needs::default(),
        scaling: None,
        evaluated: None,
        total: Duration::from_secs(1),
        flops_per_sample: Some(1_000_000),
        block_flops: None,
        block_names: Vec::new(),
    }
}

fn number(figure: &Figure, facts: &Facts) -> Option<f64> {
    let value = figure.of_run(facts)?;
    value.as_f64().or_else(|| value.get("total").and_then(Value::as_f64))
}

#[test]
fn each_figure_of_a_run_follows_its_rule_and_no_other() {
    // Rank 0 takes 45 ms in all, and rank 1 55; the slowest steps together take 68.
    let ranks = [report([(23, 0), (10, 0), (12, 0)], 2), report([(10, 0), (30, 0), (10, 5)], 5)];
    let ((config, layout), outcome) = (config(), outcome());
    let facts = |reports| Facts::new(&config, &outcome, reports, &layout);
    let (both, first, second) = (facts(&ranks), facts(&ranks[..1]), facts(&ranks[1..]));
    let mean_step = (50.0 / 3.0 + 45.0 / 3.0) / 2.0;
    let expected = [
        // Samples and tokens of both ranks, in the time of rank 1.
        ("samples_per_s", 600.0 / 0.055),
        ("tokens_per_s", 1200.0 / 0.055),
        ("model_gflop_per_s", 600.0 / 0.055 * 1e-3 / 2.0),
        ("peak_gflop_per_s", 3500.0),
        ("mfu_pct", 100.0 * (600.0 / 0.055 * 1e-3 / 2.0) / 3500.0),
        ("samples_per_s_without_data", config.samples_per_step() / 0.023),
        // The slowest rank of each step takes 23, 30 and 12 ms.
        ("step_ms_median", 23.0),
        ("step_ms_p99", 30.0),
        ("step_ms", mean_step),
        ("forward_ms", 3.5),
        ("comm_exposed_ms", 7.0),
        ("comm_hidden_ms", 3.5),
        ("comm_ms", 15.5),
        ("data_ms", 5.0 / 6.0),
        ("wall_ms", mean_step + 5.0 / 6.0),
        ("compute_ms", 3.5),
        ("rest_ms", mean_step - 10.5),
        ("overlap_pct", 100.0 * 3.5 / 15.5),
        ("comm_overhead_pct", 100.0 * 7.0 / mean_step),
        ("unlike_steps", 5.0),
        ("peak_bytes", 25.0),
        ("resident_bytes", 35.0),
        ("card_busy_pct", 35.0),
        ("card_used_bytes", 150.0),
        ("dropped_spans", 49.0),
    ];
    for figure in TABLE {
        let [of_both, of_first, of_second] =
            [&both, &first, &second].map(|facts| number(figure, facts));
        let known = expected.iter().find(|(name, _)| *name == figure.name);
        let Some((name, expected)) = known else {
            assert_eq!(of_first, of_second, "{}: say here what two ranks make", figure.name);
            continue;
        };
        let is_it = |value: Option<f64>| value.is_some_and(|of| (of / expected - 1.0).abs() < 1e-9);
        assert!(is_it(of_both), "{name}: {of_both:?} is not {expected}");
        for ranks in ALL.into_iter().filter(|rule| !is_alike(*rule, figure.ranks)) {
            let wrong = number(&Figure { ranks, ..*figure }, &both);
            // The longest step of all is the longest one of the rank that has it, and a ratio of sums is that of means.
            let is_same = match *name {
                "step_ms_p99" => matches!(ranks, Ranks::Max | Ranks::SlowestRank),
                "overlap_pct" | "comm_overhead_pct" => ranks == Ranks::Sum,
                _ => false,
            };
            assert!(is_same == is_it(wrong), "{name} by the rule {ranks:?}: {wrong:?}");
        }
    }
}

/// Whether `rule` makes the value of both ranks from those of each, which have these weights.
fn holds(rule: Ranks, each: [(f64, f64); 2], both: f64) -> bool {
    let [(a, weight_of_a), (b, weight_of_b)] = each;
    let expected = match rule {
        Ranks::MeanOfSamples => (a * weight_of_a + b * weight_of_b) / (weight_of_a + weight_of_b),
        Ranks::Same if a != b => return false,
        other => match other.combine([a, b]) {
            Some(value) => value,
            None => return false,
        },
    };
    (both - expected).abs() < 1e-9
}

/// Checks a figure whose sums the ranks add up while they train.
#[track_caller]
fn check(name: &str, of: impl Fn(&Figure, usize) -> Option<f64>, weights: [f64; 2]) {
    let figure = find(name).unwrap();
    let [a, b, both] = [0, 1, 2].map(|at| of(figure, at).unwrap());
    let each = [(a, weights[0]), (b, weights[1])];
    assert!(holds(figure.ranks, each, both), "{name}: {each:?} do not make {both}");
    for rule in ALL.into_iter().filter(|rule| *rule != figure.ranks && a != b) {
        assert!(!holds(rule, each, both), "{name} is the same by the rule {rule:?}");
    }
}

#[test]
fn figures_of_evaluations_follow_their_rules() {
    let sums = [(30.0, 4.0, 10.0), (10.0, 21.0, 30.0), (40.0, 25.0, 40.0)];
    let of = |figure: &Figure, at: usize| {
        let (loss, correct, count) = sums[at];
        let sums = EpochSums { loss, correct, count };
        let result = TestResult { samples: 8, sums, has_classes: true };
        let evaluation =
            Evaluation { steps: 1, epoch: 0, result, is_final: true, is_repeated: false };
        figure.at(&Event::Evaluated(evaluation))?.as_f64()
    };
    for figure in TABLE.iter().filter(|of| matches!(of.source, Source::Evaluation(_))) {
        // The value of another figure, not a mean itself.
        if figure.name == "eval_perplexity" {
            let loss = find("eval_loss").unwrap();
            let follows = |at| Some(of(figure, at)?.ln() - of(loss, at)?);
            assert!([0, 1, 2].into_iter().all(|at| follows(at).unwrap().abs() < 1e-12));
            continue;
        }
        check(figure.name, of, [10.0, 30.0]);
    }
}

/// The first step of a run with classes.
fn step_done<'a>(loss: &'a StepLoss, track: &'a SpanTrack, group: &'a Group) -> StepDone<'a> {
    StepDone {
        number: 0,
        steps: 1,
        epoch: 0,
        batches: 1,
        loss,
        has_classes: true,
        lr: 0.1,
        grad_norm: None,
        scaling: None,
        asked_ns: 0,
        whole: Span { start_ns: 0, end_ns: 1 },
        times: StepTimes { step: 1, ..StepTimes::default() },
        track,
        records: &[],
        actions: &[],
        group,
        compute: Box::leak(Box::new(Compute::new(1, Allocator::meta()).unwrap())),
        digests: None,
    }
}

#[test]
fn figures_of_a_steps_samples_follow_their_rules() {
    let losses = [loss(10, 3.0, 4.0), loss(30, 1.0, 21.0), loss(40, 1.5, 25.0)];
    let (group, track) = (Group::single().unwrap(), SpanTrack::with_capacity(0));
    let of = |figure: &Figure, at: usize| {
        let step = step_done(&losses[at], &track, &group);
        figure.at(&Event::Step(&step))?.as_f64()
    };
    for name in ["samples", "loss", "correct", "accuracy"] {
        check(name, of, [10.0, 30.0]);
    }
}

#[test]
fn a_model_without_classes_has_no_accuracy_anywhere() {
    let ((config, layout), outcome) = (config(), outcome());
    let sums = EpochSums { loss: 3.0, correct: 0.0, count: 6.0 };
    let result = TestResult { samples: 6, sums, has_classes: false };
    let evaluated = Evaluation { steps: 3, epoch: 0, result, is_final: true, is_repeated: false };
    let outcome = Outcome { trained: Some(sums), evaluated: Some(evaluated), ..outcome };
    let reports = [report([(1, 0); 3], 1)];
    let facts = Facts::new(&config, &outcome, &reports, &layout);
    let (group, track) = (Group::single().unwrap(), SpanTrack::with_capacity(0));
    let loss = loss(6, 0.5, 0.0);
    let step = StepDone { has_classes: false, ..step_done(&loss, &track, &group) };
    for name in ["correct", "accuracy", "train_accuracy", "eval_accuracy"] {
        let figure = find(name).unwrap();
        let at_events = [Event::Step(&step), Event::Evaluated(evaluated)].map(|of| figure.at(&of));
        let values = at_events.into_iter().chain([figure.of_run(&facts)]);
        let found: Vec<Value> = values.flatten().filter(|value| !value.is_null()).collect();
        assert!(found.is_empty(), "{name}: {found:?}");
    }
    let lines = paceline_observe::views::console::evaluation_lines(&result, &[]);
    assert_eq!(lines, ["Evaluation loss: 0.5000, over 6 samples"]);
    let tokens = TestResult { samples: 2, has_classes: true, ..result };
    let lines = paceline_observe::views::console::evaluation_lines(&tokens, &[]);
    assert_eq!(lines[0], "Evaluation loss: 0.5000, perplexity 1.65, over 6 tokens of 2 samples");
}
