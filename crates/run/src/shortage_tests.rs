//! Whole training runs of two ranks on a disk that fails at each operation in turn, and with memory that ends at each block.
//!
//! Each run continues from a checkpoint and writes every kind of file. Whatever fails, the run ends, earlier files are still
//! there, and the next run ends with the weights of an undisturbed run.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::Duration;

use paceline_analysis::read;
use paceline_checkpoint::{self as checkpoint, Checkpoint};
use paceline_collectives::Group;
use paceline_failure::{Failure, Result};
use paceline_host::disk::Disk;
use paceline_host::disk::faults::{Fault, at_each_operation};
use paceline_memory::{Allocator, Category};
use paceline_observe::figures::run_summary::RunSummary;
use paceline_settings::spec::{self, RunSpec};
use serde_json::Value;

use crate::folder;
use crate::resolve::resolve_inputs;
use crate::setup::Host;
use crate::trainer;

/// After this time a run is taken to hang.
const LIMIT: Duration = Duration::from_secs(120);

/// A run with these settings, on two ranks.
fn tiny(settings: &[(&str, &str)]) -> RunSpec {
    let all = [("nproc", "2"), ("transport", "thread"), ("timeout", "60"), ("warmup-steps", "0")];
    let spec = all.iter().fold(RunSpec::default(), |spec, (key, value)| spec.with(key, value));
    settings.iter().fold(spec.with("quiet", true), |spec, (key, value)| spec.with(key, value))
}

/// A run up to this many optimizer steps, with its checkpoints in `parent`.
fn run_spec(parent: &Path, steps: u64) -> RunSpec {
    let spec = tiny(&[
        ("model", "mlp"),
        ("input-dim", "8"),
        ("hidden-dim", "8"),
        ("output-dim", "4"),
        ("num-layers", "1"),
        ("steps-per-epoch", "4"),
        ("global-batch-size", "16"),
        ("resume", "auto"),
    ]);
    spec.with("steps", steps).with("save", parent.join("saved").display())
}

/// The same run with all kinds of files.
fn all_files(parent: &Path, steps: u64) -> RunSpec {
    let path = |name: &str| parent.join(name).display().to_string();
    let spec = run_spec(parent, steps).with("tensorboard", true).with("json", path("copy.json"));
    let window = [("profile-wait", 0), ("profile-warmup", 0), ("profile-active", 1)];
    let spec = spec.with("profile", true).with("profile-dir", path("profile"));
    window.iter().fold(spec, |spec, (key, value)| spec.with(key, value))
}

/// Runs it with a host for each rank. A run that hangs ends the test.
fn run(spec: &RunSpec, parent: &Path, hosts: [Host; 2]) -> Result<()> {
    let (config, data) = resolve_inputs(spec, None)?;
    let runs = parent.join("runs");
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let outcome = config.ranks().run(None, None, |group: Group, local_rank| {
            let host = hosts[group.rank()].clone();
            let disk = host.disk.clone();
            let make_folder = || folder::create(&disk, &runs, &config).map(Some);
            trainer::run_rank(&config, data.clone(), group, local_rank, make_folder, host)
        });
        // Nobody receives an outcome after the limit.
        let _ = sender.send(outcome);
    });
    receiver.recv_timeout(LIMIT).unwrap_or_else(|_| panic!("the run hangs after {LIMIT:?}"))
}

fn hosts(disk: &Disk) -> [Host; 2] {
    [(); 2].map(|()| Host { disk: disk.clone(), ..Host::default() })
}

/// A folder in memory if possible: hundreds of runs need no disk.
fn folder_in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// A folder with a checkpoint of two steps.
fn begun() -> tempfile::TempDir {
    let parent = folder_in_memory();
    run(&run_spec(parent.path(), 2), parent.path(), hosts(&Disk::without_fault())).unwrap();
    parent
}

/// A folder with the checkpoints of another one.
fn copy_of(begun: &Path) -> tempfile::TempDir {
    let parent = folder_in_memory();
    let saved = parent.path().join("saved");
    fs::create_dir(&saved).unwrap();
    for path in files(&begun.join("saved")) {
        let to = saved.join(path.strip_prefix(begun.join("saved")).unwrap());
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(&path, to).unwrap();
    }
    parent
}

fn saved_steps(parent: &Path) -> u64 {
    let found = checkpoint::find(&parent.join("saved")).unwrap();
    Checkpoint::open_last_good(&found).unwrap().1.progress().steps
}

/// All files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// The only run folder that was not there `before`.
fn new_run(parent: &Path, before: &[PathBuf]) -> Option<PathBuf> {
    let runs = fs::read_dir(parent.join("runs")).into_iter().flatten();
    let mut new: Vec<_> = runs.map(|run| run.unwrap().path()).collect();
    new.retain(|run| !before.contains(run));
    assert!(new.len() < 2, "{new:?}");
    new.pop()
}

fn runs(parent: &Path) -> Vec<PathBuf> {
    let runs = fs::read_dir(parent.join("runs")).into_iter().flatten();
    runs.map(|run| run.unwrap().path()).collect()
}

/// The weights at the end of the next, undisturbed run.
fn weights_of_the_next(parent: &Path) -> String {
    let before = runs(parent);
    run(&run_spec(parent, 4), parent, hosts(&Disk::without_fault())).unwrap();
    let summary = new_run(parent, &before).unwrap().join("summary.json");
    RunSummary::read(&summary).unwrap().text("weights_sha256").to_owned()
}

/// Checks that every file with its final name is whole. Only a process that has ended may cut off the last line of
/// `metrics.jsonl`.
fn check_whole(parent: &Path, fault: Fault) {
    for path in files(parent) {
        let name = path.file_name().unwrap().to_str().unwrap();
        // A checkpoint that is being written has no name yet.
        if path.display().to_string().contains("/.step-") {
            continue;
        }
        if name.ends_with(".json") {
            let text = fs::read_to_string(&path).unwrap();
            let parsed: std::result::Result<Value, _> = serde_json::from_str(&text);
            assert!(parsed.is_ok(), "{}: {text}", path.display());
        } else if name.ends_with(".gz") {
            read::open(&path).unwrap();
        } else if name == "metrics.jsonl" {
            let text = fs::read_to_string(&path).unwrap();
            assert!(fault == Fault::Stops || text.is_empty() || text.ends_with('\n'), "{text}");
            for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
                serde_json::from_str::<Value>(line).unwrap();
            }
        }
    }
}

#[test]
fn a_run_survives_or_reports_a_fault_at_any_operation_on_its_files() {
    let begun = begun();
    let reference = weights_of_the_next(copy_of(begun.path()).path());
    let mut num_without = 0;
    let num_operations = at_each_operation(|disk, fault| {
        let parent = copy_of(begun.path());
        let parent = parent.path();
        let before = runs(parent);
        let outcome = run(&all_files(parent, 4), parent, hosts(disk));
        let made = new_run(parent, &before);
        check_whole(parent, fault);
        let mut partial = files(parent);
        partial.retain(|path| path.extension().is_some_and(|end| end == "partial"));
        // A process that has ended leaves at most files about to get their names.
        assert!(partial.len() <= if fault == Fault::Stops { 2 } else { 0 }, "{partial:?}");
        match outcome {
            Ok(()) => {
                let made = made.expect("a run folder");
                let summary = RunSummary::read(&made.join("summary.json")).unwrap();
                assert_eq!(
                    fs::read(made.join("summary.json")).unwrap(),
                    fs::read(parent.join("copy.json")).unwrap()
                );
                assert_eq!(summary.text("weights_sha256"), reference);
                let missing: Vec<String> = summary.part("missing_files");
                assert_eq!(!missing.is_empty(), disk.has_failed(), "{missing:?}");
                for what in &missing {
                    assert!(what.contains(&parent.display().to_string()), "{what}");
                    assert!(what.contains("no space left"), "{what}");
                }
                num_without += missing.len();
            }
            Err(failure) => {
                let text = failure.to_string();
                assert!(matches!(failure, Failure::Run(_) | Failure::Usage(_)), "{failure:?}");
                assert!(text.contains(&parent.display().to_string()), "{text}");
                assert!(text.contains("no space left"), "{text}");
                let is_run = |run: PathBuf| run.join(spec::FILE_NAME).exists();
                assert!(
                    fault == Fault::Stops || made.is_none_or(is_run),
                    "a folder without a configuration"
                );
            }
        }
        assert!([2, 4].contains(&saved_steps(parent)), "{}", saved_steps(parent));
        assert_eq!(weights_of_the_next(parent), reference);
    });
    assert!(num_operations > 50, "{num_operations} operations");
    assert!(num_without > 15, "{num_without} faults in traces and curves");
}

#[test]
fn a_run_without_memory_ends_with_how_much_was_asked_for_and_for_what() {
    let spec = |strategy| {
        tiny(&[
            ("model", "mlp"),
            // More activations than blocks given back before, all smaller than the copy of the state.
            ("num-layers", "6"),
            ("input-dim", "64"),
            ("hidden-dim", "64"),
            ("output-dim", "4"),
            ("steps-per-epoch", "2"),
            ("global-batch-size", "40"),
            ("strategy", strategy),
            ("optimizer", "adamw"),
            ("epochs", "1"),
        ])
    };
    let mut categories = BTreeSet::new();
    for (short, strategy) in [(0, "bucket_ddp_async"), (1, "sharded3")] {
        let mut num_blocks = 0;
        loop {
            let parent = tempfile::tempdir().unwrap();
            let mut hosts = hosts(&Disk::without_fault());
            hosts[short].allocator = Allocator::with_blocks(num_blocks);
            let spec = spec(strategy).with("save", parent.path().join("saved").display());
            let Err(failure) = run(&spec, parent.path(), hosts) else { break };
            assert!(matches!(failure, Failure::Run(_)), "{failure:?}");
            let text = failure.to_string();
            let (_, rest) = text.split_once("out of memory: could not allocate ").expect(&text);
            let (bytes, category) = rest.split_once(" bytes for ").expect(&text);
            assert!(bytes.parse::<usize>().is_ok(), "{text}");
            categories.insert(category.to_owned());
            num_blocks += 1;
        }
        assert!(num_blocks > 15, "{num_blocks} blocks");
    }
    // Memory of every kind has been refused once.
    let names = Category::ALL.map(|category| category.name().to_owned());
    assert_eq!(categories, BTreeSet::from(names));
}

/// A save that takes longer than an operation may, on either rank.
#[test]
fn a_slow_disk_does_not_end_a_run() {
    for slow in [0, 1] {
        let parent = tempfile::tempdir().unwrap();
        let mut hosts = hosts(&Disk::without_fault());
        // Rank 0 waits for its disk several times in a save, and rank 1 once.
        hosts[slow].disk = Disk::slow(Duration::from_secs(if slow == 0 { 1 } else { 3 }));
        let spec = run_spec(parent.path(), 2).with("timeout", "2");
        run(&spec, parent.path(), hosts).unwrap_or_else(|e| panic!("rank {slow} is slow: {e}"));
        assert_eq!(saved_steps(parent.path()), 2);
    }
}
