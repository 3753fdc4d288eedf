//! The boundaries between the crates: who may depend on whom, and who may use `unsafe`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// It reads and writes only messages of its own ranks.
const CRATE_FOR_TESTS: &str = "/testing/emulated-card/";

/// The crates that may hold unsafe code.
const MAY_BE_UNSAFE: [&str; 6] =
    ["collectives", "cuda", "emulated-card", "kernels", "memory", "python"];

/// Each crate, and those that it may depend on. `paceline` puts all of them together.
const ALLOWED: &str = "
files:
numeric:
trace:
cuda: files trace
emulated-card: cuda
memory: cuda trace
table: files
host: files table trace
analysis: files schedule table trace
rendezvous: files trace
collectives: cuda files memory numeric rendezvous trace
python: collectives memory trace
kernels: cuda memory numeric trace
data: files memory trace
model: files kernels memory trace
schedule:
strategies: collectives kernels memory model numeric schedule trace
failure: collectives files host rendezvous table
hub: data failure files host model trace
launch: collectives cuda failure files host memory rendezvous trace
commbench: collectives failure files host launch memory table
checkpoint: data failure files host memory model strategies table trace
choices: collectives data failure files host hub kernels memory model strategies
settings: choices collectives data failure files host launch memory model numeric rendezvous strategies
observe: analysis checkpoint choices collectives cuda data failure files host kernels launch memory model settings strategies table trace
run: checkpoint choices collectives cuda data failure files host kernels launch memory model observe rendezvous settings strategies table trace
study: analysis choices collectives commbench data failure files host kernels launch memory model observe rendezvous run settings strategies table trace
paceline: analysis checkpoint choices collectives commbench data failure files host hub kernels launch memory model observe run schedule settings strategies study table trace
";

fn allowed(name: &str) -> BTreeSet<&'static str> {
    let edges = ALLOWED.lines().find_map(|row| row.strip_prefix(name)?.strip_prefix(':'));
    let edges = edges.unwrap_or_else(|| panic!("crate {name} is new: say here what it may use"));
    edges.split_whitespace().collect()
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The folders and manifests of all crates, by name without `paceline-`.
fn crates() -> BTreeMap<String, (PathBuf, toml::Table)> {
    let folders = ["crates", "testing"].map(|of| fs::read_dir(workspace().join(of)).unwrap());
    let manifest = |folder: PathBuf| {
        let text = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        let manifest: toml::Table = text.parse().unwrap();
        let name = manifest["package"]["name"].as_str().unwrap();
        (name.trim_start_matches("paceline-").to_owned(), (folder, manifest))
    };
    let folders = folders.into_iter().flatten().map(|entry| entry.unwrap().path());
    folders.chain([workspace().join("python")]).map(manifest).collect()
}

/// The workspace's crates among a manifest's normal dependencies, for any target and under any name.
fn edges(manifest: &toml::Table, names: &BTreeSet<String>) -> BTreeSet<String> {
    let mut tables: Vec<&toml::Table> =
        manifest.get("dependencies").and_then(toml::Value::as_table).into_iter().collect();
    let targets = manifest.get("target").and_then(toml::Value::as_table);
    for target in targets.into_iter().flat_map(|targets| targets.values()) {
        tables.extend(target.get("dependencies").and_then(toml::Value::as_table));
    }
    let package = |(key, value): (&String, &toml::Value)| {
        let renamed = value.get("package").and_then(toml::Value::as_str);
        renamed.unwrap_or(key).trim_start_matches("paceline-").to_owned()
    };
    let all = tables.into_iter().flatten().map(package);
    all.filter(|name| names.contains(name)).collect()
}

#[test]
fn crates_depend_on_what_they_may_only() {
    let crates = crates();
    let names: BTreeSet<String> = crates.keys().cloned().collect();
    assert_eq!(names.len(), 28, "{names:?}");
    let mut num_edges = 0;
    for (name, (_, manifest)) in &crates {
        for edge in edges(manifest, &names) {
            let allowed = allowed(name);
            let may = allowed.contains(&*edge);
            assert!(may, "{name} must not depend on {edge}, only on {allowed:?}");
            num_edges += 1;
        }
    }
    assert!(num_edges > 9, "the manifests were not understood: {num_edges} edges");
}

#[test]
fn a_forbidden_edge_is_seen() {
    let names = ["memory", "kernels"].map(str::to_owned).into();
    for text in [
        "[dependencies]\npaceline-kernels = { workspace = true }",
        "[dependencies.paceline-kernels]\npath = \"../kernels\"",
        "[dependencies]\nfast = { path = \"../kernels\", package = \"paceline-kernels\" }",
        "[target.'cfg(unix)'.dependencies]\npaceline-kernels = { workspace = true }",
    ] {
        let found = edges(&text.parse().unwrap(), &names);
        assert_eq!(found, ["kernels".to_owned()].into(), "{text}");
    }
}

#[test]
fn unsafe_code_is_forbidden_elsewhere() {
    let forbids = |file: &Path| {
        let text = fs::read_to_string(file).unwrap();
        text.lines().any(|line| line == "#![forbid(unsafe_code)]")
    };
    let lack: Vec<String> = crates()
        .into_iter()
        .filter(|(_, (folder, _))| !forbids(&folder.join("src/lib.rs")))
        .map(|(name, _)| name)
        .collect();
    assert_eq!(lack, MAY_BE_UNSAFE);
    assert!(forbids(&workspace().join("crates/paceline/src/main.rs")));
}

/// An MPI library must see which pages go back to the system, and it watches libc only.
#[test]
fn with_mpi_memory_goes_back_by_libc() {
    let crates = crates();
    let features = &crates["collectives"].1["features"]["mpi"];
    assert!(features.as_array().unwrap().contains(&"rustix/use-libc".into()), "{features}");
}

/// All source files below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let found = entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    found.filter(|path| path.extension().is_some_and(|end| end == "rs")).collect()
}

/// Files that open others directly, and why they may. All others go through `paceline-files`.
const MAY_OPEN: [(&str, &str); 6] = [
    ("files/src/lib.rs", "it is the way"),
    ("commbench/src/processes.rs", "memory of this command, by a path below /proc"),
    ("host/src/disk.rs", "what a user names for output, and folders that are forced to the disk"),
    ("host/src/resources", "what the kernel shows below /sys and /proc"),
    ("launch/src/pinning.rs", "what the kernel shows below /sys"),
    (
        "rendezvous/src/store/file.rs",
        "a new file, with a mode and with O_EXCL, which follows no link",
    ),
];

/// Ways to open a file that may wait for ever, read without an end, or follow a link.
const OPENINGS: [&str; 9] = [
    "File::open(",
    "File::create(",
    "File::options(",
    "File::create_new(",
    "OpenOptions::new(",
    "fs::read(",
    "fs::read_to_string(",
    "fs::write(",
    "fs::copy(",
];

/// Files that give a file its name, and why they may. All others go through a `Disk`.
const MAY_NAME: [(&str, &str); 9] = [
    ("collectives/src/flight_recorder.rs", "a whole dump; it has no disk"),
    ("cuda/src/compiler.rs", "a whole file of a cache; it has no disk"),
    ("data/src/text/cache.rs", "a whole file of a cache; it has no disk"),
    ("host/src/disk.rs", "it is the way"),
    ("hub/src/blob.rs", "a whole blob, under a lock"),
    ("hub/src/cache.rs", "links are what a snapshot consists of"),
    ("hub/src/download.rs", "a whole file, under a lock"),
    ("rendezvous/src/environment/error_file.rs", "a whole file; it has no disk"),
    ("rendezvous/src/store/file.rs", "a whole file; it has no disk"),
];

/// Ways to give a file a name. Each takes the place of a link and does not follow it.
const NAMINGS: [&str; 5] = ["fs::rename(", "fs::hard_link(", "symlink(", "linkat(", "renameat("];

/// Files that write to a name which a user has stated, and which flag states it. These may be the user's links, pipes and
/// devices. This program chooses all other names, and follows no link there.
const MAY_STATE: [(&str, &str); 13] = [
    ("checkpoint/src/command.rs", "checkpoint export --to"),
    ("commbench/src/sweep.rs", "bench OPERATION --json, --csv"),
    ("failure/src/outputs.rs", "it is the way"),
    ("host/src/disk.rs", "for that way"),
    ("observe/src/views/summary.rs", "train --json"),
    ("paceline/src/commands/hang.rs", "hang --json"),
    ("paceline/src/commands/schedule.rs", "schedule --csv"),
    ("paceline/src/commands/tokenizer/mod.rs", "tokenizer --to"),
    ("paceline/src/commands/trace/mod.rs", "trace merge --output"),
    ("run/src/evaluate.rs", "evaluate --json"),
    ("run/src/predictions.rs", "evaluate --predictions"),
    ("study/src/studies/strategies.rs", "train --ddp-choice --json"),
    ("study/src/study.rs", "--json and --csv of predict and of the studies"),
];

/// Ways to write to a stated name.
const STATED: [&str; 4] =
    ["open_named(", "write_stated(", "write_stated_bytes(", "write_stated_json("];

#[test]
fn files_of_others_are_opened_in_one_way() {
    let direct = uses(&OPENINGS, &MAY_OPEN);
    assert!(direct.is_empty(), "use paceline-files, or say in MAY_OPEN why not:\n{direct:#?}");
    let direct = uses(&NAMINGS, &MAY_NAME);
    assert!(direct.is_empty(), "use a Disk, or say in MAY_NAME why not:\n{direct:#?}");
    let direct = uses(&STATED, &MAY_STATE);
    assert!(direct.is_empty(), "say in MAY_STATE which flag states the name:\n{direct:#?}");
}

/// Text of others may be a formula of a spreadsheet.
#[test]
fn cells_of_csv_are_written_in_one_way() {
    let may = [("table/src/table.rs", "it is the way")];
    let direct = uses(&["csv::Writer::", "csv::WriterBuilder::"], &may);
    assert!(direct.is_empty(), "make a Table and call its csv():\n{direct:#?}");
}

/// A step changes a strategy and the state of training, never a replica.
#[test]
fn a_step_changes_nothing_behind_a_shared_reference() {
    let ways = ["RefCell", "Cell<", "Mutex", "RwLock", "take()", "mem::take", "mem::replace"];
    let mut hidden = uses(&ways, &[]);
    assert!(hidden.len() > 100, "other crates have some: {}", hidden.len());
    hidden.retain(|place| place.starts_with("strategies/src/"));
    assert!(hidden.is_empty(), "own it, or lend it as &mut:\n{hidden:#?}");
}

/// The lines of all crates outside of tests, each with its place.
fn shipped() -> Vec<(String, String)> {
    let root = workspace().join("crates");
    let folders = crates().into_values().map(|(folder, _)| folder.join("src"));
    let files: Vec<PathBuf> = folders.flat_map(|folder| sources(&folder)).collect();
    assert!(files.len() > 300, "{} files", files.len());
    let mut shipped = Vec::new();
    for file in files {
        let path = file.strip_prefix(&root).unwrap_or(&file).display().to_string();
        if path.ends_with("tests.rs") || path.ends_with("/models.rs") || path.contains("disk/") {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        // The tests of a file stand at its end.
        let text = text.split("\n#[cfg(test)]\nmod ").next().unwrap();
        let text = text.split("\n#[cfg(all(test").next().unwrap();
        let lines = text.lines().enumerate();
        shipped.extend(lines.map(|(at, line)| (format!("{path}:{}", at + 1), line.to_owned())));
    }
    shipped
}

/// The lines with one of these ways, except in files that may.
fn uses(ways: &[&str], may: &[(&str, &str)]) -> Vec<String> {
    let is_used = |line: &str| {
        // Not a longer name, such as `MetricsFile`.
        let ends = |before: &str| !before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let is_there = |way: &&str| line.find(*way).is_some_and(|at| ends(&line[..at]));
        ways.iter().any(is_there) && !line.contains("/proc") && !line.contains("/sys")
    };
    let may = |place: &str| {
        may.iter().any(|(start, _)| place.starts_with(start)) || place.contains(CRATE_FOR_TESTS)
    };
    let direct = shipped().into_iter().filter(|(place, line)| is_used(line) && !may(place));
    direct.map(|(place, line)| format!("{place}: {}", line.trim())).collect()
}

/// Where a path is shown as it is, and why. Elsewhere [`paceline_files::Printable`] shows it.
const MAY_DISPLAY: [(&str, &str); 7] = [
    ("analysis/src/read/file.rs", "data: tables and charts make it printable"),
    ("data/src", "its errors show paths as they are"),
    ("paceline/src/commands/analyze/output.rs", "names of files to write"),
    ("paceline/src/commands/compare/load.rs", "data: tables make it printable"),
    ("paceline/src/commands/fetch/mod.rs", "the line of a result that is a path"),
    ("hub/src/fetch.rs", "the line of a result that is a path"),
    ("launch/src/launcher/guard.rs", "a message to another process"),
];

#[test]
fn paths_are_shown_in_one_way() {
    let mut direct = shipped();
    direct.retain(|(place, line)| {
        let may = MAY_DISPLAY.iter().any(|(start, _)| place.starts_with(start));
        line.contains(".display()") && !may && !place.contains(CRATE_FOR_TESTS)
    });
    assert!(direct.is_empty(), "use paceline_files::Printable:\n{direct:#?}");
}

/// Threads of tests may have any stack.
#[test]
fn every_thread_has_the_stated_stack() {
    let spawns =
        ["thread::spawn(", "scope.spawn(", "thread::Builder::new(", "Builder::new().name("];
    let may = ["trace/src/runtime.rs", "trace/src/simulation/"];
    let mut others = shipped();
    others.retain(|(place, line)| {
        let is_own = spawns.iter().any(|spawn| line.contains(spawn));
        let may = may.iter().any(|start| place.contains(start));
        is_own && !line.trim_start().starts_with("//") && !may
    });
    assert!(others.is_empty(), "use paceline_trace::thread_builder: {others:#?}");
}
