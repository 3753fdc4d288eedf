//! The examples are programs with a choice of their own. They are the whole command line of paceline, in several processes
//! too.

use std::fs;
use std::path::{Path, PathBuf};

use paceline_emulated_card::for_tests::variable;

use crate::common::{Run, Sandbox, TINY, accuracy, json};

/// Runs an example with these arguments, which are separated by spaces.
#[track_caller]
fn run(sandbox: &Sandbox, example: &str, args: &str) -> Run {
    let mut command = sandbox.command(&path(example));
    command.args(args.split_whitespace());
    Run::of(command)
}

/// The executable of an example, which Cargo puts beside the folder of the tests' executables.
#[track_caller]
fn path(example: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().parent().unwrap().join("examples").join(example);
    let advice =
        "`cargo build -p paceline --examples` builds it, and so does `cargo test -p paceline`";
    assert!(path.is_file(), "there is no {}: {advice}", path.display());
    path
}

/// Both ranks end with the same weights.
#[test]
fn a_loop_of_ones_own_learns() {
    let run = run(&Sandbox::new(), "own_loop", "").ok();
    let ends: Vec<&str> = run.stdout.lines().filter(|line| line.starts_with("rank ")).collect();
    let [first, second] = ends[..] else { panic!("{run:#?}") };
    assert_eq!(first.split_once(':').unwrap().1, second.split_once(':').unwrap().1);
    let accuracy: f64 = first.split([' ', ',']).nth(3).unwrap().parse().unwrap();
    // By guessing it would reach 0.5.
    assert!(accuracy > 0.95, "{run:#?}");
}

const MODEL: &str = "--model powers --hidden-width 32 --nproc 2";

#[test]
fn a_model_learns_in_two_processes() {
    let sandbox = Sandbox::new();
    let flags = format!("train {MODEL} --transport shm --samples 2000 --evaluate");
    let ended = run(&sandbox, "own_model", &flags).ok();
    assert!(ended.stdout.contains("powers, ddp over shm, 2 ranks x 1 thread"), "{}", ended.stdout);
    // By guessing it would reach 10 %.
    assert!(accuracy(&ended) > 90.0, "{}", ended.stdout);
    let config = &json(&sandbox.run_folder().join("config.json"))["resolved"]["model"];
    let expected = serde_json::json!({
        "freeze": [], "hidden_width": 32, "name": "powers", "power": 2
    });
    assert_eq!(*config, expected);
}

/// A layer from a function runs on a card if the function is stated for cards too, and is refused otherwise.
#[test]
fn a_function_runs_on_a_card_if_it_has_a_text_for_cards() {
    let Some(found) = variable() else { return };
    let run = |example: &str, flags: &str| {
        let sandbox = Sandbox::new();
        let mut command = sandbox.command(&path(example));
        command.env("PACELINE_CUDA_LIBRARIES", &found).args(["train", "--device", "cuda"]);
        command.args(flags.split_whitespace());
        Run::of(command)
    };
    let few = "--batch-size 4 --steps 3 --image 6 6 1";
    let on_card = run("own_model", &format!("{MODEL} {few}")).ok();
    assert!(on_card.stdout.contains("powers"), "{}", on_card.stdout);
    run("template", "--model scaled_net --data circle --nproc 2")
        .refused(&["--device cuda: scale has no kernel for cards", "pass --device cpu"]);
}

#[test]
fn a_model_goes_on_from_a_checkpoint_with_the_same_flags_only() {
    let sandbox = Sandbox::new();
    let flags = format!("{MODEL} --samples 400");
    let whole = run(&sandbox, "own_model", &format!("train {flags} --steps 8")).ok();
    run(&sandbox, "own_model", &format!("train {flags} --steps 4 --save saved")).ok();
    // No parameter shows this power.
    let other = format!("train {flags} --power 3 --steps 8 --resume saved");
    let words = ["--resume saved", "written with --power 2", "this run has 3", "another model"];
    run(&sandbox, "own_model", &other).refused(&words);
    let rest = run(&sandbox, "own_model", &format!("train {flags} --steps 8 --resume saved")).ok();
    assert_eq!(rest.weights(), whole.weights());
    let evaluated =
        run(&sandbox, "own_model", &format!("evaluate --checkpoint saved {flags}")).ok();
    assert_eq!(evaluated.line("Checkpoint: "), "saved, after 4 steps");
}

#[test]
fn a_layer_with_parameters_trains_alike_on_any_ranks() {
    let sandbox = Sandbox::new();
    let flags =
        "train --model scaled --scaled-width 32 --optimizer adamw --samples 1920 --batch-size 16";
    let train = |more: &str| run(&sandbox, "own_layer", &format!("{flags} {more}")).ok();
    let tree = "--accumulation-order tree --accumulate";
    let one = train(&format!("--nproc 1 {tree} 2 --evaluate --epochs 1"));
    let two = train("--nproc 2 --evaluate --epochs 1");
    assert_eq!(one.weights(), two.weights());
    assert!(accuracy(&two) > 90.0, "{}", two.stdout);
    train("--nproc 2 --precision bf16 --steps 4 --strategy sharded3");
    train("--nproc 2 --find-unused-parameters --steps 4");
}

#[test]
fn the_name_of_a_model_and_its_flags_are_known_everywhere() {
    let sandbox = Sandbox::new();
    let help = run(&sandbox, "own_model", "train --help").ok().stdout;
    for words in [
        "--model powers",
        "One hidden layer",
        "--hidden-width N",
        "Powers: width of the hidden layer",
    ] {
        assert!(help.contains(words), "no {words:?} in: {help}");
    }
    let refused = |args: &str, words: &[&str]| {
        run(&sandbox, "own_model", args).refused(words);
    };
    refused("train --model power", &["possible values: cnn, mlp, llama, powers"]);
    refused(
        "train --hidden-width 8",
        &["--hidden-width does not apply to --model cnn", "--model powers"],
    );
    refused("train --model powers --hidden 8", &["--hidden does not apply to --model powers"]);
    let empty = ["hidden.weight of powers has no elements", "choose other --hidden-width, --power"];
    refused("train --model powers --hidden-width 0", &empty);
    sandbox.write("run.toml", b"model = \"powers\"\nhidden-widht = 8\n");
    refused(
        "train --config run.toml",
        &["run.toml:2", "no key hidden-widht", "nearest key is hidden-width"],
    );
    refused("train --model powers --freeze fc0", &["--freeze", "there are hidden, head"]);
    let predict = "predict --model powers --hidden-width 16 --rounds 1";
    let predicted = run(&sandbox, "own_model", predict).ok();
    // 784 x 16 + 16 and 16 x 10 + 10.
    assert!(predicted.stdout.contains("12,730"), "{}", predicted.stdout);
}

#[test]
fn a_data_set_teaches_a_model_of_paceline() {
    let sandbox = Sandbox::new();
    let flags = "--data waves --channels 8 --hidden 32 --optimizer adamw --nproc 2 --evaluate";
    let ended = run(&sandbox, "own_dataset", &format!("train {flags}")).ok();
    // By guessing it would reach 25 %.
    assert!(accuracy(&ended) > 90.0, "{}", ended.stdout);
    assert_eq!(ended.line("Evaluation loss: ").split_once("over ").unwrap().1, "500 samples");
    let help = run(&sandbox, "own_dataset", "train --help").ok().stdout;
    assert!(help.contains("--data waves             Noisy waves"), "{help}");
    let refused = |args: &str, words: &[&str]| {
        run(&sandbox, "own_dataset", &format!("train {args}")).refused(words);
    };
    refused(
        "--data wave",
        &["possible values: synthetic, mnist, cifar10, text, reviews, images, csv, npy, waves"],
    );
    refused("--data waves --samples 9", &["--samples does not apply to --data waves"]);
    refused("--data waves --images 0", &["--data waves", "has no samples"]);
    let mlp = ["--data waves has inputs of [16, 16, 1]", "--model mlp trains on vectors of 4096"];
    refused("--data waves --model mlp", &mlp);
}

#[test]
fn a_data_set_is_a_part_of_a_checkpoint() {
    let sandbox = Sandbox::new();
    let flags = "train --data waves --channels 4 --hidden 8 --images 200 --nproc 2";
    run(&sandbox, "own_dataset", &format!("{flags} --steps 2 --save saved")).ok();
    let refused = |more: &str, words: &[&str]| {
        let args = format!("{flags} --steps 4 --resume saved {more}");
        run(&sandbox, "own_dataset", &args).refused(words);
    };
    refused("--noise 2", &["--noise 1", "this run has 2", "another order"]);
    refused("--seed 7", &["--seed 42", "this run has 7"]);
    run(&sandbox, "own_dataset", &format!("{flags} --steps 4 --resume saved")).ok();
}

#[test]
fn a_strategy_ends_with_the_weights_of_ddp() {
    let sandbox = Sandbox::new();
    let train = |flags: &str| {
        run(&sandbox, "own_strategy", &format!("train {TINY} --epochs 1 {flags}")).ok()
    };
    let ddp = train("--nproc 2 --strategy ddp");
    for flags in ["", "--late 0", "--late 100", "--transport thread", "--transport tcp"] {
        let own = train(&format!("--nproc 2 --strategy two_pieces {flags}"));
        assert!(own.stdout.contains("cnn, two_pieces over "), "{}", own.stdout);
        assert_eq!(own.weights(), ddp.weights(), "{flags}");
    }
    let three = "--nproc 3 --global-batch-size 30 --accumulate 2 --clip-grad-norm 0.5";
    let [ddp, own] = ["ddp", "two_pieces"].map(|name| train(&format!("{three} --strategy {name}")));
    assert_eq!(own.weights(), ddp.weights());
}

#[test]
fn a_strategy_is_swept_and_compared_like_any_other() {
    let sandbox = Sandbox::new();
    let help = run(&sandbox, "own_strategy", "train --help").ok().stdout;
    assert!(help.contains("Two all-reduces, one of them during backward"), "{help}");
    run(&sandbox, "own_strategy", "train --strategy pieces").refused(&["no_sync, two_pieces"]);
    let sweep = format!("sweep --vary late=0,50 --rounds 1 --output swept {TINY}");
    let sweep = format!("{sweep} --strategy two_pieces --nproc 2 --steps 8");
    let swept = run(&sandbox, "own_strategy", &sweep).ok();
    assert!(swept.stdout.contains("late"), "{}", swept.stdout);
    let all = format!("train --ddp-choice all --nproc 2 {TINY} --epochs 1 --steps-per-epoch 3");
    let compared = run(&sandbox, "own_strategy", &format!("{all} --warmup-steps 1")).ok();
    let line = compared.stdout.lines().find(|line| line.starts_with("two_pieces"));
    assert!(line.is_some(), "{}", compared.stdout);
}

#[test]
fn the_project_of_paceline_new_trains_alike_with_any_strategy() {
    let sandbox = Sandbox::new();
    let flags =
        "train --model scaled_net --data circle --lr 0.1 --momentum 0.9 --evaluate --nproc 2";
    let train = |strategy: &str| {
        run(&sandbox, "template", &format!("{flags} --epochs 4 --strategy {strategy}")).ok()
    };
    let ddp = train("ddp");
    // By guessing it would reach 50 %.
    assert!(accuracy(&ddp) > 90.0, "{}", ddp.stdout);
    for strategy in ["sharded3", "one_reduce"] {
        assert_eq!(train(strategy).weights(), ddp.weights(), "{strategy}");
    }
    let accumulated = run(&sandbox, "template", &format!("{flags} --accumulate 2 --steps 4"));
    accumulated.ok();
    let help = run(&sandbox, "template", "train --help").ok().stdout;
    for words in ["--model scaled_net", "--data circle", "--strategy one_reduce", "--net-width"] {
        assert!(help.contains(words), "no {words:?} in: {help}");
    }
}

/// The pages of the documentation show the examples as they are.
#[test]
fn the_documentation_shows_code_of_the_examples() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("../../docs/extending.md")).unwrap();
    let (begin, end) = ("## A loop of your own", "## Inside the repository");
    let part = page.split(begin).nth(1).unwrap().split(end).next().unwrap();
    let blocks: Vec<&str> =
        part.split("```rust\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert_eq!(blocks.len(), 12, "{blocks:#?}");
    let examples =
        ["own_loop", "own_model", "own_layer", "own_dataset", "own_strategy"].map(|name| {
            let text = fs::read_to_string(root.join(format!("examples/{name}.rs"))).unwrap();
            assert!(text.lines().count() < 100, "{name} is to be read in one go");
            text
        });
    for block in blocks {
        let is_shown = examples.iter().any(|example| example.contains(block));
        assert!(is_shown, "no example has this code of docs/extending.md:\n{block}");
    }
}

/// What a program needs is explained on one page.
#[test]
fn the_documentation_has_every_name_of_the_prelude() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("../../docs/extending.md")).unwrap();
    let (_, rest) = page.split_once("## The prelude\n").unwrap();
    let part = rest.split("\n## ").next().unwrap();
    let prelude = fs::read_to_string(root.join("src/prelude.rs")).unwrap();
    let uses = prelude.split("pub use ").skip(1).map(|rest| rest.split(';').next().unwrap());
    let names: Vec<&str> = uses
        .flat_map(|path| match path.split_once('{') {
            Some((_, list)) => list.trim_end_matches('}').split(',').map(str::trim).collect(),
            None => vec![path.rsplit([':', ' ']).next().unwrap()],
        })
        .filter(|name| !name.is_empty())
        .collect();
    assert!(names.len() > 40, "{names:?}");
    for name in names {
        assert!(part.contains(&format!("`{name}`")), "{name} is not explained");
    }
}
