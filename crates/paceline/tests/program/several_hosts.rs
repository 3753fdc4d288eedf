//! Runs on several hosts, for which several launchers on one machine stand.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::marked::{Marked, names_only_rank};
use crate::common::{Run, Running, Sandbox, TINY, free_port, json, signal, wait_until, weights_of};
use rustix::process::Signal;

/// The flags that say which of two hosts a launcher starts.
fn host(node: usize, port: u16) -> String {
    format!("--nnodes 2 --node-rank {node} --master-addr 127.0.0.1 --master-port {port}")
}

/// `paceline train` on one of two hosts.
fn train_on(sandbox: &Sandbox, node: usize, port: u16, flags: &str) -> Command {
    // The hosts cannot be told apart by their addresses.
    let flags = format!("train {TINY} {flags} --host 127.0.0.1 {}", host(node, port));
    let mut command = sandbox.given(&flags);
    // Host 1 has no run folder, so its ranks' dumps go here.
    command.env("PACELINE_SECRET", "of this test").env("TMPDIR", sandbox.path(""));
    command
}

/// The same on both hosts, with the same flags and two ranks each.
fn train_on_both(sandbox: &Sandbox, flags: &str) -> [Command; 2] {
    let port = free_port();
    [0, 1].map(|node| train_on(sandbox, node, port, &format!("{flags} --nproc 2")))
}

#[test]
fn ranks_are_numbered_host_by_host() {
    let sandbox = Sandbox::new();
    let script = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, host $GROUP_RANK, \
                  at $MASTER_ADDR $MASTER_PORT, secret $PACELINE_SECRET";
    let mut args = vec!["launch", "-n", "2", "--log-dir", "logs", "--tee"];
    // torchrun's other spelling.
    args.extend("--nnodes 2 --node_rank 1 --master_addr localhost --master_port 29400".split(' '));
    args.extend(["--", "sh", "-c", script]);
    let mut command = sandbox.paceline();
    command.args(args).env("PACELINE_SECRET", "mine");
    let run = Run::of(command).ok();
    let lines: BTreeSet<&str> = run.stdout.lines().collect();
    let line = |local: usize| {
        format!(
            "[rank {0}] {0} of 4, {local} of 2, host 1, at localhost 29400, secret mine",
            2 + local
        )
    };
    assert_eq!(lines, [&*line(0), &*line(1)].into());
    assert_eq!(sandbox.contents(), ["logs", "logs/rank_2.log", "logs/rank_3.log"]);
}

#[test]
fn what_does_not_fit_the_hosts_is_refused() {
    let sandbox = Sandbox::new();
    let nowhere = "--nnodes 2 --node-rank 0 --master-addr no.such.host.invalid --master-port 9";
    let words = ["--master-addr no.such.host.invalid", "pass a name or an address"];
    sandbox.run(&format!("launch {nowhere} -- true")).refused(&words);
    sandbox.train(&format!("{TINY} {nowhere}")).refused(&words);
    let secret = "x".repeat(65);
    let words = ["PACELINE_SECRET", "64 bytes"];
    let flags = format!("{TINY} {}", host(0, 29400));
    sandbox.train_with(&flags, &[("PACELINE_SECRET", &*secret)]).refused(&words);
    let ranks = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "29400")];
    sandbox.train_with(&flags, &ranks).refused(&["--nnodes", "another launcher"]);
    assert_eq!(sandbox.contents(), [""; 0]);
}

#[test]
fn one_host_is_what_it_is_without_the_flags() {
    let sandbox = Sandbox::new();
    let script = "echo $RANK of $WORLD_SIZE at $MASTER_ADDR, host ${GROUP_RANK:-not set}";
    let flags = "-n 1 --nnodes 1 --node-rank 0 --master-addr nowhere --master-port 29400 -- sh -c";
    let mut args: Vec<&str> = flags.split(' ').collect();
    args.push(script);
    let run = sandbox.launch(&args).ok();
    assert_eq!(run.stdout, "[rank 0] 0 of 1 at 127.0.0.1, host not set\n");
    assert!(run.stderr.contains("--master-addr and --master-port have no effect"), "{run:#?}");
}

#[test]
fn two_hosts_train_to_the_bits_of_one() {
    let flags = "--global-batch-size 48 --epochs 2";
    let expected = weights_of(&format!("{TINY} {flags} --nproc 4"));
    for (more, transport) in [("", "hybrid"), ("--transport tcp", "tcp")] {
        let sandbox = Sandbox::new();
        let hosts = train_on_both(&sandbox, &format!("{flags} {more}")).map(Running::start);
        let [first, second] = hosts.map(|running| running.end().ok());
        assert_eq!(first.weights(), expected);
        assert!(first.stdout.contains(&format!("ddp over {transport}, 4 ranks")), "{first:#?}");
        // Rank 0 alone prints, and has a run folder.
        assert_eq!((second.stdout.as_str(), second.stderr.as_str()), ("", ""));
        let config = json(&sandbox.run_folder().join("config.json"));
        assert_eq!(config["resolved"]["transport"], transport);
        // Where a run was started is no setting of it.
        assert!(config["stated"].get("nnodes").is_none(), "{config:#}");
    }
}

#[test]
fn hosts_of_one_rank_each_need_no_shared_memory() {
    let sandbox = Sandbox::new();
    let port = free_port();
    let runs = [0, 1].map(|node| {
        let mut command = train_on(&sandbox, node, port, "--epochs 1 --nproc 1");
        command.env_remove("PACELINE_SECRET");
        Running::start(command)
    });
    let [first, _] = runs.map(|running| running.end().ok());
    assert!(first.stdout.contains("ddp over tcp, 2 ranks"), "{first:#?}");
    // Nobody has set a secret.
    assert!(first.stderr.contains("set PACELINE_SECRET"), "{first:#?}");
}

/// Kills the rank of that number on whichever host it is.
#[track_caller]
fn kill(hosts: &[Marked], rank: usize) {
    let found: Vec<u32> = hosts
        .iter()
        .flat_map(|host| host.processes(&format!("RANK={rank}")))
        .map(|(pid, _)| pid)
        .collect();
    let [pid] = found[..] else { panic!("{found:?}") };
    signal(pid, Signal::KILL);
}

#[test]
fn both_launchers_name_the_rank_that_was_killed() {
    for victim in [0, 3] {
        let sandbox = Sandbox::new();
        let flags = "--batch-size 10 --epochs 10000000 --save saved";
        let mut hosts = train_on_both(&sandbox, flags).map(Marked::start);
        let checkpoint = sandbox.path("saved/latest");
        wait_until("a checkpoint", || checkpoint.exists());
        kill(&hosts, victim);
        let runs = hosts.each_mut().map(Marked::end);
        let (here, there) = (&runs[victim / 2], &runs[1 - victim / 2]);
        assert_eq!((here.code, there.code), (Some(137), Some(3)), "{here:#?} {there:#?}");
        names_only_rank(here, victim, "was killed by SIGKILL");
        let said: Vec<&str> =
            there.stderr.lines().filter_map(|line| line.strip_prefix("paceline: ")).collect();
        let [verdict] = said[..] else { panic!("{there:#?}") };
        let expected = format!("rank {victim}, on another host, ended or did not answer after ");
        assert!(verdict.starts_with(&expected), "{there:#?}");
        assert!(verdict.contains("all ranks of this host were stopped"), "{there:#?}");
        hosts.iter().for_each(Marked::left_nothing);
    }
}

#[test]
fn a_stopped_rank_that_is_alone_on_its_host_is_ended_and_named() {
    let sandbox = Sandbox::new();
    let port = free_port();
    let flags = "--nproc 1 --batch-size 10 --epochs 10000000 --save saved --timeout 3";
    let mut hosts = [0, 1].map(|node| Marked::start(train_on(&sandbox, node, port, flags)));
    let checkpoint = sandbox.path("saved/latest");
    wait_until("a checkpoint", || checkpoint.exists());
    signal(hosts[1].rank(1), Signal::STOP);
    let [there, here] = hosts.each_mut().map(Marked::end);
    assert_eq!((here.code, there.code), (Some(1), Some(3)), "{here:#?} {there:#?}");
    names_only_rank(&here, 1, "is stopped");
    assert!(there.stderr.contains("paceline: rank 1, on another host, "), "{there:#?}");
    hosts.iter().for_each(Marked::left_nothing);
}

#[test]
fn hosts_with_different_numbers_of_ranks_or_secrets_do_not_train_together() {
    for (nproc, secret, words) in [
        (2, "a", "expects another world size than 4; every host needs the same WORLD_SIZE"),
        (1, "b", "belongs to another run, or to another attempt of this one (its secret differs)"),
    ] {
        let sandbox = Sandbox::new();
        let port = free_port();
        let start = |node: usize, nproc: usize, secret: &str| {
            let flags = format!("--nproc {nproc} --timeout 5");
            let mut command = train_on(&sandbox, node, port, &flags);
            command.env("PACELINE_SECRET", secret);
            Running::start(command)
        };
        let first = start(0, 1, "a");
        let second = start(1, nproc, secret).end();
        second.ended_with(1, &[words]);
        let first = first.end();
        first.ended_with(
            3,
            &["ranks [1] did not come in time", "paceline: rank 1, on another host,"],
        );
    }
}

/// Both launchers of host 1 wait for host 0, so their ranks come at once.
#[test]
fn of_two_launchers_of_a_host_one_is_refused_as_a_whole_and_the_run_goes_on() {
    let sandbox = Sandbox::new();
    let port = free_port();
    let flags = "--epochs 1 --nproc 2 --timeout 5";
    let start = |node: usize| Running::start(train_on(&sandbox, node, port, flags));
    let both = [start(1), start(1)];
    let first = start(0).end().ok();
    assert!(first.stdout.contains("ddp over hybrid, 4 ranks"), "{first:#?}");
    let both = both.map(Running::end);
    let refused: Vec<&Run> = both.iter().filter(|run| run.code != Some(0)).collect();
    let [refused] = refused[..] else { panic!("{both:#?}") };
    // A rank that came when all others were there finds nobody.
    let words = ["started by another launcher already", "rank 0 did not come in time"];
    assert!(words.iter().any(|words| refused.stderr.contains(words)), "{refused:#?}");
}

#[test]
fn ranks_of_different_attempts_have_different_secrets_and_those_of_one_attempt_the_same() {
    let secrets = [0, 1].map(|node| {
        let sandbox = Sandbox::new();
        let flags = format!("launch -n 1 --max-restarts 2 {}", host(node, 29400));
        let mut command = sandbox.given(&flags);
        command.env("PACELINE_SECRET", "mine").args([
            "--",
            "sh",
            "-c",
            "echo $PACELINE_SECRET; exit 7",
        ]);
        let run = Run::of(command);
        assert_eq!(run.code, Some(7), "{run:#?}");
        let lines = run.without_ranks().stdout;
        lines.lines().map(str::to_owned).collect::<Vec<_>>()
    });
    assert_eq!(secrets[0], secrets[1]);
    assert_eq!(secrets[0][0], "mine");
    assert_eq!(secrets[0].iter().collect::<BTreeSet<_>>().len(), 3, "{secrets:?}");
}

#[test]
fn every_launcher_restarts_its_ranks_and_they_go_on_together() {
    let flags = "--global-batch-size 48 --epochs 20 --lr-schedule cosine";
    let expected = weights_of(&format!("{TINY} {flags} --nproc 4"));
    for victim in [0, 2] {
        let sandbox = Sandbox::new();
        // A link that is slow enough to be emulated on a busy machine.
        let more = "--save saved --save-every 3 --link 100mbit,5ms --max-restarts 2";
        let mut hosts = train_on_both(&sandbox, &format!("{flags} {more}")).map(Marked::start);
        let checkpoint = sandbox.path("saved/latest");
        wait_until("a checkpoint", || checkpoint.exists());
        kill(&hosts, victim);
        let [first, second] = hosts.each_mut().map(|host| host.end().ok());
        for run in [&first, &second] {
            assert_eq!(run.stderr.matches("paceline: restart").count(), 1, "{run:#?}");
            assert!(run.stderr.contains("paceline: restart 1 of 2\n"), "{run:#?}");
        }
        first.line("Resumed from saved: ");
        assert_eq!(first.weights(), expected);
        // Host 0 has a run folder for each attempt.
        assert_eq!(fs::read_dir(sandbox.path("runs")).unwrap().count(), 2);
        hosts.iter().for_each(Marked::left_nothing);
    }
}

#[test]
fn a_host_that_fails_before_the_ranks_have_met_takes_the_other_one_along() {
    let sandbox = Sandbox::new();
    let port = free_port();
    // Rank 2 fails once, when rank 0 may wait for it already.
    let script =
        "test $RANK$TORCHELASTIC_RESTART_COUNT = 20 && exit 7; exec \"$0\" check --host 127.0.0.1";
    let hosts = [0, 1].map(|node| {
        let flags = format!("launch -n 2 --max-restarts 2 {}", host(node, port));
        let mut command = sandbox.given(&flags);
        command.env("PACELINE_SECRET", "of this test");
        command.args(["--", "sh", "-c", script, env!("CARGO_BIN_EXE_paceline")]);
        command.env("TMPDIR", sandbox.path(""));
        Running::start(command)
    });
    let [first, second] = hosts.map(|host| host.end().ok());
    assert!(first.stdout.contains("ok    group: 4 ranks met over hybrid"), "{first:#?}");
    let said = |run: &Run| -> Vec<String> {
        let lines = run.stderr.lines().filter_map(|line| line.strip_prefix("paceline: "));
        lines.map(str::to_owned).collect()
    };
    let (here, there) = (said(&second), said(&first));
    assert!(here[0].contains("rank 2 ") && here[0].contains("exited with code 7"), "{second:#?}");
    assert!(there[0].starts_with("a rank on another host failed after "), "{first:#?}");
    for said in [here, there] {
        assert_eq!(said[1..], ["restart 1 of 2"], "{said:?}");
    }
}

/// The commands of the manifests in docs/launching.md, in their order.
fn commands_of_manifests() -> Vec<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/launching.md");
    let page = fs::read_to_string(page).unwrap();
    let manifests = page.split("```yaml").skip(1).map(|rest| rest.split("```").next().unwrap());
    let command = |manifest: &str| {
        let (_, block) = manifest.split_once(">-\n").unwrap();
        let indent = block.len() - block.trim_start().len();
        let lines = block
            .lines()
            .take_while(|line| line.len() > indent && line[..indent].trim().is_empty());
        lines.map(str::trim).collect::<Vec<_>>().join(" ")
    };
    manifests.map(command).collect()
}

/// Two pods on one machine, with the variables that the operators set.
#[test]
fn the_commands_of_the_manifests_train_on_two_pods() {
    let commands = commands_of_manifests();
    let names = ["WORLD_SIZE", "PET_NNODES"];
    assert_eq!(commands.len(), names.len(), "{commands:#?}");
    for (command, of_hosts) in commands.iter().zip(names) {
        assert!(command.contains(of_hosts), "{command}");
        let sandbox = Sandbox::new();
        let command = command.replace("/checkpoints", "checkpoints");
        let command = format!("{command} {TINY} --steps 2 --batch-size 4");
        let folder = Path::new(env!("CARGO_BIN_EXE_paceline")).parent().unwrap();
        let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
        let port = free_port().to_string();
        let pods = ["0", "1"].map(|pod| {
            let mut shell = sandbox.command(Path::new("sh"));
            shell.args(["-c", &command]).env("PATH", &path).env("POD_IP", "127.0.0.1");
            shell.env("PACELINE_SECRET", "of this test").env("TMPDIR", sandbox.path(""));
            let (address, ranks) = ("127.0.0.1", "4");
            match of_hosts {
                "WORLD_SIZE" => shell.envs([("WORLD_SIZE", "2"), ("RANK", pod)]),
                _ => shell.envs([("PET_NNODES", "2"), ("PET_NODE_RANK", pod)]),
            };
            shell.envs([("MASTER_ADDR", address), ("MASTER_PORT", &port)]);
            shell.envs([("PET_MASTER_ADDR", address), ("PET_MASTER_PORT", &port)]);
            shell.env("PET_NPROC_PER_NODE", ranks);
            Running::start(shell)
        });
        let [first, second] = pods.map(Running::end);
        second.ok();
        assert!(first.ok().stdout.contains("8 ranks x 1 thread"), "{command}");
        assert!(sandbox.path("checkpoints/step-000000002").exists(), "{command}");
    }
}
