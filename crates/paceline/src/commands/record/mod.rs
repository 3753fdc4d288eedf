//! `paceline record`: runs a PyTorch program as it is, records some of its steps on each rank, and analyzes the traces. Or it watches
//! whether the program hangs.
//!
//! The program inherits everything from this process but `PYTHONPATH`, which begins with a folder that has a
//! `sitecustomize.py`. Python imports that at its start, so each Python process of the program counts its optimizer steps
//! and records. The same folder gets the notes of each process, which `notes` puts into words once the program has ended.
//!
//! This module does not know what a trace says.

pub mod args;
mod notes;
mod program;
pub mod steps;
mod watch;

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use paceline_failure::outputs::check_folder;
use paceline_failure::{Failure, Result, usage};
use paceline_files::Printable;
use paceline_host::text::warn;
use paceline_host::{resources, streams};
use paceline_kernels::{Compute, peak};
use paceline_launch::launcher::check_program;
use paceline_memory::{Allocator, DType};
use rustix::fs::{Mode, mkdir};
use serde_json::{Value, json};

use self::args::RecordArgs;
use self::notes::Notes;
use crate::commands::analyze::analyze;
use crate::commands::analyze::args::AnalyzeArgs;

/// The Python files of the hook: the first is what Python's start-up looks for, the second is also for users.
const FILES: [(&str, &str); 2] = [
    ("sitecustomize.py", include_str!("sitecustomize.py")),
    ("paceline_record.py", include_str!("paceline_record.py")),
];
/// The file of a hook that does something else than recording.
const INSTEAD: &str = "paceline_instead.py";
/// The folders of the traces and of the flight recorder's files, if the user names none.
const OUTPUTS: [&str; 2] = ["paceline-traces", "paceline-hang"];

/// Runs `paceline record`. Returns the exit code of the program, whether or not anything was recorded.
pub fn record(args: &RecordArgs) -> Result<u8> {
    if args.print_hook {
        streams::stdout().bytes(FILES[1].1.into());
        return Ok(0);
    }
    if args.after == 0 && args.seconds.is_none() {
        return usage("--after 0: a recording begins after a step; pass 1 or more");
    }
    check_program("record", &args.command)?;
    if args.watch_hang.is_none() {
        let fix = "run this in a folder that you can write to";
        check_folder("reports", Path::new("reports"), fix)?;
    }
    let output = output(args)?;
    let ended = match args.watch_hang {
        Some(limit_s) => run_watched(args, &output, limit_s),
        None => run(args, &output),
    };
    if args.output.is_none() {
        // The one that was made for this recording, if nothing was recorded. Otherwise it is not empty, and stays.
        let _ = fs::remove_dir(&output);
    }
    ended
}

/// Runs the program, says what came of the recording, and analyzes the traces.
fn run(args: &RecordArgs, output: &Path) -> Result<u8> {
    let hook = Hook::recording(args, output)?;
    let ended = hook.run(args)?;
    let notes = Notes::read(&hook.folder);
    drop(hook);
    let has_traces = notes.say(args, output);
    if has_traces || (!notes.is_whole && !is_free(output)) {
        let analyzed =
            analyze(&AnalyzeArgs { dir: Some(output.to_owned()), ..AnalyzeArgs::default() });
        analyzed.map(drop).unwrap_or_else(|failure| warn(&failure.to_string()));
    }
    Ok(ended)
}

/// Runs the program, and says which rank the others wait for if it hangs.
fn run_watched(args: &RecordArgs, output: &Path, limit_s: f64) -> Result<u8> {
    let settings = json!({ "limit_s": limit_s, "output": absolute(output)? }).to_string();
    let watcher = (INSTEAD, include_str!("paceline_watch.py"));
    let hook = Hook::new(&[watcher, ("settings.json", &settings)])?;
    let (stop, watcher) = watch::start(output, limit_s)?;
    let ended = hook.run(args)?;
    drop(stop);
    if !watcher.join().is_ok_and(|has_heard| has_heard) {
        let notes = Notes::read(&hook.folder);
        let none = "the program has joined no group of torch.distributed, or ended soon after";
        warn(&format!("nothing was watched: {}", notes.why_no_hook().unwrap_or(none)));
    }
    Ok(ended)
}

/// The folder of the traces: the one that the user names, otherwise the first that can be made, because two recordings may
/// begin at the same time.
fn output(args: &RecordArgs) -> Result<PathBuf> {
    let fix = "pass a folder that you can write to";
    if let Some(folder) = &args.output {
        if !is_free(folder) {
            return usage(format!(
                "--output {}: it is not an empty folder; pass a new one, so that traces of two recordings do not mix",
                folder.printable()
            ));
        }
        check_folder("--output", folder, fix)?;
        return Ok(folder.clone());
    }
    let name = OUTPUTS[usize::from(args.watch_hang.is_some())];
    check_folder("--output", Path::new(name), fix)?;
    let numbered = (2..).map(|number| PathBuf::from(format!("{name}-{number}")));
    let mut folders = [PathBuf::from(name)].into_iter().chain(numbered);
    let is_taken = |folder: &PathBuf| match fs::create_dir(folder) {
        Err(error) => error.kind() == std::io::ErrorKind::AlreadyExists,
        Ok(()) => false,
    };
    Ok(folders.find(|folder| !is_taken(folder)).unwrap_or_default())
}

fn is_free(folder: &Path) -> bool {
    match fs::read_dir(folder) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound && !folder.is_symlink(),
    }
}

/// The path of the folder as the hook gets it.
fn absolute(output: &Path) -> Result<String> {
    let output = std::path::absolute(output).map_err(Failure::cannot("name the folder", output))?;
    let Some(output) = output.to_str() else {
        return usage(format!(
            "--output {}: its path is not UTF-8; pass another one",
            output.printable()
        ));
    };
    Ok(output.to_owned())
}

/// The variable of Python's path.
const PATHS: &str = "PYTHONPATH";

/// The speeds that limit operations, of all cores of this machine before the program starts; `None` if memory has no room.
fn speeds() -> Result<Option<Value>> {
    let needed = 4 * peak::COPIED_BYTES as u64;
    if resources::available_bytes().is_some_and(|available| available < needed) {
        return Ok(None);
    }
    let compute = Compute::new(resources::num_cores(), Allocator::new())?;
    let (flop, bytes) =
        (peak::of_threads(&compute, DType::F32), peak::memory_bytes_per_s(&compute));
    let cores = compute.threads().count();
    Ok(Some(json!({ "cores": cores, "flop_per_s": flop, "bytes_per_s": bytes })))
}

/// The folder with the hook's files, its settings and its notes. It belongs to this user alone, and goes with this value.
struct Hook {
    folder: PathBuf,
}

impl Hook {
    fn recording(args: &RecordArgs, output: &Path) -> Result<Self> {
        let settings = json!({
            "after": args.after, "steps": args.steps, "seconds": args.seconds, "stacks": args.more.stacks,
            "memory": args.more.memory, "stop": args.stop, "output": absolute(output)?, "speeds": speeds()?,
        });
        Self::new(&[("settings.json", &settings.to_string())])
    }

    /// The folder with these files beside [`FILES`].
    fn new(files: &[(&str, &str)]) -> Result<Self> {
        let since_1970 = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
        let name = format!("paceline-record-{}-{}", std::process::id(), since_1970.as_nanos());
        // An empty variable is none, as for Python.
        let own = std::env::var_os("TMPDIR").filter(|own| !own.is_empty());
        let folder = own.map_or_else(|| PathBuf::from("/tmp"), PathBuf::from).join(name);
        if folder.as_os_str().as_encoded_bytes().contains(&b':') || folder.is_relative() {
            return usage(format!(
                "TMPDIR: Python's path cannot have {}; set TMPDIR to an absolute path without a colon",
                folder.printable()
            ));
        }
        let cannot = |error: std::io::Error| {
            Failure::Usage(format!(
                "TMPDIR: cannot write to {} ({error}); set TMPDIR to a folder that you can write to",
                folder.printable()
            ))
        };
        mkdir(&folder, Mode::RWXU).map_err(|error| cannot(error.into()))?;
        let hook = Self { folder: folder.clone() };
        for (name, text) in FILES.iter().chain(files) {
            let file = paceline_files::create(&folder.join(name));
            file.and_then(|mut file| file.write_all(text.as_bytes())).map_err(cannot)?;
        }
        Ok(hook)
    }

    /// Runs the program with this hook. Returns its exit code.
    fn run(&self, args: &RecordArgs) -> Result<u8> {
        let mut command = Command::new(&args.command[0]);
        program::run(command.args(&args.command[1..]).env(PATHS, self.paths()))
    }

    /// Python's path with the hook first. An empty variable is no path, and must not become one: it would name the current
    /// folder.
    fn paths(&self) -> OsString {
        let mut paths = self.folder.clone().into_os_string();
        if let Some(own) = std::env::var_os(PATHS).filter(|own| !own.is_empty()) {
            paths.push(":");
            paths.push(own);
        }
        paths
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        // A process of the program that goes on may write a note at this moment.
        let _ = fs::remove_dir_all(&self.folder);
    }
}
