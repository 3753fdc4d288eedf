//! `paceline new`: what it writes, and where it refuses to write. `scripts/outside-program.sh` builds and trains a project that
//! it has written; the code of the project is an example, which `own.rs` trains.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::common::{Run, Sandbox, fifo};

fn new(sandbox: &Sandbox, args: &[&str]) -> Run {
    sandbox.run_words(&[&["new"], args].concat())
}

fn manifest(sandbox: &Sandbox, project: &str) -> toml::Table {
    fs::read_to_string(sandbox.path(project).join("Cargo.toml")).unwrap().parse().unwrap()
}

#[test]
fn a_project_depends_on_the_sources_that_the_program_comes_from() {
    let sandbox = Sandbox::new();
    let run = new(&sandbox, &["my-project"]).ok();
    assert!(run.stdout.contains("my-project/ has a model") && run.stdout.contains("cargo test"));
    let files = ["", "/.gitignore", "/Cargo.toml", "/README.md", "/src", "/src/main.rs"];
    assert_eq!(sandbox.contents(), files.map(|file| format!("my-project{file}")));
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let main = fs::read(sandbox.path("my-project/src/main.rs")).unwrap();
    assert_eq!(main, fs::read(here.join("examples/template/main.rs")).unwrap());
    let manifest = manifest(&sandbox, "my-project");
    assert_eq!(manifest["package"]["name"].as_str(), Some("my-project"));
    assert_eq!(manifest["dependencies"]["paceline"]["path"].as_str(), here.to_str());
    // A workspace above the folder does not matter.
    assert!(manifest.contains_key("workspace"));
}

#[test]
fn a_project_depends_on_what_the_user_names() {
    let sandbox = Sandbox::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let path = root.canonicalize().unwrap().join("crates/paceline");
    for (name, of) in [("a", root.as_path()), ("b", path.as_path())] {
        new(&sandbox, &[name, "--path", of.to_str().unwrap()]).ok();
        let found = manifest(&sandbox, name);
        assert_eq!(found["dependencies"]["paceline"]["path"].as_str(), path.to_str());
    }
    new(&sandbox, &["c", "--git", "https://example.com/a\"b"]).ok();
    let git = &manifest(&sandbox, "c")["dependencies"]["paceline"]["git"];
    assert_eq!(git.as_str(), Some("https://example.com/a\"b"));
}

#[test]
fn nothing_that_stands_there_is_touched() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("folder")).unwrap();
    sandbox.write("file", b"mine");
    symlink(sandbox.path("folder"), sandbox.path("link")).unwrap();
    symlink(sandbox.path("nothing"), sandbox.path("dangling")).unwrap();
    fifo(&sandbox.path("fifo"));
    let before = sandbox.contents();
    for name in ["folder", "folder/", "file", "link", "dangling", "fifo"] {
        new(&sandbox, &[name]).refused(&[name, "is there already", "pass another name"]);
        assert_eq!(sandbox.contents(), before);
    }
    assert_eq!(fs::read(sandbox.path("file")).unwrap(), b"mine");
}

#[test]
fn sources_are_read_like_any_file_of_others() {
    let sandbox = Sandbox::new();
    let refused = || {
        new(&sandbox, &["a", "--path", "sources"]).refused(&["--path sources", "crates/paceline"]);
    };
    fs::create_dir(sandbox.path("sources")).unwrap();
    let manifest = sandbox.path("sources/Cargo.toml");
    fifo(&manifest);
    refused();
    fs::remove_file(&manifest).unwrap();
    for text in ["[package]\nname = \"pace\"\n", "[package]\nname = 7\n", "[pack", "package = 3"] {
        sandbox.write("sources/Cargo.toml", text.as_bytes());
        refused();
    }
    fs::File::create(&manifest).unwrap().set_len(1 << 40).unwrap();
    refused();
}

#[test]
fn no_name_commands_the_terminal() {
    let sandbox = Sandbox::new();
    let run = new(&sandbox, &["a\u{1b}[31m\nb"]).refused(&["letters, digits, _ and -"]);
    assert!(!run.stderr.contains('\u{1b}') && run.stderr.lines().count() == 1, "{run:?}");
}
