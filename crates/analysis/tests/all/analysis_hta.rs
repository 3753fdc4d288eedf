//! Compares our figures with every figure of Holistic Trace Analysis 0.5.0 on a stored trace.
//! See `fixtures/README.md` for the trace and its figures.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::figure;
use paceline_analysis::hta::{Options, RankAnalysis, Rules, Summary, analyze};
use paceline_analysis::read;

/// Our figures under the names of `expected.tsv`; times in microseconds.
fn figures(rank: &RankAnalysis) -> BTreeMap<String, f64> {
    let mut figures = BTreeMap::new();
    let mut put = |name: String, value: f64| {
        figures.insert(name, value);
    };
    let us = |time_ns: i64| time_ns as f64 / 1e3;
    for (name, value) in [
        ("idle_time(us)", figure(rank, "idle_time_us")),
        ("compute_time(us)", figure(rank, "temporal_compute_time_us")),
        ("non_compute_time(us)", figure(rank, "non_compute_time_us")),
        ("kernel_time(us)", figure(rank, "kernel_time_us")),
        ("idle_time_pctg", figure(rank, "idle_time_pctg")),
        ("compute_time_pctg", figure(rank, "compute_time_pctg")),
        ("non_compute_time_pctg", figure(rank, "non_compute_time_pctg")),
    ] {
        put(format!("temporal|{name}"), value.unwrap());
    }
    put("overlap".into(), figure(rank, "comm_comp_overlap_pctg").unwrap());
    for (kinds, ns) in &rank.kinds {
        let kinds: Vec<String> = kinds.iter().map(|kind| kind.name().to_uppercase()).collect();
        put(format!("kind|{}", kinds.join(" overlapping ")), us(*ns));
    }
    for kernel in &rank.kernels {
        for (name, value) in [
            ("sum", us(kernel.sum_ns)),
            ("mean", kernel.mean_ns / 1e3),
            ("stddev", kernel.std_ns / 1e3),
            ("min", us(kernel.min_ns)),
            ("max", us(kernel.max_ns)),
        ] {
            put(format!("kernel|{}|{name}", kernel.name), value);
        }
    }
    for of in rank.idle.iter().flat_map(|of| of.by_category.iter().map(move |by| (of.stream, by))) {
        put(format!("idle|{}|{}", of.0, of.1.category.name()), us(of.1.time_ns));
    }
    let launches = rank.launches.as_ref().unwrap();
    put("launch|count".into(), launches.cpu_ns.count as f64);
    put("launch|cpu_duration".into(), launches.cpu_ns.mean / 1e3);
    put("launch|gpu_duration".into(), launches.gpu_ns.mean / 1e3);
    put("launch|launch_delay".into(), launches.delay_ns.mean / 1e3);
    let mut put_summary = |name: &str, key: &str, of: &Summary| {
        for (what, value) in [
            ("count", of.count as f64),
            ("mean", of.mean),
            ("std", of.std),
            ("min", of.min),
            ("25%", of.p25),
            ("50%", of.p50),
            ("75%", of.p75),
            ("max", of.max),
        ] {
            put(format!("{name}|{key}|{what}"), value);
        }
    };
    rank.queues.iter().for_each(|of| put_summary("queue", &of.stream.to_string(), &of.length));
    rank.copies.iter().for_each(|of| put_summary("copy", &of.name, of.gb_per_s.as_ref().unwrap()));
    let path = rank.critical_path.as_ref().unwrap();
    put("critical|total".into(), us(path.total_ns));
    path.by_bound.iter().for_each(|of| put(format!("critical|{}", of.0.name()), us(of.1)));
    figures
}

/// Times may differ by a thousandth, percentages by a tenth of a point. HTA gives percentages with two
/// decimals.
fn agrees(name: &str, ours: f64, theirs: f64) -> bool {
    let is_percent = name.ends_with("pctg") || name == "overlap";
    (ours - theirs).abs() <= if is_percent { 0.1 } else { 1e-5 + theirs.abs() / 1e3 }
}

fn compare(rules: Rules, label: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hta");
    let timeline = read::open(&folder.join("rank_0.pt.trace.json.gz")).unwrap();
    let options = Options { rules, ..Options::default() };
    let analysis = analyze(&[timeline], &options).unwrap();
    assert!(analysis.notes.is_empty(), "{:?}", analysis.notes);
    let ours = figures(&analysis.ranks[0]);

    let expected = std::fs::read_to_string(folder.join("expected.tsv")).unwrap();
    let mut compared = 0;
    for line in expected.lines() {
        let [of, name, value] = line.split('\t').collect::<Vec<_>>()[..] else {
            panic!("not three columns: {line}")
        };
        // HTA cuts the pieces of the figures `kind` to whole microseconds, even when it does not round.
        // Rounding moves events to the same moment; HTA leaves their order open, and the figures `queue`
        // depend on it.
        let is_cut = of == "exact" && name.starts_with("kind|");
        let is_tied = of == "hta" && name.starts_with("queue|");
        if of != label || is_cut || is_tied {
            continue;
        }
        let theirs: f64 = value.parse().unwrap();
        let ours = ours.get(name).unwrap_or_else(|| panic!("we have no {name}"));
        assert!(agrees(name, *ours, theirs), "{label} {name}: {ours} here, {theirs} in HTA");
        compared += 1;
    }
    assert!(compared > 90, "{compared} figures compared");
}

#[test]
fn figures_agree_with_hta_without_rounding() {
    compare(Rules::Hta, "exact");
}

#[test]
fn figures_agree_with_hta_as_it_rounds() {
    compare(Rules::HtaRounded, "hta");
}
