//! Shared by the end-to-end tests: a separate folder for every test, in which the binary runs with a
//! clean environment, and data files in their published formats.
#![allow(dead_code)] // Each test binary uses its part.

pub mod marked;
pub mod pretrained;
pub mod pty;
pub mod traces;

use std::ffi::OsStr;
use std::fs;
use std::io::{ErrorKind, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use flate2::Compression;
use flate2::write::GzEncoder;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::Value;
use tempfile::TempDir;

/// The time limit of every wait. It is reached only if something hangs, even on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(180);

/// The Python with PyTorch that the variable `PACELINE_TORCH` names. Without it, says that the test is skipped.
pub fn torch() -> Option<PathBuf> {
    let python = std::env::var_os("PACELINE_TORCH").map(PathBuf::from);
    if python.is_none() {
        println!("skipped: PACELINE_TORCH names no Python with PyTorch");
    }
    python
}

/// The smallest CNN and data that still need several steps.
pub const TINY: &str = "--channels 4 --hidden 8 --samples 200";
/// The smallest MLP.
pub const TINY_MLP: &str =
    "--model mlp --input-dim 16 --hidden-dim 16 --output-dim 4 --num-layers 1";

/// A folder in which the binary runs.
pub struct Sandbox {
    folder: TempDir,
}

impl Sandbox {
    /// A new empty folder.
    pub fn new() -> Self {
        Self { folder: TempDir::new().unwrap() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file, and the folders above it.
    pub fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// A command that runs the binary here, without any variable of a launcher or of Hugging Face, and
    /// without a proxy.
    pub fn paceline(&self) -> Command {
        self.command(Path::new(env!("CARGO_BIN_EXE_paceline")))
    }

    /// The same for another program.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        let launchers = [
            "GROUP_",
            "HF_",
            "HUGGING",
            "LOCAL_",
            "MASTER_",
            "PACELINE_",
            "TORCHELASTIC_",
            "OMPI_",
            "PMIX_",
            "PMI_",
            "MPI_",
            "SLURM_",
        ];
        let foreign = |name: &str| {
            matches!(name, "RANK" | "WORLD_SIZE" | "TRANSFORMERS_OFFLINE")
                || launchers.iter().any(|p| name.starts_with(p))
                || name.to_ascii_lowercase().ends_with("_proxy")
        };
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(foreign))
        {
            command.env_remove(name);
        }
        // What tests look for stands on one line. Without this, tables fit 80 columns.
        command.env("COLUMNS", "10000");
        // Nothing is looked up in the caches of this user, or kept there.
        command.env("HF_HOME", self.path("hf")).env("XDG_CACHE_HOME", self.path("cache"));
        command.current_dir(self.folder.path()).stdin(Stdio::null());
        command
    }

    /// `paceline` with these words, separated by spaces.
    pub fn given(&self, words: &str) -> Command {
        let mut command = self.paceline();
        command.args(words.split_whitespace());
        command
    }

    /// Starts [`Sandbox::given`].
    pub fn start(&self, words: &str) -> Running {
        Running::start(self.given(words))
    }

    /// Runs `paceline train` with these flags, separated by spaces.
    pub fn train(&self, flags: &str) -> Run {
        self.train_with(flags, &[])
    }

    /// Like [`Sandbox::train`], with variables in the environment.
    pub fn train_with(&self, flags: &str, variables: &[(&str, &str)]) -> Run {
        let mut command = self.given(&format!("train {flags}"));
        command.envs(variables.iter().copied());
        Run::of(command)
    }

    /// Runs `paceline launch` with these arguments.
    pub fn launch<S: AsRef<OsStr>>(&self, args: &[S]) -> Run {
        let mut command = self.paceline();
        command.arg("launch").args(args);
        Run::of(command)
    }

    /// Runs `paceline` with these words, separated by spaces.
    pub fn run(&self, words: &str) -> Run {
        Run::of(self.given(words))
    }

    pub fn run_words(&self, words: &[&str]) -> Run {
        let mut command = self.paceline();
        command.args(words);
        Run::of(command)
    }

    /// The names of what lies in a folder, sorted.
    pub fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    /// Every file and folder in the sandbox, sorted, as relative paths.
    pub fn contents(&self) -> Vec<String> {
        fn visit(root: &Path, folder: &Path, found: &mut Vec<String>) {
            let entries = match fs::read_dir(folder) {
                // A run under way may have removed it since it was found.
                Err(error) if error.kind() == ErrorKind::NotFound => return,
                entries => entries.unwrap(),
            };
            for entry in entries {
                let path = entry.unwrap().path();
                found.push(path.strip_prefix(root).unwrap().display().to_string());
                if path.is_dir() {
                    visit(root, &path, found);
                }
            }
        }
        let mut found = Vec::new();
        visit(self.folder.path(), self.folder.path(), &mut found);
        found.sort();
        found
    }

    /// Waits until no process has this folder: ranks die a moment after their launcher.
    pub fn wait_until_deserted(&self) {
        let folder = self.folder.path().canonicalize().unwrap();
        let works_here = |process: fs::DirEntry| {
            // What has ended has no folder, and those of other users are none of ours.
            fs::read_link(process.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(&folder))
        };
        wait_until("the end of all processes in the sandbox", || {
            !fs::read_dir("/proc").unwrap().filter_map(Result::ok).any(works_here)
        });
    }

    /// The folder of the latest checkpoint in `saved`.
    pub fn checkpoint(&self) -> PathBuf {
        let latest = fs::read_to_string(self.path("saved/latest")).unwrap();
        self.path("saved").join(latest.trim())
    }

    /// The index of that checkpoint, which has the digests of all its files.
    pub fn checkpoint_index(&self) -> Vec<u8> {
        fs::read(self.checkpoint().join("index.json")).unwrap()
    }

    /// The only run folder.
    pub fn run_folder(&self) -> PathBuf {
        let names = self.names("runs");
        assert_eq!(names.len(), 1, "{names:?}");
        self.path("runs").join(&names[0])
    }

    pub fn summary(&self) -> Value {
        json(&self.run_folder().join("summary.json"))
    }
}

/// Makes a FIFO, at which an open waits for ever.
pub fn fifo(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
}

/// A process that is ended with its test, even if the test fails.
pub struct Running(Option<Child>);

impl Running {
    /// Starts a command whose output is kept for [`Running::end`].
    pub fn start(mut command: Command) -> Self {
        Self(Some(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()))
    }

    pub fn id(&self) -> u32 {
        self.0.as_ref().unwrap().id()
    }

    /// Waits until `condition` holds; fails the test, with the process's output, if it ends before.
    #[track_caller]
    pub fn wait_until(&mut self, what: &str, mut condition: impl FnMut() -> bool) {
        let child = self.0.as_mut().unwrap();
        let mut holds = false;
        wait_until(what, || {
            // Looked at first: what it did at its very end counts.
            let has_ended = child.try_wait().unwrap().is_some();
            holds = condition();
            holds || has_ended
        });
        if !holds {
            panic!("it ended before {what}: {:#?}", Run::wait(self.0.take().unwrap()));
        }
    }

    /// Waits for its end without reading its output. Returns its exit code.
    #[track_caller]
    pub fn end_unread(mut self) -> Option<i32> {
        let child = self.0.as_mut().unwrap();
        let mut code = None;
        wait_until("an end without a reader", || {
            let status = child.try_wait().unwrap();
            code = status.and_then(|status| status.code());
            status.is_some()
        });
        code
    }

    pub fn end(mut self) -> Run {
        Run::wait(self.0.take().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The output of a finished process, and how it ended.
#[derive(Debug)]
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Run {
    pub fn of(command: Command) -> Self {
        Running::start(command).end()
    }

    /// Waits for a process whose output is piped. A process that hangs is killed and fails the test with
    /// its output.
    pub fn wait(child: Child) -> Self {
        let pid = child.id();
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || sender.send(child.wait_with_output()));
        let Ok(output) = receiver.recv_timeout(LIMIT) else {
            signal(pid, rustix::process::Signal::KILL);
            // The process's children may hold its output open.
            let said = receiver.recv_timeout(Duration::from_secs(5));
            panic!("process {pid} still ran after {LIMIT:?}; {said:?}");
        };
        Self::ended(output.unwrap())
    }

    fn ended(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let (stdout, stderr) = (text(output.stdout), text(output.stderr));
        Self { code: output.status.code(), stdout, stderr }
    }

    /// Checks that it succeeded.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self
    }

    /// Checks that it ended with this code, and that its messages have all of `words`.
    #[track_caller]
    pub fn ended_with(&self, code: i32, words: &[&str]) -> &Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self.says(words)
    }

    /// Checks that standard error has all of `words`.
    #[track_caller]
    pub fn says(&self, words: &[&str]) -> &Self {
        words
            .iter()
            .for_each(|word| assert!(self.stderr.contains(word), "no {word:?} in {self:#?}"));
        self
    }

    /// Checks that standard output has all of `words`.
    #[track_caller]
    pub fn prints(&self, words: &[&str]) -> &Self {
        words
            .iter()
            .for_each(|word| assert!(self.stdout.contains(word), "no {word:?} in {self:#?}"));
        self
    }

    /// Checks that it was refused before anything ran: exit code 2, nothing on standard output, and one
    /// message with all of `words`.
    #[track_caller]
    pub fn refused(self, words: &[&str]) -> Self {
        assert_eq!(self.code, Some(2), "{self:#?}");
        assert_eq!(self.stdout, "", "{self:#?}");
        let num_messages = self.stderr.matches("error:").count();
        assert_eq!(num_messages, 1, "one message, please: {self:#?}");
        // The line breaks depend on the width of the terminal.
        let flat = self.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        for word in words {
            assert!(flat.contains(word), "no {word:?} in: {}", self.stderr);
        }
        self
    }

    /// The same without the rank that `paceline launch` puts before each line.
    pub fn without_ranks(mut self) -> Self {
        let line = |line: &str| {
            let (_, rest) =
                line.strip_prefix("[rank ").and_then(|rest| rest.split_once("] ")).unwrap();
            format!("{rest}\n")
        };
        self.stdout = self.stdout.lines().map(line).collect();
        self
    }

    /// The only line of standard output that begins with `start`, without it.
    #[track_caller]
    pub fn line(&self, start: &str) -> &str {
        let lines: Vec<_> =
            self.stdout.lines().filter_map(|line| line.strip_prefix(start)).collect();
        assert_eq!(lines.len(), 1, "lines that begin with {start:?} in: {}", self.stdout);
        lines[0]
    }

    /// The digest of the final weights.
    #[track_caller]
    pub fn weights(&self) -> &str {
        let digest = self.line("Weights: sha256 ");
        assert_eq!(digest.len(), 64, "{digest}");
        digest
    }
}

/// `paceline train` with these flags in a new folder.
#[track_caller]
pub fn trained(flags: &str) -> (Sandbox, Run) {
    let sandbox = Sandbox::new();
    let run = sandbox.train(flags).ok();
    (sandbox, run)
}

/// The digest of the weights after `paceline train` with these flags.
#[track_caller]
pub fn weights_of(flags: &str) -> String {
    trained(flags).1.weights().to_owned()
}

/// The accuracy that a run prints, in percent.
#[track_caller]
pub fn accuracy(run: &Run) -> f64 {
    run.line("Evaluation accuracy: ").trim_end_matches('%').parse().unwrap()
}

pub fn remove(path: &Path) {
    if fs::symlink_metadata(path).is_ok_and(|found| found.is_dir()) {
        fs::remove_dir_all(path).unwrap();
    } else {
        let _ = fs::remove_file(path);
    }
}

/// Sends a signal to a process. A process that is gone is no error.
pub fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    let _ = rustix::process::kill_process(pid, signal);
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Waits until `condition` holds; fails the test, naming `what`, if that takes too long.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < LIMIT, "waited {LIMIT:?} for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// The lines of a run folder's `metrics.jsonl`.
pub fn metrics(folder: &Path) -> Vec<Value> {
    let text = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Every step's value of `key`.
#[track_caller]
pub fn column(folder: &Path, key: &str) -> Vec<f64> {
    let value = |step: &Value| step[key].as_f64().unwrap_or_else(|| panic!("no {key} in {step}"));
    let lines = metrics(folder);
    // Not those of evaluations and saves.
    lines.iter().filter(|line| line.get("loss").is_some()).map(value).collect()
}

/// An IDX file of bytes: the dimensions, then the items.
pub fn idx(extents: &[u32], items: impl IntoIterator<Item = u8>) -> Vec<u8> {
    let mut file = vec![0, 0, 8, extents.len() as u8];
    extents.iter().for_each(|extent| file.extend(extent.to_be_bytes()));
    file.extend(items);
    file
}

/// `count` images of 28 x 28, each with a bright row that shows its label.
pub fn idx_images(count: u32) -> Vec<u8> {
    let pixel = |n: u32, row: u32| if row / 2 == n % 10 { 250 } else { (n * 7 % 40) as u8 };
    let rows = (0..count).flat_map(|n| (0..28).map(move |row| (n, row)));
    idx(&[count, 28, 28], rows.flat_map(|(n, row)| [pixel(n, row); 28]))
}

/// The labels of [`idx_images`].
pub fn idx_labels(count: u32) -> Vec<u8> {
    idx(&[count], (0..count).map(|n| (n % 10) as u8))
}

/// The four files of MNIST, with 60 images to train on and 23 to test.
pub fn mnist() -> [(&'static str, Vec<u8>); 4] {
    [
        ("train-images-idx3-ubyte", idx_images(60)),
        ("train-labels-idx1-ubyte", idx_labels(60)),
        ("t10k-images-idx3-ubyte", idx_images(23)),
        ("t10k-labels-idx1-ubyte", idx_labels(23)),
    ]
}

/// Compresses as `gzip` does.
pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// CIFAR-10's binary version with `per_file` training records in each of its five files, and `test`
/// records for testing.
pub fn write_cifar10(sandbox: &Sandbox, folder: &str, per_file: usize, test: usize) {
    let records = |range: std::ops::Range<usize>| -> Vec<u8> {
        let record = |n: usize| {
            let label = (n % 10) as u8;
            std::iter::once(label)
                .chain((0..3072).map(move |at| if at / 300 == n % 10 { 230 } else { n as u8 }))
        };
        range.flat_map(record).collect()
    };
    for i in 0..5 {
        let bytes = records(i * per_file..(i + 1) * per_file);
        sandbox.write(&format!("{folder}/data_batch_{}.bin", i + 1), &bytes);
    }
    sandbox.write(&format!("{folder}/test_batch.bin"), &records(100..100 + test));
}
