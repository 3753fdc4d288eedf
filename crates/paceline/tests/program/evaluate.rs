//! `paceline evaluate`: on any number of ranks the result is that of the run that wrote the checkpoint,
//! and checkpoints that cannot be evaluated are refused before any rank starts.

use crate::common::{Run, Sandbox, TINY, TINY_MLP, json, mnist};

/// A model with running statistics, and test images that no number of ranks divides.
const FLAGS: &str = "--channels 4 8 --hidden 8 --samples 202 --batch-norm";

/// Runs `paceline evaluate` with these flags, which are separated by spaces.
fn evaluate(sandbox: &Sandbox, flags: &str) -> Run {
    sandbox.run(&format!("evaluate {flags}"))
}

#[test]
fn a_checkpoint_evaluates_as_the_run_that_wrote_it() {
    for optimizer in ["--momentum 0.9", "--optimizer adamw"] {
        let sandbox = Sandbox::new();
        let train = format!("{FLAGS} --nproc 2 --global-batch-size 25 --steps 11 {optimizer}");
        let trained = sandbox.train(&format!("{train} --evaluate --save saved")).ok();
        let num_runs = std::fs::read_dir(sandbox.path("runs")).unwrap().count();
        let mut files = Vec::new();
        for ranks in [
            "--nproc 1",
            "--nproc 2",
            "--nproc 3 --global-batch-size 7",
            "--nproc 2 --transport thread --batch-size 64",
            "--nproc 3 --transport tcp --threads 2",
        ] {
            let flags = format!("--checkpoint saved {FLAGS} {ranks} --json found.json");
            let rows = format!("{}.csv", files.len());
            let run = evaluate(&sandbox, &format!("{flags} --predictions {rows}")).ok();
            files.push(std::fs::read(sandbox.path(&rows)).unwrap());
            assert_eq!(files.first(), files.last(), "{ranks}");
            for line in ["Evaluation loss: ", "Evaluation accuracy: "] {
                assert_eq!(run.line(line), trained.line(line), "{optimizer} {ranks}");
            }
            assert_eq!(run.line("Checkpoint: "), "saved, after 11 steps");
            assert_eq!(run.stderr, "", "{ranks}");
            let found = json(&sandbox.path("found.json"));
            assert_eq!((&found["steps"], &found["samples"]), (&11.into(), &51.0.into()));
            let percent = 100.0 * found["accuracy"].as_f64().unwrap();
            assert_eq!(format!("{percent:.2}%"), trained.line("Evaluation accuracy: "));
        }
        assert_eq!(std::fs::read_dir(sandbox.path("runs")).unwrap().count(), num_runs);
    }
}

#[test]
fn ranks_of_another_launcher_evaluate_together() {
    let sandbox = Sandbox::new();
    let trained = sandbox.train(&format!("{FLAGS} --nproc 1 --evaluate --save saved")).ok();
    let program = env!("CARGO_BIN_EXE_paceline");
    let words = format!("launch -n 2 -- {program} evaluate --checkpoint saved {FLAGS}");
    let run = sandbox.run(&words).ok().without_ranks();
    assert_eq!(run.line("Evaluation loss: "), trained.line("Evaluation loss: "));
    assert_eq!(run.line("paceline evaluate: "), "cnn over shm, 2 ranks");
}

#[test]
fn only_the_test_part_of_the_data_is_needed() {
    let sandbox = Sandbox::new();
    for (name, bytes) in mnist() {
        sandbox.write(&format!("data/{name}"), &bytes);
    }
    let flags = "--data mnist --data-dir data --channels 4 --hidden 8";
    let trained =
        sandbox.train(&format!("{flags} --nproc 2 --steps 5 --evaluate --save saved")).ok();
    for name in ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"] {
        std::fs::remove_file(sandbox.path("data").join(name)).unwrap();
    }
    let run = evaluate(&sandbox, &format!("--checkpoint saved {flags}")).ok();
    assert_eq!(run.line("Evaluation loss: "), trained.line("Evaluation loss: "));
    std::fs::remove_file(sandbox.path("data/t10k-labels-idx1-ubyte")).unwrap();
    let missing = ["--data-dir", "found no t10k-labels-idx1-ubyte"];
    evaluate(&sandbox, &format!("--checkpoint saved {flags}")).refused(&missing);
}

#[test]
fn other_data_than_it_was_trained_on_is_warned_about_once() {
    let sandbox = Sandbox::new();
    sandbox.train(&format!("{TINY} --nproc 1 --seed 7 --save saved --steps 2")).ok();
    let run = evaluate(&sandbox, &format!("--checkpoint saved {TINY} --nproc 2")).ok();
    assert_eq!(run.stderr, "");
    let run = evaluate(&sandbox, &format!("--checkpoint saved {TINY} --nproc 2 --seed 42")).ok();
    assert_eq!(
        run.stderr,
        "warning: --seed: the checkpoint was trained with 7 and is evaluated with 42\n"
    );
}

#[test]
fn what_cannot_be_evaluated_is_refused() {
    let sandbox = Sandbox::new();
    sandbox.train(&format!("{TINY} --nproc 1 --save saved --steps 2 --momentum 0.9")).ok();
    let before = sandbox.contents();
    let refuse = |flags: &str, words: &[&str]| {
        evaluate(&sandbox, flags).refused(words);
        assert_eq!(sandbox.contents(), before, "{flags} wrote something");
    };
    let saved = |flags: &str| format!("--checkpoint saved --samples 200 {flags}");
    let wider = ["--checkpoint saved", "parameter conv0.weight", "[3, 3, 1, 4]", "[3, 3, 1, 5]"];
    refuse(&saved("--channels 5 --hidden 8"), &wider);
    let deeper = ["--checkpoint saved", "it has no parameter conv1.weight"];
    refuse(&saved("--channels 4 4 --hidden 8"), &deeper);
    let norm = ["--checkpoint saved", "it has no parameter bn0.weight"];
    refuse(&saved("--channels 4 --hidden 8 --batch-norm"), &norm);
    let named = ["--checkpoint saved", "--model cnn, this run has mlp", "pass the same --model"];
    refuse(&format!("--checkpoint saved {TINY_MLP}"), &named);
    refuse(&saved("--json nowhere/found.json"), &["--json nowhere/found.json", "does not exist"]);
}
