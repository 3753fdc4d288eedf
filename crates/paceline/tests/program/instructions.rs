//! `--simd` and `PACELINE_SIMD`: runs that are held to vector instructions.

use paceline_kernels::{Instructions, available_instructions};

use crate::common::{Sandbox, json};

const SMALL: &str = "--channels 4 --hidden 16 --batch-size 8 --steps 3 --nproc 2 --json out.json";

#[test]
fn a_run_is_held_to_instructions_by_the_flag_and_by_the_variable() {
    let mut ends = Vec::new();
    for level in available_instructions() {
        let ways = [
            (format!("--simd {level}"), ""),
            (format!("--simd {level} --transport thread"), "portable"),
            (String::new(), level.name()),
        ];
        let found = ways.map(|(flags, variable)| {
            let sandbox = Sandbox::new();
            let variables = [(Instructions::VARIABLE, variable)];
            let run = sandbox.train_with(&format!("{SMALL} {flags}"), &variables).ok();
            let title = run.line("paceline train: ").to_owned();
            assert!(title.ends_with(&format!(", held to {level}")), "{title}");
            assert_eq!(json(&sandbox.path("out.json"))["simd"], level.name(), "{flags}");
            assert!(
                run.stdout.contains("\n  (the same with any --threads, on any"),
                "{}",
                run.stdout
            );
            run.weights().to_owned()
        });
        assert!(found.iter().all(|of| *of == found[0]), "{level}: {found:?}");
        ends.push((level, found[0].clone()));
    }
    // Products of plain code are rounded before they are added. All others have one order of sums, also with more threads.
    let (plain, fused) = ends.split_first().unwrap();
    for (level, end) in fused {
        assert_ne!(plain.1, *end);
        assert_eq!(fused[0].1, *end, "{level}");
        let threads = Sandbox::new().train(&format!("{SMALL} --simd {level} --threads 3")).ok();
        assert_eq!(threads.weights(), end, "{level}");
    }
    let sandbox = Sandbox::new();
    let best = sandbox.train(SMALL).ok();
    assert!(!best.line("paceline train: ").contains("held"), "{}", best.stdout);
    assert!(json(&sandbox.path("out.json"))["simd"].is_null());
}

#[test]
fn instructions_that_the_machine_lacks_are_refused_before_a_rank_starts() {
    let sandbox = Sandbox::new();
    let refused = |flags: &str, variable: &str, words: &[&str]| {
        let run = sandbox.train_with(flags, &[(Instructions::VARIABLE, variable)]);
        run.refused(words);
        assert!(sandbox.contents().is_empty());
    };
    let has = "this machine has portable";
    refused("", "sse9", &["PACELINE_SIMD sse9: ", has, "name one of these"]);
    let available = available_instructions();
    match Instructions::ALL.into_iter().find(|level| !available.contains(level)) {
        Some(level) => {
            let name = level.name();
            refused(&format!("--simd {name}"), "", &[&format!("--simd {name}: "), has]);
            refused("--steps 1", name, &[&format!("PACELINE_SIMD {name}: "), has]);
        }
        None => println!("left out: this machine has everything"),
    }
}
