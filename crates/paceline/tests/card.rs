//! `--device cuda` on a card that is emulated. Without the run-time compiler each test says so and passes.

mod common;

use std::collections::HashSet;
use std::fs::File;

use common::marked::{Marked, names_only_rank};
use common::{Run, Sandbox, signal, wait_until};
use flate2::read::GzDecoder;
use paceline_emulated_card::for_tests::variable;
use rustix::process::Signal;
use serde_json::Value;

const CNN: &str = "--image 8 8 3 --channels 4 8 --hidden 16 --batch-size 4 --device cuda";
const MLP: &str = "--nproc 2 --model mlp --input-dim 16 --hidden-dim 16 --output-dim 4 --batch-size 4 --device cuda";
const LLAMA: &str = "--nproc 2 --model llama --layers 2 --width 32 --heads 4 --kv-heads 2 --intermediate 48 --vocab 64 \
                     --seq-len 32 --batch-size 1 --device cuda";

/// The variables with which a program finds the emulated card, and others. All programs keep compiled kernels in one place.
fn variables<'a>(found: &'a str, others: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let own = [("PACELINE_CUDA_LIBRARIES", found), ("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))];
    own.into_iter().chain(others.iter().copied()).collect()
}

#[test]
fn ranks_that_share_a_card_end_with_the_same_weights_whatever_the_strategy() {
    let Some(found) = variable() else { return };
    for model in [CNN, MLP, LLAMA] {
        let run = |strategy: &str, seed: &str| {
            let sandbox = Sandbox::new();
            let variables = variables(&found, &[("PACELINE_EMULATED_SEED", seed)]);
            let flags = format!("{model} --steps 3 --strategy {strategy}");
            let run = sandbox.train_with(&flags, &variables).ok();
            assert!(run.stderr.contains("the device is emulated"), "{}", run.stderr);
            assert!(run.stderr.contains("ranks 0 and 1 share a card (cuda:0"), "{}", run.stderr);
            run.weights().to_owned()
        };
        let expected = run("ddp", "0");
        for (strategy, seed) in
            [("simple_ddp", "1"), ("zero3", "2"), ("sharded3", "3"), ("ddp", "7")]
        {
            assert_eq!(run(strategy, seed), expected, "{model} with {strategy}, seed {seed}");
        }
    }
}

#[test]
fn a_card_ends_with_the_same_weights_in_whatever_order_its_work_runs() {
    let Some(found) = variable() else { return };
    let run = |strategy: &str, seed: u32| {
        let seed = seed.to_string();
        let variables = variables(&found, &[("PACELINE_EMULATED_SEED", &seed)]);
        let flags = format!("{CNN} --steps 2 --strategy {strategy}");
        Sandbox::new().train_with(&flags, &variables).ok().weights().to_owned()
    };
    let expected = run("simple_ddp", 0);
    for (strategy, seeds) in [("ddp", 1..=20), ("zero3", 21..=27), ("sharded3", 28..=34)] {
        for seed in seeds {
            assert_eq!(run(strategy, seed), expected, "{strategy}, seed {seed}");
        }
    }
}

#[test]
fn stages_on_cards_end_with_the_weights_of_one() {
    let Some(found) = variable() else { return };
    let weights = |cards: &str, seed: &str, flags: &str| {
        let seeds = [("PACELINE_EMULATED_CARDS", cards), ("PACELINE_EMULATED_SEED", seed)];
        let flags = format!("{CNN} --global-batch-size 8 --accumulate 4 --steps 2 {flags}");
        let flags = flags.replace("--batch-size 4 ", "");
        Sandbox::new().train_with(&flags, &variables(&found, &seeds)).ok().weights().to_owned()
    };
    let alone = weights("1", "0", "--nproc 1");
    for (cards, seed, flags) in [
        ("1", "1", "--schedule 1f1b"),
        ("1", "2", "--schedule zb_h1"),
        ("2", "3", "--schedule interleaved_1f1b"),
        ("2", "4", "--transport nccl --schedule zbv"),
    ] {
        let found = weights(cards, seed, &format!("--mesh pp=2 {flags}"));
        assert_eq!(found, alone, "{cards} cards, {flags}");
    }
}

#[test]
fn a_run_on_a_card_is_saved_profiled_and_continued() {
    let Some(found) = variable() else { return };
    let variables = variables(&found, &[]);
    let whole = Sandbox::new().train_with(&format!("{CNN} --steps 16"), &variables).ok();
    let sandbox = Sandbox::new();
    let flags = format!("{CNN} --steps 14 --profile --save saved --save-every 7 --evaluate");
    let run = sandbox.train_with(&flags, &variables).ok();
    assert!(!run.stdout.contains("Model FLOP/s"), "the peak of a card is not measured");
    assert!(!run.stdout.contains(", predicted "), "what a driver takes is not predicted");
    let report = sandbox.run("analyze profile/ddp").ok();
    report.prints(&["These ranks have computed on an emulated accelerator"]);
    let resumed = sandbox.train_with("--resume saved --steps 16 --device cuda", &variables).ok();
    assert_eq!(resumed.weights(), whole.weights());
    // On the processor, a checkpoint of a card is continued too.
    sandbox.train("--resume saved --steps 16 --device cpu").ok();
}

/// The trace of rank 0 in the folder of a profile.
fn trace_of(sandbox: &Sandbox) -> Value {
    let folder = sandbox.path("profile").join(&sandbox.names("profile")[0]).join("rank_0");
    let file = std::fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
    serde_json::from_reader(GzDecoder::new(File::open(file).unwrap())).unwrap()
}

#[test]
fn a_trace_of_a_card_has_its_kernels_and_the_calls_that_launched_them() {
    let Some(found) = variable() else { return };
    for (flags, others) in [
        ("--nproc 1", vec![]),
        ("--nproc 1 --cuda-graph", vec![]),
        ("--transport nccl", vec![("PACELINE_EMULATED_CARDS", "2")]),
        ("--transport nccl --cuda-graph", vec![("PACELINE_EMULATED_CARDS", "2")]),
        ("--nproc 1", vec![("PACELINE_EMULATED_CUPTI", "cuptiActivityEnable:35")]),
    ] {
        let sandbox = Sandbox::new();
        let flags = format!("{CNN} --steps 14 --profile {flags}");
        sandbox.train_with(&flags, &variables(&found, &others)).ok();
        let trace = trace_of(&sandbox);
        let of_kind = |kind: &str| {
            let all = trace["traceEvents"].as_array().unwrap();
            all.iter().filter(|of| of["cat"] == kind).collect::<Vec<_>>()
        };
        let number = |of: &&Value| of["args"]["correlation"].as_u64().unwrap();
        let (calls, kernels) = (of_kind("cuda_driver"), of_kind("kernel"));
        if let Some(refused) = others.iter().find(|of| of.0 == "PACELINE_EMULATED_CUPTI") {
            let why = trace["paceline"]["without_cupti"].as_str().expect(refused.1);
            assert!(why.contains("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"), "{why}");
            assert!(calls.is_empty() && kernels.len() > 50, "{}", kernels.len());
            continue;
        }
        let known: HashSet<u64> =
            calls.iter().chain(&of_kind("cuda_runtime")).map(number).collect();
        assert!(kernels.iter().all(|of| known.contains(&number(of))), "{flags}");
        let of_card: Vec<_> = kernels.iter().filter(|of| of["args"]["grid"].is_array()).collect();
        let named = |name: &str| of_card.iter().any(|of| of["name"] == name);
        assert!(of_card.len() > 50 && named("emulated_cublasLt_matmul"), "{flags}: {of_card:?}");
        let sends_in_graph = flags.contains("nccl --cuda-graph");
        assert_eq!(named("ncclDevKernel_emulated"), sends_in_graph, "{flags}");
        let is_graph = calls.iter().any(|of| of["name"] == "cuGraphLaunch");
        assert_eq!(is_graph, flags.contains("--cuda-graph"), "{flags}");
        // Kernels that the main thread launched by itself belong to the operator that did so.
        let operators: HashSet<u64> =
            of_kind("cpu_op").iter().filter_map(|of| of["args"]["External id"].as_u64()).collect();
        let ids = of_card.iter().filter_map(|of| of["args"]["External id"].as_u64());
        let (count, all_known) =
            ids.fold((0, true), |(n, all), id| (n + 1, all && operators.contains(&id)));
        assert!(count > 10 && all_known, "{flags}: {count} of {}", of_card.len());
        sandbox.run(&format!("analyze profile/{}", sandbox.names("profile")[0])).ok();
    }
}

#[test]
fn ranks_with_cards_of_their_own_send_by_nccl_and_end_with_the_same_weights() {
    let Some(found) = variable() else { return };
    let run = |flags: &str, seed: &str| {
        let seeds = [("PACELINE_EMULATED_CARDS", "2"), ("PACELINE_EMULATED_SEED", seed)];
        let variables = variables(&found, &seeds);
        Sandbox::new().train_with(&format!("{CNN} --steps 3 {flags}"), &variables)
    };
    let by_host = run("--transport shm", "0").ok();
    assert!(!by_host.stderr.contains("share a card"), "{}", by_host.stderr);
    for (flags, seed) in [
        ("", "1"),
        ("--transport nccl --strategy simple_ddp", "2"),
        ("--backend nccl --strategy zero3", "3"),
        ("--strategy sharded3", "4"),
        ("--transport nccl --mesh shard=2 --strategy sharded2", "5"),
    ] {
        let run = run(flags, seed).ok();
        assert!(run.stdout.contains("nccl"), "{flags}: {}", run.stdout);
        assert_eq!(run.weights(), by_host.weights(), "{flags}");
    }
    let ring = run("--nccl-order ring", "6").ok();
    assert!(ring.stdout.contains("nccl"), "{}", ring.stdout);
}

#[test]
fn all_ranks_know_if_nccl_cannot_connect_one() {
    let Some(found) = variable() else { return };
    let run = |flags: &str| {
        let failing = [("PACELINE_EMULATED_CARDS", "3"), ("PACELINE_EMULATED_NCCL_FAILS", "1")];
        let flags = format!("{CNN} --nproc 3 --steps 2 --timeout 12 {flags}");
        Sandbox::new().train_with(&flags, &variables(&found, &failing))
    };
    let reason = "rank 1: ncclCommInitRankConfig has failed: ncclSystemError";
    let by_host = run("").ok();
    let words = format!("collectives go through memory of the host: {reason}");
    assert_eq!(by_host.stderr.matches(&words).count(), 1, "{}", by_host.stderr);
    let plain = run("--transport shm").ok();
    assert_eq!(by_host.weights(), plain.weights());
    let demanded = run("--transport nccl");
    demanded.ended_with(1, &[reason]);
    assert!(!demanded.stderr.contains("timeout"), "{}", demanded.stderr);
}

#[test]
fn nccl_is_refused_before_a_rank_starts_where_it_cannot_be() {
    let Some(found) = variable() else { return };
    let variables = variables(&found, &[]);
    let refused = |flags: &str| {
        let run = Sandbox::new().train_with(flags, &variables);
        assert_eq!(run.code, Some(2), "{flags}: {}", run.stderr);
        run.stderr
    };
    let error = refused(&format!("{CNN} --transport nccl"));
    assert!(
        error.contains("2 ranks of this host share 1 card") && error.contains("--nproc 1"),
        "{error}"
    );
    let error = refused("--transport nccl");
    assert!(error.contains("NCCL connects cards") && error.contains("--device cuda"), "{error}");
    let error = refused("--nccl-order ring");
    assert!(error.contains("--nccl-order ring") && error.contains("--device cuda"), "{error}");
    let error = refused("--tf32");
    assert!(error.contains("--tf32") && error.contains("--device cuda"), "{error}");
    let error = refused(&format!("{CNN} --tf32 --precision bf16"));
    assert!(error.contains("--tf32 is about products in f32"), "{error}");
    let error = refused(&format!("{CNN} --nccl-order star"));
    assert!(error.contains("tree or ring"), "{error}");
}

#[test]
fn cards_are_measured_as_ranks_are() {
    let Some(found) = variable() else { return };
    let variables = variables(&found, &[("PACELINE_EMULATED_CARDS", "2")]);
    let sandbox = Sandbox::new();
    let run = |words: &str| {
        let mut command = sandbox.given(words);
        command.envs(variables.clone());
        Run::of(command)
    };
    for operation in ["all_reduce", "all_gather", "reduce_scatter", "sendrecv"] {
        let flags = "-b 8 -e 4K -f 8 -w 1 --iters 2 --transport nccl,shm --device cuda --nproc 2";
        run(&format!("bench {operation} {flags}")).ok().prints(&["nccl", "algorithm tree"]);
    }
    let check = run("check --nproc 2 --device cuda --transport nccl");
    check.prints(&["every element right on every rank"]);
}

#[test]
fn steps_as_graphs_end_with_the_same_weights() {
    let Some(found) = variable() else { return };
    let adamw =
        "--steps 6 --optimizer adamw --lr-schedule cosine --lr-warmup-steps 2 --clip-grad-norm 1";
    for model in [CNN, MLP, LLAMA] {
        let run = |flags: &str, seed: &str| {
            let variables = variables(&found, &[("PACELINE_EMULATED_SEED", seed)]);
            let flags = format!("{} {adamw} {flags}", model.replace("--nproc 2", ""));
            Sandbox::new().train_with(&flags, &variables).ok().weights().to_owned()
        };
        let expected = run("--nproc 1", "0");
        assert_eq!(run("--nproc 1 --cuda-graph", "1"), expected, "{model}");
        assert_eq!(
            run("--nproc 1 --cuda-graph --copy-stream --pin-memory", "2"),
            expected,
            "{model}"
        );
        let expected = run("--nproc 2", "0");
        assert_eq!(run("--nproc 2 --cuda-graph", "3"), expected, "{model}");
        assert_eq!(run("--nproc 2 --cuda-graph --strategy zero1", "4"), expected, "{model}");
        // With cards of their own, the ranks' graphs have what they send, but for that of zero1.
        for (flags, seed) in [("", "6"), ("--strategy zero1", "7")] {
            let seeds = [("PACELINE_EMULATED_CARDS", "2"), ("PACELINE_EMULATED_SEED", seed)];
            let flags = format!("{model} {adamw} --nproc 2 --cuda-graph --transport nccl {flags}");
            let flags = flags.replacen("--nproc 2 ", "", 1);
            let run = Sandbox::new().train_with(&flags, &variables(&found, &seeds)).ok();
            assert_eq!(run.weights(), expected, "{flags}");
        }
    }
    // The epochs end with a smaller batch, halves are scaled, and the run is evaluated, saved, profiled and continued.
    let flags = "--image 8 8 3 --channels 4 8 --hidden 16 --batch-size 4 --device cuda --nproc 1 --samples 10 --precision fp16 \
                 --loss-scale dynamic --loss-scale-window 8 --accumulate 2";
    let run = |more: &str, seed: &str| {
        let sandbox = Sandbox::new();
        let seed = [("PACELINE_EMULATED_SEED", seed)];
        let variables = variables(&found, &seed);
        let weights =
            sandbox.train_with(&format!("{flags} {more}"), &variables).ok().weights().to_owned();
        (sandbox, weights)
    };
    let (_, expected) = run("--epochs 12", "0");
    let save = "--epochs 8 --cuda-graph --save saved --eval-every 2 --evaluate --profile";
    let (sandbox, _) = run(save, "5");
    let resumed = "--resume saved --epochs 12 --device cuda --cuda-graph";
    let resumed = sandbox.train_with(resumed, &variables(&found, &[])).ok();
    assert_eq!(resumed.weights(), expected);
    assert!(resumed.stdout.contains(", in fp16\n"), "{}", resumed.stdout);
}

#[test]
fn a_rank_that_is_killed_while_graphs_run_ends_the_others_and_is_named() {
    let Some(found) = variable() else { return };
    for victim in [0, 1] {
        let sandbox = Sandbox::new();
        let flags = format!("train {CNN} --nproc 2 --cuda-graph --transport nccl --epochs 1000000");
        let mut command = sandbox.given(&flags);
        command.envs(variables(&found, &[("PACELINE_EMULATED_CARDS", "2")]));
        let mut launcher = Marked::start(command);
        let has_graphs = || {
            let folders = std::fs::read_dir(sandbox.path("runs")).into_iter().flatten().flatten();
            let steps = folders.map(|of| std::fs::read_to_string(of.path().join("metrics.jsonl")));
            steps.flatten().any(|text| text.lines().count() > 10)
        };
        wait_until("a few steps", has_graphs);
        signal(launcher.rank(victim), Signal::KILL);
        let run = launcher.end();
        assert_eq!(run.code, Some(137), "{run:#?}");
        names_only_rank(&run, victim, "was killed by SIGKILL");
        launcher.left_nothing();
    }
}

#[test]
fn what_cannot_be_a_graph_is_told_before_a_rank_starts() {
    let Some(found) = variable() else { return };
    let refused = |flags: &str, words: &[&str]| {
        let run = Sandbox::new().train_with(flags, &variables(&found, &[]));
        run.refused(&[&["--cuda-graph: "], words].concat());
    };
    refused("--cuda-graph", &["pass --device cuda"]);
    let cnn = format!("{CNN} --cuda-graph");
    for strategy in ["zero2", "zero3", "sharded1", "sharded2", "sharded3"] {
        let words = format!("--strategy {strategy} communicates within the passes");
        refused(&format!("{cnn} --strategy {strategy}"), &[&words, "ddp, simple_ddp, zero1"]);
    }
    refused(&format!("{cnn} --batch-norm --sync-batch-norm"), &["--sync-batch-norm communicates"]);
    refused(&format!("{cnn} --accumulate 2 --no-sync=false"), &["--no-sync=false communicates"]);
    let tree = format!("{cnn} --accumulate 2 --accumulation-order tree");
    refused(&tree, &["--accumulation-order tree keeps memory"]);
    refused(&format!("{cnn} --mesh pp=2"), &["--mesh pp sends within the passes"]);
    let open = format!("{cnn} --find-unused-parameters --no-static-graph");
    refused(&open, &["--no-static-graph lets other parameters be used"]);
}

#[test]
fn the_driver_says_how_busy_cards_are_or_why_it_does_not() {
    let Some(found) = variable() else { return };
    let run = |others: &[(&str, &str)]| {
        let sandbox = Sandbox::new();
        let flags = format!("{CNN} --steps 3 --warmup-steps 1 --json summary.json");
        let run = sandbox.train_with(&flags, &variables(&found, others)).ok();
        let summary = common::json(&sandbox.path("summary.json"));
        let figure = |name: &str| summary.get(name).unwrap_or_else(|| panic!("no {name}")).clone();
        (run, figure("card_busy_pct"), figure("card_used_bytes"))
    };
    let (seen, busy, used) = run(&[("PACELINE_EMULATED_UTILIZATION", "37")]);
    assert_eq!(busy, 37.0);
    // The heap takes pieces of 32 MiB.
    let used = used.as_u64().unwrap();
    assert!(used > 0 && used % (32 << 20) == 0, "{used}");
    let expected = format!("busy 37.0 %, {:.1} MB used", used as f64 / 1e6);
    assert_eq!(seen.line("Card: "), expected);

    let function = "nvmlDeviceGetUtilizationRates";
    let (seen, busy, used) = run(&[("PACELINE_EMULATED_NVML", &format!("{function}:3"))]);
    assert!(busy.is_null() && used.is_u64(), "{busy} {used}");
    let words = format!("MB used, the rest is not known: {function} has failed");
    assert!(seen.line("Card: ").contains(&words), "{}", seen.stdout);
    assert!(seen.line("Card: ").ends_with("Not Supported"), "{}", seen.stdout);

    for function in ["nvmlInit_v2:9", "nvmlDeviceGetHandleByPciBusId_v2:6"] {
        let (seen, busy, used) = run(&[("PACELINE_EMULATED_NVML", function)]);
        assert!(busy.is_null() && used.is_null(), "{busy} {used}");
        let words = "how busy it is and its memory are not known: nvml";
        assert!(seen.line("Card: ").starts_with(words), "{}", seen.stdout);
        assert_eq!(seen.stdout.matches("not known").count(), 1, "{}", seen.stdout);
        assert!(!seen.stderr.contains("nvml"), "{}", seen.stderr);
    }
}

#[test]
fn what_a_card_cannot_do_is_told_before_a_rank_starts() {
    let Some(found) = variable() else { return };
    let with = |flags: &str, others: &[(&str, &str)]| {
        Sandbox::new().train_with(flags, &variables(&found, others))
    };
    with(&format!("{CNN}:3"), &[]).refused(&["--device cuda:3", "the driver sees one, number 0"]);
    with(CNN, &[("PACELINE_EMULATED_VERSION", "11080")])
        .refused(&["CUDA 11.8", "install driver 525"]);
    with(CNN, &[("PACELINE_EMULATED_CARDS", "0")])
        .refused(&["--device cuda", "the driver sees none"]);
    with(&format!("{CNN} --mesh pp=2 --schedule auto"), &[])
        .refused(&["--device cuda", "--schedule"]);
    // Whatever is there.
    with(&format!("{CNN} --steps 1").replace("cuda", "auto"), &[]).ok().line("Ranks: 2 on ");
    // Tensor cores of 16 bits, and shared memory.
    let old = [("PACELINE_EMULATED_CAPABILITY", "7.5")];
    for model in [CNN, LLAMA] {
        for precision in ["bf16", "fp16"] {
            let flag = format!("--precision {precision}");
            with(&format!("{model} {flag}"), &old).refused(&[
                &flag,
                "need compute capability 8.0",
                "has 7.5",
                "pass --precision f32",
            ]);
        }
        with(&format!("{model} --steps 1"), &old).ok();
    }
    with(&format!("{MLP} --steps 1 --precision fp16"), &old).ok();
    let small = [("PACELINE_EMULATED_CAPABILITY", "8.6")];
    let wide =
        LLAMA.replace("--width 32 --heads 4 --kv-heads 2", "--width 256 --heads 1 --kv-heads 1");
    with(&wide, &small).refused(&[
        "--device cuda",
        "140,288 bytes",
        "has 101,376",
        "--precision bf16",
    ]);
    with(&format!("{wide} --steps 1 --precision bf16"), &small).ok();
    // Memory runs out while ranks run.
    let run = with(&format!("{CNN} --steps 2"), &[("PACELINE_EMULATED_MEMORY", "1000000")]);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    run.says(&["out of memory", "bytes were asked for", "are free"]);
}
