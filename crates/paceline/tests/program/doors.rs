//! What stands at a path is not always a file: each way into the program meets FIFOs, devices, folders, links and files of a
//! terabyte. Each is refused at once, with the path and what is there, before a rank starts.

use std::fs::{self, File};
use std::os::unix::fs::symlink;

use crate::common::{Run, Sandbox, TINY, fifo, remove};

const FIFO: &str = "it is a FIFO, not a regular file";
const DEVICE: &str = "it is a device, not a regular file";
const FOLDER: &str = "it is a folder, not a regular file";
const LINK: &str = "it is a link, not a regular file";

/// Puts each thing in turn at `path`, and returns what a command says of it.
#[track_caller]
fn attack(sandbox: &Sandbox, path: &str, is_limited: bool, command: &str) {
    let file = sandbox.path(path);
    let run = |words: &str| {
        let run = sandbox.run(command);
        assert_eq!(run.code, Some(2), "{command}, {words}: {run:#?}");
        let said = format!("{}{}", run.stdout, run.stderr);
        for words in [words, path.rsplit('/').next().unwrap()] {
            assert!(said.contains(words), "{command}: no {words:?} in {run:#?}");
        }
        remove(&file);
    };
    remove(&file);
    fifo(&file);
    run(FIFO);
    symlink("/dev/zero", &file).unwrap();
    run(DEVICE);
    fs::create_dir(&file).unwrap();
    run(FOLDER);
    if is_limited {
        File::create(&file).unwrap().set_len(1 << 40).unwrap();
        run("it has more than");
    }
}

#[test]
fn what_is_read_is_a_regular_file_up_to_a_size() {
    let sandbox = Sandbox::new();
    attack(&sandbox, "run.toml", true, "train --config run.toml");
    attack(&sandbox, "times.json", true, "bench all_reduce --compare times.json");
    // A folder of traces is what this command is for, and a trace may have any size.
    fifo(&sandbox.path("trace.json"));
    sandbox.run("analyze trace.json").ended_with(1, &[FIFO]);
    fs::create_dir(sandbox.path("mnist")).unwrap();
    let mnist = "train --model cnn --data mnist --data-dir mnist";
    attack(&sandbox, "mnist/train-images-idx3-ubyte", false, mnist);

    sandbox.train(&format!("{TINY} --nproc 1 --steps 2 --save saved --quiet")).ok();
    let index = "saved/step-000000002/index.json";
    let resume = format!("train {TINY} --nproc 1 --steps 4 --resume saved");
    let whole = fs::read(sandbox.path(index)).unwrap();
    attack(&sandbox, index, true, &resume);
    fs::write(sandbox.path(index), whole).unwrap();
    attack(&sandbox, "saved/latest", true, &resume);
}

#[test]
fn a_configuration_may_still_be_piped_in_up_to_a_limit() {
    let sandbox = Sandbox::new();
    sandbox.write("small.toml", b"steps = 2\nnproc = 1\nsamples = 200\nquiet = true\n");
    let train = |file: &str| {
        let mut command = sandbox.given("train --config /dev/stdin");
        command.stdin(File::open(file).unwrap());
        Run::of(command)
    };
    train(sandbox.path("small.toml").to_str().unwrap()).ok();
    train("/dev/zero").refused(&["--config /dev/stdin", "it has more than 1 MB"]);
}

#[test]
fn no_link_is_followed_where_a_run_writes() {
    let sandbox = Sandbox::new();
    sandbox.write("precious", b"precious");
    let kept = || assert_eq!(fs::read(sandbox.path("precious")).unwrap(), b"precious");
    for folder in ["saved", "logs"] {
        fs::create_dir(sandbox.path(folder)).unwrap();
    }
    let lock = sandbox.path("saved/checkpoint.lock");
    let log = sandbox.path("logs/rank_0.log");
    for path in [&lock, &log] {
        symlink(sandbox.path("precious"), path).unwrap();
    }
    let save = format!("{TINY} --nproc 2 --steps 2 --save saved");
    let launch = ["-n", "1", "--log-dir", "logs", "--", "true"];
    sandbox.train(&save).refused(&["--save saved", "checkpoint.lock", LINK]);
    sandbox.launch(&launch).refused(&["--log-dir logs", "rank_0.log", LINK]);
    kept();
    for path in [&lock, &log] {
        remove(path);
        fifo(path);
    }
    // The launcher would wait here for a reader, deaf to signals.
    sandbox.launch(&launch).refused(&["rank_0.log", FIFO]);
    sandbox.train(&save).refused(&["checkpoint.lock", FIFO]);
    // Names that a user gives may be links.
    remove(&lock);
    symlink(sandbox.path("saved"), sandbox.path("elsewhere")).unwrap();
    let save = save.replace("--save saved", "--save elsewhere --json /dev/stdout");
    let run = sandbox.train(&save).ok();
    assert!(run.stdout.contains("\"weights_sha256\""), "{run:#?}");
    assert!(sandbox.path("saved/step-000000002").exists());
}
