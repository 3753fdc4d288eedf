//! `paceline fetch` from a server that answers as the Hugging Face Hub does, and the names that training and generation
//! find afterwards.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::common::pty::Terminal;
use crate::common::{Run, Running, Sandbox, gzip, mnist, pretrained};
use crate::hub::{COMMIT, Hub, Repo, digest};
use serde_json::json;

const MODEL: &str = "HuggingFaceTB/SmolLM2-360M-Instruct";
const DATA: &str = "Yelp/yelp_review_full";
/// The folder of the model in the cache.
const FOLDER: &str = "hf/hub/models--HuggingFaceTB--SmolLM2-360M-Instruct";

/// The settings and the weights of a small Llama with the vocabulary of the recipe `tiny-llama`.
fn files() -> (String, Vec<u8>) {
    pretrained::files(|config, tensors| {
        config["vocab_size"] = json!(394);
        config["max_position_embeddings"] = json!(8192);
        tensors[0].1[0] = 394;
    })
}

fn weights() -> Vec<u8> {
    files().1
}

fn model() -> Repo {
    let (config, weights) = files();
    let tokenizer = include_bytes!("../../../choices/reviews/tokenizer.json");
    Repo {
        path: "models/HuggingFaceTB/SmolLM2-360M-Instruct",
        files: vec![
            (".gitattributes", b"*.bin filter=lfs".to_vec()),
            ("README.md", b"# A model".to_vec()),
            ("config.json", config.into()),
            ("generation_config.json", b"{\"eos_token_id\": 2}".to_vec()),
            ("model.safetensors", weights),
            ("onnx/model.safetensors", b"another".to_vec()),
            ("pytorch_model.bin", b"the same weights once more".to_vec()),
            ("tokenizer.json", tokenizer.to_vec()),
        ],
    }
}

fn data() -> Repo {
    let rows = |len: usize| -> Vec<u8> {
        let words = ["awful", "bad", "tea", "good", "great"];
        let row = |at: usize| format!("the {} place,{}\n", words[at % 5], at % 5);
        ("text,label\n".to_owned() + &(0..len).map(row).collect::<String>()).into()
    };
    Repo {
        path: "datasets/Yelp/yelp_review_full",
        files: vec![
            ("README.md", b"# Reviews".to_vec()),
            ("dataset_infos.json", b"{}".to_vec()),
            ("yelp_review_full/test-00000-of-00001.csv", rows(20)),
            ("yelp_review_full/train-00000-of-00001.csv", rows(40)),
        ],
    }
}

fn command(sandbox: &Sandbox, hub: &Hub, words: &str) -> Command {
    let mut command = sandbox.given(words);
    command.env("HF_ENDPOINT", &hub.address);
    command
}

fn fetch(sandbox: &Sandbox, hub: &Hub, words: &str) -> Run {
    Run::of(command(sandbox, hub, &format!("fetch {words}")))
}

/// Where the blob of a file of the model is.
fn blob(sandbox: &Sandbox, path: &str) -> PathBuf {
    let repo = model();
    let (_, bytes) = repo.files.iter().find(|(known, _)| *known == path).unwrap();
    sandbox.path(&format!("{FOLDER}/blobs/{}", digest(path, bytes)))
}

fn incomplete(sandbox: &Sandbox) -> PathBuf {
    blob(sandbox, "model.safetensors").with_extension("incomplete")
}

#[test]
fn the_bar_of_a_fetch_fits_and_goes_away() {
    let (sandbox, hub) = (Sandbox::new(), Hub::with(vec![model()]));
    let words = format!("fetch model {MODEL}");
    let ended = Terminal::start(command(&sandbox, &hub, &words), 60).end();
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let is_bar = |line: &&str| line.contains("model.safetensors [");
    let drawn: Vec<&str> = ended.bytes.split(['\r', '\n']).filter(is_bar).collect();
    let num_mb = weights().len() as f64 / 1e6;
    assert!(drawn.iter().any(|bar| bar.contains(&format!("/{num_mb:.1} MB"))), "{ended:#?}");
    assert!(drawn.iter().all(|bar| bar.trim_start_matches("\u{1b}[J").chars().count() < 60));
    assert!(!ended.lines.iter().any(|line| line.contains('[')), "debris in {ended:#?}");
}

#[test]
fn a_model_lies_in_the_cache_as_huggingface_hub_has_it_and_is_fetched_once() {
    let (sandbox, hub) = (Sandbox::new(), Hub::with(vec![model()]));
    let run = fetch(&sandbox, &hub, &format!("model {MODEL}")).ok();
    let snapshot = sandbox.path(FOLDER).join("snapshots").join(COMMIT);
    run.prints(&[
        &format!("{}\n", snapshot.display()),
        &format!("{MODEL}, commit {COMMIT}: 4 files, "),
    ]);
    assert!(run.stdout.contains(&format!("train --model llama --pretrained {MODEL}")));
    assert!(run.stderr.contains("fetching model.safetensors, "), "{}", run.stderr);

    let mut expected = BTreeSet::new();
    let locks = FOLDER.replace("hub/", "hub/.locks/");
    for (path, bytes) in model().files {
        let link = snapshot.join(path);
        if !["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
            .contains(&path)
        {
            assert!(!link.exists(), "{path} is not needed");
            continue;
        }
        let digest = digest(path, &bytes);
        assert_eq!(fs::read_link(&link).unwrap(), PathBuf::from(format!("../../blobs/{digest}")));
        assert_eq!(fs::read(&link).unwrap(), bytes, "{path}");
        expected.insert(format!("{FOLDER}/snapshots/{COMMIT}/{path}"));
        expected.insert(format!("{FOLDER}/blobs/{digest}"));
        expected.insert(format!("{locks}/{digest}.lock"));
    }
    expected.insert(format!("{FOLDER}/refs/main"));
    expected.insert("hf/hub/CACHEDIR.TAG".into());
    let is_file = |name: &String| sandbox.path(name).is_file();
    assert_eq!(BTreeSet::from_iter(sandbox.contents().into_iter().filter(is_file)), expected);
    // Without a line break, which `huggingface_hub` would take for a part of the commit.
    assert_eq!(fs::read_to_string(sandbox.path(&format!("{FOLDER}/refs/main"))).unwrap(), COMMIT);
    let tag = fs::read_to_string(sandbox.path("hf/hub/CACHEDIR.TAG")).unwrap();
    assert!(tag.starts_with("Signature: 8a477f597d28d172789f06886806bc55"));

    // The list, two requests for the weights, and one for each other file.
    assert_eq!(hub.requests().len(), 1 + 2 + 3);
    let again = fetch(&sandbox, &hub, "model smollm2-360m --revision main --quiet").ok();
    assert_eq!(again.stdout, format!("{}\n", snapshot.display()));
    assert_eq!(again.stderr, "");
    let requests = hub.requests();
    assert_eq!(requests.len(), 1);
    assert_eq!(requests[0].path, format!("/api/models/{MODEL}/revision/main?blobs=true"));
    // A commit needs no reference.
    fetch(&sandbox, &hub, &format!("model {MODEL}@{COMMIT}")).ok();
    assert!(!sandbox.path(&format!("{FOLDER}/refs/{COMMIT}")).exists());
}

#[test]
fn models_in_several_files_are_fetched_with_their_index() {
    let mut repo = model();
    repo.files.retain(|(path, _)| *path != "model.safetensors");
    // Parts may have any names that the index states.
    for path in ["layers.safetensors", "model-00002-of-00002.safetensors"] {
        repo.files.push((path, path.into()));
    }
    repo.files.push(("consolidated.safetensors", b"all once more".to_vec()));
    repo.files.push(("model-of-an-earlier-state.safetensors", b"another".to_vec()));
    let (index, count) = ("model.safetensors.index.json", repo.files.len());
    repo.files.push((index, Vec::new()));
    let (sandbox, hub) = (Sandbox::new(), Hub::with(vec![repo]));
    let refuse = |text: &str, words: &[&str]| {
        hub.contents().repos[0].files[count].1 = text.into();
        fetch(&sandbox, &hub, &format!("model {MODEL}")).refused(words);
        assert!(!sandbox.path(&format!("{FOLDER}/refs")).exists());
    };
    refuse("{}", &["its model.safetensors.index.json is no index of weights"]);
    let missing = r#"{"weight_map": {"a": "layers.safetensors", "b": "gone.safetensors"}}"#;
    refuse(
        missing,
        &["its model.safetensors.index.json names gone.safetensors, which it does not"],
    );
    let outside = r#"{"weight_map": {"a": "../layers.safetensors"}}"#;
    refuse(outside, &["a lies in \"../layers.safetensors\", which is no name of a file"]);
    let whole = r#"{"weight_map": {
        "a": "layers.safetensors", "b": "model-00002-of-00002.safetensors", "c": "layers.safetensors"}}"#;
    hub.contents().repos[0].files[count].1 = whole.into();
    fetch(&sandbox, &hub, &format!("model {MODEL}")).ok();
    let snapshot = sandbox.path(FOLDER).join("snapshots").join(COMMIT);
    let expected = [
        "config.json",
        "generation_config.json",
        "layers.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ];
    assert_eq!(sandbox.names(snapshot.to_str().unwrap()), expected);

    // A snapshot may lack parts: other programs fetch single files.
    let offline = || {
        let mut command = command(&sandbox, &hub, &format!("fetch model {MODEL}"));
        command.env("HF_HUB_OFFLINE", "1");
        Run::of(command)
    };
    assert!(offline().ok().stderr.contains("warning: HF_HUB_OFFLINE is set"));
    let refuse = |lacks: &str| {
        offline().refused(&["HF_HUB_OFFLINE is set", "Without a network"]);
        let train = sandbox.train(&format!("--model llama --pretrained {MODEL}"));
        let lacks = format!("which lacks {lacks}; run `paceline fetch model {MODEL}`");
        train.refused(&["has a part of it only", &lacks]);
    };
    fs::remove_file(snapshot.join("layers.safetensors")).unwrap();
    refuse("layers.safetensors");
    fs::remove_file(snapshot.join(index)).unwrap();
    fs::write(snapshot.join(index), "{}").unwrap();
    refuse("a model.safetensors.index.json that can be read");
    fs::remove_file(snapshot.join(index)).unwrap();
    refuse("model.safetensors");
}

#[test]
fn random_weights_need_the_settings_of_a_model_only() {
    let (sandbox, hub) = (Sandbox::new(), Hub::with(vec![model(), data()]));
    fetch(&sandbox, &hub, &format!("model {MODEL}")).ok();
    fetch(&sandbox, &hub, "data yelp").ok();
    fs::remove_file(sandbox.path(&format!("{FOLDER}/snapshots/{COMMIT}/model.safetensors")))
        .unwrap();
    let lacks = ["has a part of it only", "lacks model.safetensors"];
    sandbox.train("--recipe smollm2-yelp").refused(&lacks);
    let run = sandbox.train("--recipe smollm2-yelp --epochs 1 --init random").ok();
    assert!(run.stderr.contains(&format!("--pretrained {MODEL}: ")), "{}", run.stderr);
    assert!(!run.stderr.contains("known sizes"), "{}", run.stderr);
    assert_eq!(sandbox.summary()["params"], 3760);
}

/// Two hosts may have fetched at different times.
#[test]
fn ranks_that_find_other_commits_for_a_name_end_the_run() {
    let (sandbox, hub) = (Sandbox::new(), Hub::with(vec![model(), data()]));
    fetch(&sandbox, &hub, &format!("model {MODEL}")).ok();
    fetch(&sandbox, &hub, "data yelp").ok();
    let other = COMMIT.replace('0', "f");
    let cache =
        Command::new("cp").arg("-r").arg(sandbox.path("hf")).arg(sandbox.path("hf1")).status();
    assert!(cache.unwrap().success());
    let folder = sandbox.path(&FOLDER.replace("hf/", "hf1/"));
    fs::rename(folder.join("snapshots").join(COMMIT), folder.join("snapshots").join(&other))
        .unwrap();
    fs::write(folder.join("refs/main"), &other).unwrap();
    let rank = |rank: &str, home: &str| {
        let model = format!("--model llama --pretrained {MODEL} --num-labels 5");
        let data = format!("--data text --data-dir {DATA} --max-length 20 --epochs 1");
        let mut command = command(&sandbox, &hub, &format!("train {model} {data}"));
        command.arg("--init-method").arg(format!("file://{}", sandbox.path("meet").display()));
        command.envs([("RANK", rank), ("WORLD_SIZE", "2")]);
        command.env("HF_HOME", sandbox.path(home));
        Running::start(command)
    };
    let (first, second) = (rank("0", "hf"), rank("1", "hf1"));
    let (first, second) = (first.end(), second.end());
    let expected =
        format!("different settings: --pretrained is {MODEL} (commit {COMMIT}) on rank 0 ");
    let there = format!(" and {MODEL} (commit {other}) on rank 1 ");
    assert_eq!((first.code, second.code), (Some(2), Some(3)), "{first:#?} {second:#?}");
    first.says(&[&*expected, &there, "; fetch the same revision on all hosts, or state a commit"]);
}

#[test]
fn a_broken_connection_is_replaced_and_only_the_rest_is_sent() {
    let (sandbox, hub) = (Sandbox::new(), Hub::with(vec![model()]));
    let len = weights().len();
    hub.contents().cuts = [5000].into();
    fetch(&sandbox, &hub, &format!("model {MODEL}")).ok();
    let requests = hub.large_requests();
    let sent: Vec<usize> = requests.iter().map(|request| request.num_sent).collect();
    assert_eq!(sent, [5000, len - 5000]);
    assert_eq!(requests[1].range.as_deref(), Some("bytes=5000-"));
    assert_eq!(fs::read(blob(&sandbox, "model.safetensors")).unwrap(), weights());
}

#[test]
fn a_command_that_was_broken_off_is_resumed_by_the_next_one() {
    let (sandbox, hub) = (Sandbox::new(), Hub::with(vec![model()]));
    let len = weights().len();
    hub.contents().cuts = [3000, 4000, 0].into();
    let words = ["ends after 7000 of", "run the same command again, and it fetches the rest"];
    fetch(&sandbox, &hub, &format!("model {MODEL}")).refused(&words);
    assert_eq!(fs::read(incomplete(&sandbox)).unwrap(), weights()[..7000]);
    // An incomplete snapshot is not found, neither by branch nor by commit.
    assert!(!sandbox.path(&format!("{FOLDER}/refs")).exists());
    let missing =
        ["--pretrained", "no complete revision main", &format!("paceline fetch model {MODEL}")];
    sandbox.train(&format!("--model llama --pretrained {MODEL}")).refused(&missing);
    hub.contents().cuts = [0].into();
    fetch(&sandbox, &hub, &format!("model {MODEL}@{COMMIT}")).refused(&["ends after 7000 of"]);
    assert!(!sandbox.path(&format!("{FOLDER}/snapshots")).exists());
    hub.requests();

    let run = fetch(&sandbox, &hub, &format!("model {MODEL}")).ok();
    assert!(run.stderr.contains(&format!("{len} bytes, from byte 7000 on")), "{}", run.stderr);
    let requests = hub.large_requests();
    assert_eq!((requests.len(), requests[0].num_sent), (1, len - 7000));
    assert_eq!(fs::read(blob(&sandbox, "model.safetensors")).unwrap(), weights());
    assert!(!incomplete(&sandbox).exists());
}

#[test]
fn servers_without_parts_of_files_send_the_whole_file_again() {
    let (sandbox, hub) = (Sandbox::new(), Hub::with(vec![model()]));
    hub.contents().cuts = [5000].into();
    hub.contents().knows_no_ranges = true;
    fetch(&sandbox, &hub, &format!("model {MODEL}")).ok();
    let requests = hub.large_requests();
    assert_eq!(requests[1].range.as_deref(), Some("bytes=5000-"));
    assert_eq!(requests[1].num_sent, weights().len());
    assert_eq!(fs::read(blob(&sandbox, "model.safetensors")).unwrap(), weights());
    // A server that always breaks at the same place is not asked for ever.
    hub.contents().cuts = [5000; 10].into();
    let stuck = Sandbox::new();
    fetch(&stuck, &hub, &format!("model {MODEL}")).refused(&["ends after 5000 of"]);
    assert_eq!(hub.large_requests().len(), 2);
}

#[test]
fn files_with_another_digest_are_removed() {
    let (sandbox, hub) = (Sandbox::new(), Hub::with(vec![model()]));
    let blob = blob(&sandbox, "model.safetensors");
    let refuse = || {
        let words = ["model.safetensors is not the file that", "its digest is", "try again"];
        fetch(&sandbox, &hub, &format!("model {MODEL}")).refused(&words);
        assert!(!blob.exists() && !incomplete(&sandbox).exists());
        assert!(!sandbox.path(&format!("{FOLDER}/refs")).exists());
        assert!(!sandbox.path(&format!("{FOLDER}/snapshots/{COMMIT}/model.safetensors")).exists());
    };
    hub.contents().lies = true;
    refuse();
    hub.contents().lies = false;
    // The beginning was damaged on this machine.
    fs::write(incomplete(&sandbox), [7; 100]).unwrap();
    refuse();
    // A part longer than the file is useless.
    fs::write(incomplete(&sandbox), vec![7; weights().len() + 1]).unwrap();
    fetch(&sandbox, &hub, &format!("model {MODEL}")).ok();
    // A file that was cut later is fetched again.
    fs::write(&blob, b"cut").unwrap();
    fetch(&sandbox, &hub, &format!("model {MODEL}")).ok();
    assert_eq!(fs::read(&blob).unwrap(), weights());
}

#[test]
fn one_process_fetches_and_others_wait() {
    let (sandbox, hub) = (Sandbox::new(), Hub::with(vec![model()]));
    // The first one has to ask three times.
    hub.contents().cuts = [1000, 2000].into();
    let start = || Running::start(command(&sandbox, &hub, &format!("fetch model {MODEL}")));
    let all = [start(), start(), start(), start()];
    for running in all {
        running.end().ok();
    }
    let requests = hub.large_requests();
    let sent: usize = requests.iter().map(|request| request.num_sent).sum();
    assert_eq!((requests.len(), sent), (3, weights().len()));
}

#[test]
fn the_token_goes_to_the_hub_and_to_nobody_else() {
    let (sandbox, hub) = (Sandbox::new(), Hub::with(vec![model()]));
    let mut with_token = command(&sandbox, &hub, &format!("fetch model {MODEL}"));
    with_token.env("HF_TOKEN", "hf_secret");
    Run::of(with_token).ok();
    for request in hub.requests() {
        let is_elsewhere = request.path.starts_with("/large/");
        let expected = (!is_elsewhere).then_some("Bearer hf_secret");
        assert_eq!(request.authorization.as_deref(), expected, "{}", request.path);
    }
    // Another port may be another user's. A relative redirect stays at the Hub.
    for (large_at, gets_token) in [(hub.other_port.clone(), false), (String::new(), true)] {
        let sandbox = Sandbox::new();
        hub.contents().large_at = Some(large_at);
        let mut with_token = command(&sandbox, &hub, &format!("fetch model {MODEL}"));
        with_token.env("HF_TOKEN", "hf_secret");
        Run::of(with_token).ok();
        let request = &hub.large_requests()[0];
        assert_eq!(request.authorization.is_some(), gets_token, "{request:?}");
    }
    hub.contents().large_at = None;
    // The file that `hf auth login` writes.
    sandbox.write("hf/token", b"hf_stored\n");
    fetch(&sandbox, &hub, &format!("model {MODEL}")).ok();
    assert_eq!(hub.requests()[0].authorization.as_deref(), Some("Bearer hf_stored"));
    let mut without = command(&sandbox, &hub, &format!("fetch model {MODEL}"));
    without.env("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1");
    Run::of(without).ok();
    assert_eq!(hub.requests()[0].authorization, None);
}

#[test]
fn sizes_that_wrap_are_refused_before_anything_is_fetched() {
    let mut repo = model();
    repo.files.push(("layers.safetensors", b"layers".to_vec()));
    repo.files.retain(|(path, _)| *path != "model.safetensors");
    repo.files.push(("more.safetensors", b"more".to_vec()));
    let index = r#"{"weight_map": {"a": "layers.safetensors", "b": "more.safetensors"}}"#;
    repo.files.push(("model.safetensors.index.json", index.into()));
    let (sandbox, hub) = (Sandbox::new(), Hub::with(vec![repo]));
    // Twice this is 0, with the bytes of the other files.
    hub.contents().listed_bytes = Some(1 << 63);
    fetch(&sandbox, &hub, &format!("model {MODEL}")).refused(&["more than any disk has"]);
    hub.contents().listed_bytes = Some(1 << 62);
    fetch(&sandbox, &hub, &format!("model {MODEL}")).refused(&["make room"]);
    assert!(hub.large_requests().is_empty());
}

#[test]
fn what_the_hub_refuses_is_answered_with_what_to_do() {
    let (sandbox, hub) = (Sandbox::new(), Hub::with(vec![model(), data()]));
    let refused = |words: &str, expected: &[&str]| {
        fetch(&sandbox, &hub, words).refused(expected);
    };
    refused("model a/b", &["fetch model a/b: there is no model a/b, or it is private", "HF_TOKEN"]);
    refused("data a/b", &["fetch data a/b: there is no data set a/b", "OWNER/NAME"]);
    refused(&format!("model {MODEL} --revision v9"), &["has no revision v9", "--revision"]);
    refused(&format!("model {MODEL} --revision ../.."), &["--revision ../..: pass a branch"]);
    refused(&format!("data {DATA} --data-dir here"), &["--data-dir", "leave it out"]);
    hub.contents().status = Some(("401 Unauthorized", "GatedRepo"));
    refused(&format!("model {MODEL}"), &["gated", "accept its terms on http", "set HF_TOKEN"]);
    sandbox.write("hf/token", b"hf_stored");
    refused(&format!("model {MODEL}"), &["the token may not read it", "same account"]);
    hub.contents().status = Some(("401 Unauthorized", "RepoNotFound"));
    refused(&format!("model {MODEL}"), &["or the token may not read it", "check the name"]);
    hub.contents().status = Some(("429 Too Many Requests", ""));
    refused(&format!("model {MODEL}"), &["too many requests"]);
    hub.contents().status = Some(("200 OK", ""));
    refused(&format!("model {MODEL}"), &["does not answer as the Hugging Face Hub does"]);
    hub.contents().status = None;
    for (file, expected) in [
        ("model.safetensors", "neither model.safetensors nor model.safetensors.index.json"),
        ("config.json", "it has no config.json"),
    ] {
        hub.contents().repos[0].files.retain(|(path, _)| *path != file);
        refused(&format!("model {MODEL}"), &[expected]);
    }
    hub.contents().repos[1].files.retain(|(path, _)| !path.ends_with(".csv"));
    refused(&format!("data {DATA}"), &["it has no .parquet, .csv, .jsonl or .txt files"]);
    assert_eq!(sandbox.contents(), ["hf", "hf/token"]);
}

#[test]
fn without_a_network_it_fails_at_once_and_says_what_to_put_where() {
    let (sandbox, hub) = (Sandbox::new(), Hub::with(vec![model(), data()]));
    let run = |words: &str, variable: (&str, &str)| {
        let mut command = command(&sandbox, &hub, words);
        Run::of({
            command.env(variable.0, variable.1);
            command
        })
    };
    // Nothing listens there.
    let unreachable = ("HF_ENDPOINT", "http://127.0.0.1:1");
    let unknown = ("HF_ENDPOINT", "http://no-such-host.invalid");
    let offline = ("HF_HUB_OFFLINE", "1");
    let by_hand = [
        "Put config.json, tokenizer.json,",
        "--pretrained DIR",
        "copy the whole folder models--HuggingFaceTB--SmolLM2-360M-Instruct from its cache to",
    ];
    for (variable, reason) in [
        (unreachable, "cannot fetch http://127.0.0.1:1/api/models/"),
        (unknown, "cannot fetch http://no-such-host.invalid/api/models/"),
        (offline, "HF_HUB_OFFLINE is set"),
    ] {
        let run = run(&format!("fetch model {MODEL}"), variable).refused(&by_hand);
        assert!(run.stderr.contains(reason), "{}", run.stderr);
    }
    let words =
        ["the train* and test* files", "--data-dir DIR", "datasets--Yelp--yelp_review_full"];
    run(&format!("fetch data {DATA}"), unreachable).refused(&words);
    run(&format!("fetch model {MODEL}"), ("HF_ENDPOINT", "hub")).refused(&["HF_ENDPOINT hub"]);
    assert!(hub.requests().is_empty());
    assert_eq!(sandbox.contents(), [""; 0]);

    fetch(&sandbox, &hub, &format!("model {MODEL}")).ok();
    for variable in [unreachable, offline] {
        let run = run(&format!("fetch model {MODEL}"), variable).ok();
        assert!(run.stderr.contains("warning: "), "{}", run.stderr);
        assert!(run.stdout.contains(&format!("snapshots/{COMMIT}\n")), "{}", run.stdout);
    }
}

#[test]
fn what_was_fetched_is_found_by_name() {
    let (sandbox, hub) = (Sandbox::new(), Hub::with(vec![model(), data()]));
    let missing = [
        &format!("--pretrained {MODEL}: there is nothing at this path"),
        &*sandbox.path(FOLDER).display().to_string(),
        &format!("run `paceline fetch model {MODEL}`"),
    ];
    sandbox.train("--recipe smollm2-yelp").refused(&missing);
    assert_eq!(sandbox.contents(), [""; 0]);
    fetch(&sandbox, &hub, "model smollm2-360m").ok();
    sandbox.train("--recipe smollm2-yelp").refused(&[
        &format!("--data-dir {DATA}: there is nothing at this path"),
        &format!("run `paceline fetch data {DATA}`"),
    ]);
    let fetched = fetch(&sandbox, &hub, "data yelp").ok();
    fetched.prints(&["paceline train --recipe smollm2-yelp\n"]);
    hub.requests();

    // The run is the same by the recipe, by flags, and by the folders.
    let run = sandbox.train("--recipe smollm2-yelp --epochs 1 --json a.json").ok();
    for flag in ["--pretrained", "--data-dir"] {
        let note = run.stderr.lines().filter(|line| line.starts_with(&format!("{flag} ")));
        let notes: Vec<&str> = note.collect();
        assert!(notes.len() == 1 && notes[0].contains(&COMMIT[..12]), "{}", run.stderr);
    }
    let resolved = &crate::common::json(&sandbox.run_folder().join("config.json"))["resolved"];
    for part in ["model", "data"] {
        let found = resolved[part]["found"][0].as_str().unwrap();
        assert!(found.contains(&COMMIT[..12]), "{resolved}");
    }
    assert!(sandbox.path("cache/paceline/tokens").is_dir());
    let snapshot = format!("{FOLDER}/snapshots/{COMMIT}");
    let texts = format!("hf/hub/datasets--Yelp--yelp_review_full/snapshots/{COMMIT}");
    for flags in [
        format!("--pretrained smollm2-360m --tokenizer {MODEL}@{COMMIT} --data-dir yelp@main"),
        format!("--pretrained {snapshot} --data-dir {texts}/yelp_review_full --token-cache t"),
    ] {
        let again = sandbox.train(&format!("--recipe smollm2-yelp --epochs 1 {flags}")).ok();
        assert_eq!(again.weights(), run.weights(), "{flags}");
    }
    let flags = format!("--model {MODEL} --max-tokens 3 --prompt good");
    let words = Run::of(command(&sandbox, &hub, &format!("generate {flags}"))).ok();
    assert!(words.stderr.starts_with(&format!("--model {MODEL}: ")), "{}", words.stderr);
    let by_folder = format!("generate --model {snapshot} --max-tokens 3 --prompt good");
    assert_eq!(Run::of(command(&sandbox, &hub, &by_folder)).ok().stdout, words.stdout);
    assert!(hub.requests().is_empty(), "training and generation use no network");

    // Programs that need one file fetch one.
    let config = sandbox.path(&format!("{snapshot}/config.json"));
    let elsewhere = config.with_extension("moved");
    fs::rename(&config, &elsewhere).unwrap();
    let part = ["has a part of it only", "lacks config.json", "run `paceline fetch model"];
    sandbox.train("--recipe smollm2-yelp").refused(&part);
    fs::rename(&elsewhere, &config).unwrap();
    let listed = json!({"files": {"README.md": {}, "yelp_review_full/train-1.csv": {}}});
    let tree = format!("hf/hub/datasets--Yelp--yelp_review_full/trees/{COMMIT}.json");
    sandbox.write(&tree, listed.to_string().as_bytes());
    let part = ["--data-dir", "has a part of it only", "lacks yelp_review_full/train-1.csv"];
    sandbox.train("--recipe smollm2-yelp").refused(&part);

    // A folder of the same name counts before the cache.
    fs::create_dir_all(sandbox.path(MODEL)).unwrap();
    let shadow = format!("--model llama --pretrained {MODEL}");
    sandbox.train(&shadow).refused(&[&format!("--pretrained {MODEL}/config.json: No such file")]);
    let unknown = format!("generate --model {MODEL}@v2 --prompt good");
    Run::of(command(&sandbox, &hub, &unknown)).refused(&["has no complete revision v2 of it"]);
}

#[test]
fn data_sets_of_other_places_go_into_a_folder() {
    let (sandbox, hub) = (Sandbox::new(), Hub::with(Vec::new()));
    let packed = mnist().map(|(name, bytes)| (format!("/mnist/{name}.gz"), gzip(&bytes)));
    hub.contents().others = packed.into();
    let mirror = format!("--mirror {}/mnist", hub.address);
    // These are not the published files, so they are refused.
    let words = [
        "fetch data mnist: what http",
        "is not the published file",
        "put train-images-idx3-ubyte.gz",
    ];
    let run = fetch(&sandbox, &hub, &format!("data mnist --data-dir m {mirror}")).refused(&words);
    assert!(!run.stderr.contains("--download"), "{}", run.stderr);
    // Files that are there need no network.
    for (name, _) in mnist() {
        sandbox.write(&format!("m/{name}"), b"");
    }
    let run = fetch(&sandbox, &hub, "data mnist --data-dir m").ok();
    assert_eq!(run.stdout, "m\nUse it: paceline train --data mnist --data-dir m\n");
}
