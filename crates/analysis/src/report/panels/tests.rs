//! Reports of a made-up analysis in which everything occurs.

use std::path::Path;

use super::*;
use crate::hta::*;
use crate::report::chart::Chart;
use crate::report::{Body, Note, Weight};
use crate::timeline::TimeRange;

const MS: i64 = 1_000_000;

/// Four ranks, each a little different.
fn analysis(kind: Kind) -> Analysis {
    let ranks = (0..4).map(rank).collect();
    Analysis { kind, ranks, notes: vec!["the last step was left out".into()] }
}

fn rank(rank: usize) -> RankAnalysis {
    let more = rank as i64 * MS / 3;
    let (compute, comm, copies) = (60 * MS + more, 24 * MS - 2 * more, 2 * MS);
    use KernelKind::{Communication, Computation, Memory};
    let kinds = vec![
        KindTime { kinds: vec![Computation], time_ns: compute - 9 * MS },
        KindTime { kinds: vec![Communication], time_ns: comm - 9 * MS },
        KindTime { kinds: vec![Computation, Communication], time_ns: 9 * MS },
        KindTime { kinds: vec![Memory], time_ns: copies },
    ];
    let step = |number: u64| StepAnatomy {
        step: Step {
            number,
            time: TimeRange { start_ns: number as i64 * 10 * MS, dur_ns: 9_900_000 },
        },
        parts: vec![
            PartTime { part: Part::DataWait, time_ns: 150_000 },
            PartTime { part: Part::Forward, time_ns: 3 * MS },
            PartTime { part: Part::Backward, time_ns: 5 * MS },
            PartTime { part: Part::GradSync, time_ns: MS / 5 },
            PartTime { part: Part::Exposed, time_ns: 4 * MS / 5 },
            PartTime { part: Part::OptimizerStep, time_ns: MS / 2 },
            PartTime { part: Part::Rest, time_ns: MS / 4 },
        ],
        exposed_ns: MS,
    };
    let series = (0..100).map(|at| Point {
        at_ns: at * MS,
        value: f64::from(1 << 20) * (500.0 + 60.0 * ((at + rank as i64) % 10) as f64),
    });
    let queue = (0..100).map(|at| Point { at_ns: at * MS, value: (at % 7) as f64 });
    let summary = |scale: f64| {
        Summary::of((1..=100).map(|at| scale * f64::from(at)).collect()).unwrap_or_default()
    };
    let kernel = |at: usize| KernelStats {
        name: match at % 4 {
            1 => {
                format!("ncclDevKernel_AllReduce_Sum_f32_RING_LL_{at}(ncclDevComm*, unsigned long)")
            }
            2 => format!("Memcpy HtoD {at}"),
            _ => {
                format!("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize{at}_stage3_warpsize2x2x1")
            }
        },
        kind: [Computation, Communication, Memory, Computation][at % 4],
        calls: 10 + at as u64,
        sum_ns: (30 - at as i64) * MS,
        mean_ns: (30 - at as i64) as f64 * 1e6 / (10 + at) as f64,
        std_ns: 1234.5,
        min_ns: 1000,
        max_ns: 4 * MS,
    };
    let idle = |category, gaps, time_ns, ratio| IdleTime { category, gaps, time_ns, ratio };
    let bounds = [
        (BoundBy::GpuCompute, 6 * MS),
        (BoundBy::GpuCommunication, 2 * MS),
        (BoundBy::Cpu, MS),
        (BoundBy::LaunchDelay, MS / 2),
        (BoundBy::KernelGap, MS / 4),
    ];
    RankAnalysis {
        rank,
        file: format!("profile/ddp/rank_{rank}/worker_{rank}.1.pt.trace.json.gz"),
        source: Source::Kernels,
        steps: Steps { chosen: (1..=9).map(|number| step(number).step).collect(), found: 10 },
        temporal: Temporal {
            kernel_time_ns: compute + 19_100_125,
            idle_ns: 4_100_000,
            compute_ns: compute,
            non_compute_ns: 15_000_125,
        },
        // A rank that does not communicate hides nothing.
        overlap: Overlap { communication_ns: if rank == 3 { 0 } else { comm }, both_ns: 9 * MS },
        kinds,
        kernels: (0..20).map(kernel).collect(),
        idle: vec![StreamIdle {
            stream: 7,
            by_category: [
                idle(IdleCategory::HostWait, 120, 3 * MS, Some(0.75)),
                idle(IdleCategory::KernelWait, 300, MS / 2, Some(0.125)),
                idle(IdleCategory::Other, 12, MS / 2, Some(0.125)),
            ],
        }],
        launches: Some(LaunchStats {
            cpu_ns: summary(100.0),
            gpu_ns: summary(2000.0),
            delay_ns: summary(500.0),
            short_kernels: 17,
            slow_calls: 2,
            long_delays: 5,
            by_kernel: vec![NameLaunches {
                name: "sm80_xmma_gemm".into(),
                launches: 90,
                cpu_mean_ns: 5500.0,
                gpu_mean_ns: 100_000.0,
                delay_mean_ns: 7000.0,
                delay_max_ns: 90_000,
                short: 1,
            }],
        }),
        queues: vec![StreamQueue {
            stream: 7,
            length: summary(0.1),
            full_ns: 0,
            series: queue.collect(),
        }],
        copies: vec![CopyBandwidth {
            name: "Memcpy HtoD".into(),
            copies: 40,
            bytes: 123_456_789,
            time_ns: 2 * MS,
            gb_per_s: Some(summary(0.12)),
            series: Vec::new(),
        }],
        collectives: CollectiveTimes {
            by_kind: vec![
                (CollectiveKind::AllReduce, 36, comm - 9 * MS),
                (CollectiveKind::AllGather, 12, 5 * MS),
                (CollectiveKind::ReduceScatter, 12, 3 * MS),
                (CollectiveKind::Broadcast, 12, MS),
            ],
            wait_ns: Some(3 * MS),
        },
        memory: Some(MemoryUse {
            device_type: 1,
            samples: 200,
            peak_allocated: 2760 << 20,
            peak_reserved: 2900 << 20,
            p50_allocated: 1e9,
            p95_allocated: 2e9,
            final_allocated: 1400 << 20,
            final_reserved: 2900 << 20,
            series: series.collect(),
        }),
        anatomy: Some(Anatomy {
            steps: (1..=9).map(step).collect(),
            mean_ns: step(1).parts.iter().map(|p| (p.part, p.time_ns as f64)).collect(),
            exposed_mean_ns: 1e6,
            step_mean_ns: 9.9e6,
            line: None,
        }),
        critical_path: Some(CriticalPath {
            step: Some(1),
            total_ns: bounds.iter().map(|(_, ns)| ns).sum(),
            edges: Vec::new(),
            by_bound: bounds.to_vec(),
            by_name: vec![PathName {
                name: "sm80_xmma_gemm".into(),
                bound_by: BoundBy::GpuCompute,
                pieces: 40,
                time_ns: 5 * MS,
            }],
        }),
    }
}

/// A trace in which something was odd.
fn timelines() -> Vec<Timeline> {
    vec![Timeline {
        rank: Some(2),
        oddities: [("negative duration".to_owned(), 3)].into(),
        skipped: [("python_function", 1200), ("ac2g", 400), ("nobody knows", 2)]
            .map(|(kind, count)| (kind.to_owned(), count))
            .into(),
        run_facts: [("dropped_events".to_owned(), "7".to_owned())].into(),
        ..Timeline::default()
    }]
}

/// The analysis across the four ranks.
fn across() -> AcrossRanks {
    use crate::ranks::{
        CriticalPath, RankShare, RankWaits, Segment, StepPath, Stragglers, Transfer,
    };
    let segment = |at: usize| Segment {
        rank: [0, 2, 2, 1, 3, 3][at % 6],
        what: ["forward", "backward", "all_reduce"][at % 3].into(),
        seq: (at % 3 == 2).then_some(at as u64),
        start_ns: at as i64 * MS,
        dur_ns: MS,
        compute_ns: if at % 3 == 2 { 0 } else { 900_000 },
        transfer_ns: if at % 3 == 2 { MS } else { 0 },
        hidden_ns: if at % 3 == 2 { MS / 4 } else { 0 },
        is_small: false,
    };
    let step = StepPath {
        step: Some(4),
        segments: (0..12).map(segment).collect(),
        gain_ns: Default::default(),
    };
    let share = |rank: usize| RankShare {
        rank,
        compute_ns: 2 * MS,
        host_ns: MS / 5,
        transfer_ns: MS,
        share: 0.2,
        gain_ns: MS / 2,
        parts: vec![("backward".into(), MS)],
    };
    let waits = |rank: usize| RankWaits {
        rank,
        num_collectives: 40,
        times_last: 10 * rank,
        waited_ns: (3 - rank as i64) * MS,
        made_wait_ns: rank as i64 * MS,
        lead_ns: MS / 4,
        transfer_ns: 5 * MS,
    };
    AcrossRanks {
        ranks: (0..4).collect(),
        path: CriticalPath {
            steps: vec![step],
            ranks: (0..4).map(share).collect(),
            transfers: vec![Transfer {
                what: "all_reduce".into(),
                is_small: false,
                count: 4,
                time_ns: 4 * MS,
                hidden_ns: MS,
            }],
            ..Default::default()
        },
        stragglers: Stragglers {
            num_collectives: 40,
            ranks: (0..4).rev().map(waits).collect(),
            ..Default::default()
        },
        ..AcrossRanks::default()
    }
}

fn report(kind: Kind) -> Report {
    let about = Report {
        title: "profile/ddp <four ranks>".into(),
        subtitle: "4 ranks, 9 of 10 steps each".into(),
        notes: vec![Note { weight: Weight::Warning, text: "rank 4 is missing".into() }],
        ..Report::default()
    };
    of_analysis(&analysis(kind), Some(&across()), &timelines(), about)
}

#[test]
fn every_format_is_written_and_nothing_else() {
    for (kind, name) in [(Kind::Ddp, "ddp"), (Kind::Sharding, "sharding")] {
        let files = crate::report::files(&report(kind)).unwrap();
        let has_begun: [fn(&str) -> bool; 4] = [
            |csv| csv.contains(','),
            |html| html.starts_with("<!DOCTYPE html>"),
            |json| json.starts_with('{') && json.ends_with("}\n"),
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
    let mut analysis = analysis(Kind::Sharding);
    analysis.ranks = (0..300).map(rank).collect();
    let mut across = across();
    across.ranks = (0..300).collect();
    let report = of_analysis(&analysis, Some(&across), &[], Report::default());
    let [_, (_, page), ..] = crate::report::files(&report).unwrap();
    assert!(page.len() < 2_000_000, "{} bytes", page.len());
    assert_eq!(report.table("summary").unwrap().rows.len(), 300);
    assert!(report.notes.iter().any(|note| note.text.contains("first 48 of 300 ranks")));
    let path = report.sections.iter().flat_map(|s| &s.panels).find(|panel| panel.id == "path");
    let Some(Body::Chart(Chart::Rows(lanes))) = path.map(|panel| &panel.body) else {
        panic!("no lanes")
    };
    assert_eq!(lanes.rows.len(), 4);
    assert!(lanes.jumps.iter().all(|jump| jump.from.0 < 4 && jump.to.0 < 4));
}

#[test]
fn the_csv_has_the_columns_of_the_kind_and_all_digits() {
    let report = report(Kind::Ddp);
    let csv = report.table("summary").unwrap().csv();
    let lines: Vec<&str> = csv.lines().collect();
    let names: Vec<&str> = columns(Kind::Ddp).map(|column| &*column.head.key).collect();
    assert_eq!(lines[0], names.join(","));
    assert_eq!(lines.len(), 5);
    assert!(lines[1].starts_with("0,4100,60000,15000.125,79100.125,5.183"), "{}", lines[1]);
    // Rank 3 has no figure for the overlap, which is not the same as zero.
    let overlap = names.iter().position(|name| *name == "comm_comp_overlap_pctg").unwrap();
    assert_eq!(lines[4].split(',').nth(overlap), Some(""));
}

#[test]
fn panels_have_names_of_their_own_and_say_what_they_show() {
    for kind in [Kind::Ddp, Kind::Sharding] {
        let report = report(kind);
        let mut ids: Vec<&str> = report.sections.iter().map(|section| &*section.id).collect();
        for panel in report.sections.iter().flat_map(|section| &section.panels) {
            ids.push(&panel.id);
            assert!(!panel.definition.is_empty(), "{}", panel.id);
            // A panel for which the traces hold nothing is left out, such as `worst`: no collective is listed
            // as one that made a rank wait.
            assert!(!matches!(panel.body, Body::Nothing(_)) && panel.id != "worst", "{}", panel.id);
            if let Body::Table(table) = &panel.body {
                assert!(table.rows.iter().all(|row| row.len() == table.columns.len()));
                assert!(table.columns.iter().all(|column| !column.definition.is_empty()));
                let mut keys: Vec<&str> = table.columns.iter().map(|c| &*c.key).collect();
                keys.sort();
                keys.dedup();
                assert_eq!(keys.len(), table.columns.len(), "{}", panel.id);
            }
        }
        let num = ids.len();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), num, "{ids:?}");
    }
}

#[test]
fn a_run_of_which_nothing_is_known_has_a_report_too() {
    let mut analysis = analysis(Kind::Sharding);
    for rank in &mut analysis.ranks {
        *rank = RankAnalysis {
            temporal: Temporal::default(),
            overlap: Overlap::default(),
            kinds: Vec::new(),
            kernels: Vec::new(),
            idle: Vec::new(),
            launches: None,
            queues: Vec::new(),
            copies: Vec::new(),
            collectives: CollectiveTimes::default(),
            memory: None,
            anatomy: None,
            critical_path: None,
            steps: Steps::default(),
            ..rank.clone()
        };
    }
    for kind in [Kind::Ddp, Kind::Sharding] {
        analysis.kind = kind;
        crate::report::files(&of_analysis(&analysis, None, &[], Report::default())).unwrap();
    }
}

#[test]
fn the_console_has_the_mean_first() {
    let text = console(&analysis(Kind::Ddp), None);
    let lines: Vec<&str> = text.lines().collect();
    let words = |at: usize| lines[at].split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(words(0), "figure unit mean rank 0 rank 1 rank 2 rank 3");
    // Sums over 9 steps: 4.1 ms and 36 calls. No figure appears twice.
    assert_eq!(words(2), "idle time ms/step 0.456 0.456 0.456 0.456 0.456");
    let calls = lines.iter().position(|line| line.starts_with("all reduce calls")).unwrap();
    assert_eq!(words(calls), "all reduce calls /step 4.00 4 4 4 4");
    for once in ["all reduce time ms/step ", "compute time ms/step "] {
        let count = (0..lines.len()).filter(|&at| words(at).starts_with(once)).count();
        assert_eq!(count, 1, "{text}");
    }
    assert!(!text.contains(" us "), "{text}");
    let hidden = lines.iter().position(|line| line.starts_with("communication hidden")).unwrap();
    assert_eq!(words(hidden), "communication hidden % 38.59 37.50 38.57 39.71 \u{2013}");
}

#[test]
fn what_every_trace_has_is_no_oddity() {
    let report = report(Kind::Ddp);
    let Some(odd) = report.table("oddities") else { panic!("no table") };
    let whats: Vec<String> = odd.rows.iter().map(|row| row[2].exact()).collect();
    assert_eq!(whats, ["negative duration", "nobody knows", "by the recorder"]);
    let lead = &report.sections.iter().find(|of| of.id == "numbers").unwrap().lead;
    assert_eq!(lead, "Not used: 1,600 events of kinds ac2g, python_function.");
    let mut one = timelines();
    one[0].oddities = [("negative duration".to_owned(), 1)].into();
    let notes = odd::notes(&one);
    assert!(notes[1].text.starts_with("1 event of the traces was odd"), "{}", notes[1].text);
}

#[test]
fn launches_of_our_own_ranks_are_left_out() {
    let report = |timelines: &[Timeline]| -> Report {
        of_analysis(&analysis(Kind::Ddp), None, timelines, Report::default())
    };
    let has = |report: &Report, id: &str| {
        report.sections.iter().flat_map(|section| &section.panels).any(|panel| panel.id == id)
    };
    let says_why = |report: &Report| {
        let why = "launches, their delays, queues and the causes of idle time are left out";
        report.notes.iter().any(|note| note.text.contains(why))
    };
    let mut ours = timelines();
    ours[0].run_facts.insert("lanes".into(), "main".into());
    let (ours, others) = (report(&ours), report(&timelines()));
    for id in ["launches", "launches-by-kernel", "queue", "queues", "idle"] {
        assert!(!has(&ours, id) && has(&others, id), "{id}");
    }
    for id in ["critical-path", "copies", "kernels"] {
        assert!(has(&ours, id), "{id}");
    }
    assert!(says_why(&ours) && !says_why(&others));
}

#[test]
fn nothing_on_a_cpu_is_called_as_on_a_gpu() {
    let mut ours = timelines();
    ours[0].run_facts.insert("lanes".into(), "main".into());
    let mut analysis = analysis(Kind::Ddp);
    for rank in &mut analysis.ranks {
        rank.kernels.truncate(2);
        rank.kernels[1].name = "ncclDevKernel_AllReduce_Sum_f32_Shm".into();
        rank.critical_path.as_mut().unwrap().by_name[0].name = "cudaLaunchKernel".into();
    }
    let report = of_analysis(&analysis, Some(&across()), &ours, Report::default());
    let longest = report.table("kernels").unwrap();
    assert!(longest.rows.iter().any(|row| row[1].exact().starts_with("all_reduce sum f32")));
    for (ending, text) in crate::report::files(&report).unwrap() {
        assert!(!text.contains("nccl") && !text.contains("cuda"), "{ending}");
    }
}

#[test]
fn no_heading_stands_twice() {
    for kind in [Kind::Ddp, Kind::Sharding] {
        let report = report(kind);
        let sections = report.sections.iter().map(|section| &section.title);
        let panels = report.sections.iter().flat_map(|section| &section.panels);
        let mut titles: Vec<&String> = sections.chain(panels.map(|panel| &panel.title)).collect();
        let count = titles.len();
        titles.sort();
        titles.dedup();
        assert_eq!(titles.len(), count, "{titles:?}");
    }
}

/// JSON in which no object repeats a key.
struct Unique;

impl<'de> serde::Deserialize<'de> for Unique {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Unique;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("JSON")
            }
            fn visit_bool<E>(self, _: bool) -> Result<Unique, E> {
                Ok(Unique)
            }
            fn visit_i64<E>(self, _: i64) -> Result<Unique, E> {
                Ok(Unique)
            }
            fn visit_u64<E>(self, _: u64) -> Result<Unique, E> {
                Ok(Unique)
            }
            fn visit_f64<E>(self, _: f64) -> Result<Unique, E> {
                Ok(Unique)
            }
            fn visit_str<E>(self, _: &str) -> Result<Unique, E> {
                Ok(Unique)
            }
            fn visit_unit<E>(self) -> Result<Unique, E> {
                Ok(Unique)
            }
            fn visit_seq<A: serde::de::SeqAccess<'de>>(
                self,
                mut seq: A,
            ) -> Result<Unique, A::Error> {
                while seq.next_element::<Unique>()?.is_some() {}
                Ok(Unique)
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<Unique, A::Error> {
                let mut keys = std::collections::HashSet::new();
                while let Some((key, Unique)) = map.next_entry::<String, Unique>()? {
                    if !keys.insert(key.clone()) {
                        return Err(serde::de::Error::custom(format!("{key} twice")));
                    }
                }
                Ok(Unique)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[test]
fn no_object_of_the_json_repeats_a_key() {
    assert!(serde_json::from_str::<Unique>(r#"{"a": 1, "b": [{"c": 1, "c": null}]}"#).is_err());
    for kind in [Kind::Ddp, Kind::Sharding] {
        let [_, _, (_, json), _] = crate::report::files(&report(kind)).unwrap();
        serde_json::from_str::<Unique>(&json).unwrap();
    }
}
