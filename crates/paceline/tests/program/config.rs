//! Configuration files: a run is repeated from its own file, flags win over files, and errors in a file
//! are reported with the line before any rank starts.

use crate::common::{Run, Sandbox, TINY, json};

/// Runs `paceline train` with this file and these flags.
fn train(sandbox: &Sandbox, file: &str, flags: &str) -> Run {
    sandbox.train(&format!("--config {file} {flags}"))
}

#[test]
fn a_run_is_repeated_from_its_configuration() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY} --nproc 2 --epochs 1 --lr 0.5 --strategy simple_ddp --batch-norm");
    let first = sandbox.train(&flags).ok();
    let file = sandbox.run_folder().join("config.json");
    let config = json(&file);
    assert_eq!(config["stated"]["channels"], serde_json::json!([4]));
    assert_eq!(config["stated"]["batch-norm"], true);
    assert!(config["stated"].get("seed").is_none(), "a default is not stated: {config}");
    assert_eq!(config["resolved"]["seed"], 42);
    let other = Sandbox::new();
    let again = train(&other, &file.display().to_string(), "").ok();
    assert_eq!(again.weights(), first.weights());
    // The second run has written the same settings.
    assert_eq!(json(&other.run_folder().join("config.json"))["stated"], config["stated"]);
}

#[test]
fn a_run_folder_does_not_say_where_another_run_writes() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY} --nproc 1 --steps 2 --save saved --json mine --run-dir there");
    let first = sandbox.train(&flags).ok();
    let (saved, summary) = (sandbox.checkpoint_index(), std::fs::read(sandbox.path("mine")));
    let folder = std::fs::read_dir(sandbox.path("there")).unwrap().next().unwrap().unwrap().path();
    let mut config = json(&folder.join("config.json"));
    for (key, value) in [
        ("init-method", "file:///mine"),
        ("profile-dir", "there"),
        ("mirror", "http://127.0.0.1:1"),
        ("token-cache", "there"),
        ("resume", "saved"),
    ] {
        config["stated"][key] = value.into();
    }
    config["stated"]["download"] = true.into();
    sandbox.write("given/config.json", config.to_string().as_bytes());
    let again = train(&sandbox, "given/config.json", "").ok();
    assert_eq!(again.weights(), first.weights());
    for key in ["save", "json", "run-dir", "init-method", "profile-dir", "mirror", "resume"] {
        let note = format!("{key} = {} (", config["stated"][key].as_str().unwrap());
        assert!(again.stderr.contains(&note), "no {note:?} in {}", again.stderr);
    }
    assert!(again.stderr.contains("pass --save if you want the same"), "{}", again.stderr);
    assert_eq!(std::fs::read(sandbox.path("mine")).unwrap(), summary.unwrap());
    assert_eq!(sandbox.checkpoint_index(), saved);
    assert_eq!(std::fs::read_dir(sandbox.path("there")).unwrap().count(), 1);
    config["stated"]["nproc"] = 1000.into();
    sandbox.write("many/config.json", config.to_string().as_bytes());
    train(&sandbox, "many/config.json", "").refused(&["nproc = 1000", "pass --nproc N"]);
    // What the user states counts.
    std::fs::remove_file(sandbox.path("mine")).unwrap();
    let again = train(&sandbox, "given/config.json", "--json mine").ok();
    assert!(!again.stderr.contains("pass --json"), "{}", again.stderr);
    assert_eq!(json(&sandbox.path("mine"))["world_size"], 1);
}

#[test]
fn the_mesh_of_a_run_is_in_its_configuration() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY} --nproc 2 --epochs 1");
    let plain = sandbox.train(&flags).ok();
    let config = json(&sandbox.run_folder().join("config.json"));
    assert_eq!(config["resolved"]["mesh"], "dp=2");
    assert!(config["stated"].get("mesh").is_none(), "{config}");
    let sandbox = Sandbox::new();
    let run = sandbox.train(&format!("{flags} --mesh dp=2")).ok();
    let file = sandbox.run_folder().join("config.json");
    assert_eq!(json(&file)["stated"]["mesh"], "dp=2");
    let other = Sandbox::new();
    let again = train(&other, &file.display().to_string(), "").ok();
    assert_eq!([run.weights(), again.weights()], [plain.weights(); 2]);
}

#[test]
fn defaults_follow_what_flags_change() {
    let sandbox = Sandbox::new();
    sandbox.write("run.toml", b"optimizer = \"sgd\"\nsamples = 200\nchannels = 4\nhidden = 8\n");
    train(&sandbox, "run.toml", "--optimizer adamw --epochs 1 --nproc 1").ok();
    let resolved = &json(&sandbox.run_folder().join("config.json"))["resolved"];
    assert_eq!(resolved["optimizer"]["lr"], 0.001);
}

#[test]
fn flags_win_and_the_run_says_so() {
    let sandbox = Sandbox::new();
    let file = "# a comment\nlr = 0.5\nbatch_size = 10\nbatch-norm = true\nsamples = 200\n\
                channels = [4]\nhidden = 8\nepochs = 1\n";
    sandbox.write("run.toml", file.as_bytes());
    let flags = "--lr 0.25 --global-batch-size 40 --batch-norm=false --nproc 2";
    let run = train(&sandbox, "run.toml", flags).ok();
    run.says(&[
        "--lr 0.25 takes the place of lr = 0.5 (run.toml:2)",
        "--global-batch-size 40 takes the place of batch-size = 10 (run.toml:3)",
        "--batch-norm false takes the place of batch-norm = true (run.toml:4)",
    ]);
    let config = json(&sandbox.run_folder().join("config.json"));
    assert_eq!(config["resolved"]["global_batch_size"], 40);
    assert_eq!(config["resolved"]["model"]["batch_norm"], false);
    // A flag with the value of the file changes nothing.
    let run = train(&sandbox, "run.toml", "--lr 0.5 --nproc 1").ok();
    assert!(!run.stderr.contains("takes the place"), "{}", run.stderr);
}

#[test]
fn another_choice_displaces_what_only_the_first_one_reads() {
    let sandbox = Sandbox::new();
    sandbox.write("run.toml", b"model = \"mlp\"\nhidden-dim = 8\nepochs = 1\n");
    let flags = format!("--model cnn {TINY} --nproc 1");
    let run = train(&sandbox, "run.toml", &flags).ok();
    let note = "hidden-dim = 8 (run.toml:2) is left out: it does not apply to --model cnn";
    assert!(run.stderr.contains(note), "{}", run.stderr);
    sandbox.write("data.toml", b"data = \"mnist\"\ndata-dir = \"nowhere\"\nepochs = 1\n");
    train(&sandbox, "data.toml", &format!("--synthetic {TINY} --nproc 1")).ok();
}

/// Checks that a file is refused with all of `words`, before anything is written.
#[track_caller]
fn refused(name: &str, text: &str, words: &[&str]) {
    let sandbox = Sandbox::new();
    sandbox.write(name, text.as_bytes());
    let before = sandbox.contents();
    train(&sandbox, name, "").refused(words);
    assert_eq!(sandbox.contents(), before, "{text} wrote something");
}

#[test]
fn what_is_wrong_is_said_with_its_line() {
    refused("a.toml", "lr = 0.1\nbatchsize = 4\n", &["a.toml:2", "batchsize", "batch-size"]);
    refused("a.json", "{\n \"epoch\": 4\n}\n", &["a.json:2", "epoch", "epochs"]);
    refused("a.toml", "\nepochs = \"three\"\n", &["a.toml:2", "\"three\"", "a number"]);
    refused("a.toml", "epochs = 1.5\n", &["a.toml:1", "epochs = 1.5", "invalid"]);
    refused("a.toml", "batch-norm = 1\n", &["a.toml:1", "batch-norm", "true"]);
    refused("a.toml", "seed = true\n", &["a.toml:1", "seed = true"]);
    refused("a.toml", "lr = [0.1, 0.2]\n", &["a.toml:1", "lr"]);
    refused("a.toml", "channels = []\n", &["a.toml:1", "at least one value"]);
    refused("a.toml", "[training]\nlr = 1\n", &["a.toml:1", "training", "a list"]);
    let strategies = ["a.toml:1", "'dpp'", "single, simple_ddp", "ddp"];
    refused("a.toml", "strategy = \"dpp\"\n", &strategies);
    let mesh = ["--mesh dp=2,shard=2", "does not know the axis shard"];
    refused("a.toml", "seed = 1\nmesh = \"dp=2,shard=2\"\nnproc = 4\n", &mesh);
    refused("a.toml", "lr = = 1\n", &["a.toml:1"]);
    refused("a.json", "{\"lr\": }", &["a.json:1"]);
    refused("a.json", "[1]", &["a.json:1", "a table"]);
    refused("a.json", "{\"version\": 9, \"stated\": {}}", &["a.json:1", "version 9", "version 1"]);
    refused("a.toml", "batch-size = 1\nglobal-batch-size = 2\n", &["a.toml", "cannot be used"]);
    refused("a.toml", "model = \"cnn\"\nhidden-dim = 2\n", &["hidden-dim", "--model cnn"]);
    Sandbox::new().train("--config missing.toml").refused(&["--config missing.toml", "No such"]);
}
