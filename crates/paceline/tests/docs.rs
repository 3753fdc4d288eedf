//! The documentation names files of the repository, and they exist; and it says how many lines an addition takes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The files and folders below a folder, relative to the root, in the form "a/b.rs". What a build or a run makes is left out.
fn entries(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with('.') || name == "target" || name == "runs" || name == "profile" {
            continue;
        }
        found.insert(path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned());
        if path.is_dir() {
            entries(&path, found);
        }
    }
}

/// A page without its blocks of code, which show commands, output and code.
fn prose(page: &str) -> String {
    page.split("```").step_by(2).collect()
}

/// `a/{b,c}.rs` is `a/b.rs` and `a/c.rs`.
fn alternatives(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else { return vec![path.to_owned()] };
    let Some((inner, after)) = rest.split_once('}') else { return vec![path.to_owned()] };
    inner.split(',').flat_map(|of| alternatives(&format!("{before}{of}{after}"))).collect()
}

/// A curve of TensorBoard, whose name begins like a crate's folder.
const TAG: &str = "checkpoint/save_s";

/// Whether a word in backquotes is meant as a place in the repository: it ends like a source file, or begins with a folder of
/// it. Words with a stand-in, such as `choices/NAME.rs`, are not.
fn is_path(word: &str, folders: &BTreeSet<String>) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "./_-".contains(c);
    let begin = word.split('/').next().unwrap_or_default();
    let is_source = word.ends_with(".rs") || word.ends_with(".py");
    word.chars().all(is_plain)
        && !word.starts_with('.')
        && !word.contains("NAME")
        && word != TAG
        && (is_source || word.contains('/') && folders.contains(begin))
}

/// The places that a page names and that do not exist.
fn missing(page: &str, folder: &str, all: &BTreeSet<String>) -> Vec<String> {
    let children = |of: &str| {
        let names = all.iter().filter_map(|path| path.strip_prefix(of)?.split('/').next());
        names.map(str::to_owned).collect::<BTreeSet<String>>()
    };
    let folders: BTreeSet<String> =
        ["", "crates/", "testing/"].into_iter().flat_map(children).collect();
    // A page may name a file by the end of its path.
    let ends: BTreeSet<&str> = all
        .iter()
        .flat_map(|path| path.match_indices('/').map(|(at, _)| &path[at + 1..]).chain([&**path]))
        .collect();
    let prose = prose(page);
    let words = prose.split('`').skip(1).step_by(2).flat_map(alternatives);
    let words = words.filter(|word| is_path(word, &folders));
    let mut lost: Vec<String> =
        words.filter(|word| !ends.contains(word.trim_end_matches('/'))).collect();
    let links = prose.split("](").skip(1).filter_map(|rest| rest.split(['#', ')']).next());
    let links = links.filter(|link| !link.is_empty() && !link.contains("://"));
    let here = root().join(folder);
    lost.extend(links.filter(|link| !here.join(link).exists()).map(str::to_owned));
    lost
}

#[test]
fn every_path_that_a_page_names_exists() {
    let mut all = BTreeSet::new();
    entries(&root(), &mut all);
    // The log tells of files as they were.
    let is_page = |path: &&String| path.ends_with(".md") && !path.starts_with("docs/log/");
    let is_of_docs = |path: &&String| !path.starts_with("bench") && !path.starts_with("results");
    let pages: Vec<&String> = all.iter().filter(is_page).filter(is_of_docs).collect();
    assert!(pages.len() > 25, "{pages:?}");
    let mut lost = Vec::new();
    for path in pages {
        let page = fs::read_to_string(root().join(path)).unwrap();
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        lost.extend(missing(&page, folder, &all).into_iter().map(|word| format!("{path}: {word}")));
    }
    assert!(lost.is_empty(), "pages name what does not exist:\n{}", lost.join("\n"));
}

#[test]
fn a_path_that_does_not_exist_is_seen() {
    let all = ["crates", "crates/a", "crates/a/src", "crates/a/src/b.rs", "docs", "docs/c.md"];
    let all: BTreeSet<String> = all.map(str::to_owned).into();
    let page = "`a/src/{b,d}.rs`, `b.rs`, `docs/`, `docs/e.md`, `a/NAME.rs`, `x/y`, [no](f.md), [yes](https://g)\n\
                ```sh\n`h.rs`\n```\n`i.rs`";
    assert_eq!(missing(page, "docs", &all), ["a/src/d.rs", "docs/e.md", "i.rs", "f.md"]);
}

/// `scripts/extensions.sh` builds and runs them.
#[test]
fn kept_additions_apply_and_have_the_lines_that_the_page_says() {
    let page = fs::read_to_string(root().join("ADDING.md")).unwrap();
    for patch in fs::read_dir(root().join("scripts/extensions")).unwrap() {
        let mut git = Command::new("git");
        git.args(["apply", "--check", "--numstat"]).arg(patch.unwrap().path());
        let output = git.current_dir(root()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for line in String::from_utf8(output.stdout).unwrap().lines() {
            let [added, _, path] = line.split('\t').collect::<Vec<_>>()[..] else {
                panic!("{line}")
            };
            let said = match path.rsplit_once('/') {
                Some((folder, _)) if !root().join(path).exists() => {
                    format!("`{folder}/NAME.rs` ({added})")
                }
                _ => format!("`{path}` {added}"),
            };
            assert!(page.contains(&said), "the page does not say {said}");
        }
    }
}
