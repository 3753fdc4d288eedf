//! Runs that continue where another one stopped: on another number of ranks, or because a command is repeated.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::{Run, Running, Sandbox, TINY, TINY_MLP, metrics, signal, write_cifar10};
use rustix::process::Signal;
use serde_json::Value;

/// Every step's value of `key`, over all run folders of the sandbox in order of their steps.
fn column(sandbox: &Sandbox, key: &str) -> Vec<f64> {
    let mut lines: Vec<Value> = Vec::new();
    for folder in fs::read_dir(sandbox.path("runs")).unwrap() {
        let text = fs::read_to_string(folder.unwrap().path().join("metrics.jsonl")).unwrap();
        // A killed run may leave half a line, which the next run writes again.
        lines.extend(text.lines().filter_map(|line| serde_json::from_str(line).ok()));
    }
    lines.retain(|line| line.get("loss").is_some());
    lines.sort_by_key(|line| line["step"].as_u64());
    lines.dedup_by_key(|line| line["step"].as_u64());
    lines.iter().map(|line| line[key].as_f64().unwrap()).collect()
}

#[test]
fn a_run_goes_on_with_another_number_of_ranks() {
    // Units of 40, 6280 and 90 parameters, which each number of ranks pads differently.
    for optimizer in ["--momentum 0.9", "--optimizer adamw"] {
        let flags = format!("{TINY} --global-batch-size 32 {optimizer}");
        let sandbox = Sandbox::new();
        sandbox.train(&format!("{flags} --epochs 4 --nproc 2")).ok();
        let whole = column(&sandbox, "loss");
        assert_eq!(whole.len(), 28);

        let sandbox = Sandbox::new();
        // In the middle of the third epoch.
        sandbox.train(&format!("{flags} --steps 17 --nproc 2 --save saved")).ok();
        for (nproc, strategy) in [(4, "ddp"), (3, "simple_ddp"), (1, "single")] {
            fs::remove_dir_all(sandbox.path("runs")).unwrap();
            let more = format!("--epochs 4 --resume saved --nproc {nproc} --strategy {strategy}");
            let run = sandbox.train(&format!("{flags} {more}")).ok();
            run.line(
                "Resumed from saved: 2 epochs, 3 batches of the next and 17 steps are complete",
            );
            let losses = column(&sandbox, "loss");
            assert_eq!(losses.len(), 11);
            for (step, (got, expected)) in losses.iter().zip(&whole[17..]).enumerate() {
                // Sums over the batch in another order, in f32, as between any two world sizes.
                let off = (got - expected).abs();
                assert!(off < 1e-4, "{nproc} ranks, step {}: {got}, {expected}", step + 18);
            }
        }
        // This test can fail: a step that starts elsewhere has another loss.
        assert!((whole[17] - whole[0]).abs() > 1e-2, "{whole:?}");
        let batch = flags.replace("--global-batch-size 32", "--batch-size 16");
        let words = ["--global-batch-size 32", "this run has 64", "pass the same"];
        sandbox.train(&format!("{batch} --epochs 4 --resume saved --nproc 4")).refused(&words);
    }
}

/// Runs `flags` to the end, and again with an interruption after each of its `total` optimizer steps: all must end with
/// the same weights, epochs and evaluation.
#[track_caller]
fn interrupt_at_every_step(flags: &str, total: u64) {
    // The last epoch and its results, without the time that it took.
    let last_epoch = |run: &Run| -> String {
        let mut lines = run.stdout.lines().rev();
        let line = lines.find(|line| line.starts_with("Epoch ") && line.contains('/')).unwrap();
        line.rsplit_once(',').unwrap().0.to_owned()
    };
    let evaluation = |run: &Run| -> Vec<String> {
        let lines = run.stdout.lines().filter(|line| line.starts_with("Evaluation "));
        lines.map(str::to_owned).collect()
    };
    let flags = format!("{flags} --save saved --save-every 1");
    let sandbox = Sandbox::new();
    let whole = sandbox.train(&format!("{flags} --steps {total}")).ok();
    let lines = metrics(&sandbox.run_folder());
    assert_eq!(lines.iter().filter(|line| line["loss"].is_number()).count() as u64, total);
    let mut seen = vec![whole.weights().to_owned()];
    for step in 1..total {
        let sandbox = Sandbox::new();
        let first = sandbox.train(&format!("{flags} --steps {step}")).ok();
        assert!(
            !seen.contains(&first.weights().to_owned()),
            "{flags}: step {step} changed nothing"
        );
        seen.push(first.weights().to_owned());
        let rest = sandbox.train(&format!("{flags} --steps {total} --resume saved")).ok();
        assert_eq!(rest.weights(), whole.weights(), "{flags}, interrupted after step {step}");
        assert_eq!(evaluation(&rest), evaluation(&whole), "{flags}, step {step}");
        assert_eq!(last_epoch(&rest), last_epoch(&whole), "{flags}, step {step}");
        let resumed = rest.line("Resumed from saved: ");
        let steps = if step == 1 { "1 step are".into() } else { format!("{step} steps are") };
        assert!(resumed.contains(&steps), "{resumed}");
        assert!(resumed.ends_with("; no sample is repeated or skipped"), "{resumed}");
    }
}

#[test]
fn the_last_line_of_a_run_that_is_asked_to_end_says_what_is_left() {
    let endless = format!("{TINY_MLP} --batch-size 4 --steps-per-epoch 20 --epochs 1000000");
    for (flags, left) in [
        ("--nproc 2", "paceline: no checkpoint: nothing is kept without --save\n"),
        ("--nproc 2 --save saved --resume auto", "in saved: the same command goes on from there\n"),
        ("--nproc 1", "paceline: no checkpoint: nothing is kept without --save\n"),
    ] {
        let sandbox = Sandbox::new();
        let mut run = sandbox.start(&format!("train {endless} {flags} --run-dir all --name mine"));
        let metrics = sandbox.path("all/mine/metrics.jsonl");
        let has_begun = || std::fs::metadata(&metrics).is_ok_and(|file| file.len() > 0);
        run.wait_until("a first step", || {
            has_begun() && (!flags.contains("saved") || sandbox.path("saved/latest").exists())
        });
        signal(run.id(), Signal::INT);
        let run = run.end();
        assert_eq!(run.code, Some(130), "{flags}: {run:#?}");
        assert!(run.stderr.ends_with(left), "{flags}: {}", run.stderr);
    }
}

#[test]
fn a_run_that_is_asked_to_end_saves_and_goes_on_with_the_same_bits() {
    let flags = format!("{TINY_MLP} --batch-size 4 --steps-per-epoch 20 --save saved");
    for more in ["--nproc 1", "--nproc 2", "--nproc 2 --transport thread --strategy local_sgd"] {
        let sandbox = Sandbox::new();
        let mut run = sandbox.start(&format!("train {flags} {more} --epochs 1000000"));
        run.wait_until("a first epoch", || sandbox.path("saved/latest").exists());
        signal(run.id(), Signal::TERM);
        let run = run.end();
        assert_eq!(run.code, Some(143), "{more}: {run:#?}");
        let (_, rest) = run.stderr.split_once("checkpoint after step ").expect(&run.stderr);
        let (steps, rest) = rest.split_once(' ').unwrap();
        assert_eq!(rest, "in saved: add --resume auto to go on from there\n", "the last line");
        // What a rank writes when it is told to end is withdrawn.
        let dumps = |name: &String| name.contains("-rank");
        assert!(!sandbox.contents().iter().any(dumps), "{:?}", sandbox.contents());

        let flags = format!("{flags} {more} --steps {}", steps.parse::<u64>().unwrap() + 3);
        let rest = sandbox.train(&format!("{flags} --resume auto")).ok();
        assert!(rest.line("Resumed from saved: ").contains(&format!("{steps} steps are complete")));
        let whole = Sandbox::new().train(&flags).ok();
        assert_eq!(rest.weights(), whole.weights(), "{more}: stopped after step {steps}");
    }
}

// These are four tests instead of one, so that they run in parallel.

#[test]
fn a_cnn_goes_on_after_any_step() {
    // Seven batches of an epoch, the last one of 20 samples: four steps of two batches, or less.
    let flags = format!("{TINY} --global-batch-size 30 --lr-schedule cosine --lr-warmup-steps 2");
    for (nproc, more) in [
        (1, "--momentum 0.9 --lr-steps 7"),
        (2, "--momentum 0.9 --lr-steps 7 --accumulate 2 --batch-norm --evaluate"),
        (2, "--optimizer adamw --lr-steps 6 --eval-every 2 --transport thread"),
    ] {
        interrupt_at_every_step(&format!("{flags} --nproc {nproc} {more}"), 6);
    }
}

#[test]
fn an_mlp_goes_on_after_any_step() {
    // New vectors in each epoch, in the order in which they are made.
    let flags = format!("{TINY_MLP} --batch-size 4 --steps-per-epoch 3");
    for (nproc, more) in [
        (1, "--optimizer adamw --lr-schedule linear --lr-steps 9"),
        (2, "--momentum 0.9 --accumulate 2"),
    ] {
        interrupt_at_every_step(&format!("{flags} --nproc {nproc} {more}"), 5);
    }
}

#[test]
fn ranks_with_uneven_shards_go_on_after_any_step() {
    // The first rank has four batches, the second two. A run may stop where the second is at the end of its data.
    let flags = format!("{TINY} --batch-size 30 --rank-samples 100 45 --nproc 2 --momentum 0.9");
    interrupt_at_every_step(&format!("{flags} --batch-norm --evaluate"), 6);
    interrupt_at_every_step(&flags.replace("100 45", "45 0"), 3);
}

#[test]
fn files_go_on_after_any_step() {
    let sandbox = Sandbox::new();
    write_cifar10(&sandbox, "data", 8, 7);
    let data = sandbox.path("data");
    let flags = format!("--data cifar10 --data-dir {} --channels 4 --hidden 8", data.display());
    let flags = format!("{flags} --nproc 2 --batch-size 6 --clip-grad-norm 0.5");
    interrupt_at_every_step(&format!("{flags} --strategy bucket_ddp_async --evaluate"), 5);

    // With other files, samples would come in another order.
    let sandbox = Sandbox::new();
    sandbox.train(&format!("{flags} --steps 2 --save saved")).ok();
    let path = data.join("data_batch_5.bin");
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() / 8 * 7]).unwrap();
    let words =
        ["written with 40 training samples, this run has 39", "another order", "same files"];
    sandbox.train(&format!("{flags} --steps 4 --resume saved")).refused(&words);
}

#[test]
fn checkpoints_are_written_when_they_are_due() {
    let flags = format!("{TINY} --global-batch-size 50 --nproc 2 --steps 9 --save saved");
    // Four steps are an epoch, after which checkpoints are written by default.
    for (saving, at) in [
        ("", "1 epoch and 4 steps are"),
        ("--save-every 1", "1 epoch, 1 batch of the next and 5 steps are"),
        ("--save-every 2", "1 epoch and 4 steps are"),
        ("--save-every 5", "1 epoch, 1 batch of the next and 5 steps are"),
    ] {
        let sandbox = Sandbox::new();
        sandbox.train(&flags.replace("--steps 9", "--steps 4")).ok();
        // The fifth step moves the weights far away, the sixth shows it, and the run ends as if killed.
        let broken = sandbox.train(&format!("{flags} {saving} --resume auto --lr 1e30"));
        assert!(broken.stderr.contains("loss of step 6 is not finite"), "{broken:#?}");
        let rest = sandbox.train(&format!("{flags} --resume saved --lr 1e-30"));
        assert!(rest.line("Resumed from saved: ").starts_with(at), "{saving}: {rest:#?}");
    }
}

#[test]
fn a_run_that_has_made_its_steps_has_nothing_left_to_do() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY} --global-batch-size 50 --nproc 1 --save saved --quiet");
    sandbox.train(&format!("{flags} --steps 5")).ok();
    let enough = ["--resume saved", "5 optimizer steps already", "a larger --steps than 5"];
    sandbox.train(&format!("{flags} --steps 5 --resume saved")).refused(&enough);
    let enough = ["--resume saved", "1 complete epochs already", "a larger --epochs than 1"];
    sandbox.train(&format!("{flags} --epochs 1 --resume saved")).refused(&enough);
    let auto = format!("{flags} --steps 5 --resume auto").replace(" --quiet", "");
    let rest = sandbox.train(&auto).ok();
    assert_eq!(rest.line("Resumed from saved: "), "all 5 steps are complete already");
}

/// A command that a scheduler would repeat. The ranks are started by a launcher that is not part of
/// training, so each resolves its flags by itself.
fn under_a_launcher(sandbox: &Sandbox, flags: &str) -> Command {
    sandbox.given(&format!("launch -n 2 -- {} train {flags}", env!("CARGO_BIN_EXE_paceline")))
}

#[test]
fn one_command_begins_and_goes_on() {
    let flags = format!("{TINY} --global-batch-size 50 --lr-schedule cosine --lr-warmup-steps 30");
    let flags = format!("{flags} --optimizer adamw --clip-grad-norm 0.5 --epochs 100");
    let expected = Sandbox::new();
    let weights = expected.train(&format!("{flags} --nproc 2")).ok().weights().to_owned();

    let sandbox = Sandbox::new();
    let flags = format!("{flags} --save saved --resume auto");
    // A run that is killed while it writes its first checkpoint leaves this, which is not a checkpoint.
    sandbox.write("saved/.step-000000004.0123.partial/rank-000-of-002.shard", b"half of");
    // Every operation takes 30 ms, so its 400 steps take at least 12 s and do not end before the signal.
    let slow = format!("{flags} --link 1gbit,10ms");
    let mut running = Running::start(under_a_launcher(&sandbox, &slow));
    let checkpoint = sandbox.path("saved/latest");
    running.wait_until("a checkpoint", || checkpoint.exists());
    signal(running.id(), rustix::process::Signal::KILL);
    // What it said on its way may be lost with it.
    assert_ne!(running.end().code, Some(0));
    sandbox.wait_until_deserted();

    let rest = Run::of(under_a_launcher(&sandbox, &flags)).ok().without_ranks();
    assert_eq!(rest.line("Weights: sha256 "), weights);
    let resumed = rest.line("Resumed from saved: ");
    let epochs: u64 = resumed.split(' ').next().unwrap().parse().unwrap();
    assert!((1..100).contains(&epochs), "it was killed on its way: {resumed}");
    // Its learning rates continue where those of the other run ended.
    assert_eq!(column(&sandbox, "lr"), column(&expected, "lr"));

    // Nothing is left to do, which is not an error.
    let again = Run::of(under_a_launcher(&sandbox, &format!("{flags} --evaluate")));
    let again = again.ok().without_ranks();
    assert_eq!(again.line("Resumed from saved: "), "all 100 epochs are complete already");
    assert_eq!(again.line("Weights: sha256 "), weights);
    assert!(again.line("Evaluation loss: ").ends_with(", over 50 samples"));
}

#[test]
fn our_own_launcher_decides_the_same() {
    for transport in ["thread", "shm"] {
        let flags = format!("{TINY} --global-batch-size 50 --nproc 2 --transport {transport}");
        let sandbox = Sandbox::new();
        let auto = |epochs: usize| {
            let more = format!("--epochs {epochs} --save saved --resume auto");
            sandbox.train(&format!("{flags} {more}")).ok()
        };
        auto(1).line("No checkpoint in saved yet: training starts from the beginning");
        let rest = auto(3);
        rest.line("Resumed from saved: 1 epoch and 4 steps are complete");
        let whole = Sandbox::new().train(&format!("{flags} --epochs 3")).ok();
        assert_eq!(rest.weights(), whole.weights());
    }
}

#[test]
fn ranks_that_see_other_folders_do_not_begin() {
    let flags = format!("{TINY} --global-batch-size 50");
    // Two folders stand for two hosts without a shared folder.
    let hosts = [Sandbox::new(), Sandbox::new()];
    let together = |more: &str| {
        let meet = hosts[0].path("meet");
        let start = |rank: usize| {
            let meet = format!("--init-method file://{}", meet.display());
            let mut command = hosts[rank].given(&format!("train {flags} {more} {meet}"));
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
            Running::start(command)
        };
        [0, 1].map(start).map(Running::end)
    };
    // Two checkpoints of one epoch that differ only in the weights.
    let save = |host: &Sandbox, lr: &str| {
        host.train(&format!("{flags} --epochs 1 --save saved --nproc 1 --quiet --lr {lr}")).ok();
    };

    // A checkpoint would have one part here, and one part there.
    let [first, second] = together("--epochs 2 --save saved --resume auto");
    assert_eq!((first.code, second.code), (Some(3), Some(2)), "{first:#?} {second:#?}");
    second.says(&["--save saved: rank 1 does not see the folder of rank 0", "all hosts share"]);

    save(&hosts[0], "0.1");
    save(&hosts[1], "0.2");
    // A difference in what the checkpoints record would be found earlier.
    let [first, second] = together("--epochs 2 --resume saved --lr 0.1");
    assert_eq!((first.code, second.code), (Some(3), Some(1)), "{first:#?} {second:#?}");
    let words = "rank 1 finds another checkpoint there than rank 0";
    assert!(second.stderr.contains(words), "{second:#?}");
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_folder(&path, &to);
        } else {
            fs::copy(&path, &to).unwrap();
        }
    }
}

/// A run whose parameters are not finite after its second step: the loss and the gradients of the step were.
const DIVERGES: &str = "--model mlp --input-dim 16 --hidden-dim 16 --output-dim 4 --num-layers 1 \
                        --batch-size 4 --steps-per-epoch 1 --nproc 2 --save saved";

#[test]
fn a_run_that_diverges_in_its_last_step_keeps_the_good_checkpoint() {
    let sandbox = Sandbox::new();
    sandbox.train(&format!("{DIVERGES} --epochs 1")).ok();
    let good = sandbox.checkpoint_index();
    let run = sandbox.train(&format!("{DIVERGES} --epochs 2 --lr 1e39 --resume auto"));
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    run.says(&["after step 2", "is not finite", "no checkpoint is written", "--lr"]);
    assert_eq!(sandbox.checkpoint_index(), good);
    // Without a checkpoint to keep, it is an error too.
    let unsaved = DIVERGES.replace(" --save saved", "");
    let run = sandbox.train(&format!("{unsaved} --epochs 1 --lr 1e39"));
    run.ended_with(1, &["is not finite"]);
    sandbox.train(&format!("{DIVERGES} --epochs 2 --resume auto")).ok();
}

#[test]
fn a_damaged_checkpoint_gives_way_to_the_one_before_it() {
    let sandbox = Sandbox::new();
    let flags =
        format!("{TINY} --batch-size 16 --nproc 2 --save saved --save-every 2 --resume auto");
    let whole = Sandbox::new();
    let whole = whole.train(&format!("{flags} --steps 6")).ok().weights().to_owned();
    sandbox.train(&format!("{flags} --steps 4")).ok();
    let saved = sandbox.path("saved");
    let good = sandbox.path("good");
    copy_folder(&saved, &good);
    let shard = |name: &str| saved.join("step-000000004").join(name);
    // The launcher finds a file that is cut or missing. The ranks that read it find a wrong byte.
    type Damage<'a> = &'a dyn Fn();
    let cases: [(&str, Damage); 3] = [
        ("is corrupt: its bytes 0..", &|| {
            let mut bytes = fs::read(shard("rank-001-of-002.shard")).unwrap();
            bytes[100] ^= 1;
            fs::write(shard("rank-001-of-002.shard"), bytes).unwrap();
        }),
        ("cannot be read: No such file", &|| {
            fs::remove_file(shard("rank-001-of-002.shard")).unwrap();
        }),
        ("is corrupt: it has 3 bytes, not ", &|| {
            fs::write(shard("rank-001-of-002.shard"), b"abc").unwrap();
        }),
    ];
    for (problem, damage) in cases {
        fs::remove_dir_all(&saved).unwrap();
        copy_folder(&good, &saved);
        damage();
        let run = sandbox.train(&format!("{flags} --steps 6")).ok();
        let warnings: Vec<_> =
            run.stderr.lines().filter(|line| line.contains("warning: --resume auto")).collect();
        assert_eq!(warnings.len(), 1, "{run:#?}");
        for words in [
            "step-000000004/rank-001-of-002.shard, which rank 1 wrote, ",
            problem,
            "training goes on from step-000000002, after step 2",
        ] {
            assert!(warnings[0].contains(words), "no {words:?} in {}", run.stderr);
        }
        assert_eq!(run.weights(), whole);
    }
}

#[test]
fn two_runs_do_not_save_to_one_folder() {
    let sandbox = Sandbox::new();
    // Far longer than a second run waits for the first one's lock.
    let slow = format!("{TINY} --nproc 2 --save saved --link 1gbit,10ms --epochs 1000");
    let mut first = sandbox.start(&format!("train {slow}"));
    let lock = sandbox.path("saved/checkpoint.lock");
    first.wait_until("the first run's lock", || {
        fs::read_to_string(&lock).is_ok_and(|text| text.ends_with('\n'))
    });
    let words = ["--save saved", "another run (process ", "runs/", "wait for its end"];
    sandbox.train(&format!("{TINY} --nproc 2 --save saved")).refused(&words);
    signal(first.id(), rustix::process::Signal::TERM);
    first.end();
    sandbox.wait_until_deserted();
    sandbox.train(&format!("{TINY} --nproc 2 --save saved --resume auto --steps 1")).ok();
}

#[test]
fn a_step_that_is_not_finite_is_tried_from_an_earlier_checkpoint_and_not_for_ever() {
    let flags = format!("{TINY} --global-batch-size 50 --nproc 2 --save saved --save-every 1");
    let sandbox = Sandbox::new();
    sandbox.train(&format!("{flags} --steps 14")).ok();
    let good = fs::read_to_string(sandbox.path("saved/good")).unwrap();
    // The next step ruins the weights, which are finite and saved; the one after it shows it.
    let ruined = format!("{flags} --steps 30 --resume auto --lr 1e30");
    let run = sandbox.train(&ruined);
    run.ended_with(1, &["loss of step 16 is not finite"]);
    assert!(sandbox.path("saved/step-000000015").exists());
    assert!(sandbox.path("saved").join(good.trim()).exists(), "the good one stays");
    let rest = sandbox.train(&format!("{flags} --steps 30 --resume auto --lr 1e-30")).ok();
    let steps: u64 = good.trim().trim_start_matches("step-").parse().unwrap();
    let words = format!(
        "goes on from saved/step-{steps:09}, the last good checkpoint, and not from step-000000015"
    );
    assert!(rest.stderr.contains(&words), "no {words:?} in {rest:#?}");
    assert!(!rest.line("Resumed from saved: ").contains("15 steps"), "{rest:#?}");
    assert!(!sandbox.path("saved/not-finite.json").exists(), "the run has come further");

    // The launcher tries twice more, then ends.
    let sandbox = Sandbox::new();
    let restarts = format!(
        "{TINY} --global-batch-size 50 --nproc 2 --save saved --lr 1e30 --steps 9 --max-restarts 5"
    );
    let run = sandbox.train(&restarts);
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert_eq!(run.stderr.matches("paceline: restart ").count(), 2, "{run:#?}");
    run.says(&["step 2 was not finite in 3 runs in a row, so it is not tried again", "--lr"]);
    let again = sandbox.train(&restarts.replace("--max-restarts 5", "--resume auto"));
    again.refused(&["--resume auto", "step 2 was not finite in 3 runs"]);
    // A user who begins without it has chosen.
    let run = sandbox.train(&restarts.replace("--lr 1e30", "--lr 0.01")).ok();
    assert_eq!(run.stderr.matches("restart").count(), 0, "{run:#?}");
}

#[test]
fn a_run_that_is_asked_to_end_reports_what_it_has_measured() {
    let sandbox = Sandbox::new();
    let flags = "--batch-size 4 --steps-per-epoch 1000000 --nproc 2 --json copy.json";
    let mut run = sandbox.start(&format!("train {TINY_MLP} {flags} --run-dir all --name mine"));
    let path = sandbox.path("all/mine/metrics.jsonl");
    run.wait_until("steps that are measured", || {
        fs::read_to_string(&path).is_ok_and(|text| text.lines().count() > 20)
    });
    signal(run.id(), Signal::INT);
    let run = run.end();
    assert_eq!(run.code, Some(130), "{run:#?}");
    let made = metrics(&sandbox.path("all/mine")).len();
    let summary = crate::common::json(&sandbox.path("all/mine/summary.json"));
    assert_eq!(summary["stopped_after"].as_u64(), Some(made as u64));
    assert!(summary["step_ms_median"].as_f64().unwrap() > 0.0, "{summary}");
    assert_eq!(crate::common::json(&sandbox.path("copy.json")), summary);
    run.line(&format!("Stopped after step {}", paceline_table::table::grouped(made as f64, 0)));
    let part = run.line("Epoch 1/");
    assert!(part.contains(&format!(", {made} of 1000000 batches: loss")), "{part}");
    assert!(!run.stdout.contains("Epoch 1/1: "), "a part of an epoch is not an epoch: {run:#?}");
}

/// Nothing forwards the signal here: rank 0 learns from rank 1 that the run ends.
#[test]
fn ranks_of_no_launcher_all_end_with_the_code_of_ctrl_c() {
    let sandbox = Sandbox::new();
    let meet = sandbox.path("meet").display().to_string();
    let start = |rank: &str| {
        let flags = format!(
            "train {TINY} --batch-size 10 --epochs 10000000 --quiet --save saved --init-method file://{meet}"
        );
        let mut command = sandbox.given(&flags);
        command.envs([("RANK", rank), ("WORLD_SIZE", "2")]);
        Running::start(command)
    };
    let (mut first, second) = (start("0"), start("1"));
    first.wait_until("a checkpoint", || sandbox.path("saved/latest").exists());
    signal(second.id(), Signal::INT);
    let runs = [first, second].map(Running::end);
    assert_eq!(runs.each_ref().map(|run| run.code), [Some(130); 2], "{runs:#?}");
}

/// A limit on the size of files would end a process by default; to a run it is like a full disk.
#[test]
fn beyond_the_limit_on_the_size_of_files_a_run_goes_on_without_metrics() {
    let sandbox = Sandbox::new();
    let flags =
        format!("train {TINY_MLP} --batch-size 4 --epochs 1 --steps-per-epoch 4000 --nproc 1");
    let mut command = sandbox.command("prlimit".as_ref());
    // The memory that ranks share counts as a file, too.
    command.arg("--fsize=800000").arg("--").arg(env!("CARGO_BIN_EXE_paceline"));
    command.args(flags.split_whitespace());
    let run = Run::of(command).ok();
    let words = ["metrics.jsonl", "File too large", "the run goes on without"];
    assert!(words.iter().all(|words| run.stderr.contains(words)), "{run:#?}");
    run.line("Not written: ");
    // `metrics` fails on a line that is not whole.
    let file = sandbox.run_folder().join("metrics.jsonl");
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.len() > 790_000 && text.ends_with('\n'), "{} bytes", text.len());
    let num_lines = metrics(&sandbox.run_folder()).len();
    assert!((1000..4000).contains(&num_lines), "{num_lines}");
}
