//! `paceline train --profile`: the contents of the traces, and that recording does not change the result. Ranges for other
//! profilers.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::common::{Run, Sandbox, TINY, json};
use flate2::read::GzDecoder;
use paceline_emulated_card::for_tests;
use paceline_schedule as schedule;
use serde_json::Value;

/// The only trace of a rank.
fn trace(sandbox: &Sandbox, choice: &str, rank: usize) -> Value {
    let folder = sandbox.path("profile").join(choice).join(format!("rank_{rank}"));
    let names = sandbox.names(folder.to_str().unwrap());
    let [name] = &names[..] else { panic!("{names:?}") };
    assert!(name.starts_with(&format!("worker_{rank}.")), "{name}");
    assert!(name.ends_with(".pt.trace.json.gz"), "{name}");
    serde_json::from_reader(GzDecoder::new(File::open(folder.join(name)).unwrap())).unwrap()
}

fn events<'a>(trace: &'a Value, cat: &str) -> Vec<&'a Value> {
    trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["cat"] == cat).collect()
}

fn named<'a>(events: &[&'a Value], part: &str) -> Vec<&'a Value> {
    let is_named = |event: &&&Value| event["name"].as_str().unwrap().contains(part);
    events.iter().filter(is_named).copied().collect()
}

fn begin_end(event: &Value) -> (f64, f64) {
    let begin = event["ts"].as_f64().unwrap();
    (begin, begin + event["dur"].as_f64().unwrap())
}

#[test]
fn each_rank_writes_a_trace_of_the_steps_that_were_asked_for() {
    let sandbox = Sandbox::new();
    let flags = format!(
        "{TINY} --nproc 2 --epochs 2 --global-batch-size 20 --profile --profile-wait 2 \
         --profile-warmup 3 --profile-active 4"
    );
    let run = sandbox.train(&flags).ok();
    run.line("Traces: profile/ddp (paceline analyze profile/ddp;");
    let plain = Sandbox::new().train(flags.split_once(" --profile").unwrap().0).ok();
    assert_eq!(run.weights(), plain.weights(), "recording changes no bit");
    // Four steps on each of two ranks, each operation beside its limit, in the files and in `show`.
    let summary = sandbox.summary();
    assert_eq!(summary["operations"]["steps"], 8);
    let all = summary["operations"]["all"].as_array().unwrap();
    let sgd = all.iter().find(|of| of["name"] == "sgd").unwrap();
    // Parameters read and written, and gradients, in storage with some room between them.
    let bytes = 8 * 3 * 4 * summary["params"].as_u64().unwrap();
    let found = sgd["bytes"].as_u64().unwrap();
    assert!(sgd["calls"] == 8 && (bytes..bytes + bytes / 50).contains(&found), "{sgd}");
    assert!(all.iter().all(|of| of["limit_ns"].as_f64().unwrap() > 0.0), "{all:?}");
    assert!(summary["limit_pct"].as_f64().unwrap() > 0.0);
    let mut show = sandbox.paceline();
    show.arg("show").arg(sandbox.run_folder());
    let shown = Run::of(show).ok();
    assert!(shown.line("Operations take ").contains(" % of their limit ("), "{}", shown.stdout);
    let table = shown.stdout.lines().skip_while(|line| !line.starts_with("operation ")).take(20);
    let widths = table.map(|line| line.chars().count());
    assert!(widths.max().is_some_and(|width| width <= 80), "{}", shown.stdout);
    let run_of = |rank| trace(&sandbox, "ddp", rank)["distributedInfo"]["run_id"].clone();
    assert!(run_of(0).is_string() && run_of(0) == run_of(1));
    for rank in 0..2 {
        let trace = trace(&sandbox, "ddp", rank);
        let info = &trace["distributedInfo"];
        assert_eq!((&info["rank"], &info["world_size"]), (&rank.into(), &2.into()));
        assert_eq!(trace["paceline"]["transport"], "shm");
        assert_eq!(trace["paceline"]["dropped_events"], "0");
        assert_eq!(trace["paceline"]["clock_offset_begin_ns"], "0", "one host has one clock");

        let annotations = events(&trace, "user_annotation");
        let steps = named(&annotations, "ProfilerStep#");
        let names: Vec<&str> = steps.iter().map(|step| step["name"].as_str().unwrap()).collect();
        assert_eq!(names, [5, 6, 7, 8].map(|step| format!("ProfilerStep#{step}")));
        let is_within_a_step = |event: &&Value| {
            let (begin, end) = begin_end(event);
            let holds = |(from, to): (f64, f64)| from <= begin && end <= to + 0.001;
            steps.iter().any(|step| holds(begin_end(step)))
        };
        for span in ["forward", "backward", "exposed", "grad_sync", "optimizer_step"] {
            let spans = named(&annotations, span);
            assert!(spans.len() >= 4, "{span}: {}", spans.len());
            assert!(spans.iter().all(is_within_a_step), "{span}");
        }

        let kernels = events(&trace, "kernel");
        assert_eq!(named(&kernels, "conv_relu_pool_forward").len(), 4);
        assert_eq!(named(&kernels, "sgd").len(), 4);
        let operations = named(&kernels, "ncclDevKernel_AllReduce_");
        // Each step has one bucket, and the sums of the loss.
        assert_eq!(operations.len(), 8);
        let seqs = operations.iter().map(|op| op["args"]["Seq"].as_u64().unwrap());
        assert!(seqs.collect::<Vec<_>>().is_sorted_by(|a, b| a + 1 == *b));
        assert_eq!(events(&trace, "cuda_runtime").len(), kernels.len());
        assert!(kernels.iter().all(is_within_a_step));

        let memory = named(&events(&trace, "cpu_instant_event"), "[memory]");
        assert!(memory.len() > 20, "{}", memory.len());
        for sample in memory {
            let of = |key: &str| sample["args"][key].as_i64().unwrap();
            assert!(of("Total Allocated") <= of("Total Reserved") && of("Total Allocated") > 0);
        }
    }
}

#[test]
fn threads_and_copies_have_lanes_of_their_own() {
    let sandbox = Sandbox::new();
    let flags = format!(
        "{TINY} --nproc 2 --threads 2 --strategy bucket_ddp_async --profile --profile-active 1 \
         --global-batch-size 20"
    );
    let run = sandbox.train(&flags).ok();
    assert!(run.stderr.contains("warning: --profile-active 1: Holistic"), "{}", run.stderr);
    let trace = trace(&sandbox, "bucket_ddp_async", 0);
    let copies = events(&trace, "gpu_memcpy");
    // Every gradient goes into a bucket and back.
    let bytes = |event: &&Value| event["args"]["bytes"].as_u64().unwrap();
    let num_params = 4 * 9 + 4 + 14 * 14 * 4 * 8 + 8 + 8 * 10 + 10;
    assert_eq!(copies.iter().map(bytes).sum::<u64>(), 2 * 4 * num_params);
    let shares = named(&events(&trace, "user_annotation"), "share of a kernel");
    assert!(shares.len() >= 4, "{}", shares.len());
    let mut tracks: Vec<u64> = shares.iter().map(|share| share["tid"].as_u64().unwrap()).collect();
    tracks.sort_unstable();
    tracks.dedup();
    assert!(!tracks.contains(&trace["traceEvents"][0]["pid"].as_u64().unwrap()), "{tracks:?}");
}

/// Tests `paceline analyze` too: a run on the processor has none of these figures.
#[test]
fn an_emulated_device_has_streams_launches_queues_and_causes_of_idle_time() {
    let sandbox = Sandbox::new();
    let flags = format!(
        "{TINY} --nproc 2 --global-batch-size 20 --profile --profile-active 4 --device sim:copy=8gbit,20us,launch=20us --generate-on-host --pin-memory \
         --non-blocking --copy-stream"
    );
    sandbox.train(&flags).ok();
    for rank in 0..2 {
        let trace = trace(&sandbox, "ddp", rank);
        assert!(trace["paceline"]["emulated_device"].as_str().unwrap().contains("emulated"));
        let stream = |event: &&Value| event["args"]["stream"].as_u64().unwrap();
        let kernels = events(&trace, "kernel");
        let convolutions = named(&kernels, "conv_relu_pool_forward");
        assert!(convolutions.len() >= 4 && convolutions.iter().all(|of| stream(of) == 7));
        let copies = events(&trace, "gpu_memcpy");
        let batches = named(&copies, "Memcpy HtoD (Pinned -> Device)");
        let on_copy_stream = batches.iter().filter(|of| stream(of) == 8);
        assert!(on_copy_stream.count() >= 8, "the inputs and the targets of four steps");
        let calls = events(&trace, "cuda_runtime");
        let launches = named(&calls, "cudaLaunchKernel");
        let took_us = |call: &Value| call["dur"].as_f64().unwrap();
        let kernel_of = |id: &Value| {
            convolutions.iter().find(|of| of["args"]["correlation"] == *id).map(|of| begin_end(of))
        };
        let mut num_seen = 0;
        for launch in launches {
            if let Some((begin, _)) = kernel_of(&launch["args"]["correlation"]) {
                assert!(took_us(launch) >= 20.0, "{launch}");
                assert!(begin >= begin_end(launch).1 - 0.001, "a kernel begins behind its launch");
                num_seen += 1;
            }
        }
        assert_eq!(num_seen, convolutions.len());
        assert!(!named(&calls, "cudaDeviceSynchronize").is_empty());
        let on_device = events(&trace, "gpu_user_annotation");
        for pass in ["to_device", "forward", "backward", "optimizer_step"] {
            assert!(named(&on_device, pass).len() >= 4, "{pass}");
        }
    }
    let report = sandbox.run("analyze profile/ddp").ok();
    report.prints(&["These ranks have computed on an emulated accelerator"]);
    let summary = json(&sandbox.path("reports/ddp/summary.json"));
    for table in ["idle", "launches", "queues", "copies"] {
        let rows = summary["tables"][table]["rows"].as_array();
        assert!(rows.is_some_and(|rows| rows.len() >= 2), "{table}: {rows:?}");
    }
    let step = &summary["tables"]["steps"]["rows"][0];
    assert!(step["to_device_ms"].is_number() && step["forward_ms"].is_number(), "{step}");
}

/// The ranges that each thread has marked, as the names of a range and of those around it, in the order in which they began.
fn ranges(text: &str) -> Vec<Vec<String>> {
    let mut threads: BTreeMap<&str, (Vec<&str>, Vec<String>)> = BTreeMap::new();
    for line in text.lines() {
        let (thread, what) = line.split_once(' ').unwrap();
        let (open, all) = threads.entry(thread).or_default();
        match what.strip_prefix("begin ") {
            Some(name) => {
                open.push(name);
                all.push(open.join("/"));
            }
            None => assert!(open.pop().is_some(), "{thread} ends what it has not begun"),
        }
    }
    assert!(threads.values().all(|(open, _)| open.is_empty()), "a range has no end: {text}");
    threads.into_values().map(|(_, all)| all).collect()
}

#[test]
fn steps_and_their_parts_are_ranges_of_nvtx_if_a_profiler_asks() {
    let sandbox = Sandbox::new();
    let (profiler, file) = (for_tests::library(), sandbox.path("ranges"));
    let (profiler, file) = (profiler.to_str().unwrap(), file.to_str().unwrap());
    let flags = format!("{TINY} --nproc 2 --steps 2 --strategy sharded3");
    let asked = [("NVTX_INJECTION64_PATH", profiler), ("PACELINE_EMULATED_NVTX", file)];
    let run = sandbox.train_with(&flags, &asked).ok();
    let ranges = ranges(&fs::read_to_string(file).unwrap());
    assert_eq!(ranges.len(), 2, "a thread of each rank");
    for of_rank in ranges {
        let steps: Vec<&String> = of_rank.iter().filter(|of| !of.contains('/')).collect();
        assert!(
            steps.iter().filter(|of| of.starts_with("step ")).eq(["step 1", "step 2"].iter()),
            "{steps:?}"
        );
        for part in ["forward", "backward", "grad_sync", "optimizer_step"] {
            let range = format!("step 2/{part}");
            assert!(of_rank.contains(&range), "no {range}: {of_rank:#?}");
        }
    }
    // Nobody asks, and the profiler cannot start.
    let plain = sandbox.train(&flags).ok();
    assert_eq!(run.weights(), plain.weights());
    for (path, words) in [
        (profiler, "did not start"),
        ("/no/such.so", "/no/such.so"),
        ("/dev/zero", "it is no regular file"),
    ] {
        let run = sandbox.train_with(&flags, &[("NVTX_INJECTION64_PATH", path)]).ok();
        assert_eq!(run.stderr.matches("no ranges of NVTX are marked").count(), 1, "{}", run.stderr);
        assert!(run.stderr.contains(words), "{}", run.stderr);
    }
}

#[test]
fn the_capture_script_says_what_it_needs() {
    let sandbox = Sandbox::new();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/nsys_capture.sh");
    let capture = |args: &[&str], path: &str| {
        let mut command = sandbox.command(Path::new("/bin/bash"));
        command.arg(&script).args(args).env("PATH", path);
        Run::of(command)
    };
    let usage = capture(&[], "/usr/bin:/bin");
    usage.ended_with(2, &["nsys_capture.sh [--out FOLDER] -- paceline train"]);
    // A folder with the tools of the script, but for the profiler.
    let tools = sandbox.path("tools");
    fs::create_dir(&tools).unwrap();
    for tool in ["sed", "mkdir"] {
        let found = ["/usr/bin", "/bin"].map(|folder| Path::new(folder).join(tool));
        let found = found.into_iter().find(|path| path.exists()).unwrap();
        std::os::unix::fs::symlink(found, tools.join(tool)).unwrap();
    }
    let args = ["--out", "capture", "--", "program", "--flag"];
    let run = capture(&args, tools.to_str().unwrap()).refused(&["nsys is not installed"]);
    assert!(run.stderr.contains("Nsight Systems"), "{run:#?}");
    assert!(!sandbox.path("capture").exists());
    // With one that only says how it is called.
    sandbox.write("tools/nsys", b"#!/bin/bash\necho \"nsys $*\"\n");
    fs::set_permissions(tools.join("nsys"), fs::Permissions::from_mode(0o755)).unwrap();
    let run = capture(&args, tools.to_str().unwrap()).ok();
    let called: Vec<&str> = run.stdout.lines().filter(|line| line.starts_with("nsys ")).collect();
    assert!(called[0].contains("--trace=cuda,nvtx"), "{called:#?}");
    assert!(called[0].ends_with("-o capture/report program --flag"), "{called:#?}");
    assert!(called[1].starts_with("nsys stats "), "{called:#?}");
}

#[test]
fn stages_of_a_pipeline_name_what_they_do() {
    let sandbox = Sandbox::new();
    let flags = "--channels 4 4 --hidden 8 --global-batch-size 16 --accumulate 4 --steps 4 --samples 256 --nproc 2 \
                 --mesh pp=2 --schedule zb_h1 --profile --profile-wait 0 --profile-warmup 1 --profile-active 2";
    sandbox.train(flags).ok();
    let even = |stages: &_| schedule::Costs::even(stages, 1.0, 1.0, 1.0);
    let plan = schedule::Plan::new(&schedule::ZbH1, 2, 4, even).unwrap();
    for rank in 0..2 {
        let trace = trace(&sandbox, "ddp", rank);
        let mut acted: Vec<(f64, String)> = events(&trace, "user_annotation")
            .into_iter()
            .map(|event| (begin_end(event).1, event["name"].as_str().unwrap().to_owned()))
            .filter(|(_, name)| name.parse::<schedule::Action>().is_ok())
            .collect();
        acted.sort_by(|a, b| a.0.total_cmp(&b.0));
        let planned = plan.actions(rank).iter().map(ToString::to_string);
        let planned: Vec<String> = planned.collect();
        let twice = planned.iter().chain(&planned);
        assert!(acted.iter().map(|(_, name)| name).eq(twice), "{acted:?}");
    }
}
