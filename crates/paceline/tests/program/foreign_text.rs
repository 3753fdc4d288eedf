//! Names that others chose, on the way to a terminal: none of them may command it, or show a text other than it is.
//!
//! Each test takes another way in: a key, a path, a word of the command line, a checkpoint, a trace, the folder of a run, a
//! program.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

use crate::common::pty::Terminal;
use crate::common::traces::{Training, trace};
use crate::common::{Run, Sandbox, TINY, json};
use paceline_files::printable_lines;
use sha2::{Digest, Sha256};

/// Clears the screen, sets the title, and turns the text that follows.
const EVIL: &str = "a\u{1b}[2J\u{1b}]0;t\u{7}\u{9b}31m\u{202e}b\u{2066}";
/// What is shown of it.
const SHOWN: &str = "a\\u{1b}[2J\\u{1b}]0;t\\u{7}\\u{9b}31m\\u{202e}b\\u{2066}";
/// Its end. `clap` leaves out the begin, which commands a terminal.
const SHOWN_END: &str = "\\u{9b}31m\\u{202e}b\\u{2066}";

/// Checks that the name was shown, and that all of the output can be seen.
#[track_caller]
fn check(run: &Run) {
    let all = format!("{}{}", run.stdout, run.stderr);
    assert_eq!(all, printable_lines(&all), "something is hidden");
    assert!(all.contains(SHOWN_END), "the name is not shown: {all}");
}

#[test]
fn a_key_or_a_value_of_a_configuration() {
    let sandbox = Sandbox::new();
    let quoted = EVIL.replace('\u{1b}', "\\u001b").replace('\u{7}', "\\u0007");
    for text in [format!("\"{quoted}\" = 1\n"), format!("model = \"{quoted}\"\n")] {
        sandbox.write("run.toml", text.as_bytes());
        check(&sandbox.run_words(&["train", "--config", "run.toml"]).refused(&["run.toml:1"]));
    }
    sandbox.write("run.json", serde_json::json!({EVIL: 1}).to_string().as_bytes());
    check(&sandbox.run_words(&["train", "--config", "run.json"]).refused(&["run.json:1"]));
}

#[test]
fn a_path_or_a_word_of_the_command_line() {
    let sandbox = Sandbox::new();
    for words in [
        &["train", "--config", EVIL][..],
        &["train", "--resume", EVIL],
        &["train", "--model", EVIL],
        &["train", &format!("--{EVIL}")],
        &["train", EVIL],
        &[EVIL],
        &["generate", "--model", EVIL, "--prompt", "a"],
        &["launch", "--log-dir", &format!("/proc/{EVIL}"), "--", "true"],
        &["compare", EVIL],
        &["checkpoint", "verify", EVIL],
    ] {
        check(&sandbox.run_words(words).refused(&[]));
    }
    for words in [&["analyze", EVIL][..], &["trace", "merge", EVIL, "-o", "all.json"]] {
        let run = sandbox.run_words(words);
        assert_eq!(run.code, Some(1), "{run:#?}");
        check(&run);
    }
    // Bytes that are no text have no characters to hide.
    let mut command = sandbox.paceline();
    command.args(["train", "--model"]).arg(OsStr::from_bytes(b"\xff\x1b[2J\xc2\x9b"));
    let run = Run::of(command).refused(&["\\xff\\u{1b}[2J\\u{9b}"]);
    assert_eq!(run.stderr, printable_lines(&run.stderr));
}

#[test]
fn a_name_in_a_checkpoint() {
    let sandbox = Sandbox::new();
    sandbox.train(&format!("{TINY} --steps 1 --save saved")).ok();
    let file = sandbox.checkpoint().join("index.json");
    let text = fs::read_to_string(&file).unwrap();
    // The index is signed as it is written.
    let (head, rest) = text.split_once("\"index\":").unwrap();
    let index = rest.trim_end().strip_suffix('}').unwrap();
    let name = serde_json::to_string(EVIL).unwrap();
    let index = index.replacen(
        "\"strategy\":\"",
        &format!("\"strategy\":{}", name.trim_end_matches('"')),
        1,
    );
    let digest = Sha256::digest(index.as_bytes());
    let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let (start, _) = head.split_once(":\"").unwrap();
    fs::write(&file, format!("{start}:\"{digest}\",\"index\":{index}}}\n")).unwrap();
    check(&sandbox.run_words(&["checkpoint", "show", "saved"]).ok());
}

/// A name with a line end must not look like a message of its own.
#[test]
fn a_name_stays_on_its_line() {
    const NAME: &str = "a\nerror: forged\tb";
    const SHOWN: &str = "a\\nerror: forged\\tb";
    let sandbox = Sandbox::new();
    sandbox.write("run.json", serde_json::json!({NAME: 1}).to_string().as_bytes());
    sandbox.write("value.json", serde_json::json!({"model": NAME}).to_string().as_bytes());
    fs::create_dir(sandbox.path(NAME)).unwrap();
    fs::write(sandbox.path(NAME).join("index.json"), "{}").unwrap();
    fs::write(sandbox.path(NAME).join("model.safetensors"), "{}").unwrap();
    let missing = format!("{NAME}/none");
    for words in [
        &["train", "--config", "run.json"][..],
        &["train", "--config", "value.json"],
        &["train", "--config", &missing],
        &["train", "--resume", NAME],
        &["evaluate", "--checkpoint", NAME],
        &["generate", "--model", NAME, "--prompt", "a"],
        &["compare", &missing],
        &["analyze", NAME],
        &["analyze", &missing],
        &["trace", "merge", &missing, "-o", "all.json"],
        &["checkpoint", "show", NAME],
        &["checkpoint", "verify", &missing],
        &["launch", "--log-dir", &format!("/proc/{NAME}"), "--", "true"],
        &["launch", "--", NAME],
    ] {
        let run = sandbox.run_words(words);
        assert_ne!(run.code, Some(0), "{run:#?}");
        assert!(run.stderr.contains(SHOWN), "{words:?}: {}", run.stderr);
        assert!(!run.stderr.contains("\nerror: forged"), "{words:?}: {}", run.stderr);
    }
}

#[test]
fn a_name_in_a_trace_on_a_terminal_and_in_a_report() {
    let sandbox = Sandbox::new();
    let mut foreign = trace(0, 1, Training::Ddp, 1.0);
    foreign["deviceProperties"] = serde_json::json!([{"name": EVIL}]);
    for event in foreign["traceEvents"].as_array_mut().unwrap() {
        if event["name"] == "sm80_xmma_gemm_forward" {
            event["name"] = EVIL.into();
        }
    }
    sandbox.write("a.json", foreign.to_string().as_bytes());
    let analyze = ["analyze", "a.json", "--output", "report"];
    check(&sandbox.run_words(&analyze).ok());
    for ending in ["html", "md"] {
        let text = fs::read_to_string(sandbox.path(&format!("report/summary.{ending}"))).unwrap();
        assert_eq!(text, printable_lines(&text), "{ending}");
        assert!(text.contains(SHOWN), "{ending}");
    }
    let mut command = sandbox.paceline();
    command.args(analyze);
    let ended = Terminal::start(command, 200).end();
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    assert!(!ended.bytes.contains('\u{1b}') && ended.bytes.contains(SHOWN), "{ended:#?}");
}

#[test]
fn the_folder_of_a_run() {
    let sandbox = Sandbox::new();
    sandbox.train(&format!("{TINY} --steps 2")).ok();
    fs::rename(sandbox.run_folder(), sandbox.path("runs").join(EVIL)).unwrap();
    // Words of a summary may be a formula of a spreadsheet.
    let file = sandbox.path("runs").join(EVIL).join("summary.json");
    let mut summary = json(&file);
    summary["model"] = format!("={EVIL}").into();
    fs::write(&file, summary.to_string()).unwrap();
    let run = sandbox.run_words(&["compare", "runs"]).ok();
    check(&run);
    let csv = fs::read_to_string(sandbox.path("reports/compare/compare.csv")).unwrap();
    assert_eq!(csv, printable_lines(&csv));
    assert!(csv.contains(&format!("\n{SHOWN},'={SHOWN},")), "{csv}");
    // Cells are as wide as what they show.
    let lines: Vec<&str> = run.stdout.lines().collect();
    let at = lines.iter().position(|line| line.starts_with(SHOWN)).expect("a row of the run");
    let rule = lines[..at].iter().rev().find(|line| line.starts_with("---")).expect("a rule");
    assert!(rule.split(' ').next().unwrap().len() >= SHOWN.len(), "{}", run.stdout);
}

#[test]
fn a_program_that_is_launched_and_what_it_writes() {
    let sandbox = Sandbox::new();
    check(&sandbox.run_words(&["launch", "--", EVIL]).refused(&["launch"]));
    // What a program writes is its own, and passed on as it is.
    sandbox.write(EVIL, b"#!/bin/sh\nprintf '\\033[1mbold\\033[0m\\n'; exit 7\n");
    let path = sandbox.path(EVIL);
    let made = Command::new("chmod").arg("+x").arg(&path).status().unwrap();
    assert!(made.success());
    let run = sandbox.run_words(&["launch", "--", path.to_str().unwrap()]);
    assert_eq!(run.code, Some(7), "{run:#?}");
    assert!(run.stdout.contains("\u{1b}[1mbold\u{1b}[0m\n"), "{run:#?}");
    assert_eq!(run.stderr, printable_lines(&run.stderr), "{run:#?}");
}
