//! Whole saves: by several ranks, on disks that fail, and on disks that lose their power.

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use paceline_data::Position;
use paceline_failure::{Failure, Result};
use paceline_host::disk::faults::{Fault, at_each_operation};
use paceline_host::disk::power_cut::{LastingNames, ModelDisk, Unsynced};
use paceline_host::disk::{Disk, Operation};
use paceline_kernels::optimizer::AdamW;
use paceline_memory::{Allocator, DType};
use paceline_model::weights::WeightFile;
use paceline_model::{MlpConfig, Optimizer, OptimizerConfig, Storage};

use super::index::{CHUNK_BYTES, INDEX, ShardFile};
use super::pieces::{self, Ranges};
use super::reader::Reader;
use super::verify::verify;
use super::*;
use crate::progress::{Best, EpochSums, LossScaling, Progress};

const ADAMW: AdamW = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
const KIND: &str = "any of the exact ones";

/// Layers of this width: 2.2 MB with the optimizer's state at 400.
const fn mlp(hidden_dim: usize) -> MlpConfig {
    MlpConfig { input_dim: 64, hidden_dim, output_dim: 4, num_layers: 3, tie_layers: false }
}

/// A model and its optimizer for this many ranks, whose values depend on the seed.
fn model(sizes: MlpConfig, ranks: usize, seed: u64) -> (Storage, Optimizer) {
    let allocator = Allocator::new();
    let layout = sizes.build(ranks).unwrap().layout;
    let storage = Storage::private(layout.clone(), DType::F32, &allocator).unwrap();
    storage.initialize(seed).unwrap();
    let optimizer = Optimizer::new(OptimizerConfig::AdamW(ADAMW), &storage, &allocator).unwrap();
    for param in layout.params() {
        for (at, (_, state)) in optimizer.state_of(param.range()).unwrap().into_iter().enumerate() {
            let values = storage.values().slice(param.range()).unwrap();
            let values = values.read::<f32>().unwrap();
            let mut state = state.write::<f32>().unwrap();
            state.iter_mut().zip(&*values).for_each(|(x, v)| *x = v * (at + 2) as f32);
        }
    }
    (storage, optimizer)
}

/// The ranges that rank `rank` owns in a placement that cuts each unit evenly.
fn shard(storage: &Storage, rank: usize, ranks: usize) -> Ranges {
    let layout = storage.layout();
    let cut = |unit: &paceline_model::Unit| {
        let len = unit.range.len() / ranks;
        unit.range.start + rank * len..unit.range.start + (rank + 1) * len
    };
    let values: Vec<_> = layout.units().iter().map(cut).collect();
    Ranges { state: values.clone(), values }
}

fn everything(storage: &Storage) -> Ranges {
    Ranges::everything(storage.layout())
}

fn saver(disk: &Disk, folder: &Path, rank: usize, ranks: usize, budget: Option<usize>) -> Saver {
    let settings = SaveSettings { keep: 2, budget_bytes: budget, limit: SAVE_LIMIT };
    Saver::new(disk.clone(), folder, settings, "0123".into(), rank, ranks)
}

/// Begins a save of a rank.
fn begin(
    saver: &mut Saver,
    (storage, optimizer): &(Storage, Optimizer),
    owned: &[Ranges],
    rank: usize,
    steps: u64,
) -> Result<()> {
    let own = pieces::share(owned, rank);
    let mut pieces = pieces::of_ranges("", &own, storage, optimizer).unwrap();
    if rank == 0 {
        pieces.extend(pieces::of_buffers(storage, |_| true).unwrap());
    }
    let progress = Progress { steps, ..Progress::default() };
    let head = head(owned.len(), KIND, &[], steps, &progress);
    saver.begin(head, &progress, &pieces, &Allocator::new())
}

/// Saves a model as several ranks that own these ranges, after a checkpoint in the same folder.
fn save(
    disk: &Disk,
    folder: &Path,
    model: &(Storage, Optimizer),
    owned: &[Ranges],
    steps: u64,
    previous: Option<Previous>,
) -> Result<()> {
    let mut savers: Vec<_> =
        (0..owned.len()).map(|rank| saver(disk, folder, rank, owned.len(), None)).collect();
    previous.into_iter().for_each(|previous| savers[0].follow(previous));
    for (rank, saver) in savers.iter_mut().enumerate() {
        begin(saver, model, owned, rank, steps)?;
    }
    savers.iter_mut().try_for_each(Saver::wait_for_part)?;
    savers[0].wait()
}

/// Saves as one rank, which has taken the folder.
fn save_alone(disk: &Disk, path: &Path, model: &(Storage, Optimizer), steps: u64) -> Result<()> {
    let _folder = Folder::take(path, disk.clone(), "a run")?;
    save(disk, path, model, &[everything(&model.0)], steps, None)
}

/// The elements of a model and its optimizer in some ranges, without padding.
fn contents(
    (storage, optimizer): &(Storage, Optimizer),
    ranges: &Ranges,
) -> Vec<(String, Vec<f32>)> {
    let pieces = pieces::of_ranges("", ranges, storage, optimizer).unwrap();
    let piece = |piece: pieces::Piece| {
        let name = format!("{} {:?} {}", piece.name, piece.shape, piece.start);
        (name, piece.data.read::<f32>().unwrap().to_vec())
    };
    pieces.into_iter().map(piece).collect()
}

fn last(path: &Path) -> std::result::Result<Checkpoint, String> {
    Checkpoint::open_last_good(&find(path)?).map(|(_, checkpoint, _)| checkpoint)
}

fn restore(checkpoint: &Checkpoint, ranges: &Ranges, to: &mut (Storage, Optimizer)) -> Result<()> {
    let place = RankOfRun { rank: 0, world_size: 1, strategy: KIND };
    checkpoint.restore(place, ranges, &to.0, &mut to.1, Vec::new())
}

fn num_read(checkpoint: &Checkpoint) -> u64 {
    checkpoint.reader.num_read.load(Ordering::Relaxed)
}

#[test]
fn a_checkpoint_of_any_placement_is_read_in_any_placement() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    for (steps, ranks, is_sharded) in [(1, 1, false), (2, 4, false), (3, 4, true), (4, 3, true)] {
        let written = model(mlp(256), ranks, steps);
        let owned: Vec<_> =
            (0..ranks)
                .map(|rank| {
                    if is_sharded { shard(&written.0, rank, ranks) } else { everything(&written.0) }
                })
                .collect();
        save(&Disk::default(), path, &written, &owned, steps, None).unwrap();
        let checkpoint = last(path).unwrap();
        let files = &checkpoint.index().files;
        let num_bytes: u64 = files.iter().map(|file| file.num_bytes).sum();
        let largest = files.iter().map(|file| file.num_bytes).max().unwrap();
        assert!(largest * ranks as u64 <= num_bytes * 3 / 2, "the work is divided: {files:?}");
        for ranks in [1, 2, 3, 8] {
            let expected = model(mlp(256), ranks, steps);
            for rank in 0..ranks {
                let mut read = model(mlp(256), ranks, 99);
                let ranges = shard(&read.0, rank, ranks);
                let checkpoint = last(path).unwrap();
                checkpoint.check(read.0.layout(), &OptimizerConfig::AdamW(ADAMW), &[]).unwrap();
                restore(&checkpoint, &ranges, &mut read).unwrap();
                assert_eq!(contents(&read, &ranges), contents(&expected, &ranges));
                assert_eq!(read.1.steps(), steps);
                // Chunks at the bounds of ranges are read as a whole.
                let limit = num_bytes / ranks as u64 + 20 * CHUNK_BYTES as u64;
                assert!(num_read(&checkpoint) < limit, "{} bytes", num_read(&checkpoint));
            }
        }
    }
}

#[test]
fn a_rank_reads_only_the_chunks_in_which_its_part_lies() {
    let folder = tempfile::tempdir().unwrap();
    // 12 MB of values and twice as much state.
    let sizes = || mlp(1024);
    let written = model(sizes(), 1, 1);
    save(&Disk::default(), folder.path(), &written, &[everything(&written.0)], 1, None).unwrap();
    let mut read = model(sizes(), 8, 2);
    let ranges = shard(&read.0, 3, 8);
    let checkpoint = last(folder.path()).unwrap();
    restore(&checkpoint, &ranges, &mut read).unwrap();
    let all = checkpoint.index().files[0].num_bytes;
    assert!(all > 20 << 20, "{all} bytes");
    assert!(num_read(&checkpoint) < all / 2, "{} of {all} bytes", num_read(&checkpoint));
}

#[test]
fn a_budget_bounds_the_copy_and_changes_no_byte() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let written = model(mlp(400), 1, 5);
    let owned = [everything(&written.0)];
    for (folder, budget) in folders.iter().zip([None, Some(MIN_BUDGET_BYTES)]) {
        let mut saver = saver(&Disk::default(), folder.path(), 0, 1, budget);
        let pieces = pieces::of_ranges("", &owned[0], &written.0, &written.1).unwrap();
        assert_eq!(saver.is_over_budget(&pieces), budget.is_some());
        begin(&mut saver, &written, &owned, 0, 1).unwrap();
        saver.wait().unwrap();
    }
    let digests = folders.map(|folder| last(folder.path()).unwrap().digest());
    assert_eq!(digests[0], digests[1]);
    // One block is filled, one is written, and none waits.
    assert_eq!(snapshot::num_waiting(100 << 20, Some(MIN_BUDGET_BYTES)), 0);
    assert_eq!(snapshot::num_waiting(100 << 20, Some(10 << 20)), 8);
    assert_eq!(snapshot::num_waiting((3 << 20) + 1, Some(10 << 20)), 4);
    assert_eq!(snapshot::num_waiting((3 << 20) + 1, None), 4);
}

#[test]
fn what_changes_after_a_save_has_begun_is_not_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let written = model(mlp(256), 1, 5);
    let expected = contents(&model(mlp(256), 1, 5), &everything(&written.0));
    let mut saver = saver(&Disk::default(), folder.path(), 0, 1, None);
    begin(&mut saver, &written, &[everything(&written.0)], 0, 1).unwrap();
    written.0.initialize(6).unwrap();
    saver.wait().unwrap();
    let mut read = model(mlp(256), 1, 7);
    let ranges = everything(&read.0);
    restore(&last(folder.path()).unwrap(), &ranges, &mut read).unwrap();
    assert_eq!(contents(&read, &ranges), expected);
}

#[test]
fn a_part_that_never_comes_leaves_no_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let written = model(mlp(16), 2, 5);
    let owned = [0, 1].map(|rank| shard(&written.0, rank, 2));
    let mut first = saver(&Disk::default(), path, 0, 2, None);
    begin(&mut first, &written, &owned, 0, 1).unwrap();
    first.wait_for_part().unwrap();
    // The run has failed, and rank 0 waits for the other part.
    drop(first);
    assert_eq!(fs::read_dir(path).unwrap().count(), 0);
    assert_eq!(find(path).unwrap_err(), format!("there is no checkpoint in {}", path.display()));
}

#[test]
fn a_part_of_the_elements_is_no_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let written = model(mlp(16), 1, 5);
    let first = 0..64;
    let owned = Ranges { values: vec![first], ..everything(&written.0) };
    let failure = save(&Disk::default(), folder.path(), &written, &[owned], 1, None).unwrap_err();
    let text = failure.to_string();
    assert!(text.contains("would be incomplete") && text.contains("are in no file"), "{text}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_damaged_checkpoint_gives_way_to_the_one_before_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let written = model(mlp(16), 1, 1);
    for steps in [3, 5, 7] {
        save_alone(&Disk::default(), path, &written, steps).unwrap();
    }
    assert_eq!(steps::all(path), [5, 7], "two are kept");
    assert_eq!(last(path).unwrap().progress().steps, 7);
    assert_eq!(Checkpoint::open(&path.join(steps::name(5))).unwrap().progress().steps, 5);

    let shard = path.join(steps::name(7)).join("rank-000-of-001.shard");
    let whole = fs::read(&shard).unwrap();
    fs::write(&shard, &whole[..whole.len() - 1]).unwrap();
    let (place, checkpoint, note) = Checkpoint::open_last_good(&find(path).unwrap()).unwrap();
    assert_eq!((place, checkpoint.progress().steps), (1, 5));
    let note = note.unwrap();
    for words in ["which rank 0 wrote, is corrupt", "goes on from step-000000005, after step 5"] {
        assert!(note.contains(words), "{note}");
    }
    let refused = Checkpoint::open(path).unwrap_err();
    assert!(refused.contains("is corrupt") && refused.contains("--resume auto"), "{refused}");
    let verified = find(path).unwrap().iter().map(|path| verify(path).is_ok()).collect::<Vec<_>>();
    assert_eq!(verified, [false, true]);

    fs::remove_dir_all(path.join(steps::name(5))).unwrap();
    let refused = Checkpoint::open(path).unwrap_err();
    assert!(refused.contains("is corrupt") && !refused.contains("--resume"), "{refused}");
}

#[test]
fn an_exported_checkpoint_is_a_weight_file() {
    let folder = tempfile::tempdir().unwrap();
    let written = model(mlp(256), 3, 1);
    let owned = [0, 1, 2].map(|rank| shard(&written.0, rank, 3));
    save(&Disk::default(), folder.path(), &written, &owned, 9, None).unwrap();
    let reader = Reader::open(last(folder.path()).unwrap().path()).unwrap();
    for with_optimizer in [false, true] {
        let mut bytes = Vec::new();
        let (count, num_bytes) = export::export(&reader, with_optimizer, &mut bytes).unwrap();
        assert!(count > 0 && bytes.len() as u64 > num_bytes);
        let file = WeightFile::from_bytes(Path::new("file"), bytes).unwrap();
        assert_eq!(file.metadata()["steps"], "9");
        let read = model(mlp(256), 1, 2);
        let adamw = OptimizerConfig::AdamW(ADAMW);
        if with_optimizer {
            file.restore(&read.0, &read.1).unwrap()
        } else {
            file.check(read.0.layout(), DType::F32, &adamw).unwrap_err();
            file.restore_model(&read.0).unwrap();
        }
        assert_eq!(read.0.digest().unwrap(), written.0.digest().unwrap());
    }
}

/// A folder in memory if possible: the files of thousands of states need no disk.
fn folder_in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

#[test]
fn a_fault_at_any_operation_of_a_save_loses_no_checkpoint() {
    let model = model(mlp(400), 1, 1);
    let num_operations = at_each_operation(|disk, fault| {
        let folder = folder_in_memory();
        let path = folder.path();
        save_alone(&Disk::default(), path, &model, 1).unwrap();
        save_alone(&Disk::default(), path, &model, 2).unwrap();
        let outcome = save_alone(disk, path, &model, 3);
        let checkpoint = last(path).unwrap();
        let found = checkpoint.progress().steps;
        verify(checkpoint.path()).unwrap();
        // The last operations come after the new checkpoint has its name.
        assert!(found == 2 || found == 3, "step {found}");
        match outcome {
            Ok(()) => assert_eq!(found, 3),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains(&path.display().to_string()), "{text}");
                assert!(text.contains("no space left"), "{text}");
                assert!(matches!(error, Failure::Run(_)), "{error:?}");
                if fault == Fault::Fails {
                    let left = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
                    let left: Vec<_> =
                        left.filter(|name| name.to_string_lossy().ends_with(".partial")).collect();
                    assert!(left.is_empty(), "{left:?}");
                }
            }
        }
        // The next run goes on as if nothing had happened.
        save_alone(&Disk::default(), path, &model, 4).unwrap();
        assert_eq!(Checkpoint::open(path).unwrap().progress().steps, 4);
        assert_eq!(steps::all(path).len(), 2);
        let names = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
        let hidden = names.filter(|name| name.to_string_lossy().starts_with('.')).count();
        assert_eq!(hidden, 0, "nothing is left over");
    });
    assert!(num_operations > 20, "{num_operations} operations");
}

/// Two ranks save four times, and keep two checkpoints. After a power cut at any operation a checkpoint loads, no older
/// than the last one reported complete.
#[test]
fn a_power_cut_after_any_operation_loses_no_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("saved");
    let disk = Disk::recorded();
    let owner = Folder::take(&path, disk.clone(), "a run").unwrap();
    let mut previous = None;
    // The last one replaces the one before: the run has gone back to step 3.
    for (steps, seed) in [(1, 1), (2, 2), (3, 3), (4, 4), (4, 5)] {
        if seed == 5 {
            previous = Checkpoint::open(&path.join(steps::name(3))).unwrap().as_previous(&path);
            assert!(previous.is_some());
            disk.acknowledge(3);
        }
        let model = model(mlp(4), 2, seed);
        let owned = [0, 1].map(|rank| shard(&model.0, rank, 2));
        save(&disk, &path, &model, &owned, steps, previous.take()).unwrap();
        disk.acknowledge(steps);
    }
    drop(owner);

    let expected: Vec<_> = (0..=5)
        .map(|seed| {
            let model = model(mlp(4), 1, seed);
            contents(&model, &everything(&model.0))
        })
        .collect();
    let mut model_disk = ModelDisk::new(folder.path());
    let (mut acknowledged, mut num_states) = (0, 0);
    for (at, operation) in disk.operations().iter().enumerate() {
        model_disk.apply(operation);
        if let Operation::Acknowledged(steps) = operation {
            acknowledged = *steps;
        }
        let num_names = model_disk.num_unsynced_names();
        let first = (0..=num_names).map(LastingNames::First);
        for names in first.chain((1..=num_names).map(LastingNames::AllBut)) {
            for data in Unsynced::ALL {
                let left = folder_in_memory();
                model_disk.leave(left.path(), data, names);
                num_states += 1;
                let found = last(&left.path().join("saved"));
                let state =
                    format!("after operation {at}, {operation:?}, with {data:?} and {names:?}");
                let checkpoint = match found {
                    Ok(checkpoint) => checkpoint,
                    Err(reason) if acknowledged == 0 => {
                        assert!(!reason.is_empty());
                        continue;
                    }
                    Err(reason) => panic!("{state}: {reason}"),
                };
                let steps = checkpoint.progress().steps;
                assert!(steps >= acknowledged, "{state}: step {steps}, not {acknowledged}");
                let mut read = model(mlp(4), 1, 99);
                let ranges = everything(&read.0);
                restore(&checkpoint, &ranges, &mut read).unwrap_or_else(|e| panic!("{state}: {e}"));
                let found = contents(&read, &ranges);
                let is_expected = found == expected[steps as usize];
                assert!(is_expected || steps == 4 && found == expected[5], "{state}");
            }
        }
    }
    assert_eq!(acknowledged, 4);
    assert!(num_states > 500, "{num_states} states");
}

#[test]
fn the_whole_state_of_a_run_is_read_as_it_was_written() {
    // Every field is named here, and none has its default value.
    let progress = Progress {
        position: Position { epoch: 1, batch: 2 },
        steps: 11,
        samples: 99,
        epoch: EpochSums { loss: 0.1 + 0.2, correct: 5.0, count: 8.0 },
        scaling: Some(LossScaling {
            scale: 0.5,
            good_steps: 3,
            skipped_steps: 9,
            skipped_in_a_row: 2,
        }),
        best: Best { lowest: Some((0.7 / 3.0, 7)), since: 4 },
    };
    let mut index = head(1, KIND, &[], 11, &progress);
    index.files.push(ShardFile { name: "empty".into(), ..ShardFile::default() });
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("empty"), b"").unwrap();
    fs::write(folder.path().join(INDEX), index.to_json()).unwrap();
    assert_eq!(Checkpoint::open_at(folder.path()).unwrap().progress(), progress);
}

#[test]
fn a_run_that_has_gone_back_knows_its_own_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let model = model(mlp(16), 1, 1);
    let run = |from: Option<u64>, all: &[u64]| {
        let own = Folder::take(path, Disk::default(), "a run").unwrap();
        let settings = SaveSettings { keep: 99, budget_bytes: None, limit: SAVE_LIMIT };
        let mut saver = Saver::new(Disk::default(), path, settings, "0123".into(), 0, 1);
        if let Some(steps) = from {
            own.go_back(steps).unwrap();
            let from = Checkpoint::open_at(&path.join(steps::name(steps))).unwrap();
            saver.follow(from.as_previous(path).unwrap());
        }
        for steps in all {
            begin(&mut saver, &model, &[everything(&model.0)], 0, *steps).unwrap();
            saver.wait().unwrap();
        }
    };
    run(None, &[30, 40, 45, 50, 60]);
    assert_eq!(steps::good(path), Some(50));
    // At once, so that a run that ends before its first save restarts from here. Later steps have proven it.
    run(Some(40), &[]);
    assert_eq!((latest(path), steps::good(path)), (Some(40), Some(40)));
    run(Some(40), &[47]);
    let order = [47, 40, 30, 60, 50, 45].map(|steps| path.join(steps::name(steps)));
    assert_eq!(find(path).unwrap(), order, "45 is not before 47 on the way of this run");
    NotFinite::note(&Disk::default(), path, 49, "a").unwrap();
    assert_eq!(restart(path, find(path).unwrap()).unwrap().found, order[1..3]);
    // It comes to a step that was good on the other way.
    run(Some(47), &[50]);
    assert_eq!((latest(path), steps::good(path)), (Some(50), Some(40)));
    // An old mark says nothing about a new run.
    fs::remove_dir_all(path.join(steps::name(50))).unwrap();
    fs::write(path.join(steps::GOOD), steps::name(50)).unwrap();
    run(None, &[50]);
    assert_eq!(steps::good(path), None);
}

#[test]
fn steps_that_were_skipped_prove_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(mlp(16), 1, 1);
    let mut saver = saver(&Disk::default(), folder.path(), 0, 1, None);
    for (steps, skipped_in_a_row, good) in [(4, 0, None), (20, 12, None), (21, 0, Some(4))] {
        let scaling = Some(LossScaling { skipped_in_a_row, ..LossScaling::default() });
        let progress = Progress { steps, scaling, ..Progress::default() };
        let own = everything(&model.0);
        let pieces = pieces::of_ranges("", &own, &model.0, &model.1).unwrap();
        let head = head(1, KIND, &[], steps, &progress);
        saver.begin(head, &progress, &pieces, &Allocator::new()).unwrap();
        saver.wait().unwrap();
        assert_eq!(steps::good(folder.path()), good, "after {steps}");
    }
}

#[test]
fn the_file_of_an_earlier_version_is_named() {
    let folder = tempfile::tempdir().unwrap();
    assert!(!is_in(folder.path()));
    fs::write(folder.path().join("checkpoint.safetensors"), b"whatever").unwrap();
    assert!(is_in(folder.path()));
    let refused = find(folder.path()).unwrap_err();
    for words in ["checkpoint.safetensors", "earlier version", "start again in another folder"] {
        assert!(refused.contains(words), "{refused}");
    }
    save_alone(&Disk::default(), folder.path(), &model(mlp(16), 1, 1), 1).unwrap();
    assert_eq!(last(folder.path()).unwrap().progress().steps, 1);
}

#[test]
fn rank_0_does_not_wait_for_ever() {
    let folder = tempfile::tempdir().unwrap();
    let written = model(mlp(16), 2, 5);
    let owned = [0, 1].map(|rank| shard(&written.0, rank, 2));
    let settings = SaveSettings { keep: 2, budget_bytes: None, limit: Duration::ZERO };
    let mut first = Saver::new(Disk::default(), folder.path(), settings, "0123".into(), 0, 2);
    begin(&mut first, &written, &owned, 0, 1).unwrap();
    let text = first.wait().unwrap_err().to_string();
    assert!(text.contains("rank 1 has not written its part within 0 s"), "{text}");
}
