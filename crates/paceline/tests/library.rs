//! A program that trains by calling a function, with a strategy of its own, and programs whose choices are refused.

#[path = "library/mistakes.rs"]
mod mistakes;
#[path = "library/public_api.rs"]
mod public_api;

use std::fs;
use std::path::Path;
use std::sync::{Arc, Once};

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

        impl OwnStrategy for $type {}

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
fn the_picture_of_a_step_does_not_depend_on_the_name_of_a_strategy() {
    in_scratch_folder();
    strategy!(ZeroCopies, "zero_copies", {});
    let program = Program::new().strategy::<ZeroCopies>();
    for (strategy, is_sent) in [("zero_copies", false), ("zero1", true), ("zero3", false)] {
        let flags = format!("{TINY} --batch-size 10 --warmup-steps 1 --strategy {strategy}");
        let run = program.train(flags.split_whitespace()).unwrap();
        let picture = fs::read_to_string(run.folder.join("step.svg")).unwrap();
        assert!(picture.contains("optimizer"), "{strategy}: {picture}");
        assert_eq!(picture.contains("parameters"), is_sent, "{strategy}: {picture}");
        fs::remove_dir_all(&run.folder).unwrap();
    }
}

/// Vectors whose targets are two sums of theirs.
#[derive(Debug, Args)]
struct Sums {}

impl Own for Sums {
    const NAME: &str = "sums";
    const ABOUT: &str = "Sums of vectors";
}

impl DataSettings for Sums {
    fn open(&self, _: u64, _: Split) -> paceline::Result<Arc<dyn Dataset>> {
        Ok(Arc::new(Vectors))
    }
}

struct Vectors;

impl Dataset for Vectors {
    fn len(&self) -> usize {
        40
    }

    fn fields(&self) -> Vec<Field> {
        vec![Field::f32("inputs", [4]), Field::f32("targets", [2])]
    }

    fn read(&self, _: u64, index: usize, sample: &mut Sample<'_>) {
        let value = |at: usize| ((index * 7 + at * 3) % 11) as f32 / 11.0;
        for (at, x) in sample.f32("inputs").iter_mut().enumerate() {
            *x = value(at);
        }
        let sums = [value(0) + value(1), value(2) + value(3)];
        sample.f32("targets").copy_from_slice(&sums);
    }
}

/// A model that does not classify, and says nothing about the samples that it trains on.
#[derive(Debug, Args)]
struct Regression {}

impl Own for Regression {
    const NAME: &str = "regression";
    const ABOUT: &str = "One linear layer";
}

impl ModelSettings for Regression {
    fn build(&self, _: &dyn Dataset, world_size: usize) -> Result<Model, ModelError> {
        let mut layout = LayoutBuilder::new();
        let linear = layout.block("linear", |unit| Linear::new(unit, 4, 2, Activation::None));
        Ok(Model::new(Self::NAME, [linear], MeanSquaredError, layout.finish(world_size)))
    }
}

#[test]
fn a_model_without_classes_has_no_accuracy() {
    in_scratch_folder();
    let program = Program::new().model::<Regression>().data_set::<Sums>();
    let flags = "--model regression --data sums --nproc 2 --batch-size 5 --epochs 2 --quiet";
    let more = "--evaluate --eval-every 3 --tensorboard --name without-classes";
    let run = program.train(format!("{flags} {more}").split_whitespace()).unwrap();
    assert_eq!(run.accuracy(), None);
    assert_eq!(run.summary.number("eval_samples"), Some(40.0));
    for name in ["train_accuracy", "eval_accuracy", "eval_accuracy_pct", "eval_tokens"] {
        assert_eq!(run.summary.number(name), None, "{name}");
    }
    let metrics = fs::read_to_string(run.folder.join("metrics.jsonl")).unwrap();
    assert!(metrics.contains("eval_loss"), "{metrics}");
    assert!(!metrics.contains("accuracy") && !metrics.contains("correct"), "{metrics}");
    let entries = fs::read_dir(&run.folder).unwrap().map(|entry| entry.unwrap().path());
    let events = entries.filter(|path| path.to_str().unwrap().contains("tfevents"));
    for file in events {
        let bytes = fs::read(file).unwrap();
        let has = |word: &str| bytes.windows(word.len()).any(|part| part == word.as_bytes());
        assert!(has("evaluation/loss") && !has("accuracy"));
    }
    fs::remove_dir_all(&run.folder).unwrap();
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
    refused(&Program::new().strategy::<Path>(), "", &["'a/b'", "not a possible name", "letters"]);
    refused(&Program::new().strategy::<Empty>(), "", &["''", "not a possible name"]);
    refused(&Program::new().strategy::<All>(), "", &["'all'", "not a possible name"]);
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
fn all_that_is_wrong_with_flags_is_said_at_once() {
    strategy!(Greedy, "greedy", {
        /// A flag of every run
        #[arg(long)]
        seed: Option<u64>,
        /// Another one
        #[arg(long)]
        epochs: Option<u64>,
    });
    strategy!(Homonym, "ddp", {});
    let program = Program::new().strategy::<Greedy>().strategy::<Homonym>();
    let words = ["--seed is a flag of", "--epochs is a flag of", "Own::PREFIX", "one of this name"];
    refused(&program, "", &words);
}

/// The flags of this strategy would be those of a run and of the CNN.
#[derive(Debug, Args)]
struct Prefixed {
    /// Prefixed: a number
    #[arg(long, alias = "hidden-size", default_value_t = 3)]
    hidden: i64,
    /// Prefixed: a list
    #[arg(long, num_args = 1.., default_values = ["1", "2"])]
    channels: Vec<i64>,
    /// Prefixed: a switch
    #[arg(long)]
    quiet: bool,
}

impl Own for Prefixed {
    const NAME: &str = "prefixed";
    const ABOUT: &str = "One all-reduce";
    const PREFIX: &str = "my";
}

impl OwnStrategy for Prefixed {}

impl StrategySettings for Prefixed {
    fn build(&self) -> paceline::Result<Box<dyn Strategy>> {
        match (self.hidden, &self.channels[..], self.quiet) {
            (3, [1, 2], false) | (-7, [-4, 5, 6], true) => Ok(Box::new(FlatDdp)),
            other => Err(Failure::Run(format!("{other:?}"))),
        }
    }
}

#[test]
fn a_prefix_keeps_flags_apart() {
    let program = Program::new().strategy::<Prefixed>();
    // The flags of the CNN are there too, in `TINY`.
    let flags = "--strategy prefixed";
    train(&program, flags).unwrap();
    train(&program, &format!("{flags} --my-hidden=-7 --my-channels -4 5 6 --my-quiet")).unwrap();
    train(&program, &format!("{flags} --my-hidden-size=-7 --my-channels -4 5 6 --my-quiet=true"))
        .unwrap();
    let other = train(&program, &format!("{flags} --my-hidden 4")).unwrap_err().to_string();
    assert_eq!(other, "(4, [1, 2], false)");
    refused(&program, &format!("{flags} --my-hidden many"), &["--my-hidden <HIDDEN>"]);
}

#[test]
fn wrong_flags_are_refused() {
    let program = Program::new();
    refused(&program, "--transport shm", &["--transport shm", "ranks are threads"]);
    refused(&program, "--no-such-flag", &["--no-such-flag"]);
    refused(&program, "--width 7", &["--width"]);
    refused(&program, "--ddp-choice all", &["--ddp-choice all makes several runs"]);
}
