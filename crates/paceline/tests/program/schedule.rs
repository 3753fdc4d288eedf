//! `paceline schedule`: plans of pipelines, drawn and counted.

use std::fs;

use crate::common::{Run, Sandbox, fifo};

fn schedule(sandbox: &Sandbox, words: &str) -> Run {
    let mut command = sandbox.paceline();
    command.arg("schedule").args(words.split_whitespace()).env("COLUMNS", "80");
    Run::of(command)
}

#[test]
fn a_schedule_is_drawn_counted_and_written() {
    let sandbox = Sandbox::new();
    let run = schedule(&sandbox, "zb_h1 --stages 2 --micro-batches 3 --csv plan.csv").ok();
    let drawn: Vec<&str> = run.stdout.lines().filter(|line| line.starts_with("stage")).collect();
    assert_eq!(drawn.len(), 2);
    assert!(drawn[0].starts_with("stage 0 F0=====F1=====.......I0====="), "{}", run.stdout);
    assert!(drawn.iter().all(|line| line.len() <= 80), "{}", run.stdout);
    // Three micro-batches of 3, and (p - 1)(F + I - W) more.
    run.prints(&["The step takes 10.0, of which 10.0 % are bubble"]);
    let lists = fs::read_to_string(sandbox.path("plan.csv")).unwrap();
    assert_eq!(lists, "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n");
    let run = schedule(&sandbox, "gpipe --stages 2 --micro-batches 1").ok();
    assert!(run.stdout.contains("2 ranks, 2 stages, 1 micro-batch\n"), "{}", run.stdout);
    let run = schedule(&sandbox, "--stages 4 --micro-batches 7").ok();
    assert!(run.stdout.contains("dualpipev: 8 stages need as many"), "{}", run.stdout);
    assert_eq!(
        run.stdout.lines().filter(|line| line.starts_with("zb")).count(),
        3,
        "{}",
        run.stdout
    );
}

/// Nobody's file may hang the command, change the terminal or be repeated at length.
#[test]
fn lists_of_a_file_are_checked_drawn_and_counted() {
    let sandbox = Sandbox::new();
    sandbox.write("plan.csv", b"0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n");
    let run = schedule(&sandbox, "--check plan.csv --costs 2,2,2").ok();
    run.prints(&[
        "plan.csv: no fault",
        "2 ranks, 2 stages, 2 micro-batches",
        "The step takes 18.0",
    ]);
    sandbox.write("stuck.csv", b"0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n");
    let stuck = "--check stuck.csv: the ranks wait for each other: rank 0 cannot do 0B0";
    schedule(&sandbox, "--check stuck.csv").ended_with(2, &[stuck, "1F1 is rank 1, column 2"]);
    sandbox.write("escape.csv", b"0F0,\x1b]0;title\x07,0B0\n");
    let run = schedule(&sandbox, "--check escape.csv");
    run.ended_with(2, &["rank 0, column 2: "]);
    assert!(!run.stderr.contains('\x1b'), "{run:?}");
    sandbox.write("zero.csv", b"0F0,\0\0,0B0\n");
    schedule(&sandbox, "--check zero.csv").ended_with(2, &["rank 0, column 2: "]);
    sandbox.write("wide.csv", "0F0,".repeat(1 << 20).as_bytes());
    schedule(&sandbox, "--check wide.csv").ended_with(2, &["more than a million cells"]);
    sandbox.write("large.csv", &vec![b','; (1 << 25) + 1]);
    schedule(&sandbox, "--check large.csv").ended_with(2, &["--check large.csv: "]);
    fifo(&sandbox.path("pipe.csv"));
    schedule(&sandbox, "--check pipe.csv").ended_with(2, &["--check pipe.csv: "]);
    std::os::unix::fs::symlink(sandbox.path("plan.csv"), sandbox.path("link.csv")).unwrap();
    schedule(&sandbox, "--check link.csv").ok();
    schedule(&sandbox, "--check plan.csv --side-by-side 0.8")
        .ended_with(2, &["the file runs no passes in pairs"]);
}
