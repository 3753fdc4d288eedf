//! A program that trains by calling a function, with a strategy of its own, and programs whose choices are refused.

use std::fs;
use std::path::Path;
use std::sync::Once;

use paceline::prelude::*;
use paceline::strategies::FlatDdp;

const TINY: &str = "--channels 4 --hidden 8 --samples 200 --epochs 1 --nproc 2 --quiet";

/// Runs go to a folder for tests, and not to the current folder.
fn in_scratch_folder() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("library");
        fs::create_dir_all(&folder).unwrap();
        std::env::set_current_dir(folder).unwrap();
    });
}

fn train(program: &Program, flags: &str) -> Result<FinishedRun, Failure> {
    in_scratch_folder();
    let run = program.train(format!("{TINY} {flags}").split_whitespace())?;
    fs::remove_dir_all(&run.folder).unwrap();
    Ok(run)
}

/// Checks that a program refuses to train, with a message that has all of `words`.
#[track_caller]
fn refused(program: &Program, flags: &str, words: &[&str]) {
    match train(program, flags) {
        Err(Failure::Usage(message)) => {
            for word in words {
                assert!(message.contains(word), "no {word:?} in: {message}");
            }
        }
        other => panic!("{other:?}"),
    }
}

/// A choice named `$name`, with these flags, that builds `FlatDdp`.
macro_rules! strategy {
    ($type:ident, $name:literal, $flags:tt) => {
        #[derive(Debug, Args)]
        struct $type $flags

        impl Own for $type {
            const NAME: &str = $name;
            const ABOUT: &str = "One all-reduce";
        }

        impl OwnStrategy for $type {
            const SYNCHRONISES: Synchronises = Synchronises::EveryStep;
        }

        impl StrategySettings for $type {
            fn build(&self) -> paceline::Result<Box<dyn Strategy>> {
                Ok(Box::new(FlatDdp))
            }
        }
    };
}

#[test]
fn a_function_trains_and_returns_the_results() {
    strategy!(Flat, "flat", {});
    let program = Program::new().strategy::<Flat>();
    let own = train(&program, "--strategy flat --evaluate").unwrap();
    // A second program may have the same choice.
    let ddp = train(&Program::new().strategy::<Flat>(), "--strategy ddp --evaluate").unwrap();
    assert_eq!(own.weights().len(), 64);
    assert_eq!(own.weights(), ddp.weights());
    assert_eq!((own.loss(), own.accuracy()), (ddp.loss(), ddp.accuracy()));
    assert!(own.loss().unwrap() > 0.0 && own.accuracy().unwrap() <= 1.0, "{own:?}");
    assert_eq!(own.summary.text("transport"), "thread");
    let name = own.folder.file_name().unwrap().to_str().unwrap();
    assert!(name.contains("-cnn-flat"), "{name}");
}

#[test]
fn a_name_that_exists_is_refused() {
    strategy!(Ddp, "ddp", {});
    strategy!(Alias, "pytorch_ddp", {});
    strategy!(First, "first", {});
    strategy!(Second, "first", {});
    let there = "there is one of this name already";
    let ddp = ["--strategy ddp", there, "Gradients live in buckets"];
    refused(&Program::new().strategy::<Ddp>(), "", &ddp);
    refused(&Program::new().strategy::<Alias>(), "", &["--strategy pytorch_ddp", there]);
    let program = Program::new().strategy::<First>();
    train(&program, "--strategy first").unwrap();
    refused(&program.strategy::<Second>(), "", &["--strategy first", there, "One all-reduce"]);
}

#[test]
fn an_impossible_name_is_refused() {
    strategy!(Path, "a/b", {});
    strategy!(Empty, "", {});
    strategy!(All, "all", {});
    refused(&Program::new().strategy::<Path>(), "", &["'a/b'", "no possible name", "letters"]);
    refused(&Program::new().strategy::<Empty>(), "", &["''", "no possible name"]);
    refused(&Program::new().strategy::<All>(), "", &["'all'", "no possible name"]);
}

#[test]
fn a_flag_that_exists_is_refused() {
    strategy!(Seed, "seeded", {
        /// A flag of every run
        #[arg(long)]
        seed: Option<u64>,
    });
    strategy!(Caps, "capped", {
        /// A flag of another strategy
        #[arg(long)]
        bucket_cap_mb: Option<u64>,
    });
    strategy!(Output, "written", {
        /// A flag of a study and of a sweep
        #[arg(long)]
        output: Option<u64>,
    });
    strategy!(Helper, "helped", {
        /// A flag that every command gets
        #[arg(long = "help")]
        words: Option<u64>,
    });
    strategy!(Positional, "placed", {
        /// No flag
        place: Option<u64>,
    });
    let seed = ["--strategy seeded", "--seed is a flag of paceline train already"];
    refused(&Program::new().strategy::<Seed>(), "", &seed);
    let caps = ["--strategy capped", "--bucket-cap-mb is a flag of paceline train already"];
    refused(&Program::new().strategy::<Caps>(), "", &caps);
    let output = ["--strategy written", "--output is a flag of paceline bench scaling already"];
    refused(&Program::new().strategy::<Output>(), "", &output);
    let help = ["--strategy helped", "--help is a flag of paceline train already"];
    refused(&Program::new().strategy::<Helper>(), "", &help);
    refused(&Program::new().strategy::<Positional>(), "", &["place", "has no long name"]);
}

#[test]
fn wrong_flags_are_refused() {
    let program = Program::new();
    refused(&program, "--transport shm", &["--transport shm", "ranks are threads"]);
    refused(&program, "--no-such-flag", &["--no-such-flag"]);
    refused(&program, "--width 7", &["--width"]);
    refused(&program, "--ddp-choice all", &["--ddp-choice all makes several runs"]);
}
