//! `--recipe NAME`: the recipes train, their runs are repeated from their configuration, and flags win over them.

use crate::common::{Sandbox, json, metrics};

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

    // An exported folder has the tokenizer, which is a part of the program.
    sandbox
        .run("checkpoint export saved --hugging-face --to folder")
        .ok()
        .line("Copied: tokenizer.json");
    let tokenizer = std::fs::read(sandbox.path("folder/tokenizer.json")).unwrap();
    assert_eq!(tokenizer, include_bytes!("../../../choices/reviews/tokenizer.json"));

    // An evaluation takes what it needs from the recipe.
    sandbox.run("evaluate --recipe tiny-llama --checkpoint saved --json found.json").ok();
    assert_eq!(json(&sandbox.path("found.json"))["accuracy"], accuracy);
}

#[test]
fn every_batch_has_a_line_with_its_times() {
    let flags = "--recipe tiny-llama --epochs 2 --accumulate 4 --warmup-steps 1";
    let run = Sandbox::new().train(&format!("{flags} --log-every 1 --verbose")).ok();
    // The 13 batches of an epoch are three steps of four batches, and a step of one.
    for (epoch, batch) in [1, 2].iter().flat_map(|epoch| [4, 8, 12, 13].map(|batch| (epoch, batch)))
    {
        let line = run.line(&format!("Epoch {epoch} Batch {batch} Loss: "));
        assert!(line.contains(", data ") && line.ends_with(" s"), "{line}");
    }
    assert!(run.line("Epoch 2/2: loss ").contains("; 13 batches, mean data "), "{}", run.stdout);
    assert!(run.line("Training: ").contains(" s, 26 batches, mean data "), "{}", run.stdout);
    let flops = run.line("Model FLOP/s: ");
    assert!(
        flops.contains(" G per rank, ") && flops.contains("% of the peak of 1 thread, "),
        "{flops}"
    );
    run.line("Evaluation accuracy: ");
    run.line("Rank 1 memory, MB: model ");
    let usual = Sandbox::new().train(flags).ok();
    assert!(!usual.stdout.contains("Training: "), "{}", usual.stdout);
    assert!(!usual.line("Epoch 1 Batch 12 Loss: ").contains("data"), "{}", usual.stdout);
    Sandbox::new().train("--log-every 0").refused(&["'--log-every <N>': pass 1 or more"]);
}

#[test]
fn flags_win_over_a_recipe() {
    let sandbox = Sandbox::new();
    let run = sandbox.train("--recipe tiny-llama --steps 2 --lr 0.5 --evaluate=false").ok();
    let line_of = |setting: &str| {
        let file = include_str!("../../../settings/recipes/tiny-llama.toml");
        1 + file.lines().position(|line| line == setting).unwrap()
    };
    for (flag, setting) in [("--lr 0.5", "lr = 0.001"), ("--steps 2", "epochs = 10")] {
        let place = format!("(recipes/tiny-llama.toml:{})", line_of(setting));
        let note = format!("{flag} takes the place of {setting} {place}");
        assert!(run.stderr.contains(&note), "{}\nlacks {note}", run.stderr);
    }
    // A size by name takes the place of all sizes of the recipe but those that other flags state.
    let sizes =
        "--recipe tiny-llama --steps 1 --llama-size tiny --width 32 --evaluate=false --quiet";
    let sized = Sandbox::new().train(sizes).ok();
    for (flag, setting) in [("--llama-size tiny", "layers = 2"), ("--width 32", "width = 64")] {
        let note = format!("{flag} takes the place of {setting} (");
        assert!(sized.stderr.contains(&note), "{}\nlacks {note}", sized.stderr);
    }
    // One line says so, and not one for each flag.
    assert_eq!(run.stderr.matches("warning: ").count(), 1, "{}", run.stderr);
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
fn smollm2_yelp_trains_on_the_users_files() {
    let sandbox = Sandbox::new();
    let unfetched = ["--pretrained", "paceline fetch model HuggingFaceTB/SmolLM2-360M-Instruct"];
    refused(&sandbox, "--recipe smollm2-yelp", &unfetched);
    let rows = |len: usize| {
        let words = ["awful", "bad", "tea", "good", "great"];
        let row = |at: usize| format!("the {} place,{}\n", words[at % 5], at % 5);
        "text,label\n".to_owned() + &(0..len).map(row).collect::<String>()
    };
    sandbox.write("yelp/train.csv", rows(40).as_bytes());
    sandbox.write("yelp/test.csv", rows(20).as_bytes());
    let tokenizer = include_bytes!("../../../choices/reviews/tokenizer.json");
    sandbox.write("yelp/tokenizer.json", tokenizer);
    // Random weights at full size need no fetched model.
    let full = "--recipe smollm2-yelp --init random --data-dir yelp";
    let model = "--model llama --pretrained HuggingFaceTB/SmolLM2-360M-Instruct --init random --num-labels 5";
    let data = "--data text --data-dir yelp --max-length 8192";
    let plan = "plan --on 1xL4 --top 1 --batch-size 1 --precision f32 --json plan.json";
    sandbox.run(&format!("{plan} {model} {data}")).ok();
    assert_eq!(json(&sandbox.path("plan.json"))["params"], 361_825_920);
    refused(&sandbox, &format!("{full} --layers 2"), &["--layers: the folder of --pretrained"]);
    let unknown = "--recipe smollm2-yelp --init random --pretrained a/b";
    refused(&sandbox, unknown, &["--pretrained a/b", "paceline fetch model a/b"]);
    let another = "HuggingFaceTB/SmolLM2-360M-Instruct@v2";
    let another = format!("--recipe smollm2-yelp --init random --pretrained {another}");
    refused(&sandbox, &another, &["--pretrained", "@v2: there is nothing at this path"]);

    // A folder takes the place of the name.
    let missing = "--recipe smollm2-yelp --data-dir yelp --pretrained nowhere";
    refused(&sandbox, missing, &["--pretrained nowhere/config.json: No such file"]);
    let sizes = "--layers 1 --width 16 --heads 4 --kv-heads 2 --intermediate 8 --vocab 394";
    let random = format!("--recipe smollm2-yelp --llama-size tiny {sizes}");
    let unfetched =
        ["--data-dir Yelp/yelp_review_full", "paceline fetch data Yelp/yelp_review_full"];
    refused(&sandbox, &random, &unfetched);
    sandbox.train(&format!("{random} --data-dir yelp --epochs 1")).ok();
    // 32 rows in batches of 8.
    assert_eq!(losses(&sandbox).len(), 4);
    // A size takes the place of the model by name.
    let stated = &json(&sandbox.run_folder().join("config.json"))["stated"];
    assert_eq!(
        (&stated["llama-size"], stated.get("pretrained")),
        (&"tiny".into(), None),
        "{stated}"
    );
}
