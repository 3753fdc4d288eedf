//! `--recipe NAME`: the recipes train, their runs are repeated from their configuration, and flags win over them.

mod common;

use std::fs;

use common::{Run, Sandbox, json, metrics};

#[test]
fn tiny_llama_learns_and_is_repeated_from_its_configuration() {
    let sandbox = Sandbox::new();
    let first =
        sandbox.train("--recipe tiny-llama --epochs 5 --save saved --json summary.json").ok();
    let losses = losses(&sandbox);
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let epoch = losses.len() / 5;
    let epochs: Vec<f64> = losses.chunks(epoch).map(mean).collect();
    assert!(epochs.len() == 5 && epochs[4] < 0.5 * epochs[0], "{epochs:?}");
    // Half of the reviews are good, so a guess is right half of the time.
    let summary = json(&sandbox.path("summary.json"));
    let accuracy = summary["eval_accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.8, "{accuracy}, {epochs:?}");

    // The configuration states the settings of the recipe, and the program that reads it needs no recipe.
    let file = sandbox.run_folder().join("config.json");
    let stated = &json(&file)["stated"];
    assert_eq!((&stated["data"], &stated["epochs"]), (&"reviews".into(), &5.into()), "{stated}");
    let other = Sandbox::new();
    let again = other.train(&format!("--config {}", file.display()));
    assert_eq!(again.ok().weights(), first.weights());

    // An evaluation takes what it needs from the recipe.
    let mut command = sandbox.paceline();
    command.args("evaluate --recipe tiny-llama --checkpoint saved --json found.json".split(' '));
    Run::of(command).ok();
    assert_eq!(json(&sandbox.path("found.json"))["accuracy"], accuracy);
}

#[test]
fn flags_win_over_a_recipe() {
    let sandbox = Sandbox::new();
    let run = sandbox.train("--recipe tiny-llama --steps 2 --lr 0.5 --evaluate=false").ok();
    let line_of = |setting: &str| {
        let file = include_str!("../recipes/tiny-llama.toml");
        1 + file.lines().position(|line| line == setting).unwrap()
    };
    for (flag, setting) in [("--lr 0.5", "lr = 0.001"), ("--steps 2", "epochs = 10")] {
        let place = format!("(recipes/tiny-llama.toml:{})", line_of(setting));
        let note = format!("{flag} takes the place of {setting} {place}");
        assert!(run.stderr.contains(&note), "{}\nlacks {note}", run.stderr);
    }
    assert_eq!(losses(&sandbox).len(), 2);
}

/// The loss of each step of the only run. Lines about checkpoints and evaluations are no steps.
fn losses(sandbox: &Sandbox) -> Vec<f64> {
    let lines = metrics(&sandbox.run_folder());
    lines.iter().filter_map(|line| line["loss"].as_f64()).collect()
}

/// Checks that flags are refused with all of `words`, before anything is written.
#[track_caller]
fn refused(sandbox: &Sandbox, flags: &str, words: &[&str]) {
    let before = sandbox.contents();
    sandbox.train(flags).refused(words);
    assert_eq!(sandbox.contents(), before, "{flags} wrote something");
}

#[test]
fn mistakes_are_refused() {
    let sandbox = Sandbox::new();
    sandbox.write("run.toml", b"epochs = 1\n");
    let known = ["'huge-llama'", "--recipe", "tiny-llama, smollm2-yelp"];
    refused(&sandbox, "--recipe huge-llama", &known);
    let both = ["--recipe", "--config", "cannot be used"];
    refused(&sandbox, "--recipe tiny-llama --config run.toml", &both);
    refused(&sandbox, "--data reviews", &["--model cnn trains on images", "texts"]);
    let next = ["--model llama predicts the next token", "--num-labels 2"];
    refused(&sandbox, "--data reviews --model llama", &next);
    let small = "--recipe tiny-llama --vocab 100";
    refused(&sandbox, small, &["integers below 394", "--model llama"]);
}

#[test]
fn smollm2_yelp_trains_on_the_users_files() {
    let sandbox = Sandbox::new();
    refused(&sandbox, "--recipe smollm2-yelp", &["--data text needs --data-dir"]);
    let rows = |len: usize| {
        let words = ["awful", "bad", "tea", "good", "great"];
        let row = |at: usize| format!("the {} place,{}\n", words[at % 5], at % 5);
        "text,label\n".to_owned() + &(0..len).map(row).collect::<String>()
    };
    sandbox.write("yelp/train.csv", rows(40).as_bytes());
    sandbox.write("yelp/test.csv", rows(20).as_bytes());
    let tokenizer = include_bytes!("../recipes/tiny-llama/tokenizer.json");
    sandbox.write("yelp/tokenizer.json", tokenizer);
    // The folder of the model takes the place of the size by name.
    let missing = "--recipe smollm2-yelp --data-dir yelp --pretrained nowhere";
    refused(&sandbox, missing, &["--pretrained nowhere/config.json: No such file"]);
    let sizes = "--layers 1 --width 16 --heads 4 --kv-heads 2 --intermediate 8 --vocab 394";
    sandbox.train(&format!("--recipe smollm2-yelp --data-dir yelp --epochs 1 {sizes}")).ok();
    // 32 rows in batches of 8.
    assert_eq!(losses(&sandbox).len(), 4);
    let config = fs::read_to_string(sandbox.run_folder().join("config.json")).unwrap();
    assert!(config.contains("\"smollm2-360m\""), "{config}");
}
