//! Wrong input to every command: each line of a table is answered by one message, before any rank starts, with exit code 2,
//! and nothing is written. The whole text of all messages is one snapshot, which reads as what a user would see.
//!
//! A case is a command line that is wrong on any machine. What depends on the machine or on the contents of files is in
//! `../bad_input.rs`, `../bad_llama_input.rs` and beside the tests of the command.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::thread;

use crate::common::{Run, Sandbox};

/// The command lines below their titles. `\xff` is a byte, and single quotes hold a word together.
const LINES: &str = include_str!("lines.txt");

/// A folder with what stands in the way of commands.
fn furnished() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("file", b"in the way");
    sandbox.write("bad.json", b"{\n  \"size\": ");
    sandbox.write("broken/summary.json", b"{\"strategy\": \"ddp\", ");
    sandbox.write("broken/config.json", b"{}");
    sandbox.write("other/summary.json", b"{}");
    sandbox.write("short/a.txt", b"a text");
    sandbox.write("binary/a.txt", b"\x00\x01\xff\xfe");
    sandbox.write("untimed/rank_0.json", b"{\"traceEvents\": []}");
    std::fs::create_dir_all(sandbox.path("empty")).unwrap();
    std::fs::create_dir_all(sandbox.path("tmp")).unwrap();
    sandbox
}

/// The words of a command line: separated by spaces, except within single quotes. `\xff` is a byte.
fn words(line: &str) -> Vec<OsString> {
    let (mut words, mut word, mut is_quoted) = (Vec::new(), None::<Vec<u8>>, false);
    let line = line.replace("\\xff", "\u{1}");
    for letter in line.bytes() {
        match letter {
            b'\'' => {
                is_quoted = !is_quoted;
                word.get_or_insert_default();
            }
            b' ' if !is_quoted => words.extend(word.take()),
            1 => word.get_or_insert_default().push(0xff),
            letter => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words.into_iter().map(OsString::from_vec).collect()
}

/// What the user gets after a command line.
fn answer(line: &str) -> String {
    let sandbox = furnished();
    let before = sandbox.contents();
    let mut command = sandbox.paceline();
    command.args(words(line)).env("TMPDIR", sandbox.path("tmp"));
    let run = Run::of(command).refused(&[]);
    assert!(!run.stderr.contains("panicked"), "{line}: {run:#?}");
    assert_eq!(sandbox.contents(), before, "{line} wrote something");
    let here = sandbox.path("file");
    let here = here.parent().unwrap().to_str().unwrap();
    format!("$ paceline {line}\n{}", run.stderr.replace(here, "[current folder]"))
}

/// What the user gets after each of the lines below a title.
fn answers(titled: &str) -> String {
    let (title, lines) = titled.split_once('\n').unwrap();
    let lines = lines.lines().filter(|line| !line.is_empty());
    format!("# {title}\n\n{}", lines.map(answer).collect::<Vec<_>>().join("\n"))
}

#[test]
fn each_wrong_input_has_its_answer() {
    let texts: Vec<String> = thread::scope(|scope| {
        let titled = LINES.trim_start_matches("# ").split("\n# ");
        let started: Vec<_> = titled.map(|titled| scope.spawn(|| answers(titled))).collect();
        started.into_iter().map(|titled| titled.join().unwrap()).collect()
    });
    insta::assert_snapshot!(texts.join("\n"));
}
