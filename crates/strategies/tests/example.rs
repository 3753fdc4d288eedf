//! The example is a program that needs this crate and those below it, and nothing else.

use std::process::Command;

#[test]
fn the_example_learns_and_its_ranks_agree() {
    let test = std::env::current_exe().unwrap();
    let example = test.parent().unwrap().parent().unwrap().join("examples/train");
    assert!(example.is_file(), "`cargo test -p paceline-strategies` builds {}", example.display());
    let ended = Command::new(example).output().unwrap();
    let text = String::from_utf8(ended.stdout).unwrap();
    assert!(ended.status.success(), "{text}{}", String::from_utf8_lossy(&ended.stderr));
    let after = |start: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(start));
        line.unwrap_or_else(|| panic!("no line begins with {start:?}: {text}")).to_owned()
    };
    // The mean of the squared products of such numbers is 1/9.
    let loss: f64 = after("step 300: loss ").parse().unwrap();
    assert!(loss < 0.01, "{text}");
    assert_eq!(after("weights of rank 0: "), after("weights of rank 1: "));
}
