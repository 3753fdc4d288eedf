//! `paceline schedule`: plans of pipelines, drawn and counted.

use std::fs;

use crate::common::{Run, Sandbox};

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
