//! Whose checkpoints lie in the folder of `--save`: a new run replaces none that it has not written, and a run that goes back
//! begins there again after a failure.

use std::fs;

use crate::common::{Sandbox, TINY};

/// Everything in the folder `saved`, with its contents.
fn contents(sandbox: &Sandbox) -> Vec<(String, Vec<u8>)> {
    let files = sandbox.contents().into_iter().filter(|name| name.starts_with("saved/"));
    let content = |name: String| (name.clone(), fs::read(sandbox.path(&name)).unwrap_or_default());
    files.map(content).collect()
}

#[test]
fn a_new_run_replaces_no_checkpoint_of_another_one() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY} --nproc 1 --global-batch-size 50");
    let save = "--save saved --save-every 2 --eval-every 2 --save-best";
    sandbox.train(&format!("{flags} {save} --steps 6")).ok();
    sandbox.train(&format!("{flags} --save other --steps 6")).ok();
    let before = contents(&sandbox);
    let refuse = |more: &str| {
        let words = [
            "--save saved: saved",
            "holds a checkpoint already",
            "--resume auto",
            "another folder",
        ];
        sandbox.train(&format!("{flags} {save} {more}")).refused(&words);
        assert_eq!(contents(&sandbox), before, "{more}");
    };
    for more in ["", "--seed 7", "--max-restarts 1", "--lr 0.2"] {
        refuse(more);
    }
    refuse("--steps 8 --resume other");
    refuse("--steps 8 --resume saved/best");
    sandbox.train(&format!("{flags} {save} --steps 8 --resume auto")).ok();

    // The best weights alone are as good a reason.
    for name in ["latest", "step-000000006", "step-000000008", "step-000000002"] {
        let path = sandbox.path("saved").join(name);
        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
    }
    let words = ["--save saved: saved/best holds a checkpoint already", "another folder"];
    sandbox.train(&format!("{flags} {save} --steps 6")).refused(&words);
}

#[test]
fn a_file_of_the_user_stays() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY} --nproc 1 --global-batch-size 50 --save saved --save-every 10");
    sandbox.write("saved/step-000000020/notes.txt", b"mine");
    let words = ["--save saved: saved/step-000000020/notes.txt lies where", "move it away"];
    sandbox.train(&format!("{flags} --steps 30")).refused(&words);
    assert!(!sandbox.path("runs").exists() && !sandbox.path("saved/checkpoint.lock").exists());
    fs::remove_dir_all(sandbox.path("saved")).unwrap();

    // In a checkpoint that is there, it keeps the checkpoint from being removed.
    sandbox.train(&format!("{flags} --steps 20")).ok();
    sandbox.write("saved/step-000000010/notes.txt", b"mine");
    sandbox.train(&format!("{flags} --steps 60 --resume auto")).ok();
    assert_eq!(fs::read(sandbox.path("saved/step-000000010/notes.txt")).unwrap(), b"mine");
    assert!(!sandbox.path("saved/step-000000020").exists());
}

#[test]
fn a_run_that_goes_back_starts_again_from_there() {
    let sandbox = Sandbox::new();
    let flags = format!(
        "{TINY} --nproc 2 --global-batch-size 50 --save saved --save-every 1 --save-keep 99 --steps 20"
    );
    sandbox.train(&flags).ok();
    let named = |file: &str| fs::read_to_string(sandbox.path("saved").join(file)).unwrap();
    assert_eq!(named("good"), "step-000000010\n");
    // The next step ruins the weights, which are finite and saved, and the one after it shows it.
    let run =
        sandbox.train(&format!("{flags} --resume saved/step-000000005 --lr 1e30 --max-restarts 1"));
    run.ended_with(1, &["restart 1 of 1"]);
    let words = "step 7 was not finite, so training goes on from saved/step-000000005, the last good \
                 checkpoint, and not from step-000000006";
    assert!(run.stderr.contains(words), "no {words:?} in {run:#?}");
    assert_eq!([named("good"), named("latest")], ["step-000000005\n", "step-000000006\n"]);
}
