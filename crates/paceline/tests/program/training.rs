//! `paceline train` from flags to the summary, on generated data and on real files.

use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;

use crate::common::{
    Run, Running, Sandbox, TINY, TINY_MLP, gzip, json, metrics, mnist, weights_of, write_cifar10,
};
use paceline::observe::figures::table::TABLE;
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
use serde_json::Value;

/// A number between two texts of a line.
#[track_caller]
fn number_in(line: &str, before: &str, after: &str) -> f64 {
    let rest = line.split_once(before).unwrap_or_else(|| panic!("no {before:?} in {line}")).1;
    let text = rest.split_once(after).unwrap_or_else(|| panic!("no {after:?} in {rest}")).0;
    text.replace(',', "").parse().unwrap_or_else(|_| panic!("{text:?} is no number, in {line}"))
}

#[test]
fn a_run_folder_has_what_verbose_prints() {
    let sandbox = Sandbox::new();
    let flags = "--nproc 2 --channels 4 --hidden 16 --steps 8 --batch-size 8 --evaluate --verbose";
    let run = sandbox.train(flags).ok();
    let folder = run.line("Run folder: ").trim_end_matches('/').to_owned();
    let show = |folder: &str| sandbox.run(&format!("show {folder}"));
    let shown = show(&folder).ok();
    for rank in 0..2 {
        let device = run.line(&format!("[Rank {rank}] CUDA_VISIBLE_DEVICES="));
        assert!(device.ends_with(&format!(", LOCAL_RANK={rank}, device=cpu")), "{device}");
        run.line(&format!("Rank {rank} memory, MB: "));
    }
    run.line("Buckets (ms after the batch arrived; backward ends at ");
    let is_of_both = |line: &&str| !line.starts_with("Epoch ");
    let printed: Vec<&str> = run.stdout.lines().filter(is_of_both).collect();
    for line in printed {
        assert!(shown.stdout.lines().any(|other| other == line), "{line}\n{}", shown.stdout);
    }
    assert_eq!(show("runs").ok().stdout, shown.stdout);

    let unfinished = sandbox.path(&folder).join("summary.txt");
    std::fs::remove_file(&unfinished).unwrap();
    show(&folder).refused(&["summary.txt", "once it has come to its end"]);
    std::os::unix::fs::symlink("/dev/zero", &unfinished).unwrap();
    show(&folder).refused(&["summary.txt"]);
    show("nowhere").refused(&["nowhere", "there is no such folder"]);
}

#[test]
fn a_run_learns_and_reports() {
    let sandbox = Sandbox::new();
    let flags = "--nproc 2 --channels 8 16 --hidden 32 --samples 2000 --batch-size 50 --epochs 4 \
                 --momentum 0.9 --lr 0.02 --evaluate --json copy.json";
    let run = sandbox.train(flags).ok();

    let lines: Vec<&str> = run.stdout.lines().collect();
    assert_eq!(lines[0], "paceline train: cnn, ddp over shm, 2 ranks x 1 thread, sgd at lr 0.02");
    let place = run.line("Ranks: 2 on ");
    assert!(place.ends_with(", device cpu"), "{place}");
    // 3x3x1x8 + 8, 3x3x8x16 + 16, 784x32 + 32, 32x10 + 10.
    assert_eq!(run.line("Parameters: "), "26,698, gradients: 0.11 MB");
    for epoch in 1..=4 {
        let loss = run.line(&format!("Epoch {epoch} Batch 20 Loss: "));
        assert_eq!(loss.split_once('.').unwrap().1.len(), 4, "four decimals: {loss}");
        let line = run.line(&format!("Epoch {epoch}/4: loss "));
        assert!(number_in(line, "accuracy ", " %") <= 100.0);
    }
    assert_eq!(run.stdout.matches(" Batch ").count(), 4, "{}", run.stdout);
    let total = run.line("Total time:");
    assert!(number_in(total, " ", " s") > 0.0 && number_in(total, "; ", " samples/s") > 0.0);
    assert_eq!(number_in(run.line("Step:"), "over ", " steps"), 75.0);
    let times = run.line("Compute time:");
    assert!(number_in(times, " ", " ms") > 0.0);
    assert!(number_in(times, "exposed communication: ", " %") >= 0.0);
    assert!(number_in(run.line("Memory of a rank:"), " ", " MB in tensors, ") > 0.0);

    let folder = sandbox.run_folder();
    let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
    let line = run.line("Run folder: ");
    assert_eq!(
        line,
        format!("runs/{name}/ (paceline show runs/{name}; docs/output.md explains it)")
    );
    assert!(name.ends_with("-cnn-ddp"), "{name}");
    // Without the progress, it fits a terminal of 24 lines of 80 characters.
    let lines = lines.iter().filter(|line| !line.starts_with("Epoch"));
    let rows: usize = lines.map(|line| line.chars().count().max(1).div_ceil(80)).sum();
    assert!(rows <= 24, "{rows} rows:\n{}", run.stdout);
    let files = ["config.json", "metrics.jsonl", "step.svg", "summary.json", "summary.txt"]
        .map(|f| format!("runs/{name}/{f}"));
    let all = ["copy.json", "runs", &format!("runs/{name}")];
    let mut expected: Vec<String> =
        files.into_iter().chain(all.into_iter().map(str::to_owned)).collect();
    expected.sort();
    assert_eq!(sandbox.contents(), expected);

    let config = &json(&folder.join("config.json"))["resolved"];
    assert_eq!(config["model"]["channels"], serde_json::json!([8, 16]));
    assert_eq!(config["optimizer"]["momentum"], 0.9);
    assert_eq!((&config["world_size"], &config["global_batch_size"]), (&2.into(), &100.into()));

    let steps = metrics(&folder);
    assert_eq!(steps.len(), 81, "80 steps and the evaluation");
    for (at, step) in steps[..80].iter().enumerate() {
        assert_eq!((&step["step"], &step["samples"]), (&(at + 1).into(), &100.into()));
        let fields = step.as_object().unwrap();
        assert!(fields.values().all(Value::is_number), "{step}");
        for key in ["loss", "lr", "step_ms", "forward_ms", "backward_ms", "comm_exposed_ms"] {
            assert!(fields.contains_key(key), "no {key} in {step}");
        }
    }

    let summary = json(&folder.join("summary.json"));
    let keys: BTreeSet<&str> = summary.as_object().unwrap().keys().map(String::as_str).collect();
    let figures = TABLE.iter().filter(|figure| figure.in_summary);
    assert_eq!(keys, figures.map(|figure| figure.name).collect(), "all of them, and nothing else");
    assert_eq!(json(&sandbox.path("copy.json")), summary);
    let text = |key: &str| summary[key].as_str().unwrap().to_owned();
    assert_eq!(text("model") + &text("strategy") + &text("transport"), "cnnddpshm");
    assert_eq!(text("device"), "cpu");
    assert_eq!(text("weights_sha256"), run.weights());
    let number = |key: &str| summary[key].as_f64().unwrap_or_else(|| panic!("{key}: {summary}"));
    assert_eq!([number("params"), number("batch_size"), number("steps")], [26698.0, 50.0, 75.0]);
    // World x batch / median step.
    let speed = 2.0 * 50.0 / number("step_ms_median") * 1e3;
    assert!((number("samples_per_s_without_data") / speed - 1.0).abs() < 1e-9);
    // The slowest rank's mean is no less than the mean over all ranks.
    assert!(number("samples_per_s") <= 2.0 * 50.0 / number("wall_ms") * 1e3 * (1.0 + 1e-9));
    assert!(number("step_ms_p99") >= number("step_ms_median"));
    // The gradients of 26698 parameters take 4 bytes each.
    assert!(summary["peak_bytes"]["gradients"].as_f64().unwrap() >= 4.0 * 26698.0);
    assert!(summary["peak_bytes"]["total"].as_f64() > summary["peak_bytes"]["gradients"].as_f64());
    assert!(number("resident_bytes") > 1e6);

    // It has learned: guessing would reach 0.1 on images that it has not seen.
    assert!(number("eval_accuracy") > 0.9, "{}", run.stdout);
    let percent = number_in(run.line("Evaluation accuracy:"), " ", "%");
    assert!((percent - 100.0 * number("eval_accuracy")).abs() < 0.006, "{percent}");
    assert!(steps[79]["loss"].as_f64() < steps[0]["loss"].as_f64());

    // The losses of the last epoch and of the test set are different figures.
    let evaluation = steps.last().unwrap();
    assert_eq!(evaluation["eval_loss"], summary["eval_loss"]);
    let last_epoch = steps[60..80].iter().map(|step| step["loss"].as_f64().unwrap());
    assert!((last_epoch.sum::<f64>() / 20.0 - number("train_loss")).abs() < 1e-9);
    let said = number_in(run.line("Epoch 4/4: "), "loss ", ",");
    assert!((said - number("train_loss")).abs() < 6e-5, "{said}");
}

#[test]
fn a_quiet_run_says_nothing() {
    let sandbox = Sandbox::new();
    for transport in ["thread", "shm"] {
        let run = sandbox.train(&format!("{TINY} --nproc 2 --quiet --transport {transport}")).ok();
        assert_eq!((run.stdout, run.stderr), (String::new(), String::new()));
    }
    // Two runs within a second do not share a folder.
    assert_eq!(fs::read_dir(sandbox.path("runs")).unwrap().count(), 2);
}

#[test]
fn strategies_and_transports_end_with_the_same_weights() {
    // 202 samples in steps of 30: the last step of an epoch has 22, and 4 ranks share neither evenly.
    for nproc in [2, 4] {
        let mut digests = Vec::new();
        for strategy in ["simple_ddp", "ddp"] {
            for transport in ["thread", "shm", "tcp", "hybrid"] {
                let flags = format!(
                    "--channels 4 --hidden 8 --samples 202 --global-batch-size 30 --epochs 3 \
                     --momentum 0.9 --nproc {nproc} --strategy {strategy} --transport {transport}"
                );
                let sandbox = Sandbox::new();
                let run = sandbox.train(&flags).ok();
                let steps = metrics(&sandbox.run_folder());
                assert_eq!(steps.len(), 21);
                let samples: u64 = steps.iter().map(|s| s["samples"].as_u64().unwrap()).sum();
                assert_eq!(samples, 3 * 202, "every sample once per epoch");
                digests.push((run.weights().to_owned(), strategy, transport));
            }
        }
        assert!(digests.iter().all(|(digest, ..)| *digest == digests[0].0), "{digests:?}");
    }
}

#[test]
fn a_run_on_an_emulated_link_says_so() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY} --nproc 2 --epochs 1 --transport tcp --timeout 30");
    let run = sandbox.train(&format!("{flags} --link 1gbit,20ms")).ok();
    let head = "paceline train: cnn, ddp over tcp, 2 ranks x 1 thread, sgd at lr 0.01, on an emulated link of ";
    assert_eq!(run.line(head), "1 Gbit/s, 20000.0 us");
    assert_eq!(run.weights(), weights_of(&format!("{TINY} --nproc 2 --epochs 1")));
    let summary = sandbox.summary();
    assert_eq!(
        (&summary["transport"], &summary["link"]),
        (&"tcp".into(), &"1 Gbit/s, 20000.0 us".into())
    );
    let config = &json(&sandbox.run_folder().join("config.json"))["resolved"];
    assert_eq!((&config["transport"], &config["comm"]["timeout"]), (&"tcp".into(), &30.0.into()));
    assert_eq!(config["comm"]["link"]["bytes_per_s"], 1.25e8);
}

#[test]
fn communication_is_logged_when_asked_for() {
    let logged = |flags: &str, level: &str| {
        let flags = format!("{TINY} --nproc 2 --epochs 1 {flags}");
        Sandbox::new().train_with(&flags, &[("PACELINE_COMM_LOG", level)]).ok().stderr
    };
    assert!(!logged("", "").contains("comm: "));
    let by_variable = logged("", "info");
    assert!(by_variable.contains("all_reduce(") && by_variable.contains(" bytes in "));
    // The flag counts more than the variable.
    assert!(logged("--comm-log trace", "off").contains(" starts\n"));
}

#[test]
fn libraries_log_what_the_variable_asks_for() {
    let logged_with = |flags: &str, level: &str| {
        let flags = format!("{TINY} --nproc 2 --epochs 1 {flags}");
        Sandbox::new().train_with(&flags, &[("RUST_LOG", level)]).ok().stderr
    };
    let logged = |level| logged_with("", level);
    let all = logged("paceline=debug");
    for words in [
        "DEBUG paceline_rendezvous::store: rank 1 of 2 goes to ",
        "DEBUG paceline_collectives::group: rank 0 of 2 has formed world over Shm",
        "DEBUG paceline_collectives::flight_recorder: rank 0 world #",
        "DEBUG paceline_launch::launcher::start: rank 1 is process ",
        "DEBUG paceline_launch::launcher::watch: rank 1 has ended: exit status: 0",
    ] {
        assert!(all.contains(words), "no {words:?} in: {all}");
    }
    assert!(!all.contains("TRACE") && !all.contains("comm: "), "{all}");
    let of_launcher = logged("paceline_launch=debug");
    assert!(of_launcher.contains("paceline_launch") && !of_launcher.contains("collectives"));
    assert!(!logged("").contains("DEBUG"));
    let problem = logged("paceline=loud");
    assert_eq!(problem.matches("warning: RUST_LOG: ").count(), 1, "{problem}");
    assert!(!problem.contains("DEBUG"), "{problem}");
    assert_eq!(logged_with("--quiet", "paceline=loud"), "");
}

/// The name of a program is untrusted text.
#[test]
fn logged_names_are_printable() {
    let sandbox = Sandbox::new();
    let program = sandbox.path("red\u{1b}[31m.sh");
    std::os::unix::fs::symlink("/bin/true", &program).unwrap();
    let mut command = sandbox.paceline();
    command.env("RUST_LOG", "paceline=debug").args(["launch", "-n", "1", "--"]).arg(program);
    let Run { stderr, .. } = Run::of(command).ok();
    assert!(stderr.contains(" is process ") && stderr.contains(".sh"), "{stderr}");
    assert!(!stderr.contains('\u{1b}'), "{stderr}");
}

#[test]
fn ranks_train_as_one_process_does() {
    let flags = "--channels 4 --hidden 8 --samples 202 --global-batch-size 30 --momentum 0.9";
    let losses = |nproc: usize| -> Vec<f64> {
        let sandbox = Sandbox::new();
        sandbox.train(&format!("{flags} --nproc {nproc}")).ok();
        let steps = metrics(&sandbox.run_folder());
        steps.iter().map(|step| step["loss"].as_f64().unwrap()).collect()
    };
    let one = losses(1);
    for nproc in [2, 3] {
        for (step, (got, expected)) in losses(nproc).iter().zip(&one).enumerate() {
            // Sums in another order, in f32: 21 steps add some rounding errors of 6e-8 each.
            assert!((got - expected).abs() < 1e-4, "{nproc} ranks, step {step}: {got} {expected}");
        }
    }
}

#[test]
fn the_mlp_has_no_accuracy_and_a_short_run_measures_nothing() {
    let sandbox = Sandbox::new();
    let flags = "--nproc 2 --batch-size 32 --epochs 2 --steps-per-epoch 10 --warmup-steps 4";
    sandbox.train(&format!("{TINY_MLP} {flags}")).ok();
    assert!(sandbox.run_folder().to_str().unwrap().ends_with("-mlp-ddp"));
    let summary = sandbox.summary();
    for key in ["train_accuracy", "eval_accuracy", "eval_loss"] {
        assert_eq!(summary[key], Value::Null, "{key}");
    }
    let run = sandbox.train(&format!("{TINY_MLP} --epochs 1 --steps-per-epoch 3")).ok();
    run.line("3 steps ran, all within --warmup-steps 5: nothing was measured");
}

#[test]
fn a_run_has_the_name_and_the_place_that_the_user_chooses() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY} --nproc 1 --epochs 1 --steps-per-epoch 1");
    let named = |more: &str, variable: &[(&str, &str)]| {
        let run = sandbox.train_with(&format!("{flags} {more}"), variable).ok();
        let folder = run.line("Run folder: ").split_once(" (").unwrap().0.to_owned();
        assert!(sandbox.path(&folder).join("summary.json").is_file(), "{folder}");
        folder
    };
    assert_eq!(named("--name mine", &[]), "runs/mine/");
    assert_eq!(named("--name mine", &[]), "runs/mine-2/");
    let variable = [("PACELINE_RUNS", "shared/all")];
    assert_eq!(named("--name mine", &variable), "shared/all/mine/");
    assert_eq!(named("--name mine --run-dir here", &variable), "here/mine/");
    assert!(named("--run-dir here", &variable).starts_with("here/2"));
    // The file of a run repeats its name, but not its folder.
    assert_eq!(named("--config here/mine/config.json", &[]), "runs/mine-3/");
}

#[test]
fn runs_may_be_kept_in_a_folder_whose_name_is_not_utf8() {
    use std::os::unix::ffi::OsStrExt;
    let sandbox = Sandbox::new();
    let name = std::ffi::OsStr::from_bytes(b"runs\xff");
    let flags = "--nproc 2 --epochs 1 --steps-per-epoch 1 --name a";
    let mut command = sandbox.given(&format!("train {TINY} {flags}"));
    command.env("PACELINE_RUNS", name);
    Run::of(command).ok();
    let folder = sandbox.path("").join(name);
    assert!(folder.join("a/summary.json").is_file());
}

#[test]
fn a_resumed_run_ends_like_an_uninterrupted_one() {
    // `resume.rs` interrupts runs of every kind; this one is about what lies in the folder.
    let flags = format!("{TINY} --global-batch-size 30 --momentum 0.9 --nproc 2");
    let whole = weights_of(&format!("{flags} --epochs 3"));
    let sandbox = Sandbox::new();
    let first = sandbox.train(&format!("{flags} --epochs 1 --save saved")).ok();
    assert_ne!(first.weights(), whole);
    // Continues in the same folder, and removes what a run killed while saving left there.
    sandbox.write("saved/.step-000000001.0123.partial/index.json", b"half of");
    let rest = sandbox.train(&format!("{flags} --epochs 3 --resume saved --save saved")).ok();
    assert_eq!(rest.weights(), whole, "{flags}");
    rest.line("Epoch 3/3: ");
    assert!(!rest.stdout.contains("Epoch 1/3"), "{}", rest.stdout);
    // The last two of three epochs, and one that is good or may be proven good.
    let (folders, mut others): (Vec<String>, Vec<String>) =
        sandbox.names("saved").into_iter().partition(|name| name.starts_with("step-"));
    others.retain(|name| name != "good");
    assert_eq!((folders.len(), &others[..]), (3, &["checkpoint.lock".into(), "latest".into()][..]));
    // The new checkpoint stands at the end of the third epoch.
    let again = sandbox.train(&format!("{flags} --epochs 3 --resume saved"));
    again.refused(&["3 complete epochs already"]);
}

#[test]
fn a_loss_that_is_not_finite_stops_all_ranks_and_spares_the_checkpoint() {
    for transport in ["thread", "shm"] {
        let sandbox = Sandbox::new();
        let flags = format!("{TINY} --global-batch-size 50 --nproc 2 --transport {transport}");
        sandbox.train(&format!("{flags} --epochs 1 --save saved")).ok();
        let before = sandbox.checkpoint_index();
        let more = format!("{flags} --epochs 2 --resume saved --save saved");
        let run = sandbox.train(&format!("{more} --lr 1e30"));
        assert_eq!(run.code, Some(1), "{run:#?}");
        // Four steps were saved. The fifth step moves the weights far away, and the sixth shows it.
        let words = ["loss of step 6 is not finite", "rank 0 (", "learning rate of 1e30"];
        run.says(&words);
        assert!(run.stderr.contains("before the optimizer step"), "{}", run.stderr);
        assert!(!run.stdout.contains("Total time"), "{}", run.stdout);
        assert_eq!(sandbox.checkpoint_index(), before);
        let resumed = sandbox.train(&more).ok();
        assert_eq!(resumed.weights(), weights_of(&format!("{flags} --epochs 2")));
    }
}

#[test]
fn mnist_files_plain_and_compressed() {
    let sandbox = Sandbox::new();
    for (name, bytes) in mnist() {
        sandbox.write(&format!("plain/{name}"), &bytes);
        sandbox.write(&format!("packed/{name}.gz"), &gzip(&bytes));
    }
    let run = |folder: &str| {
        let flags = "--nproc 2 --channels 4 --hidden 16 --batch-size 10 --epochs 12 --momentum 0.9";
        sandbox.train(&format!("{flags} --data mnist --data-dir {folder} --evaluate")).ok()
    };
    // The files are there, so nothing is downloaded.
    let (plain, packed) = (run("plain"), run("packed --download --mirror http://127.0.0.1:1"));
    assert_eq!(plain.weights(), packed.weights());
    // Bright rows distinguish the ten classes.
    assert_eq!(plain.line("Evaluation accuracy: "), "100.00%");
    assert!(plain.line("Evaluation loss: ").ends_with(", over 23 samples"));
}

#[test]
fn cifar10_files() {
    let sandbox = Sandbox::new();
    write_cifar10(&sandbox, "data", 8, 7);
    let flags = "--data cifar10 --data-dir data --channels 16 32 --hidden 64 --nproc 2";
    let run = sandbox
        .train(&format!("{flags} --batch-size 5 --epochs 10 --momentum 0.9 --evaluate"))
        .ok();
    // 3x3x3x16 + 16, 3x3x16x32 + 32, 2048x64 + 64, 64x10 + 10.
    assert_eq!(run.line("Parameters: "), "136,874, gradients: 0.55 MB");
    let accuracy = number_in(run.line("Epoch 10/10: "), "accuracy ", " %");
    assert!(accuracy > 90.0, "{}", run.stdout);
    assert!(run.line("Evaluation loss: ").ends_with(", over 7 samples"));
}

#[test]
fn evaluation_counts_every_sample_once() {
    // 101 training samples leave 26 to evaluate on, which neither 3 ranks nor steps of 7 divide.
    for (samples, tested) in [(101, 26), (53, 14), (4, 1)] {
        let mut seen = Vec::new();
        for nproc in [1, 2, 3] {
            let run = Sandbox::new()
                .train(&format!(
                    "--channels 4 --hidden 8 --samples {samples} --global-batch-size 7 --nproc \
                     {nproc} --epochs 1 --lr 0 --evaluate"
                ))
                .ok();
            let loss = run.line("Evaluation loss: ");
            assert!(loss.ends_with(&format!(", over {tested} samples")), "{loss}");
            let accuracy = run.line("Evaluation accuracy: ");
            assert_eq!(accuracy.split_once('.').unwrap().1.len(), "xx%".len(), "{accuracy}");
            seen.push((loss.to_owned(), accuracy.to_owned()));
        }
        // Nothing was learned, so all have the same model. Counting a sample twice or never would change the result.
        assert!(seen.iter().all(|s| *s == seen[0]), "{seen:?}");
    }
}

/// Starts ranks by hand, each with these variables and its RANK.
fn by_hand(sandbox: &Sandbox, flags: &str, variables: &[(&str, &str)], world: usize) -> Vec<Run> {
    let start = |rank: usize| {
        let mut command = sandbox.given(&format!("train {flags}"));
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
        command.envs(variables.iter().copied());
        Running::start(command)
    };
    // The last rank first: the others are waited for.
    let children: Vec<_> = (0..world).rev().map(start).collect();
    children.into_iter().rev().map(Running::end).collect()
}

/// A port that no other program is given while the socket is bound to it. A rank can listen there, because the socket
/// does not.
fn held_port() -> (OwnedFd, String) {
    let holder = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    set_socket_reuseaddr(&holder, true).unwrap();
    bind(&holder, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = SocketAddr::try_from(getsockname(&holder).unwrap()).unwrap();
    (holder, address.port().to_string())
}

#[test]
fn ranks_started_by_hand() {
    let flags = format!("{TINY} --momentum 0.9");
    let expected = weights_of(&format!("{flags} --nproc 3"));
    let (_holder, port) = held_port();
    let sandbox = Sandbox::new();
    let meet = format!("{flags} --init-method file://{}", sandbox.path("meet").display());
    for (flags, variables) in [
        (&flags, vec![("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port.as_str())]),
        (&meet, vec![]),
    ] {
        let runs = by_hand(&sandbox, flags, &variables, 3);
        for (rank, run) in runs.into_iter().enumerate() {
            let run = run.ok();
            if rank == 0 {
                assert_eq!(run.weights(), expected);
            } else {
                assert_eq!(run.stdout, "", "rank {rank} is silent");
            }
        }
    }
    assert!(!sandbox.path("meet").exists());
    assert_eq!(fs::read_dir(sandbox.path("runs")).unwrap().count(), 2);
}

#[test]
fn the_names_that_other_launchers_and_scripts_have_are_accepted() {
    let expected = weights_of(&format!("{TINY} --nproc 3 --transport thread"));
    for nproc in ["--nproc-per-node", "--nproc_per_node=3"] {
        let nproc = if nproc.contains('=') { nproc.to_owned() } else { format!("{nproc} 3") };
        assert_eq!(weights_of(&format!("{TINY} {nproc} --backend thread")), expected);
    }
}

#[test]
fn an_epoch_that_asks_for_more_steps_than_there_are_is_warned_about() {
    let run = Sandbox::new().train(&format!("{TINY} --nproc 2 --steps-per-epoch 900")).ok();
    assert!(run.stderr.starts_with("warning: --steps-per-epoch 900: "), "{}", run.stderr);
    assert_eq!(run.stderr.lines().count(), 1, "once, not once per rank: {}", run.stderr);
}

#[test]
fn pinned_ranks_and_threads_train_the_same() {
    let flags = format!("{TINY} --nproc 1");
    assert_eq!(weights_of(&format!("{flags} --pin-cores")), weights_of(&flags));
    let run = Sandbox::new().train(&format!("{TINY} --nproc 1 --pin-cores")).ok();
    assert!(run.stderr.starts_with("Pinned to processors: rank 0 computes on "), "{}", run.stderr);
    let run = Sandbox::new().train(&format!("{TINY} --nproc 1 --pin-cores --quiet")).ok();
    assert_eq!(run.stderr, "");
}

#[test]
fn ranks_without_enough_processors_are_not_pinned_and_train_the_same() {
    let cores = std::thread::available_parallelism().unwrap();
    let flags = format!("{TINY} --nproc 2 --threads {cores}");
    let run = Sandbox::new().train(&format!("{flags} --pin-cores")).ok();
    let said = format!("warning: --pin-cores: 2 x {cores} thread");
    assert!(run.stderr.starts_with(&said), "{}", run.stderr);
    assert!(run.stderr.contains("threads run where the system puts them"), "{}", run.stderr);
    assert_eq!(run.weights(), weights_of(&flags));
}
