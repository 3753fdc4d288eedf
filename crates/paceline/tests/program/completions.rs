//! `paceline completions`: bash takes the script and completes with it, and there is one for each shell.

use std::path::Path;

use crate::common::{Run, Sandbox};

fn script(sandbox: &Sandbox, shell: &str) -> String {
    sandbox.run(&format!("completions {shell}")).ok().stdout
}

#[test]
fn bash_completes_commands_flags_and_values() {
    let sandbox = Sandbox::new();
    sandbox.write("completions", script(&sandbox, "bash").as_bytes());
    let completed = |words: &[&str]| {
        let (current, before) = (words[words.len() - 1], words[words.len() - 2]);
        let line = format!(
            "set -eu; . ./completions; COMP_WORDS=({}); COMP_CWORD={}; _paceline paceline '{current}' '{before}'; \
             echo \"${{COMPREPLY[@]}}\"",
            words.join(" "),
            words.len() - 1
        );
        let mut bash = sandbox.command(Path::new("bash"));
        bash.args(["--norc", "-c", &line]);
        let run = Run::of(bash).ok();
        run.stdout.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(completed(&["paceline", "predi"]), ["predict"]);
    let flags = completed(&["paceline", "train", "--strat"]);
    assert_eq!(flags, ["--strategy"]);
    let values = completed(&["paceline", "train", "--strategy", "shard"]);
    assert_eq!(values, ["sharded1", "sharded2", "sharded3"]);
}

#[test]
fn each_shell_has_a_script() {
    let sandbox = Sandbox::new();
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = script(&sandbox, shell);
        for word in ["paceline", "train", "sharded3"] {
            assert!(script.contains(word), "{shell} has no {word}");
        }
        assert!(!script.contains("__guard"), "{shell} offers commands of the launcher");
    }
}
