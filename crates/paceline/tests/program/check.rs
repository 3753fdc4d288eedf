//! `paceline check`, and what `paceline predict` says about links and models.

use crate::common::{Run, Sandbox};

fn run(args: &str) -> Run {
    let mut command = Sandbox::new().paceline();
    // The sandbox is removed already; the command runs elsewhere and needs no folder.
    command.current_dir("/").args(args.split_whitespace());
    Run::of(command)
}

#[test]
fn every_question_is_answered() {
    for transport in ["thread", "shm", "tcp", "hybrid"] {
        let run = run(&format!("check --nproc 2 --transport {transport} --timeout 20")).ok();
        let group = run.line("ok    group: ");
        assert!(group.starts_with(&format!("2 ranks met over {transport} in ")), "{group}");
        for rank in 0..2 {
            let device = run.line(&format!("ok    device: [Rank {rank}] CUDA_VISIBLE_DEVICES="));
            assert!(device.contains(&format!("LOCAL_RANK={rank}, device=cpu, cores ")), "{device}");
        }
        for question in ["memory", "locked memory", "open files", "clock", "links", "all-reduce"] {
            let answers = run.stdout.lines().filter(|line| {
                line.get(6..).is_some_and(|rest| rest.starts_with(&format!("{question}: ")))
            });
            assert_eq!(answers.count(), 1, "{question} in {}", run.stdout);
        }
        assert_eq!(run.stdout.matches("      rank 1 ").count(), 2, "two matrices: {}", run.stdout);
        assert!(!run.stdout.contains("FAIL"), "{}", run.stdout);
    }
}

#[test]
fn ranks_that_share_cores_are_warned() {
    let cores = std::thread::available_parallelism().unwrap().get();
    if cores >= 8 {
        println!("skipped: so many ranks would take long");
        return;
    }
    let run = run(&format!("check --nproc {} --transport thread", cores + 1)).ok();
    run.line(&format!("warn  device: {} ranks share {cores} cores of this host", cores + 1));
}

#[test]
fn ranks_of_another_launcher_are_checked() {
    let binary = env!("CARGO_BIN_EXE_paceline");
    let run = run(&format!("launch -n 2 -- {binary} check")).ok().without_ranks();
    run.line("ok    group: 2 ranks met over shm in ");
}

#[test]
fn a_link_that_is_too_fast_fails() {
    for transport in ["thread", "shm"] {
        let run = run(&format!("check --nproc 2 --transport {transport} --link nvlink4"));
        assert_eq!(run.code, Some(1), "{run:#?}");
        let group = run.line("FAIL  group: ");
        assert!(group.starts_with("cannot emulate a link of 3600 Gbit/s"), "{group}");
        assert!(!run.stderr.contains("rank 1"), "{}", run.stderr);
    }
}

#[test]
fn links_are_listed() {
    let run = run("predict --links").ok();
    let hdr = run.line("hdr ");
    assert!(hdr.contains("200 Gbit/s") && hdr.contains(" 25 "), "{hdr}");
    run.line("Link     Note");
}

#[test]
fn models_are_priced() {
    let given = "--gradient-bytes 102.4e6 --compute-ms 50 --links 10gbit,50us --nproc 4";
    let run = run(&format!("predict {given}")).ok();
    // 102.4 MB x 1.5 / 1.25 GB/s, three latencies for each bucket, and headers of 88 bytes to three ranks. ddp's second bucket is
    // final after 35 of 128 parts, at 25.8 ms. From then on 100.8 MB travel in four buckets, until 147.3 ms.
    let rows = run.stdout.lines().filter(|line| line.trim_start().starts_with("4  10gbit,50us"));
    let rows: Vec<Vec<&str>> = rows.map(|line| line.split_whitespace().collect()).collect();
    assert_eq!([rows[0][4], rows[1][2]], ["71.2", "33.9"], "{}", run.stdout);
}

#[test]
fn a_model_has_its_true_count() {
    let model = "--model cnn --channels 8 16 --hidden 32 --samples 96 --batch-size 8";
    let run = run(&format!("predict {model} --rounds 1 --links 10gbit,50us")).ok();
    // 3x3x1x8 + 8, 3x3x8x16 + 16, 784x32 + 32, 32x10 + 10.
    run.line("26,698 parameters, 0.11 MB of gradients");
}
