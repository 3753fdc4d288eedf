//! Reports of four ranks with everything that a trace may have, and of traces with little.

use std::path::Path;

use crate::common::{Build, NCCL, across, timeline};
use paceline_analysis::hta::{Analysis, Kind, Options, analyze, columns};
use paceline_analysis::report::chart::Chart;
use paceline_analysis::report::panels::{console, of_analysis};
use paceline_analysis::report::{Body, Note, Panel, Report, Weight, files};
use paceline_analysis::timeline::{Collective, Timeline};

/// A rank of three steps of 1 ms, the last of which is left out. It comes `late` us late to an all-reduce, beside which it
/// computes for 150 us. On a processor there are no copies.
fn rank(rank: usize, late: f64, on_cpu: bool) -> Timeline {
    let all_reduce = if on_cpu { "ncclDevKernel_AllReduce_Sum_f32_Shm" } else { NCCL };
    let said = |name: &str, seq| {
        let (name, group) = (name.into(), Some("0".into()));
        Collective { name, group, seq: Some(seq), ..Collective::default() }
    };
    let mut of = timeline(rank);
    for step in 0..3 {
        let from = 1000.0 * step as f64;
        of = of
            .step(step, from, from + 1000.0)
            .span("data wait", from, from + 20.0)
            .span("forward", from + 20.0, from + 300.0)
            .span("backward", from + 300.0, from + 700.0)
            .span("exposed", from + 700.0, from + 800.0)
            .span("Optimizer.step#SGD.step", from + 800.0, from + 900.0)
            .kernel("gemm", 7, from + 30.0, from + 400.0 + late)
            .kernel("gemm", 7, from + 450.0, from + 600.0)
            .kernel("adam", 7, from + 800.0, from + 880.0)
            .kernel(all_reduce, 20, from + 400.0 + late, from + 800.0)
            .described(said("all_reduce", 2 * step))
            .kernel("ncclDevKernel_AllGather", 20, from + 900.0, from + 930.0)
            .described(said("all_gather", 2 * step + 1))
            .memory(from, 1, (500 + step) << 20, 600 << 20);
        if !on_cpu {
            of = of.copy("Memcpy HtoD (Pinned -> Device)", from + 5.0, from + 25.0, 1000, 10.0);
        }
    }
    of
}

/// Four ranks, each a little different. The last one does not communicate.
fn ranks(on_cpu: bool) -> Vec<Timeline> {
    let mut all: Vec<_> = (0..4).map(|at| rank(at, 20.0 * at as f64, on_cpu)).collect();
    let last = &mut all[3];
    last.kernels.retain(|kernel| kernel.collective.is_none());
    last.oddities = [("negative duration".to_owned(), 3)].into();
    let skipped = [("python_function", 1200), ("ac2g", 400), ("nobody knows", 2)];
    last.skipped = skipped.map(|(kind, count)| (kind.to_owned(), count)).into();
    last.run_facts = [("dropped_events".to_owned(), "7".to_owned())].into();
    if on_cpu {
        last.run_facts.insert("lanes".into(), "main".into());
    }
    all
}

fn analyzed(timelines: &[Timeline], kind: Kind) -> Analysis {
    analyze(timelines, &Options { kind: Some(kind), ..Options::default() }).unwrap()
}

fn report_of(timelines: &[Timeline], kind: Kind) -> Report {
    let about = Report {
        title: "profile/ddp <four ranks>".into(),
        notes: vec![Note { weight: Weight::Warning, text: "rank 4 is missing".into() }],
        ..Report::default()
    };
    of_analysis(&analyzed(timelines, kind), Some(&across(timelines)), timelines, about)
}

fn panels(report: &Report) -> impl Iterator<Item = &Panel> {
    report.sections.iter().flat_map(|section| &section.panels)
}

#[track_caller]
fn assert_distinct<T: Ord + std::fmt::Debug>(mut all: Vec<T>) {
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), count, "{all:?}");
}

#[test]
fn every_format_is_written_and_nothing_else() {
    for (kind, name) in [(Kind::Ddp, "ddp"), (Kind::Sharding, "sharding")] {
        let files = files(&report_of(&ranks(false), kind)).unwrap();
        let has_begun: [fn(&str) -> bool; 4] = [
            |csv| csv.contains(','),
            |html| html.starts_with("<!DOCTYPE html>"),
            |json| serde_json::from_str::<serde_json::Value>(json).is_ok() && json.ends_with("}\n"),
            |md| md.starts_with("## "),
        ];
        for ((ending, text), has_begun) in files.iter().zip(has_begun) {
            assert!(has_begun(text), "{ending}: {text:.40}");
        }
        assert_eq!(files.each_ref().map(|(ending, _)| *ending), ["csv", "html", "json", "md"]);
        // Keeps the reports for a person to look at.
        if let Some(out) = std::env::var_os("REPORT_OUT") {
            for (ending, text) in files {
                std::fs::write(Path::new(&out).join(format!("{name}.{ending}")), text).unwrap();
            }
        }
    }
}

#[test]
fn a_page_of_many_ranks_stays_small() {
    // All wait for rank 1.
    let many = (0..300).map(|at| rank(at, if at == 1 { 30.0 } else { 0.0 }, false));
    let report = report_of(&many.collect::<Vec<_>>(), Kind::Sharding);
    let [_, (_, page), ..] = files(&report).unwrap();
    assert!(page.len() < 2_000_000, "{} bytes", page.len());
    assert_eq!(report.table("summary").unwrap().rows.len(), 300);
    assert!(report.notes.iter().any(|note| note.text.contains("first 48 of 300 ranks")));
    let path = panels(&report).find(|panel| panel.id == "path").map(|panel| &panel.body);
    let Some(Body::Chart(Chart::Rows(lanes))) = path else { panic!("no lanes") };
    assert!((2..5).contains(&lanes.rows.len()), "{}", lanes.rows.len());
    let is_here = |lane: usize| lane < lanes.rows.len();
    assert!(lanes.jumps.iter().all(|jump| is_here(jump.from.0) && is_here(jump.to.0)));
}

#[test]
fn the_csv_has_the_columns_of_the_kind_and_all_digits() {
    let report = report_of(&ranks(false), Kind::Ddp);
    let csv = report.table("summary").unwrap().csv();
    let lines: Vec<&str> = csv.lines().collect();
    let names: Vec<&str> = columns(Kind::Ddp).map(|column| &*column.head.key).collect();
    assert_eq!((lines[0], lines.len()), (&*names.join(","), 5));
    // In each step a copy of 20 us and 880 us of other work; 600 us of it compute.
    assert!(lines[1].starts_with("0,125,1200,600,1925,6.4935"), "{}", lines[1]);
    // A rank that does not communicate has no overlap, which is not the same as zero.
    let overlap = names.iter().position(|name| *name == "comm_comp_overlap_pctg").unwrap();
    assert_eq!(lines[4].split(',').nth(overlap), Some(""));
}

#[test]
fn all_parts_have_names_of_their_own_and_say_what_they_show() {
    for kind in [Kind::Ddp, Kind::Sharding] {
        let report = report_of(&ranks(false), kind);
        let (sections, panels) = (&report.sections, || panels(&report));
        for panel in panels() {
            assert!(!panel.definition.is_empty(), "{}", panel.id);
            assert!(!matches!(panel.body, Body::Nothing(_)), "{}", panel.id);
            if let Body::Table(table) = &panel.body {
                assert!(table.rows.iter().all(|row| row.len() == table.columns.len()));
                assert!(table.columns.iter().all(|column| !column.definition.is_empty()));
                assert_distinct(table.columns.iter().map(|column| &column.key).collect());
            }
        }
        let ids = sections.iter().map(|of| &of.id);
        assert_distinct(ids.chain(panels().map(|of| &of.id)).collect());
        let titles = sections.iter().map(|of| &of.title);
        assert_distinct(titles.chain(panels().map(|of| &of.title)).collect());
        assert_distinct(report.figures.iter().map(|of| &of.column.key).collect());
    }
}

#[test]
fn a_run_of_which_little_is_known_has_a_report_too() {
    let little = [timeline(0).operator("aten::mul", 0.0, 10.0)];
    for kind in [Kind::Ddp, Kind::Sharding] {
        let report = of_analysis(&analyzed(&little, kind), None, &little, Report::default());
        files(&report).unwrap();
        for id in ["memory", "anatomy", "critical-path", "copies"] {
            assert!(panels(&report).all(|panel| panel.id != id), "{id}");
        }
    }
}

#[test]
fn the_console_has_the_mean_first() {
    let text = console(&analyzed(&ranks(false), Kind::Ddp), None);
    let lines: Vec<&str> = text.lines().collect();
    let words = |at: usize| lines[at].split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(words(0), "figure unit mean rank 0 rank 1 rank 2 rank 3");
    let line = |name: &str| {
        let at: Vec<usize> = (0..lines.len()).filter(|&at| words(at).starts_with(name)).collect();
        // No figure appears twice.
        assert_eq!(at.len(), 1, "{name}: {text}");
        words(at[0])
    };
    // Sums over 2 steps. A kernel that computes runs for 600 us of each.
    assert_eq!(
        line("temporal compute time"),
        "temporal compute time ms/step 0.627 0.600 0.620 0.640 0.650"
    );
    assert_eq!(line("all reduce calls"), "all reduce calls /step 0.75 1 1 1 0");
    assert_eq!(line("all reduce time"), "all reduce time ms/step 0.285 0.400 0.380 0.360 0.000");
    assert_eq!(line("compute time ms/step"), "compute time ms/step 0.630 0.600 0.620 0.640 0.660");
    // 150 us of 430, 410 and 390.
    assert_eq!(
        line("communication hidden"),
        "communication hidden % 36.64 34.88 36.59 38.46 \u{2013}"
    );
    assert!(!text.contains(" us "), "{text}");
}

#[test]
fn what_every_trace_has_is_no_oddity() {
    let report = report_of(&ranks(false), Kind::Ddp);
    let Some(odd) = report.table("oddities") else { panic!("no table") };
    let whats: Vec<String> = odd.rows.iter().map(|row| row[2].exact()).collect();
    assert_eq!(whats, ["negative duration", "nobody knows", "by the recorder"]);
    let lead = &report.sections.iter().find(|of| of.id == "numbers").unwrap().lead;
    assert_eq!(lead, "Not used: 1,600 events of kinds ac2g, python_function.");
    let mut one = ranks(false);
    one[3].oddities = [("negative duration".to_owned(), 1)].into();
    let notes = report_of(&one, Kind::Ddp).notes;
    let is_odd = |note: &Note| note.text.starts_with("1 event of the traces was odd");
    assert!(notes.iter().any(is_odd), "{notes:?}");
}

#[test]
fn ranks_that_compute_on_a_cpu_have_no_launches_and_nothing_is_called_as_on_a_gpu() {
    let [ours, others] = [true, false].map(|on_cpu| report_of(&ranks(on_cpu), Kind::Ddp));
    let has = |report: &Report, id: &str| panels(report).any(|panel| panel.id == id);
    let says_why = |report: &Report| {
        let why = "launches, their delays, queues and the causes of idle time are left out";
        report.notes.iter().any(|note| note.text.contains(why))
    };
    for id in ["launches", "launches-by-kernel", "queue", "queues", "idle"] {
        assert!(!has(&ours, id) && has(&others, id), "{id}");
    }
    for id in ["critical-path", "kernels"] {
        assert!(has(&ours, id), "{id}");
    }
    assert!(says_why(&ours) && !says_why(&others));
    let longest = ours.table("kernels").unwrap();
    assert!(longest.rows.iter().any(|row| row[1].exact().starts_with("all_reduce sum f32")));
    for (ending, text) in files(&ours).unwrap() {
        assert!(!text.contains("nccl") && !text.contains("cuda"), "{ending}");
    }
}
