//! Ranks that were started with different settings do not begin, whoever started them; settings of a host may differ.

use std::fs;

use crate::common::{Run, Running, Sandbox, TINY, TINY_MLP, free_port, pretrained, write_cifar10};

/// The variables of a launcher for a rank of two.
type Environment = fn(&Sandbox, usize, u16) -> Vec<(&'static str, String)>;

fn by_hand(_: &Sandbox, rank: usize, port: u16) -> Vec<(&'static str, String)> {
    vec![
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", "2".into()),
        ("MASTER_ADDR", "127.0.0.1".into()),
        ("MASTER_PORT", port.to_string()),
    ]
}

/// As torchrun starts ranks whose store is with rank 0. Both are on hosts of their own.
fn torchrun(sandbox: &Sandbox, rank: usize, port: u16) -> Vec<(&'static str, String)> {
    let more = [
        ("LOCAL_RANK", "0".to_owned()),
        ("LOCAL_WORLD_SIZE", "1".into()),
        ("GROUP_RANK", rank.to_string()),
        ("TORCHELASTIC_RUN_ID", "run7".into()),
        ("TORCHELASTIC_RESTART_COUNT", "0".into()),
    ];
    by_hand(sandbox, rank, port).into_iter().chain(more).collect()
}

fn open_mpi(_: &Sandbox, rank: usize, port: u16) -> Vec<(&'static str, String)> {
    vec![
        ("OMPI_COMM_WORLD_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_SIZE", "2".into()),
        ("OMPI_COMM_WORLD_LOCAL_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2".into()),
        // The port makes the name one that no other test has.
        ("PMIX_NAMESPACE", format!("agreement-{port}")),
    ]
}

fn slurm(_: &Sandbox, rank: usize, port: u16) -> Vec<(&'static str, String)> {
    vec![
        ("SLURM_PROCID", rank.to_string()),
        ("SLURM_NTASKS", "2".into()),
        ("SLURM_LOCALID", rank.to_string()),
        ("SLURM_NODEID", "0".into()),
        ("SLURM_NNODES", "1".into()),
        ("SLURM_JOB_ID", port.to_string()),
        ("SLURM_STEP_ID", "0".into()),
    ]
}

/// Two ranks, each with its own flags.
fn start(sandbox: &Sandbox, environment: Environment, flags: [&str; 2]) -> [Run; 2] {
    let port = free_port();
    let start = |rank: usize| {
        let mut command = sandbox.given(flags[rank]);
        command.envs(environment(sandbox, rank, port));
        command.env("TMPDIR", sandbox.path(""));
        Running::start(command)
    };
    [0, 1].map(start).map(Running::end)
}

/// The first rank says that these settings differ, and nothing has been written.
#[track_caller]
fn refused(sandbox: &Sandbox, runs: &[Run; 2], words: &[&str]) {
    let before = sandbox.contents();
    assert_eq!(runs[0].code, Some(2), "{runs:#?}");
    assert!(matches!(runs[1].code, Some(2 | 3)), "{runs:#?}");
    runs[0].says(&["error: the ranks were started with different settings: "]).says(words);
    let has_run = |name: &String| name.starts_with("runs") || name.starts_with("saved");
    assert!(!before.iter().any(has_run), "{before:?}");
}

#[test]
fn whoever_starts_the_ranks_settings_that_differ_are_named() {
    let flags = format!("train {TINY} --epochs 1 --save saved");
    for environment in [by_hand, torchrun, open_mpi, slurm] {
        let sandbox = Sandbox::new();
        let tcp = format!("{flags} --transport tcp --host 127.0.0.1");
        let flags = [format!("{tcp} --lr 0.1"), format!("{tcp} --lr 0.2 --seed 7")];
        let runs = start(&sandbox, environment, [&flags[0], &flags[1]]);
        let words = ["--lr is 0.1 on rank 0 (host ", "and 0.2 on rank 1 (host ", "--seed is 42 on"];
        refused(&sandbox, &runs, &words);
    }
}

#[test]
fn every_setting_that_decides_the_weights_is_compared() {
    let flags = format!("train {TINY} --epochs 1");
    for (other, words) in [
        ("--optimizer adamw", "--optimizer is sgd on rank 0"),
        ("--momentum 0.9", "--momentum is 0.0 on rank 0"),
        ("--clip-grad-norm 1", "--clip-grad-norm is not set on rank 0"),
        ("--accumulate 2", "--accumulate is 1 on rank 0"),
        ("--precision bf16", "--precision is f32 on rank 0"),
        ("--save elsewhere", "--save is not set on rank 0"),
    ] {
        let sandbox = Sandbox::new();
        let runs = start(&sandbox, by_hand, [&flags, &format!("{flags} {other}")]);
        refused(&sandbox, &runs, &[words, "start all ranks with the same flags"]);
    }
}

#[test]
fn what_belongs_to_a_host_may_differ() {
    let sandbox = Sandbox::new();
    write_cifar10(&sandbox, "a", 4, 2);
    write_cifar10(&sandbox, "b", 4, 2);
    let flags = "train --channels 4 --hidden 8 --data cifar10 --steps 2 --evaluate";
    let here = format!("{flags} --data-dir a");
    let there = format!("{flags} --data-dir b --threads 2 --quiet --timeout 50 --name there");
    let runs = start(&sandbox, by_hand, [&here, &there]);
    for run in runs {
        run.ok();
    }
}

#[test]
fn files_with_other_contents_are_refused() {
    let sandbox = Sandbox::new();
    write_cifar10(&sandbox, "a", 4, 2);
    write_cifar10(&sandbox, "b", 4, 2);
    let path = sandbox.path("b/data_batch_3.bin");
    let mut bytes = fs::read(&path).unwrap();
    bytes[7] ^= 1;
    fs::write(&path, bytes).unwrap();
    let flags = "train --channels 4 --hidden 8 --data cifar10 --steps 2 --data-dir";
    let runs = start(&sandbox, by_hand, [&format!("{flags} a"), &format!("{flags} b")]);
    refused(&sandbox, &runs, &["the training data is ", "copy the same files to all hosts"]);
}

/// The weights themselves are not compared before the model is built.
#[test]
fn replicas_that_begin_with_other_weights_do_not_train() {
    let sandbox = Sandbox::new();
    for folder in ["a", "b"] {
        pretrained::write(&sandbox.path(folder), |_, _| {});
    }
    let path = sandbox.path("b/model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    fs::write(&path, bytes).unwrap();
    let flags = "train --model llama --seq-len 8 --steps 2 --save saved --pretrained";
    let runs = start(&sandbox, by_hand, [&format!("{flags} a"), &format!("{flags} b")]);
    assert_eq!((runs[0].code, runs[1].code), (Some(1), Some(3)), "{runs:#?}");
    runs[0].says(&["before the first step, ", " has other values on rank 1 than on rank 0"]);
    assert!(!sandbox.path("saved/latest").exists());
}

#[test]
fn launchers_of_two_hosts_with_other_flags_say_it_on_both() {
    let sandbox = Sandbox::new();
    let port = free_port();
    let host = |node: usize, lr: &str| {
        let flags =
            format!("{TINY_MLP} --batch-size 4 --epochs 1 --nproc 2 --save saved --lr {lr}");
        let host = format!("--nnodes 2 --node-rank {node} --master-addr 127.0.0.1");
        let at = format!("--host 127.0.0.1 --master-port {port}");
        let mut command = sandbox.given(&format!("train {flags} {host} {at}"));
        command.env("PACELINE_SECRET", "of this test").env("TMPDIR", sandbox.path(""));
        Running::start(command)
    };
    let runs = [host(0, "0.1"), host(1, "0.2")].map(Running::end);
    for run in &runs {
        let words = "different settings: --lr is 0.1 on ranks 0, 1 (host ";
        run.ended_with(2, &[words, "and 0.2 on ranks 2, 3 (host "]);
    }
    let contents = sandbox.contents();
    assert!(
        contents.iter().all(|name| name == "runs" || !name.starts_with("runs/")),
        "{contents:?}"
    );
    assert!(!contents.iter().any(|name| name.starts_with("saved")), "{contents:?}");
}

#[test]
fn an_evaluation_compares_too() {
    let sandbox = Sandbox::new();
    sandbox.train(&format!("{TINY} --nproc 1 --steps 2 --save saved --quiet")).ok();
    let flags = "evaluate --checkpoint saved";
    let runs = start(&sandbox, by_hand, [flags, &format!("{flags} --samples 100")]);
    assert_eq!((runs[0].code, runs[1].code), (Some(2), Some(3)), "{runs:#?}");
    assert!(runs[0].stderr.contains("--samples is "), "{runs:#?}");
}
