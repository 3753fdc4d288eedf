//! Commit points: they change no bits, both copies of a shard are equal, and the ranks that are left when one is lost end with the
//! contents of the same step.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Barrier, Mutex};

use paceline_collectives::{Axis, Group, Mesh, MeshShape};
use paceline_memory::{Category, Tensor};
use paceline_model::{Batch, Optimizer, Owned, Precision, Storage};
use paceline_strategies::{
    Commit, Ddp, InterruptedStep, LeftTrainer, LocalSgd, MicroBatch, NoSync, PeerShard, Replica,
    ReplicaOptions, Stages, Stepped, TopK, schedule, train_step,
};

use crate::common::{Make, Net, Optim, SHARDED, Trainer, on_mesh};

/// The bits of elements, by their kind and the first of them.
type Contents = BTreeMap<(String, usize), Vec<u32>>;

const DDP: Make = || Box::new(Ddp::new(1024));

/// The samples of the two micro-batches of a step.
const STEP: [usize; 2] = [7, 6];

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.read::<f32>().unwrap().iter().map(|value| value.to_bits()).collect()
}

fn contents(kind: &str, owned: &Owned, storage: &Storage, optimizer: &Optimizer) -> Contents {
    let mut contents = Contents::new();
    for range in &owned.values {
        let values = storage.values().slice(range.clone()).unwrap();
        contents.insert((format!("{kind} values"), range.start), bits(&values));
    }
    for range in &owned.state {
        for (name, state) in optimizer.state_of(range.clone()).unwrap() {
            contents.insert((format!("{kind} {name}"), range.start), bits(&state));
        }
    }
    contents
}

fn own(trainer: &Trainer) -> Contents {
    contents("own", &trainer.valid(), &trainer.replica.storage, &trainer.optimizer)
}

fn of_peer(trainer: &Trainer, kind: &str) -> Contents {
    of_copy(trainer.commit.as_ref().and_then(|commit| commit.peer()), kind)
}

fn of_copy(peer: Option<&PeerShard>, kind: &str) -> Contents {
    peer.map(|of| contents(kind, &of.owned, &of.storage, &of.optimizer)).unwrap_or_default()
}

/// The same of a rank that has left.
fn all_kept(left: &LeftTrainer) -> Contents {
    left.restore_buffers().unwrap();
    let mut all = contents("own", &left.valid, &left.storage, &left.optimizer);
    all.extend(of_copy(left.peer(), "peer"));
    all.insert(("buffers".into(), 0), bits(left.storage.buffers()));
    all
}

/// All that outlives a rank.
fn all_contents(trainer: &Trainer) -> Contents {
    let mut contents = own(trainer);
    contents.extend(of_peer(trainer, "peer"));
    let buffers = trainer.commit.as_ref().unwrap().buffers();
    contents.insert(("buffers".into(), 0), bits(buffers));
    contents
}

/// Compares a rank's copy with the shard of the rank before it. Returns the elements of the copy.
fn check_peer(trainer: &mut Trainer, what: &str) -> usize {
    trainer.sync_replicas();
    let group = trainer.replica.group.clone();
    let list: Vec<_> = own(trainer).into_iter().collect();
    let all = group.all_gather_object(&list).unwrap();
    let before = &all[(group.rank() + group.world_size() - 1) % group.world_size()];
    let before: Contents = before.iter().cloned().collect();
    let copy = of_peer(trainer, "own");
    for (key, copied) in &copy {
        assert_eq!(before.get(key), Some(copied), "{key:?} of {what} on rank {}", group.rank());
    }
    copy.values().map(Vec::len).sum()
}

/// The digest after steps of all kinds: with other learning rates, clipped, without an update, and after a resume.
fn train(trainer: Trainer, copies: Option<usize>, what: &str) -> (String, usize) {
    let mut trainer = match copies {
        Some(copies) => trainer.with_commit(copies).unwrap(),
        None => trainer,
    };
    let mut copied = 0;
    for at in 0..6 {
        trainer.optimizer.set_lr(0.02 / (1.0 + at as f64));
        // Gradients in f32 overflow with this scale.
        let (scales_loss, scale) = (at == 3, if at == 3 { f64::exp2(400.0) } else { 1.0 });
        (trainer.scales_loss, trainer.state.loss_scale) = (scales_loss, scale);
        trainer.max_norm = (at % 2 == 1).then_some(0.05);
        if at == 4 {
            trainer.optimizer.resume_after(20);
        }
        let shares = trainer.shares(&STEP);
        let Stepped { is_updated, .. } =
            paceline_strategies::Trainer::step_on(&mut trainer, &shares).unwrap();
        assert_eq!(is_updated, at != 3, "step {at} of {what}");
        assert!(trainer.commit.as_ref().is_none_or(|commit| commit.interrupted().is_none()));
        copied = check_peer(&mut trainer, what);
    }
    (trainer.digest(), copied)
}

#[test]
fn commit_points_change_no_bits_and_both_copies_are_equal() {
    for net in [Net::BatchNormCnn, Net::FrozenCnn, Net::TiedLlama] {
        for (make, optim) in SHARDED.into_iter().chain([DDP]).flat_map(|make| {
            [Optim::Plain, Optim::Momentum, Optim::AdamW].map(|optim| (make, optim))
        }) {
            let name = make().name();
            let run = |copies: Option<usize>| {
                let what = format!("{name}, {net:?}, {optim:?}, {copies:?}");
                on_mesh("dp=3", |mesh| {
                    let group = mesh.world().clone();
                    train(Trainer::with_optimizer(net, group, make(), optim), copies, &what)
                })
            };
            let expected = run(None);
            for copies in [1, 2] {
                let found = run(Some(copies));
                for (rank, (digest, _)) in found.iter().enumerate() {
                    assert_eq!(*digest, expected[rank].0, "{name}, {net:?}, {optim:?}, {copies}");
                }
                let copied: usize = found.iter().map(|(_, copied)| copied).sum();
                assert_eq!(copied > 0, copies == 2 && name != "ddp", "{name}: {copied}");
            }
        }
    }
}

#[test]
fn replicas_of_a_shard_need_no_copy_and_stages_copy_their_own() {
    let last = SHARDED.len() - 1;
    let copied = on_mesh("dp=2,shard=2", |mesh| {
        let trainer = Trainer::on_mesh(Net::Cnn, mesh, SHARDED[last]());
        train(trainer, Some(2), "dp=2,shard=2").1
    });
    assert_eq!(copied, [0; 4]);
    for (mesh, has_copies) in [("pp=2,dp=2", true), ("pp=2,dp=1", false)] {
        for make in SHARDED {
            let what = format!("{}, {mesh}", make().name());
            let run = |copies| on_mesh(mesh, |mesh| train(in_stages(mesh, make), copies, &what));
            let (found, expected) = (run(Some(2)), run(None));
            // A rank may own nothing of its stage.
            assert_eq!(found.iter().any(|(_, copied)| *copied > 0), has_copies, "{what}");
            assert!(found.iter().zip(expected).all(|(of, expected)| of.0 == expected.0), "{what}");
        }
    }
}

#[test]
fn commit_points_take_the_memory_that_is_stated() {
    const CATEGORIES: [Category; 5] = [
        Category::Parameters,
        Category::Gradients,
        Category::Optimizer,
        Category::Unsharded,
        Category::Communication,
    ];
    for (make, copies) in SHARDED.into_iter().chain([DDP]).flat_map(|make| [(make, 1), (make, 2)]) {
        on_mesh("dp=3", |mesh| {
            let (rank, shape) = (mesh.world().rank(), mesh.shape().clone());
            let mut trainer = Trainer::on_mesh(Net::BatchNormCnn, mesh, make());
            let allocator = trainer.replica.compute.allocator.clone();
            let used =
                || CATEGORIES.map(|category| allocator.usage(category).current_bytes as usize);
            let before = used();
            trainer = trainer.with_commit(copies).unwrap();
            trainer.step(&STEP).unwrap();
            let (strategy, model) = (make(), &trainer.replica.model);
            let stated =
                Commit::footprint((&*strategy, copies), model, Precision::F32, &shape, rank);
            let copied = PeerShard::owned_by(&*strategy, model, &shape, rank);
            let state =
                copied.filter(|_| copies > 1).map_or(0, |of| of.state.iter().map(Range::len).sum());
            // The optimizer has one tensor of state.
            let expected = [stated.parameters, stated.gradients, 4 * state, 0, 0];
            let found: Vec<_> =
                used().iter().zip(before).map(|(now, before)| now - before).collect();
            assert_eq!(found, expected, "{}, {copies} copies, rank {rank}", strategy.name());
        });
    }
}

fn in_stages(mesh: Mesh, make: Make) -> Trainer {
    let stages = Stages::even(schedule::named("1f1b").unwrap(), STEP.len());
    Trainer::in_stages(Net::DeepMlp, mesh, make(), &stages).unwrap()
}

#[test]
fn steps_that_cannot_be_made_again_are_refused() {
    let refused = |make: Make, options: ReplicaOptions, copies: usize| {
        let errors = on_mesh("dp=2", |mesh| {
            let mut trainer = Trainer::new(Net::Mlp, mesh.world().clone(), make());
            trainer.replica.options = options;
            trainer.with_commit(copies).err().unwrap().to_string()
        });
        assert_eq!(errors[0], errors[1]);
        errors.into_iter().next().unwrap()
    };
    let plain = ReplicaOptions::DEFAULT;
    let steps_by_bucket = ReplicaOptions { steps_by_bucket: true, ..plain };
    assert!(refused(DDP, steps_by_bucket, 1).contains("unset ReplicaOptions::steps_by_bucket"));
    assert!(refused(DDP, plain, 0).contains("1 or 2 copies of each shard, not 0"));
    assert!(refused(DDP, plain, 3).contains("not 3"));
    for (make, name) in [
        ((|| Box::new(LocalSgd::new(4).unwrap())) as Make, "local_sgd"),
        (|| Box::new(NoSync), "no_sync"),
        (|| Box::new(Ddp::new(1024).with_hook(TopK::new(0.1).unwrap())), "top_k"),
    ] {
        let error = refused(make, plain, 1);
        assert!(error.ends_with(&format!("unlike {name}")), "{error}");
    }
    let alone = Trainer::new(Net::Mlp, Group::single().unwrap(), DDP());
    assert!(alone.leave().complete().unwrap_err().to_string().contains("no step has reached"));
}

/// When a rank is lost in the step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    /// It does not begin the step.
    AtBegin,
    /// It begins the second micro-batch.
    InPasses,
    /// It has final gradients.
    BeforeCommit,
    /// It has passed the commit point, and made no update.
    AfterCommit,
}

struct Case {
    net: Net,
    mesh: &'static str,
    make: Make,
    copies: usize,
}

impl Case {
    fn trainer(&self, mesh: Mesh) -> Trainer {
        let mut trainer = if mesh.shape().size(Axis::Pp) > 1 {
            in_stages(mesh, self.make)
        } else {
            Trainer::on_mesh(self.net, mesh, (self.make)())
        };
        trainer.max_norm = Some(0.05);
        trainer.with_commit(self.copies).unwrap()
    }

    /// What each rank has after two steps and after three.
    fn undisturbed(&self) -> Vec<[Contents; 2]> {
        on_mesh(self.mesh, |mesh| {
            let mut trainer = self.trainer(mesh);
            trainer.step(&STEP).unwrap();
            [2, 3].map(|_| {
                trainer.step(&STEP).unwrap();
                trainer.sync_replicas();
                all_contents(&trainer)
            })
        })
    }

    /// Loses a rank in the third step. Returns what `reader` has, and after how many steps. The others leave, so that the memory
    /// of failed operations is given back to it. With `completes`, the step is completed though no rank that is left has
    /// passed the commit point: the lost one might have.
    fn disturbed(
        &self,
        lost: usize,
        when: Loss,
        reader: usize,
        completes: bool,
    ) -> (usize, Contents) {
        let shape: MeshShape = self.mesh.parse().unwrap();
        let num_left = shape.num_ranks().unwrap() - 1;
        let (meeting, known) = (Barrier::new(num_left), Mutex::new(Vec::new()));
        let found = on_mesh(self.mesh, |mesh| {
            let groups = groups_of(&mesh);
            let rank = mesh.world().rank();
            let mut trainer = self.trainer(mesh);
            trainer.step(&STEP).unwrap();
            trainer.step(&STEP).unwrap();
            if rank == lost {
                lose(&mut trainer, when);
                return None;
            }
            let is_ended = trainer.step(&STEP).is_ok();
            let interrupted = trainer.commit.as_ref().unwrap().interrupted();
            let has_passed = is_ended || interrupted.is_some_and(|of| of.has_passed);
            known.lock().unwrap().push(has_passed);
            meeting.wait();
            let has_any_passed = known.lock().unwrap().contains(&true);
            assert!(when == Loss::AfterCommit || !has_any_passed, "{interrupted:?}");
            let is_completed = has_any_passed || (completes && interrupted.is_some());
            let group = trainer.replica.group.clone();
            let mut left = trainer.leave();
            if is_completed && !is_ended {
                let InterruptedStep { stepped, .. } = interrupted.unwrap();
                assert!(stepped.is_updated && stepped.grad_norm > Some(0.05));
                left.complete().unwrap();
                assert!(left.interrupted().is_none());
            }
            if rank != reader {
                return None;
            }
            for group in groups.iter().chain([&group]) {
                // All operations before have ended.
                group.barrier().unwrap_err();
                group.give_back_failed().unwrap();
            }
            Some((2 + usize::from(is_completed), all_kept(&left)))
        });
        found.into_iter().flatten().next().unwrap()
    }
}

/// All groups of a rank.
fn groups_of(mesh: &Mesh) -> Vec<Group> {
    let axes = mesh.shape().axes().iter().filter_map(|(axis, _)| mesh.group(*axis));
    axes.chain([mesh.world()]).cloned().collect()
}

/// The last deeds of a rank.
fn lose(trainer: &mut Trainer, when: Loss) {
    let mut shares = trainer.shares(&STEP);
    match when {
        Loss::AtBegin => {}
        Loss::InPasses => {
            let MicroBatch { batch, .. } = &mut shares[1];
            *batch = Batch::new(batch.get("targets").unwrap().clone(), batch.inputs().clone());
            trainer.step_on(&shares).unwrap_err();
        }
        Loss::BeforeCommit => {
            let (strategy, mut cx, _) = trainer.parts();
            train_step(strategy, &mut cx, &shares).unwrap();
            strategy.grad_norm(&mut cx).unwrap();
        }
        Loss::AfterCommit => {
            let Replica { storage, compute, .. } = &trainer.replica;
            let len = storage.layout().len();
            let (config, elsewhere) = (*trainer.optimizer.config(), len..len + 16);
            let memory = &compute.allocator;
            trainer.optimizer =
                Optimizer::of_ranges(config, storage, vec![elsewhere], memory).unwrap();
            let error = trainer.step_on(&shares).unwrap_err().to_string();
            assert!(error.contains("does not hold the elements"), "{error}");
        }
    }
}

/// Compares what each rank that is left has with an undisturbed run.
fn check(case: &Case, lost: usize, losses: &[Loss]) {
    let expected = case.undisturbed();
    let mut reached = Vec::new();
    for &when in losses {
        for reader in (0..expected.len()).filter(|reader| *reader != lost) {
            for completes in [false, true] {
                let (steps, found) = case.disturbed(lost, when, reader, completes);
                reached.push(steps);
                let (name, mesh) = ((case.make)().name(), case.mesh);
                let what = format!("{name} on {mesh}, {when:?}, rank {reader}, {steps} steps");
                let expected = &expected[reader][steps - 2];
                assert!(found.keys().eq(expected.keys()), "{what}");
                let differs = found.iter().find(|(key, bits)| expected[*key] != **bits);
                assert_eq!(differs.map(|(key, _)| key), None, "{what}");
            }
        }
    }
    assert!(reached.contains(&2) && reached.contains(&3), "{reached:?}");
}

const LOSSES: [Loss; 4] = [Loss::AtBegin, Loss::InPasses, Loss::BeforeCommit, Loss::AfterCommit];

#[test]
fn the_ranks_that_are_left_have_the_same_step() {
    for (at, make) in SHARDED.into_iter().chain([DDP]).enumerate() {
        for copies in [1, 2] {
            let net = if at % 2 == 0 { Net::BatchNormCnn } else { Net::FrozenCnn };
            check(&Case { net, mesh: "dp=3", make, copies }, at % 3, &LOSSES);
        }
    }
}

#[test]
fn so_have_stages_and_replicas_of_shards() {
    // Until the commit point, ranks may wait for others that are left and have failed.
    let losses = [Loss::BeforeCommit, Loss::AfterCommit];
    let make = SHARDED[SHARDED.len() - 1];
    for mesh in ["pp=2,dp=2", "dp=2,shard=2"] {
        check(&Case { net: Net::Cnn, mesh, make, copies: 2 }, 1, &losses);
    }
}
