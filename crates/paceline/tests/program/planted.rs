//! Others may plant a link, a FIFO or a folder at a name that the program chooses. Each command runs once to learn which files
//! it makes, and again with something planted at each of these names. The target of a link stays as it was, and the command
//! either replaces what was planted or names it and ends.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::common::traces::{Training, write_traces};
use crate::common::{Run, Sandbox, TINY, fifo, remove};

/// A command that writes, and what it needs.
struct Case {
    command: &'static str,
    prepare: &'static [&'static str],
    /// Prefixes of files and folders that the command makes new each time, or that the user has stated.
    exempt: &'static [&'static str],
}

const SHORT: &str = "--rounds 1 --channels 4 --hidden 8 --samples 200";
const LAB: &str = "--seconds 0 --steps 3 --warmup-steps 1 --image 8 8 1";
const LM: &str = "train --recipe tiny-lm --layers 1 --width 16 --heads 2 --intermediate 32 --seq-len 8 --test-samples 4 --nproc 1 \
                  --steps 1 --data-dir texts --save model --quiet";

const CASES: [Case; 12] = [
    Case { command: "analyze traces --output out", prepare: &[], exempt: &[] },
    Case { command: "analyze traces --against traces --output out", prepare: &[], exempt: &[] },
    Case { command: "analyze memory.pickle --output out", prepare: &[], exempt: &[] },
    Case {
        command: "bench all_reduce -b 8 -e 8 --iters 1 --charts out -J stated.json --csv stated.csv",
        prepare: &[],
        exempt: &["stated."],
    },
    Case {
        command: "checkpoint export model --hugging-face --force --to out",
        prepare: &["LM"],
        exempt: &[],
    },
    Case {
        command: "compare runs --output out",
        prepare: &["train TINY --steps 2 --quiet"],
        exempt: &[],
    },
    Case {
        command: "lab memory-layout --output out SHORT LAB",
        prepare: &[],
        exempt: &["out/runs/"],
    },
    Case {
        command: "lab --report out",
        prepare: &["lab memory-layout --output out/layout SHORT LAB"],
        exempt: &[],
    },
    Case { command: "launch -n 1 --log-dir out -- true", prepare: &[], exempt: &[] },
    Case {
        command: "plan --on 2xL4 --link 10gbe --model mlp --top 2 --charts out --json stated.json",
        prepare: &[],
        exempt: &["stated."],
    },
    Case {
        command: "predict --gradient-bytes 1e6 --compute-ms 5 --nproc 2,8 --links 10gbe 25gbe --charts out --json stated.json",
        prepare: &[],
        exempt: &["stated."],
    },
    Case {
        command: "sweep --vary strategy=ddp,flat_ddp --output out --steps 4 --warmup-steps 1 SHORT",
        prepare: &[],
        exempt: &["out/runs/"],
    },
];

/// Nobody can have planted anything in a new run folder or checkpoint, only in the folder of `--save`.
const TRAIN: Case = Case {
    command: "train TINY --steps 2 --save out --json stated.json --quiet",
    prepare: &[],
    exempt: &["stated.", "runs/", CHECKPOINTS],
};

/// The prefix of checkpoints. A new run is refused where another one has left them.
const CHECKPOINTS: &str = "out/step-";

/// Commands without a case, and why.
const ELSEWHERE: [(&str, &str); 14] = [
    ("check", "it writes no file, and lets --numerics write into a folder that it makes"),
    ("classify", "it writes no file"),
    ("completions", "it writes no file"),
    ("evaluate", "the user states the name: --json"),
    (
        "fetch",
        "its files have digests for names; the crate `hub` opens them without following links",
    ),
    ("generate", "it writes no file"),
    ("hang", "the user states the name: --json"),
    ("help", "it writes no file"),
    ("new", "it writes into a folder that it makes"),
    ("record", "its folder of traces is empty or new; the report is that of `analyze`"),
    ("schedule", "the user states the name: --csv"),
    ("show", "it writes no file"),
    ("tokenizer", "the user states the name: --to"),
    ("trace", "the user states the name: --output"),
];

#[derive(Clone, Copy, Debug)]
enum Plant {
    Link,
    Fifo,
    Folder,
}

const KEPT: &str = "kept";

impl Case {
    fn run(sandbox: &Sandbox, line: &str) -> Run {
        let long = line.replace("SHORT", SHORT).replace("LAB", LAB).replace("TINY", TINY);
        sandbox.run(&long.replace("LM", LM))
    }

    /// The files that the command makes under names of its own choice, with their contents.
    fn made(&self, sandbox: &Sandbox, before: &[String]) -> BTreeMap<String, Vec<u8>> {
        let is_exempt = |name: &String| self.exempt.iter().any(|of| name.starts_with(of));
        let mut names = sandbox.contents();
        names.retain(|name| !before.contains(name) && !is_exempt(name));
        let file = |name: String| {
            let path = sandbox.path(&name);
            path.is_file().then(|| (name, fs::read(path).unwrap()))
        };
        names.into_iter().filter_map(file).collect()
    }

    fn check(&self) {
        let sandbox = Sandbox::new();
        write_traces(&sandbox, "traces", 2, Training::Ddp);
        sandbox.write("memory.pickle", br#"{"segments":[{"total_size":512}]}"#);
        sandbox.write("texts/a.md", "the cat sat on the mat.\n".repeat(20).as_bytes());
        for line in self.prepare {
            Self::run(&sandbox, line).ok();
        }
        let before = sandbox.contents();
        Self::run(&sandbox, self.command).ok();
        let made = self.made(&sandbox, &before);
        assert!(!made.is_empty(), "{} makes no file", self.command);
        for plant in [Plant::Link, Plant::Fifo, Plant::Folder] {
            for (at, name) in made.keys().enumerate() {
                let path = sandbox.path(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                plant.put(&path, &target(&sandbox, at));
            }
            self.run_among(&sandbox, plant, &made);
            for (name, contents) in &made {
                remove(&sandbox.path(name));
                fs::write(sandbox.path(name), contents).unwrap();
            }
        }
    }

    /// Runs the command until it succeeds. Each planted thing that it refuses is taken away.
    fn run_among(&self, sandbox: &Sandbox, plant: Plant, made: &BTreeMap<String, Vec<u8>>) {
        let mut planted: Vec<(usize, &String)> = made.keys().enumerate().collect();
        for _ in 0..=made.len() {
            let mut old = sandbox.contents();
            old.retain(|name| {
                name.starts_with(CHECKPOINTS) && !name[CHECKPOINTS.len()..].contains('/')
            });
            old.iter().for_each(|name| remove(&sandbox.path(name)));
            let run = Self::run(sandbox, self.command);
            for (at, name) in &planted {
                assert!(
                    plant.is_untouched(&sandbox.path(name), &target(sandbox, *at)),
                    "{}: {plant:?} {name}: {run:#?}",
                    self.command
                );
            }
            if run.code == Some(0) {
                for (_, name) in planted {
                    let file = sandbox.path(name).symlink_metadata();
                    assert!(
                        file.is_ok_and(|of| of.is_file()),
                        "{} does not replace {plant:?} {name}, and does not refuse it",
                        self.command
                    );
                }
                return;
            }
            let said = format!("{}{}", run.stdout, run.stderr);
            let is_named = |(_, name): &(usize, &String)| {
                let file = Path::new(name.as_str()).file_name().unwrap().to_str().unwrap();
                // Whatever has this name says that there is a checkpoint.
                said.contains(file) || (file == "latest" && said.contains("holds a checkpoint"))
            };
            let at = planted.iter().position(is_named);
            let at = at.unwrap_or_else(|| panic!("{}, {plant:?}: {run:#?}", self.command));
            let (_, name) = planted.swap_remove(at);
            remove(&sandbox.path(name));
            if !name.ends_with("latest") {
                fs::write(sandbox.path(name), &made[name]).unwrap();
            }
        }
        panic!("{} refuses with nothing planted", self.command);
    }
}

impl Plant {
    fn put(self, path: &Path, target: &Path) {
        remove(path);
        fs::write(target, KEPT).unwrap();
        match self {
            Plant::Link => symlink(target, path).unwrap(),
            Plant::Fifo => fifo(path),
            Plant::Folder => {
                fs::create_dir(path).unwrap();
                fs::write(path.join(KEPT), KEPT).unwrap();
            }
        }
    }

    /// Whether nothing that the user had is gone.
    fn is_untouched(self, path: &Path, target: &Path) -> bool {
        let kept = match self {
            Plant::Link => target.to_owned(),
            Plant::Folder => path.join(KEPT),
            Plant::Fifo => return true,
        };
        fs::read_to_string(kept).is_ok_and(|text| text == KEPT)
    }
}

/// The file that the link at a name leads to.
fn target(sandbox: &Sandbox, at: usize) -> PathBuf {
    sandbox.path(&format!("target-{at}"))
}

#[test]
fn what_was_planted_at_a_name_leads_nowhere() {
    CASES.iter().for_each(Case::check);
}

#[test]
fn what_was_planted_in_a_folder_of_checkpoints_leads_nowhere() {
    TRAIN.check();
}

/// A new command says here where it writes.
#[test]
fn every_command_has_a_decision() {
    let sandbox = Sandbox::new();
    let help = Case::run(&sandbox, "--help").ok().stdout;
    let (_, commands) = help.split_once("\nCommands:\n").unwrap();
    let (commands, _) = commands.split_once("\n\n").unwrap();
    let commands = commands.lines().filter_map(|line| line.strip_prefix("  "));
    let mut commands: Vec<&str> = commands
        .filter_map(|line| line.split(' ').next())
        .filter(|name| !name.is_empty())
        .collect();
    commands.sort_unstable();
    let of_cases = CASES.iter().chain([&TRAIN]).filter_map(|case| case.command.split(' ').next());
    let mut decided: Vec<&str> = of_cases.chain(ELSEWHERE.iter().map(|(name, _)| *name)).collect();
    decided.sort_unstable();
    decided.dedup();
    assert_eq!(decided, commands);
}

#[test]
fn an_export_replaces_no_file_unasked() {
    let sandbox = Sandbox::new();
    sandbox.write("texts/a.md", "the cat sat on the mat.\n".repeat(20).as_bytes());
    Case::run(&sandbox, "LM").ok();
    sandbox.write("precious", b"precious");
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        let file = sandbox.path("out").join(name);
        for is_link in [false, true] {
            sandbox.write(&format!("out/{name}"), b"precious");
            if is_link {
                remove(&file);
                symlink(sandbox.path("precious"), &file).unwrap();
            }
            let run = Case::run(&sandbox, "checkpoint export model --hugging-face --to out");
            run.refused(&[&format!("--to out/{name} is there already; pass --force")]);
            assert_eq!(fs::read(&file).unwrap(), b"precious");
            assert_eq!(fs::read_dir(sandbox.path("out")).unwrap().count(), 1, "nothing is written");
        }
        remove(&file);
        // Nor one that leads nowhere yet.
        symlink(sandbox.path("nowhere"), &file).unwrap();
        let run = Case::run(&sandbox, "checkpoint export model --hugging-face --to out");
        run.refused(&[name]);
        assert!(!sandbox.path("nowhere").exists());
        remove(&file);
    }
}
