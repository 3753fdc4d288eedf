//! What a user sees on a terminal: the progress bar, and text that fits.

mod common;

use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::pty::{Ended, Terminal};
use common::{Run, Sandbox, TINY, signal};
use rustix::process::Signal;

/// Each drawing of a bar begins so, and ends with a carriage return.
const ERASE: &str = "\r\u{1b}[J";

/// How long `mpirun` may take to end after its ranks. Open MPI 4.1's sometimes waits for itself for good.
const MPIRUN_LIMIT: Duration = Duration::from_secs(20);

/// A run of 100 batches on two ranks whose link is slow.
fn slow_run(epochs: usize) -> String {
    format!(
        "train --channels 4 --hidden 8 --samples 1000 --batch-size 5 --nproc 2 --threads 1 --link 10gbit,5ms \
         --epochs {epochs}"
    )
}

fn command(sandbox: &Sandbox, line: &str) -> Command {
    let mut command = sandbox.paceline();
    command.args(line.split_whitespace());
    command
}

/// Every bar that was drawn.
fn bars(ended: &Ended) -> Vec<&str> {
    let drawn = ended.bytes.split(ERASE).filter_map(|drawn| drawn.strip_suffix('\r'));
    drawn.filter(|bar| !bar.is_empty() && !bar.contains('\n')).collect()
}

/// Checks that nothing of a bar is left, that each line fits, and that the next line can begin.
#[track_caller]
fn check_screen(ended: &Ended, columns: usize) {
    assert_eq!(ended.cursor_column, 0, "{ended:#?}");
    for line in &ended.lines {
        let is_bar = line.contains("batches/s") || line.contains(" left, ") || line.contains("[#");
        assert!(!is_bar && !line.contains("--] "), "debris: {line:?} in {ended:#?}");
    }
    // The terminal would cut a longer line in the middle of a word. A digest or a path is one word.
    for line in ended.bytes.split("\r\n") {
        let line = line.rsplit(ERASE).next().unwrap().trim();
        assert!(line.chars().count() <= columns || !line.contains(' '), "{line:?} in {ended:#?}");
    }
}

#[test]
fn the_bar_shows_speeds_and_the_time_left_and_goes_away() {
    let full = ["Epoch 1/1 [", "/100", " left", " batches/s", " samples/s", "loss "];
    for (columns, shown) in [(200, full.as_slice()), (80, &full), (20, &["/100, 0:", " left"])] {
        let sandbox = Sandbox::new();
        let ended = Terminal::start(command(&sandbox, &slow_run(1)), columns).end();
        assert_eq!(ended.code, Some(0), "{ended:#?}");
        let bars = bars(&ended);
        let has_all = |bar: &&str| shown.iter().all(|word| bar.contains(word));
        assert!(bars.iter().any(has_all), "{columns}: no {shown:?} in {bars:#?}");
        for bar in bars {
            assert!(bar.chars().count() < usize::from(columns), "{columns}: {bar:?}");
        }
        check_screen(&ended, columns.into());
        let words = ended.lines.join(" ");
        let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
        for expected in ["Epoch 1/1: loss", "Compute time:", "Run folder: runs/"] {
            assert!(words.contains(expected), "no {expected:?} in {ended:#?}");
        }
    }
}

/// Threads that keep all cores busy until this value is dropped.
struct Busy(Arc<AtomicBool>);

impl Busy {
    fn start() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        for _ in 0..std::thread::available_parallelism().unwrap().get() {
            let is_over = is_over.clone();
            std::thread::spawn(move || while !is_over.load(Ordering::Relaxed) {});
        }
        Self(is_over)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The first command of the README, with fewer images.
#[test]
fn the_first_run_fits_a_screen_and_its_answer_comes_first_also_on_a_busy_machine() {
    const COLUMNS: u16 = 80;
    const ROWS: usize = 30;
    let line = "train --link 1gbit,50us --evaluate --profile --samples 640 --nproc 2";
    let sandbox = Sandbox::new();
    let busy = Busy::start();
    let ended = Terminal::start(command(&sandbox, line), COLUMNS).end();
    let piped = Run::of(command(&sandbox, line)).ok();
    drop(busy);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    check_screen(&ended, COLUMNS.into());
    // What is printed twice as wide is two rows there.
    let broken = piped.stdout.lines().chain(piped.stderr.lines());
    let piped_rows = broken.map(|line| line.chars().count().max(1).div_ceil(COLUMNS.into())).sum();
    for (rows, last, text) in [
        (ended.lines.len(), ended.lines.last(), format!("{ended:#?}")),
        (piped_rows, piped.stdout.lines().last().map(str::to_owned).as_ref(), piped.stdout.clone()),
    ] {
        // A busy machine has a line about a slow rank, or about the link.
        assert!(rows <= ROWS, "{rows} rows: {text}");
        assert!(last.is_some_and(|line| line.starts_with("Traces: ")), "{text}");
        let at = |words: &str| text.find(words).unwrap_or_else(|| panic!("no {words}: {text}"));
        assert!(at("Evaluation accuracy: ") < at("Total time: "), "{text}");
    }
}

#[test]
fn the_bar_counts_each_sample_once() {
    // Five samples of a batch are not divided evenly, and two stages have the same ones.
    for flags in [
        "--nproc 3 --global-batch-size 5",
        "--nproc 2 --mesh pp=2 --accumulate 2 --global-batch-size 5",
    ] {
        let sandbox = Sandbox::new();
        let line = format!(
            "train --channels 4 --hidden 8 --samples 500 --threads 1 --steps 20 --link 10gbit,5ms {flags}"
        );
        let ended = Terminal::start(command(&sandbox, &line), 200).end();
        assert_eq!(ended.code, Some(0), "{ended:#?}");
        let speed = |bar: &str, unit: &str| -> Option<f64> {
            bar.split(", ").find_map(|fact| fact.strip_suffix(unit)?.replace(',', "").parse().ok())
        };
        let of_batch = |bar: &&str| Some(speed(bar, " samples/s")? / speed(bar, " batches/s")?);
        let found: Vec<f64> = bars(&ended).iter().filter_map(of_batch).collect();
        // Both speeds are rounded to three digits.
        assert!(
            !found.is_empty() && found.iter().all(|of| (of / 5.0 - 1.0).abs() < 0.02),
            "{flags}: {found:?}"
        );
    }
}

#[test]
fn the_bar_survives_a_resize() {
    let sandbox = Sandbox::new();
    // Longer than any test: it is interrupted below.
    let terminal = Terminal::start(command(&sandbox, &slow_run(100)), 200);
    terminal.wait_for(&["/100 [", "batches/s", "loss "]);
    for columns in [60, 20, 120] {
        terminal.resize(columns);
        // The terminal has broken a wide bar into several lines, which must all be gone.
        common::wait_until("a bar of another width", || {
            let lines = terminal.lines();
            let is_bar = |line: &&String| line.contains("/100, ") || line.ends_with("/100");
            let is_new = |bar: &&String| bar.contains('[') == (columns > 20);
            let fits = |bar: &&String| bar.chars().count() < usize::from(columns);
            let bars: Vec<&String> = lines.iter().filter(is_bar).collect();
            bars.len() == 1 && bars.iter().all(is_new) && bars.iter().all(fits)
        });
    }
    signal(terminal.id(), Signal::INT);
    let ended = terminal.end();
    assert_ne!(ended.code, Some(0), "{ended:#?}");
    check_screen(&ended, 200);
}

#[test]
fn tables_fit_a_terminal_a_pipe_and_a_given_width() {
    let line = "plan --on 4xL4 --link 10gbe --model mlp --top 4";
    let sandbox = Sandbox::new();
    let names = ["strategy", "schedule", "parameters", "activations", "total"];
    let longest = |text: &str| {
        let is_table = |line: &&str| line.starts_with("layout") || line.starts_with("dp4");
        let lines = text.lines().filter(is_table);
        names.iter().for_each(|name| assert!(text.contains(name), "no {name} in {text}"));
        lines.map(|line| line.chars().count()).max().unwrap()
    };
    for (columns, limits) in [(None, 50..=80), (Some("60"), 40..=60), (Some("300"), 100..=300)] {
        let mut command = command(&sandbox, line);
        match columns {
            Some(columns) => command.env("COLUMNS", columns),
            None => command.env_remove("COLUMNS"),
        };
        let run = Run::of(command);
        let longest = longest(&run.stdout);
        assert!(limits.contains(&longest), "{columns:?}: {longest} characters in {}", run.stdout);
    }
    for columns in [40, 80, 200] {
        let ended = Terminal::start(command(&sandbox, line), columns).end();
        assert_eq!(ended.code, Some(0), "{ended:#?}");
        check_screen(&ended, columns.into());
        longest(&ended.lines.join("\n"));
    }
}

#[test]
fn rows_of_a_format_stay_lines_on_a_narrow_terminal() {
    let sandbox = Sandbox::new();
    let line = "bench all_reduce --nproc 2 --minbytes 1k --maxbytes 1k --iters 2";
    let ended = Terminal::start(command(&sandbox, line), 40).end();
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let row = ended.bytes.lines().find(|line| line.trim_start().starts_with("1024 ")).unwrap();
    assert_eq!(row.split_whitespace().count(), 13, "{row:?}");
}

#[test]
fn no_bar_is_drawn_on_the_terminal_that_mpirun_gives_its_ranks() {
    let sandbox = Sandbox::new();
    let mut command = command(&sandbox, &format!("train {TINY}"));
    for (name, value) in [("RANK", "0"), ("SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "1")] {
        command.env(format!("OMPI_COMM_WORLD_{name}"), value);
    }
    command.env("PMIX_NAMESPACE", "prterun-a@1");
    let ended = Terminal::start(command, 80).end();
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    assert!(ended.bytes.contains("Epoch 1/") && !ended.bytes.contains('\u{1b}'), "{ended:#?}");
}

/// `mpirun`, which ends with the test.
struct Mpirun(Child);

impl Drop for Mpirun {
    fn drop(&mut self) {
        // It ends its ranks, if it gets the time.
        signal(self.0.id(), Signal::TERM);
        let begin = Instant::now();
        while begin.elapsed() < MPIRUN_LIMIT && matches!(self.0.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_file_with_the_output_of_mpirun_has_no_bar() {
    let sandbox = Sandbox::new();
    let printed = File::create(sandbox.path("printed")).unwrap();
    let mut command = sandbox.command("mpirun".as_ref());
    command
        .args(["-n", "2", env!("CARGO_BIN_EXE_paceline"), "train"])
        .args(TINY.split_whitespace())
        // By default Open MPI refuses to run more ranks than cores, and to run as root.
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
        .envs(["OMPI_", "PRTE_"].map(|by| (format!("{by}ALLOW_RUN_AS_ROOT"), "1")))
        .envs(["OMPI_", "PRTE_"].map(|by| (format!("{by}ALLOW_RUN_AS_ROOT_CONFIRM"), "1")))
        .stdout(printed.try_clone().unwrap())
        .stderr(Stdio::from(printed));
    let mut mpirun = match command.spawn() {
        Ok(child) => Mpirun(child),
        Err(error) => {
            println!("skipped: cannot run mpirun: {error}");
            return;
        }
    };
    let text =
        || String::from_utf8_lossy(&std::fs::read(sandbox.path("printed")).unwrap()).into_owned();
    let mut done_since = None;
    common::wait_until("the end of mpirun", || {
        let is_done = text().contains("Run folder: ");
        done_since = is_done.then(|| done_since.unwrap_or_else(Instant::now));
        let is_stuck = done_since.is_some_and(|since| since.elapsed() > MPIRUN_LIMIT);
        mpirun.0.try_wait().unwrap().is_some() || is_stuck
    });
    drop(mpirun);
    let text = text();
    assert!(text.contains("2 ranks") && text.contains("Run folder: "), "{text}");
    assert!(!text.contains('\u{1b}') && !text.contains('\r'), "{text}");
}
