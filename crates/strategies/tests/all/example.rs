//! The examples are programs that need this crate and those below it, and nothing else.

use std::process::Command;

/// The output of an example.
fn printed(name: &str) -> String {
    let test = std::env::current_exe().unwrap();
    let example = test.parent().unwrap().parent().unwrap().join("examples").join(name);
    assert!(example.is_file(), "`cargo test -p paceline-strategies` builds {}", example.display());
    let ended = Command::new(example).output().unwrap();
    let text = String::from_utf8(ended.stdout).unwrap();
    assert!(ended.status.success(), "{text}{}", String::from_utf8_lossy(&ended.stderr));
    text
}

#[test]
fn a_schedule_of_ones_own_ends_with_the_weights_of_any_other() {
    let text = printed("own_schedule");
    let drawn: Vec<&str> = text.lines().filter(|line| line.starts_with("stage ")).collect();
    assert_eq!(drawn.len(), 2, "{text}");
    assert!(drawn[0].starts_with("stage 0 F0==F1=="), "{text}");
    assert!(text.contains("in flight on rank 0: 2\n"), "{text}");
    let weights = text.lines().filter_map(|line| line.strip_prefix("weights of "));
    let weights: Vec<&str> =
        weights.flat_map(|line| line.split_once(": ").unwrap().1.split(" and ")).collect();
    assert_eq!(weights.len(), 4, "{text}");
    assert!(weights.iter().all(|of| *of == weights[0]), "{text}");
}

#[test]
fn the_example_learns_and_its_ranks_agree() {
    let text = printed("train");
    let after = |start: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(start));
        line.unwrap_or_else(|| panic!("no line begins with {start:?}: {text}")).to_owned()
    };
    // The mean of the squared products of such numbers is 1/9.
    let loss: f64 = after("step 300: loss ").parse().unwrap();
    assert!(loss < 0.01, "{text}");
    assert_eq!(after("weights of rank 0: "), after("weights of rank 1: "));
}
