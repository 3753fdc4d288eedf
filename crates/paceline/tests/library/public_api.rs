//! The public interface of the prelude, as a list that is kept beside this test: fields, variants, methods and functions with
//! their types. A line that goes or changes may break a program, so it needs a new version and a line in CHANGELOG.md.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The crates that own the names of the prelude.
const CRATES: [&str; 11] = [
    "choices",
    "collectives",
    "data",
    "failure",
    "kernels",
    "memory",
    "model",
    "paceline",
    "run",
    "strategies",
    "trace",
];

/// The names of the prelude.
fn prelude() -> BTreeSet<&'static str> {
    let uses = include_str!("../../src/prelude.rs").split("pub use ").skip(1);
    let paths = uses.map(|rest| rest.split(';').next().unwrap());
    paths.flat_map(|path| path.split(|c: char| !c.is_alphanumeric() && c != '_')).collect()
}

/// Lines as rustfmt writes them, without comments, attributes and tests. Each item begins in the first column.
fn items(text: &str) -> Vec<Vec<&str>> {
    let mut items: Vec<Vec<&str>> = Vec::new();
    for line in text.lines().take_while(|line| *line != "mod tests {") {
        let words = line.trim_start();
        if words.is_empty() || words.starts_with("//") || words.starts_with("#[") {
            continue;
        }
        if line.starts_with(|c: char| c.is_ascii_alphabetic()) || items.is_empty() {
            items.push(Vec::new());
        }
        items.last_mut().unwrap().push(line);
    }
    items
}

/// The beginning of a statement, up to its body, in one line.
fn statement<'a>(lines: impl Iterator<Item = &'a str>) -> String {
    let mut text = String::new();
    for line in lines {
        text = format!("{text} {}", line.trim());
        if line.ends_with(['{', ';']) || (!text.contains('(') && line.ends_with(',')) {
            break;
        }
    }
    let text = text.split(" {").next().unwrap_or_default();
    text.replace("( ", "(").replace(", )", ")").trim_matches([' ', ',', ';']).to_owned()
}

/// The kind and the name of an item: `trait`, `Layer`. Of an implementation of a trait, nothing.
fn named(statement: &str) -> Option<(&str, &str)> {
    let rest = statement.strip_prefix("pub ").unwrap_or(statement);
    let kind = ["struct", "enum", "trait", "impl"].into_iter().find(|of| rest.starts_with(of))?;
    let mut rest = &rest[kind.len()..];
    if kind == "impl" && rest.starts_with('<') {
        let mut depth = 0;
        let end = rest.find(|c| {
            depth += i32::from(c == '<') - i32::from(c == '>');
            depth == 0
        })?;
        rest = &rest[end + 1..];
    }
    let is_public = kind == "impl" && !rest.contains(" for ") || statement.starts_with("pub ");
    let word = rest.trim_start().split(|c: char| !c.is_alphanumeric()).next()?;
    is_public.then_some((kind, word))
}

/// Adds the statements of a file about names of the prelude.
fn add(text: &str, names: &BTreeSet<&str>, found: &mut BTreeSet<String>) {
    for item in items(text) {
        let whole = statement(item.iter().copied());
        let Some((kind, name)) = named(&whole).filter(|(_, name)| names.contains(name)) else {
            continue;
        };
        if kind != "impl" {
            found.insert(format!("{name}: {whole}"));
        }
        for (at, line) in item.iter().enumerate().skip(1) {
            let Some(words) = line.strip_prefix("    ") else { continue };
            let begins: &[&str] = match kind {
                "trait" => &["fn ", "const ", "type "],
                _ => &["pub "],
            };
            let is_variant = kind == "enum" && words.starts_with(|c: char| c.is_ascii_uppercase());
            if is_variant || begins.iter().any(|of| words.starts_with(of)) {
                found.insert(format!("{name}: {}", statement(item[at..].iter().copied())));
            }
        }
    }
}

#[test]
fn the_public_interface_is_the_stored_one() {
    let (names, mut found) = (prelude(), BTreeSet::new());
    for of in CRATES {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut folders = vec![crates.join(of).join("src")];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
                if entry.is_dir() {
                    folders.push(entry);
                } else if entry.extension().is_some_and(|of| of == "rs") {
                    add(&fs::read_to_string(entry).unwrap(), &names, &mut found);
                }
            }
        }
    }
    assert!(found.len() > 300, "{}", found.len());
    insta::assert_snapshot!("public_api", found.into_iter().collect::<Vec<_>>().join("\n"));
}
