//! `paceline analyze`, its difference and `paceline compare`, run as a user would: what is printed and
//! written, and every bad input.

use std::fs;
use std::path::Path;

use crate::common::traces::{Training, trace, write_traces};
use crate::common::{Sandbox, TINY, gzip, json};

/// Exit code 1, one message with these words, and no report.
#[track_caller]
fn fails(sandbox: &Sandbox, args: &str, words: &[&str]) {
    sandbox.run(args).ended_with(1, words);
    for folder in ["reports", "reports_sharding"] {
        assert!(!sandbox.path(folder).exists(), "{folder} was made");
    }
}

fn names(sandbox: &Sandbox, folder: &str) -> Vec<String> {
    let entries = fs::read_dir(sandbox.path(folder)).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

const FILES: [&str; 4] = ["summary.csv", "summary.html", "summary.json", "summary.md"];

#[test]
fn a_run_becomes_a_report() {
    let sandbox = Sandbox::new();
    write_traces(&sandbox, "profile/ddp", 2, Training::Ddp);
    let run = sandbox.run("analyze profile/ddp").ok();
    assert_eq!(names(&sandbox, "reports/ddp"), FILES);
    assert!(!sandbox.path("reports_sharding").exists());
    // Four steps, of which the last is left out, with one all-reduce each of 600 - 40 x rank us.
    let csv = fs::read_to_string(sandbox.path("reports/ddp/summary.csv")).unwrap();
    let mut lines = csv.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let head = lines.next().unwrap();
    let column = |name: &str| head.iter().position(|field| *field == name).unwrap();
    let rows: Vec<_> = lines.collect();
    let all = |name| rows.iter().map(|row| row[column(name)]).collect::<Vec<_>>();
    assert_eq!(all("rank"), ["0", "1"]);
    assert_eq!(all("all_reduce_calls"), ["3", "3"]);
    assert_eq!(all("all_reduce_time_us"), ["1800", "1680"]);
    assert_eq!(all("memory_time_us"), ["30", "30"]);
    assert_eq!(all("compute_time_us"), ["4260", "4380"]);
    // The console: the mean, then each rank.
    let line = run.line("all reduce time        ms/step");
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words, ["0.580", "0.600", "0.560"]);
    let summary = json(&sandbox.path("reports/ddp/summary.json"));
    assert_eq!(summary["tables"]["summary"]["rows"][1]["all_reduce_time_us"], 1680.0);
    let markdown = fs::read_to_string(sandbox.path("reports/ddp/summary.md")).unwrap();
    assert!(markdown.contains("### Stragglers") && markdown.contains("1,680.0"), "{markdown}");
}

#[test]
fn the_memory_of_a_card_becomes_a_report() {
    let sandbox = Sandbox::new();
    let block = r#"{"size":2097152,"requested_size":1048576,"state":"active_allocated","frames":[{"filename":"a\u001b[2J.py","line":7,"name":"f"}]}"#;
    let file = format!(
        r#"{{"segments":[{{"device":0,"total_size":2097152,"blocks":[{block}]}}],"device_traces":[[]]}}"#
    );
    sandbox.write("memory.pickle", file.as_bytes());
    let run = sandbox.run("analyze memory.pickle").ok();
    assert_eq!(names(&sandbox, "reports/memory.pickle"), FILES);
    for words in [
        "1.00 MiB are allocated at the peak, and 1.00 of 2.00 MiB reserved at the end",
        ".py:7 in f",
        "rounding of sizes",
    ] {
        assert!(run.stdout.contains(words), "{}", run.stdout);
    }
    assert!(!run.stdout.contains('\u{1b}'));
    sandbox.write("other.pkl", b"\x80\x04}.");
    sandbox
        .run("analyze other.pkl")
        .ended_with(1, &["other.pkl: no snapshot of PyTorch's memory: it has no segments"]);
    assert!(!sandbox.path("reports/other.pkl").exists());
}

#[test]
fn the_kind_is_seen_or_said() {
    let sandbox = Sandbox::new();
    write_traces(&sandbox, "profile_runpod/zero3", 2, Training::Sharding);
    sandbox.run("analyze --trace-dir profile_runpod/zero3").ok();
    assert_eq!(names(&sandbox, "reports_sharding/zero3"), FILES);
    let csv = fs::read_to_string(sandbox.path("reports_sharding/zero3/summary.csv")).unwrap();
    assert!(csv.contains("reduce_scatter_time_us") && csv.contains("peak_allocated_mb"), "{csv}");
    assert!(!csv.contains("all_reduce_calls"), "{csv}");
    sandbox.run("analyze profile_runpod/zero3 --kind ddp").ok();
    let csv = fs::read_to_string(sandbox.path("reports/zero3/summary.csv")).unwrap();
    assert!(csv.contains("all_reduce_calls"), "{csv}");
    sandbox.run("analyze profile_runpod/zero3 --output here").ok();
    assert_eq!(names(&sandbox, "here"), FILES);
}

#[test]
fn windows_files_and_steps_are_chosen() {
    let sandbox = Sandbox::new();
    write_traces(&sandbox, "profile/ddp", 2, Training::Ddp);
    for rank in 0..2 {
        let later = format!("profile/ddp/rank_{rank}/worker_{rank}.1800.pt.trace.json.gz");
        let text = trace(rank, 2, Training::Ddp, 2.0).to_string();
        sandbox.write(&later, &gzip(text.as_bytes()));
    }
    let all_reduce = |file: &str| {
        let summary = json(&sandbox.path(file));
        summary["tables"]["summary"]["rows"][0]["all_reduce_time_us"].as_f64().unwrap()
    };
    sandbox.run("analyze profile/ddp").ok();
    assert_eq!(all_reduce("reports/ddp/summary.json"), 3600.0);
    sandbox.run("analyze profile/ddp --select all --output all").ok();
    assert_eq!(names(&sandbox, "all"), ["run_0_1700", "run_1_1800"]);
    assert_eq!(all_reduce("all/run_0_1700/summary.json"), 1800.0);
    assert_eq!(all_reduce("all/run_1_1800/summary.json"), 3600.0);
    let run = sandbox
        .run("analyze profile/ddp --include-last-step --enable-multiprocessing --output last");
    let run = run.ok();
    assert!(run.stdout.contains("Reading 2 traces in parallel"), "{}", run.stdout);
    assert_eq!(all_reduce("last/summary.json"), 4800.0);
    let files =
        [0, 1].map(|rank| format!("profile/ddp/rank_{rank}/worker_{rank}.1700.pt.trace.json"));
    for (separator, output) in [(",", "commas"), (" ", "spaces")] {
        let list = files.join(separator);
        sandbox.run(&format!("analyze --output {output} --trace-files {list}")).ok();
        assert_eq!(all_reduce(&format!("{output}/summary.json")), 1800.0);
    }
}

#[test]
fn a_trace_of_any_name_alone_is_of_rank_0() {
    let sandbox = Sandbox::new();
    let mut alone = trace(0, 1, Training::Ddp, 1.0);
    alone.as_object_mut().unwrap().remove("distributedInfo");
    let text = alone.to_string();
    sandbox.write("traces/my run/step.of.mine.json.gz", &gzip(text.as_bytes()));
    // Other JSON in the folder is no trace.
    for (name, other) in
        [("config.json", "{\"model\": 1}"), ("rows.json", "[{\"op\": 1}]"), ("x.json", "no")]
    {
        sandbox.write(&format!("traces/{name}"), other.as_bytes());
    }
    let run = sandbox.run("analyze traces").ok();
    let words = run.stdout.lines().nth(1).unwrap();
    assert!(words.starts_with("1 rank ") && !words.contains("profiled"), "{words}");
    let summary = json(&sandbox.path("reports/summary.json"));
    assert_eq!(summary["tables"]["summary"]["rows"][0]["rank"], 0);
    // A time in the name is said, and is no rank.
    sandbox.write("dated/host_17.1769860800000.json", text.as_bytes());
    let run = sandbox.run("analyze dated").ok();
    assert!(run.stdout.contains("profiled 2026-01-31 "), "{}", run.stdout);
    sandbox.write("dated/host_17.1769860900000.json", text.as_bytes());
    sandbox.run("analyze dated --select all --output all").ok();
    assert_eq!(names(&sandbox, "all"), ["run_0_1769860800000", "run_1_1769860900000"]);
}

#[test]
fn reports_of_two_traces_share_no_name() {
    let sandbox = Sandbox::new();
    for (name, scale) in [("x/a", 1.0), ("x/b", 2.0), ("y/a", 3.0), ("x/deep/a", 4.0)] {
        let text = trace(0, 1, Training::Ddp, scale).to_string();
        sandbox.write(&format!("{name}.json"), text.as_bytes());
    }
    let time = |report: &str| {
        let summary = json(&sandbox.path(&format!("{report}/summary.json")));
        summary["tables"]["summary"]["rows"][0]["all_reduce_time_us"].as_f64().unwrap() / 1800.0
    };
    // Twice, because a report of the same trace is replaced.
    for _ in 0..2 {
        for (place, report, scale) in [
            ("x/a.json", "reports/a", 1.0),
            ("x/b.json", "reports/b", 2.0),
            ("y/a.json", "reports/a-2", 3.0),
            ("x/deep", "reports/deep", 4.0),
            ("x/deep/a.json", "reports/deep/a", 4.0),
        ] {
            let run = sandbox.run(&format!("analyze {place}")).ok();
            assert!(
                run.stdout.contains(&format!("Report: {report}/summary.html")),
                "{}",
                run.stdout
            );
            assert_eq!(time(report), scale, "{place}");
        }
        for (pair, report) in [
            ("x/a.json --against x/b.json", "a-b"),
            ("y/a.json --against x/b.json", "a-b-2"),
            ("x/b.json --against x/a.json", "b-a"),
        ] {
            let run = sandbox.run(&format!("analyze {pair}")).ok();
            let report = format!("Report: reports/against/{report}/against.html");
            assert!(run.stdout.contains(&report), "{}", run.stdout);
        }
    }
    assert_eq!([time("reports/a"), time("reports/b"), time("reports/a-2")], [1.0, 2.0, 3.0]);
}

#[test]
fn what_is_missing_is_said() {
    let sandbox = Sandbox::new();
    write_traces(&sandbox, "profile/ddp", 3, Training::Ddp);
    fs::remove_dir_all(sandbox.path("profile/ddp/rank_1")).unwrap();
    let run = sandbox.run("analyze profile/ddp").ok();
    // The message is printed once, even if both streams are combined.
    let both = format!("{}{}", run.stdout, run.stderr);
    assert_eq!(both.matches("There are no traces of rank 1").count(), 1, "{run:#?}");
    assert!(run.stdout.contains("warning: There are no traces of rank 1"), "{run:#?}");
    let page = fs::read_to_string(sandbox.path("reports/ddp/summary.html")).unwrap();
    assert!(page.contains("There are no traces of rank 1"));

    let mut without = trace(0, 1, Training::Ddp, 1.0);
    let events = without["traceEvents"].as_array_mut().unwrap();
    events.retain(|event| !event["name"].as_str().unwrap().starts_with("ProfilerStep"));
    sandbox.write("steps.pt.trace.json", without.to_string().as_bytes());
    let run = sandbox.run("analyze --trace-files steps.pt.trace.json --output found").ok();
    assert!(run.stdout.contains("prof.step() marks no steps. They are taken from"), "{run:#?}");
    // Traces of paceline mark their steps, so none are looked for.
    without["paceline"] = serde_json::json!({"transport": "shm"});
    sandbox.write("steps.pt.trace.json", without.to_string().as_bytes());
    let run = sandbox.run("analyze --trace-files steps.pt.trace.json --output steps").ok();
    assert!(run.stdout.contains("names no steps"), "{run:#?}");
    assert!(run.stdout.contains("no steps"), "{run:#?}");
}

#[test]
fn bad_traces() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("empty")).unwrap();
    fails(&sandbox, "analyze empty", &["No trace files found."]);
    fails(&sandbox, "analyze nowhere", &["nowhere"]);

    let mut no_rank = trace(0, 2, Training::Ddp, 1.0);
    no_rank.as_object_mut().unwrap().remove("distributedInfo");
    for name in ["a", "b"] {
        sandbox.write(&format!("no_rank/{name}.pt.trace.json"), no_rank.to_string().as_bytes());
    }
    fails(&sandbox, "analyze no_rank", &["no_rank/a.pt.trace.json", "which rank"]);

    let text = trace(0, 1, Training::Ddp, 1.0).to_string();
    let packed = gzip(text.as_bytes());
    sandbox.write("cut/rank_0/a.pt.trace.json.gz", &packed[..20]);
    fails(&sandbox, "analyze cut", &["cut/rank_0/a.pt.trace.json.gz", "cut off"]);

    let broken = text.replacen("\"traceEvents\":[", "\"traceEvents\":[}", 1);
    let at = broken.find("[}").unwrap() + 1;
    sandbox.write("broken/rank_0/a.pt.trace.json", broken.as_bytes());
    fails(&sandbox, "analyze broken", &["broken/rank_0/a.pt.trace.json", &at.to_string()]);

    for name in ["a", "b"] {
        sandbox.write(&format!("two/{name}.pt.trace.json"), text.as_bytes());
    }
    let both = "analyze --trace-files two/a.pt.trace.json,two/b.pt.trace.json";
    fails(&sandbox, both, &["two/a.pt.trace.json", "two/b.pt.trace.json", "rank 0"]);

    // One good window and one bad one: nothing is written.
    sandbox.write("profile/x/rank_0/a.1700.pt.trace.json", text.as_bytes());
    sandbox.write("profile/x/rank_0/a.1800.pt.trace.json", broken.as_bytes());
    fails(&sandbox, "analyze profile/x --select all", &["a.1800.pt.trace.json"]);
}

#[test]
fn names_in_traces_command_nothing() {
    let sandbox = Sandbox::new();
    let mut foreign = trace(0, 1, Training::Ddp, 1.0);
    let name = "\u{1b}[31m<img src=x>|\n\u{7}";
    foreign["deviceProperties"] = serde_json::json!([{"name": name}]);
    for event in foreign["traceEvents"].as_array_mut().unwrap() {
        if event["name"] == "sm80_xmma_gemm_forward" {
            event["name"] = name.into();
        }
    }
    sandbox.write("a.pt.trace.json", foreign.to_string().as_bytes());
    // A file in the current folder is its own title.
    let run = sandbox.run("analyze --trace-files a.pt.trace.json").ok();
    assert!(run.stdout.starts_with("a.pt.trace.json\n"), "{}", run.stdout);
    let page = fs::read_to_string(sandbox.path("reports/a/summary.html")).unwrap();
    assert!(page.contains("<title>a.pt.trace.json</title>"));
    write_traces(&sandbox, "b", 1, Training::Ddp);
    let diff = sandbox.run("analyze a.pt.trace.json --against b").ok();
    assert!(run.stdout.contains("\\u{1b}[31m<img"), "{}", run.stdout);
    for said in [&run.stdout, &diff.stdout] {
        assert!(!said.contains(|c: char| c.is_control() && c != '\n'), "{said}");
    }
    for file in ["reports/a/summary.md", "reports/against/a-b/against.md"] {
        let markdown = fs::read_to_string(sandbox.path(file)).unwrap();
        assert!(markdown.contains("&lt;img src=x>\\|"), "{markdown}");
        assert!(!markdown.contains("<img") && !markdown.contains('\u{1b}'), "{markdown}");
    }
}

#[test]
fn bad_flags() {
    let sandbox = Sandbox::new();
    write_traces(&sandbox, "profile/ddp", 1, Training::Ddp);
    sandbox.write("file", b"in the way");
    let refused = |args: &str, words: &[&str]| {
        sandbox.run(args).refused(words);
        assert!(!sandbox.path("reports").exists());
    };
    refused("analyze profile/ddp --trace-dir profile/ddp", &["--trace-dir"]);
    refused("analyze profile/ddp --output file/below", &["--output", "cannot write"]);
    fails(&sandbox, "analyze nowhere --against profile/ddp", &["nowhere"]);
    // The output folder is tested before anything is read. The folder's names have no effect.
    write_traces(&sandbox, "other/profile/ddp", 1, Training::Ddp);
    let run = sandbox.run("analyze other/profile/ddp").ok();
    assert!(run.stdout.contains("Report: reports/profile/ddp/summary.html"), "{}", run.stdout);
    assert!(!sandbox.path("other/reports").exists());
    let absolute = sandbox.path("other/profile/ddp").display().to_string();
    let run = sandbox.run(&format!("analyze {absolute}")).ok();
    assert!(run.stdout.contains("Report: reports/profile/ddp/summary.html"), "{}", run.stdout);
    sandbox.write("reports/blocked", b"in the way");
    sandbox.run("analyze traces/blocked/ddp").refused(&["reports/blocked", "--output"]);
}

#[test]
fn two_runs_differ() {
    let sandbox = Sandbox::new();
    write_traces(&sandbox, "profile/ddp", 2, Training::Ddp);
    write_traces(&sandbox, "profile/zero", 2, Training::Sharding);
    let run = sandbox.run("analyze profile/ddp --against profile/zero --steps 1").ok();
    let files = ["against.csv", "against.html", "against.json", "against.md"];
    assert_eq!(names(&sandbox, "reports/against/ddp-zero"), files);
    assert!(
        run.stdout.lines().count() <= 24 && run.stdout.starts_with("A step "),
        "{}",
        run.stdout
    );
    let diff = json(&sandbox.path("reports/against/ddp-zero/against.json"));
    let rows = diff["tables"]["diff"]["rows"].as_array().unwrap().clone();
    let row = |name: &str| rows.iter().find(|row| row["name"] == name).cloned().unwrap();
    let gone = row("ncclDevKernel_AllReduce_Sum_f32");
    assert_eq!((&gone["change"], &gone["difference_ms"]), (&"deleted".into(), &(-0.6).into()));
    let new = row("ncclDevKernel_AllGather_RING_LL");
    assert_eq!((&new["change"], &new["second_calls"]), (&"added".into(), &1.0.into()));
    assert_eq!(row("sm80_xmma_gemm_forward")["change"], "unchanged");
}

#[test]
fn runs_stand_side_by_side() {
    let sandbox = Sandbox::new();
    let profile = "--profile --profile-warmup 1 --profile-active 3";
    sandbox.train(&format!("{TINY} --epochs 3 --strategy ddp {profile}")).ok();
    let first = sandbox.run_folder();
    let one = sandbox.run(&format!("compare {}", first.display())).ok();
    assert!(one.stdout.contains("Comparison of 1 run"), "{}", one.stdout);
    sandbox
        .train(
            "--model mlp --input-dim 16 --hidden-dim 16 --output-dim 4 --num-layers 1 --epochs 1 \
             --quiet",
        )
        .ok();
    // A folder of run folders means all of them.
    // One of them was measured on busy cores.
    let file = first.join("summary.json");
    let mut summary = json(&file);
    summary["cpu_wait_pct"] = 37.4.into();
    fs::write(&file, summary.to_string()).unwrap();
    let run = sandbox.run("compare runs --price-per-hour 3600 --output out").ok();
    run.line("Measured beside other work: threads had no core for ");
    assert!(run.stderr.contains("warning: the runs have different models"), "{run:#?}");
    let report = json(&sandbox.path("out/compare.json"));
    let rows = report["tables"]["compare"]["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    // The answer comes first, and settings are listed if they differ between the runs.
    assert!(run.stdout.starts_with("First of single runs: "), "{}", run.stdout);
    let names: Vec<&str> = report["tables"]["settings"]["columns"]
        .as_array()
        .unwrap()
        .iter()
        .map(|column| column["key"].as_str().unwrap())
        .collect();
    assert!(names.starts_with(&["run"]) && names.contains(&"model.name"), "{names:?}");
    for other in ["seed", "warnings", "quiet", "run_dir"] {
        assert!(!names.contains(&other) && !run.stdout.contains(other), "{other}: {names:?}");
    }
    let head = run.stdout.lines().find(|line| line.starts_with("run ")).unwrap();
    assert!(head.contains("model") && head.contains("samples/s"), "{head}");
    for row in rows {
        let seconds = row["total_s"].as_f64().unwrap();
        // At 3600 an hour, a second costs 1.
        assert!(seconds > 0.0 && (row["cost"].as_f64().unwrap() - seconds).abs() < 1e-9, "{row}");
        assert!(row["samples_per_s"].as_f64().unwrap() > 0.0);
        // Only the first was profiled.
        for figure in ["traced_compute_pct", "traced_overhead_pct"] {
            assert_eq!(row[figure].is_number(), row["model"] == "cnn", "{figure} of {row}");
        }
    }
    let csv = fs::read_to_string(sandbox.path("out/compare.csv")).unwrap();
    assert_eq!(csv.lines().count(), 3);

    // With bad traces, a run loses its columns of traces, and nothing else.
    let summary = json(&first.join("summary.json"));
    let trace = summary["traces"][0].as_str().unwrap().to_owned();
    let whole = fs::read(sandbox.path(&trace)).unwrap();
    let half = whole[..whole.len() / 2].to_vec();
    for (bytes, words) in
        [(Some(half), "cut off"), (Some(b"hello".to_vec()), ""), (None, "is not there")]
    {
        match bytes {
            Some(bytes) => fs::write(sandbox.path(&trace), bytes).unwrap(),
            None => fs::remove_file(sandbox.path(&trace)).unwrap(),
        }
        let run = sandbox.run("compare runs --output out").ok();
        let warning = run.stderr.lines().find(|line| line.contains("columns of traces stay empty"));
        let warning = warning.unwrap_or_else(|| panic!("no warning: {run:#?}"));
        assert!(warning.contains(&trace) && warning.contains(words), "{warning}");
        let report = json(&sandbox.path("out/compare.json"));
        for row in report["tables"]["compare"]["rows"].as_array().unwrap() {
            assert!(row["traced_compute_pct"].is_null(), "{row}");
            assert!(row["samples_per_s"].as_f64().unwrap() > 0.0);
        }
        let page = fs::read_to_string(sandbox.path("out/compare.html")).unwrap();
        assert!(page.contains("columns of traces stay empty"));
    }

    // A broken or unfinished run is left out with a warning; the others are compared.
    fs::write(first.join("summary.json"), "{}").unwrap();
    sandbox.write("runs/unfinished/config.json", b"{}");
    let run = sandbox.run("compare runs --output out").ok();
    for (name, why) in
        [(first.to_str().unwrap(), "is broken: it has no strategy"), ("unfinished", "its end")]
    {
        let name = Path::new(name).file_name().unwrap().to_str().unwrap();
        let is_it = |line: &&str| line.starts_with("warning: left out") && line.contains(name);
        let said = run.stderr.lines().find(is_it).unwrap_or_else(|| panic!("no {name}: {run:#?}"));
        assert!(said.contains(why), "{said}");
    }
    let report = json(&sandbox.path("out/compare.json"));
    assert_eq!(report["tables"]["compare"]["rows"].as_array().unwrap().len(), 1);
    let broken = sandbox.run(&format!("compare {}", first.display()));
    broken.refused(&["no run can be compared", "summary.json is broken"]);
}
