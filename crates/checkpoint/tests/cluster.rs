//! Ranks train, save to one disk and are started again in a simulated cluster. Under faults, a full disk and power cuts, each checkpoint
//! with a name is whole and of one step, none that was reported complete is lost, and no rank waits beyond its limit.

#[path = "../../rendezvous/tests/cluster/excuses.rs"]
#[allow(dead_code)] // Other tests use the rest.
mod excuses;
#[path = "../../rendezvous/tests/cluster/schedules.rs"]
mod schedules;
#[path = "../../run/src/together.rs"]
mod together;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use excuses::{are_short, pauses, wrongly_blamed};
use paceline_checkpoint::pieces::{self, Piece, Ranges};
use paceline_checkpoint::progress::Progress;
use paceline_checkpoint::{
    Checkpoint, Folder, Previous, RankOfRun, SaveSettings, Saver, find, head,
};
use paceline_collectives::{Group, GroupOptions, ReduceOp, Rendezvous};
use paceline_failure::{Failure, Result};
use paceline_host::disk::power_cut::{ModelDisk, Unsynced};
use paceline_host::disk::{Disk, Operation};
use paceline_kernels::optimizer::AdamW;
use paceline_memory::{Allocator, DType};
use paceline_model::{MlpConfig, Optimizer, OptimizerConfig, Storage};
use paceline_trace::runtime::sleep;
use paceline_trace::simulation::{
    ClusterFault, FaultOfHost, HostProgram, ProcessEnd, SplitMix, run,
};
use schedules::explore;
use together::{complete, together};

const WORLD: usize = 3;
const NUM_STEPS: u64 = 7;
const SAVE_EVERY: u64 = 2;
/// Of an operation.
const LIMIT: Duration = Duration::from_secs(5);
const SAVE_LIMIT: Duration = Duration::from_secs(30);
/// The time that [`train`] may take: each of its waits may end at its limit.
const ALL: Duration = Duration::from_secs(300);
/// The longest time of an operation on the disk.
const MAX_PAUSE: Duration = Duration::from_millis(200);
/// How often the ranks start with faults. Then they start once without.
const NUM_LIVES: u64 = 2;
const KIND: &str = "any of the exact ones";

/// The state of a rank: its weights, and the optimizer's state.
struct State(Storage, Optimizer);

impl State {
    fn new() -> Result<Self> {
        let allocator = Allocator::new();
        let mlp = MlpConfig {
            input_dim: 8,
            hidden_dim: 6,
            output_dim: 4,
            num_layers: 2,
            tie_layers: false,
        };
        let storage = Storage::private(mlp.build(1)?.layout, DType::F32, &allocator)?;
        storage.initialize(1)?;
        let adamw = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
        let optimizer = Optimizer::new(OptimizerConfig::AdamW(adamw), &storage, &allocator)?;
        Ok(Self(storage, optimizer))
    }

    fn everything(&self) -> Ranges {
        Ranges::everything(self.0.layout())
    }

    /// A step, given the sum of all ranks' numbers.
    fn advance(&mut self, sum: f32) -> Result<()> {
        let change = |values: &mut [f32], by: f32| {
            values.iter_mut().zip(1u8..).for_each(|(x, at)| *x = *x / 2.0 + by * f32::from(at));
        };
        for param in self.0.layout().params() {
            change(&mut self.0.values().slice(param.range())?.write::<f32>()?, sum);
            for (at, (_, state)) in (2u8..).zip(self.1.state_of(param.range())?) {
                change(&mut state.write::<f32>()?, sum * f32::from(at));
            }
        }
        Ok(())
    }

    fn pieces(&self, ranges: &Ranges) -> Result<Vec<Piece>> {
        pieces::of_ranges("", ranges, &self.0, &self.1)
    }

    fn contents(&self) -> Result<Vec<Vec<f32>>> {
        let pieces = self.pieces(&self.everything())?;
        pieces.iter().map(|piece| Ok(piece.data.read::<f32>()?.to_vec())).collect()
    }

    fn restore(&mut self, from: &Checkpoint, rank: usize) -> Result<()> {
        let (ranges, place) =
            (self.everything(), RankOfRun { rank, world_size: WORLD, strategy: KIND });
        from.restore(place, &ranges, &self.0, &mut self.1, Vec::new())
    }
}

/// The number of a rank in a step.
fn number(rank: usize, step: u64) -> f32 {
    (1 + rank as u64 * 10 + step * 100) as f32
}

fn sum(step: u64) -> f32 {
    (0..WORLD).map(|rank| number(rank, step)).sum()
}

/// The contents after each number of steps, without any fault.
fn undisturbed() -> Result<Vec<Vec<Vec<f32>>>> {
    let mut state = State::new()?;
    let mut all = vec![state.contents()?];
    for step in 1..=NUM_STEPS {
        state.advance(sum(step))?;
        all.push(state.contents()?);
    }
    Ok(all)
}

/// A start of all ranks.
#[derive(Clone)]
struct Life {
    number: u64,
    folder: PathBuf,
    disk: Disk,
}

/// A rank's run. Returns its contents at the end.
fn train(rank: usize, Life { number: life, folder, disk }: &Life) -> Result<Vec<Vec<f32>>> {
    let rendezvous = Rendezvous::by_tcp("10.0.0.1", 29_500, format!("secret {life}"));
    let options = GroupOptions {
        timeout: LIMIT,
        spin: Duration::from_micros(5),
        worker_spin: Duration::ZERO,
        ..GroupOptions::for_local_ranks(1)
    };
    let world = Group::tcp(&rendezvous, &format!("10.0.0.{}", 1 + rank), rank, WORLD, options)?;
    let own = together(&world, "take the folder", SAVE_LIMIT, || {
        let take = || Folder::take(folder, disk.clone(), "a run");
        (rank == 0).then(take).transpose()
    })?;
    let mut state = State::new()?;
    let settings = SaveSettings { keep: 2, budget_bytes: None, limit: SAVE_LIMIT };
    let mut saver = Saver::new(disk.clone(), folder, settings, life.to_string(), rank, WORLD);
    let mut steps = 0;
    if let Some(previous) = resume(&world, folder, &mut state)? {
        steps = previous.steps;
        together(&world, "use the folder", SAVE_LIMIT, || {
            own.as_ref().map_or(Ok(()), |own| own.go_back(steps))
        })?;
        saver.follow(previous);
    }
    let mut under_way = None;
    while steps < NUM_STEPS {
        sleep(Duration::from_millis((rank as u64 * 7 + steps * 3) % 20));
        let mut numbers = [number(rank, steps + 1)];
        world.all_reduce_slice(&mut numbers, ReduceOp::Sum)?;
        state.advance(numbers[0])?;
        steps += 1;
        saver.look()?;
        if steps % SAVE_EVERY == 0 || steps == NUM_STEPS {
            finish(&mut saver, &world, &mut under_way, disk)?;
            let own = pieces::share(&[(); WORLD].map(|()| state.everything()), rank);
            let progress = Progress { steps, ..Progress::default() };
            let head = head(WORLD, KIND, &[], steps, &progress);
            under_way = Some(steps);
            saver.begin(head, &progress, &state.pieces(&own)?, &Allocator::new())?;
        }
    }
    finish(&mut saver, &world, &mut under_way, disk)?;
    state.contents()
}

/// Restores the state from the newest checkpoint, the one that rank 0 finds. Collective.
fn resume(world: &Group, folder: &Path, state: &mut State) -> Result<Option<Previous>> {
    let newest = || find(folder).ok().and_then(|found| found.into_iter().next());
    let newest = if world.rank() == 0 { newest() } else { None };
    let Some(path) = world.broadcast_object(Some(&newest), 0)? else { return Ok(None) };
    together(world, "read the checkpoint", SAVE_LIMIT, || {
        let checkpoint = Checkpoint::open_at(&path).map_err(Failure::Run)?;
        state.restore(&checkpoint, world.rank())?;
        Ok(checkpoint.as_previous(folder))
    })
}

/// Waits until the save under way, if any, is complete, which is then relied on. Collective.
fn finish(
    saver: &mut Saver,
    world: &Group,
    under_way: &mut Option<u64>,
    disk: &Disk,
) -> Result<()> {
    if let Some(steps) = under_way.take() {
        complete(saver, world)?;
        disk.acknowledge(steps);
    }
    Ok(())
}

/// The disk after the ranks have ended. By chance, there was a power cut after any of their operations, and any part of what had not been
/// synced is lost.
fn disk_after(
    mut before: ModelDisk,
    disk: &Disk,
    random: &mut SplitMix,
) -> (tempfile::TempDir, u64) {
    let mut operations = disk.operations();
    let is_cut = random.below(3) > 0;
    if is_cut {
        operations.truncate(random.below(1 + operations.len() as u64) as usize);
    }
    operations.iter().for_each(|operation| before.apply(operation));
    let relied_on = operations.iter().rev().find_map(|operation| match operation {
        Operation::Acknowledged(steps) => Some(*steps),
        _ => None,
    });
    let left = folder_in_memory();
    let mut dice = *random;
    let mut data = || if is_cut { Unsynced::ALL[dice.below(4) as usize] } else { Unsynced::Kept };
    before.leave_each(left.path(), &mut data, &mut |_| !is_cut || random.below(2) == 0);
    (left, relied_on.unwrap_or(0))
}

fn folder_in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Checks all checkpoints in a folder, the newest of which must not be older than `relied_on`.
fn check_folder(folder: &Path, relied_on: u64, expected: &[Vec<Vec<f32>>]) -> Result<(), String> {
    let found = match find(folder) {
        Ok(found) => found,
        Err(_) if relied_on == 0 => return Ok(()),
        Err(reason) => return Err(format!("step {relied_on} is lost: {reason}")),
    };
    for (at, path) in found.iter().enumerate() {
        let checkpoint = Checkpoint::open_at(path)?;
        let steps = checkpoint.progress().steps;
        if at == 0 && steps < relied_on {
            return Err(format!("step {relied_on} is lost: the newest is {steps}"));
        }
        let read = || {
            let mut state = State::new()?;
            state.restore(&checkpoint, 0)?;
            state.contents()
        };
        let contents = read().map_err(|e| format!("{}: {e}", path.display()))?;
        if contents != expected[steps as usize] {
            return Err(format!("{} has not the values of its step", path.display()));
        }
    }
    Ok(())
}

type End = ProcessEnd<Result<Vec<Vec<f32>>>>;

/// Checks how the ranks of a life have ended.
fn check_ends(
    ends: &[End],
    faults: &[FaultOfHost],
    disk: &Disk,
    expected: &[Vec<f32>],
) -> Result<(), String> {
    let is_killed = ends.iter().any(|end| matches!(end, ProcessEnd::Killed));
    let is_quiet = !is_killed && are_short(faults) && !disk.has_failed();
    for (rank, end) in ends.iter().enumerate() {
        let (failure, at) = match end {
            ProcessEnd::Killed => continue,
            ProcessEnd::Hung(waits) => return Err(format!("rank {rank} hangs: {waits:?}")),
            ProcessEnd::Returned(Ok(contents), _) if contents == expected => continue,
            ProcessEnd::Returned(Ok(_), _) => return Err(format!("rank {rank} has other values")),
            ProcessEnd::Returned(Err(failure), at) => (failure, *at),
        };
        let fails = |how: &str| Err(format!("rank {rank} {how}: {failure}; all: {ends:?}"));
        if is_quiet {
            return fails("fails without a reason");
        }
        match failure {
            Failure::Missing { ranks, .. } => {
                if let Some(wrong) = wrongly_blamed(ranks, (rank, at), faults, ends) {
                    return fails(&format!("blames {wrong}"));
                }
            }
            Failure::Consequence(_) => {}
            Failure::Run(text) if text.contains("no space left") && disk.has_failed() => {}
            // The part of a rank that has failed never comes.
            Failure::Run(text) if text.contains("has not written its part") => {}
            _ => return fails("has another error"),
        }
    }
    Ok(())
}

fn check(seed: u64, faults: &[FaultOfHost]) -> Result<(), String> {
    let mut random = SplitMix(seed ^ 0xD15C);
    let expected = undisturbed().map_err(|e| e.to_string())?;
    let (mut root, mut relied_on) = (folder_in_memory(), 0);
    for life in 0..=NUM_LIVES {
        let is_last = life == NUM_LIVES;
        let faults = if is_last { &[] } else { faults };
        let most = MAX_PAUSE.as_nanos() as u64;
        let pause = |_| Duration::from_nanos(random.time_ns(most));
        let times = (0..61).map(pause).collect();
        let begin = random.below(400) as usize;
        let is_full = !is_last && random.below(4) == 0;
        let full = begin..begin + if is_full { 1 + random.below(200) as usize } else { 0 };
        let disk = Disk::simulated(times, full);
        let before = ModelDisk::holding(root.path());
        let folder = root.path().join("saved");
        let of_all = Arc::new(Life { number: life, folder, disk: disk.clone() });
        let rank = |rank: usize| {
            let life = of_all.clone();
            HostProgram { host: rank, main: Box::new(move || train(rank, &life)) }
        };
        let programs = (0..WORLD).map(rank).collect();
        let ends: Vec<End> = run(seed * 10 + life, faults, ALL + pauses(faults), programs);
        check_ends(&ends, faults, &disk, &expected[NUM_STEPS as usize])
            .map_err(|reason| format!("life {life}: {reason}"))?;
        let (left, newest) = disk_after(before, &disk, &mut random);
        relied_on = relied_on.max(newest);
        check_folder(&left.path().join("saved"), relied_on, &expected).map_err(|reason| {
            let names: Vec<_> =
                fs::read_dir(left.path().join("saved")).into_iter().flatten().collect();
            format!("life {life}: {reason}; there are {names:?}; all: {ends:?}")
        })?;
        root = left;
    }
    Ok(())
}

#[test]
fn no_checkpoint_is_lost_or_mixed() {
    explore(WORLD, check);
}

/// A save of a rank without a group, which begins after a while.
fn save_after(rank: usize, pause: Duration, disk: &Disk, folder: &Path) -> Result<()> {
    let settings = SaveSettings { keep: 2, budget_bytes: None, limit: Duration::from_secs(10) };
    let mut saver = Saver::new(disk.clone(), folder, settings, "1".into(), rank, 2);
    sleep(pause);
    let state = State::new()?;
    let own = pieces::share(&[(); 2].map(|()| state.everything()), rank);
    let progress = Progress { steps: 1, ..Progress::default() };
    let head = head(2, KIND, &[], 1, &progress);
    saver.begin(head, &progress, &state.pieces(&own)?, &Allocator::new())?;
    saver.wait()
}

#[test]
fn time_in_which_all_were_suspended_is_no_wait_for_a_part() {
    let at = Duration::from_secs(1);
    let faults =
        [FaultOfHost { at, host: 0, kind: ClusterFault::Suspend, time: Duration::from_secs(60) }];
    let folder = folder_in_memory();
    let rank = |rank: usize| {
        let (path, pause) = (folder.path().to_owned(), at * 5 * rank as u32);
        HostProgram {
            host: rank,
            main: Box::new(move || save_after(rank, pause, &Disk::default(), &path)),
        }
    };
    let ends = run(1, &faults, ALL, (0..2).map(rank).collect());
    for end in &ends {
        assert!(matches!(end, ProcessEnd::Returned(Ok(()), _)), "{ends:?}");
    }
}

/// Removes a file as soon as it is there, as rank 0 does when it gives up.
fn remove(path: &Path) -> Result<()> {
    while fs::remove_file(path).is_err() {
        sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Found by seed 602.
#[test]
fn a_rank_whose_files_rank_0_removes_is_not_the_cause() {
    let folder = folder_in_memory();
    let disk = Disk::simulated(vec![Duration::from_millis(10)], 0..0);
    let file = folder.path().join(".step-000000001.1.partial/rank-001.partial");
    let path = folder.path().to_owned();
    let writer = move || save_after(1, Duration::ZERO, &disk, &path);
    let programs = [
        HostProgram { host: 0, main: Box::new(move || remove(&file)) },
        HostProgram { host: 1, main: Box::new(writer) as Box<_> },
    ];
    let ends = run(1, &[], ALL, programs.into());
    let is_consequence = matches!(ends[1], ProcessEnd::Returned(Err(Failure::Consequence(_)), _));
    assert!(is_consequence, "{ends:?}");
}
