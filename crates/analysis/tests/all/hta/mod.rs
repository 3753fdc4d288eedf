//! Compares the analysis with Holistic Trace Analysis (HTA) 0.5.0 on the same traces. The traces and HTA's
//! figures were written by `bench/traces.py --fixtures` (see `fixtures/README.md`).
//!
//! Every percentage agrees within 0.1 point and every time within 0.1 %, with and without HTA's rounding of
//! times to microseconds.

mod comparison;

use std::path::{Path, PathBuf};

use comparison::{Comparison, analysis};
use paceline_analysis::hta::{Rules, Source};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

#[track_caller]
fn compare(name: &str, rules: Rules) {
    let Comparison { compared, differences, .. } = Comparison::of(&fixture(name), rules);
    let num = differences.len();
    assert!(differences.is_empty(), "{num} of {compared}:\n{}", differences.join("\n"));
    assert!(compared >= 200, "only {compared} figures were compared");
}

#[test]
fn our_traces_of_two_ranks() {
    compare("paceline_2", Rules::Hta);
}

#[test]
fn our_traces_of_four_ranks() {
    compare("paceline_4", Rules::Hta);
}

#[test]
fn traces_in_the_shape_of_cuda() {
    compare("cuda_shaped", Rules::Hta);
}

#[test]
fn our_traces_of_two_ranks_rounded() {
    compare("paceline_2", Rules::HtaRounded);
}

#[test]
fn our_traces_of_four_ranks_rounded() {
    compare("paceline_4", Rules::HtaRounded);
}

#[test]
fn traces_in_the_shape_of_cuda_rounded() {
    compare("cuda_shaped", Rules::HtaRounded);
}

#[test]
fn a_trace_of_a_processor_is_analyzed_from_its_operators() {
    let analysis = analysis(&fixture("torch_cpu"), Rules::Hta);
    assert_eq!(analysis.ranks.len(), 2);
    assert!(analysis.notes.iter().any(|note| note.contains("operators")), "{:?}", analysis.notes);
    for rank in &analysis.ranks {
        assert_eq!(rank.source, Source::Operators);
        // Three steps, of which the last is left out, with one bucket each.
        assert_eq!((rank.steps.found, rank.steps.chosen.len()), (3, 2));
        let found = rank.temporal;
        assert_eq!(found.idle_ns + found.compute_ns + found.non_compute_ns, found.kernel_time_ns);
        assert!(found.compute_ns > 0 && rank.overlap.communication_ns > 0, "{found:?}");
        assert!(rank.launches.is_none() && rank.memory.is_some());
    }
}
