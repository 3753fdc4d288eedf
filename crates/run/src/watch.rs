//! Digests of the gradients and weights of each step: compared between replicas, and put together for the run folder.
//!
//! Input: what the optimizer has noted of the elements that it updates. Output: the digests of whole parameters on rank 0, or a failure that
//! names the first tensor and the ranks that differ. A step costs one operation of 16 bytes, and one of 32 for each parameter if ranks own parts.

use paceline_collectives::{Axis, Group, ReduceOp};
use paceline_failure::{Result, usage};
use paceline_kernels::digest::Digest;
use paceline_memory::{Category, DType};
use paceline_model::{BufferId, Optimizer, Owned, Param};
use paceline_settings::flags::RunFlags;
use paceline_strategies::{Digested, Exactness, Phase, Replica, Trainer};

use crate::equality;

/// Compares the digests of the last step with those of the other replicas. Returns those of all ranks together, by the number of the
/// parameter; `None` if the run does not watch. Collective.
pub(crate) fn compare(
    replica: &Replica,
    optimizer: &Optimizer,
    exactness: &Exactness,
    steps: u64,
) -> Result<Option<Vec<[u64; 2]>>> {
    let Some(own) = optimizer.digests() else { return Ok(None) };
    let owns_all = replica.owned.state == Owned::everything(&replica.model).state;
    let replicas = replicas(replica, owns_all);
    let keeps_equal = matches!(exactness, Exactness::Exact | Exactness::Lossy(_));
    if let Some(group) = replicas.filter(|group| keeps_equal && group.world_size() > 1) {
        compare_replicas(replica, group, own, steps)?;
    }
    let params = replica.model.layout.params();
    let only = |is_kept: &dyn Fn(&Param) -> bool| -> Vec<[Digest; 2]> {
        let kept = own.iter().zip(params);
        kept.map(|(of, param)| if is_kept(param) { *of } else { Default::default() }).collect()
    };
    if let Some(ranks) = &replica.tensor {
        compare_replicas(replica, ranks, &only(&|param| param.part.is_none()), steps)?;
    }
    let folded = |all: &[[Digest; 2]]| all.iter().map(|of| of.map(Digest::folded)).collect();
    if owns_all && !replica.is_stage() && replica.tensor.is_none() {
        return Ok(Some(folded(own)));
    }
    let is_first = replicas.is_none_or(|group| group.rank() == 0);
    let counted = only(&|param| is_first && replica.counts(param));
    let numbers = counted.iter().flatten().flat_map(|of| [of.sum as i64, of.by_row as i64]);
    let mut numbers: Vec<i64> = numbers.collect();
    replica.world.all_reduce_slice(&mut numbers, ReduceOp::Sum)?;
    let digest = |of: &[i64; 2]| Digest { sum: of[0] as u64, by_row: of[1] as u64 };
    let all: Vec<Digest> = numbers.as_chunks::<2>().0.iter().map(digest).collect();
    Ok(Some(folded(all.as_chunks::<2>().0)))
}

/// Fails for a place that is none, and if passes cannot be watched.
pub(crate) fn check(flags: &RunFlags) -> Result<()> {
    match &flags.output.watch_passes {
        Some(_) if flags.ranks.cuda_graph => {
            usage("--watch-passes: a graph keeps no tensors of its blocks; leave out --cuda-graph")
        }
        Some(place) if place != "digests" && place.split(':').count() < 4 => usage(format!(
            "--watch-passes {place}: pass a place such as 2:0:forward:conv1, or nothing"
        )),
        _ => Ok(()),
    }
}

/// Brings the digests of the step's passes to rank 0, with those of its results; `None` elsewhere, or if the run does not watch them.
/// Collective.
pub(crate) fn passes(
    trainer: &mut Trainer,
    norm: Option<f64>,
) -> Result<Option<Vec<Vec<Digested>>>> {
    let Some(mut observer) = trainer.state.observer().take() else { return Ok(None) };
    let (strategy, mut cx) = trainer.parts();
    let Replica { model, storage, compute, owned, world, group, .. } = cx.replica;
    for (id, param) in model.layout.trained() {
        let label = param.label();
        // Values of others may still be on their way.
        let holds_own = owned.values == owned.state;
        let (values, own) = if strategy.passes_are_local() || holds_own {
            (storage.values().clone(), &owned.values)
        } else {
            (strategy.gather_unit(&mut cx, param.unit)?, &owned.state)
        };
        let results =
            [(Phase::Reduced, storage.grads(), &owned.grads), (Phase::Weights, &values, own)];
        for (phase, held, ranges) in results {
            for range in ranges {
                let whole = param.range();
                let part = whole.start.max(range.start)..whole.end.min(range.end);
                if !part.is_empty() {
                    let (of, start) = ((id.0, &*label), part.start - whole.start);
                    let shape = (param.shape.dims(), start);
                    observer.add(compute, phase, of, shape, &held.slice(part)?)?;
                }
            }
        }
    }
    // Running statistics follow the first rank's micro-batches, and come to the others before the next step.
    let statistics = model.layout.buffers().iter().enumerate();
    for (at, buffer) in statistics.filter(|_| group.rank() == 0) {
        if cx.replica.counts_unit(buffer.unit) {
            let of = (model.layout.params().len() + at, &*buffer.name);
            let shape = (buffer.shape.dims(), 0);
            observer.add(compute, Phase::Weights, of, shape, &storage.buffer(BufferId(at))?)?;
        }
    }
    if let Some(norm) = norm {
        let tensor = compute.host.tensor(DType::F64, [1], Category::Workspace)?;
        tensor.write::<f64>()?[0] = norm;
        observer.add(compute, Phase::Norm, (0, "gradients"), (&[1], 0), &tensor)?;
    }
    let ranks = world.gather_object(&observer.take(), 0)?;
    *trainer.state.observer() = Some(observer);
    Ok(ranks)
}

/// The ranks that own the same elements as this one, which may be alone.
fn replicas(replica: &Replica, owns_all: bool) -> Option<&Group> {
    if owns_all {
        return Some(&replica.group);
    }
    replica.mesh.group(Axis::Shard).and_then(|_| replica.mesh.group(Axis::Dp))
}

/// First one number for everything, and only if it differs the digests of all parameters.
fn compare_replicas(
    replica: &Replica,
    group: &Group,
    own: &[[Digest; 2]],
    steps: u64,
) -> Result<()> {
    let all = own.iter().flatten().map(|digest| digest.folded());
    let root =
        all.fold(0u64, |root, of| (root ^ of).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29));
    // The largest and the smallest are the same if all are.
    let mut ends = [root as i64, !(root as i64)];
    group.all_reduce_slice(&mut ends, ReduceOp::Max)?;
    if ends[0] == !ends[1] {
        return Ok(());
    }
    let mut parts = Vec::new();
    for (at, of) in own.iter().enumerate() {
        parts.extend((0..2).map(|kind| ((kind, at, 0), of[kind].folded())));
    }
    let params = replica.model.layout.params();
    equality::compare(&replica.world, group, &parts, steps, |(kind, at, _)| match kind {
        0 => format!("the gradient of {}", params[at].label()),
        _ => params[at].label().into_owned(),
    })
}

#[cfg(test)]
mod tests {
    use paceline_collectives::Mesh;
    use paceline_failure::Failure;
    use paceline_kernels::Compute;
    use paceline_kernels::optimizer::Sgd;
    use paceline_memory::Allocator;
    use paceline_model::{Divided, MlpConfig, OptimizerConfig};
    use paceline_strategies::{
        FlatDdp, ReplicaOptions, ShardOptions, Sharded, Strategy, ZeroStage,
    };

    use super::*;

    type Told = Result<Option<Vec<[u64; 2]>>>;

    /// A step without gradients on four ranks, before which one rank has changed a bit of its gradients or its weights: of the first
    /// parameter that has no parts.
    fn told(
        make: fn() -> Box<dyn Strategy>,
        mesh: &str,
        parts: usize,
        flip: Option<(usize, bool)>,
    ) -> Vec<Told> {
        let config = MlpConfig {
            input_dim: 8,
            hidden_dim: 8,
            output_dim: 4,
            num_layers: 2,
            tie_layers: false,
        };
        let rank = |group: Group| {
            let rank = group.rank();
            let mesh = Mesh::new(group, &mesh.parse().unwrap()).unwrap();
            let mut strategy = make();
            let compute = Compute::new(1, Allocator::new()).unwrap();
            let divided = Divided { parts, by_rows: true, ..Divided::NOT };
            let model =
                if parts > 1 { config.build_divided(4, divided) } else { config.build(4) }.unwrap();
            let options = ReplicaOptions::DEFAULT;
            let replica =
                Replica::new(strategy.as_mut(), model, compute, mesh, 1, options).unwrap();
            let sgd = OptimizerConfig::Sgd(Sgd { lr: 0.0, momentum: 0.0, weight_decay: 0.0 });
            let mut optimizer = replica.optimizer(sgd).unwrap().watched(replica.storage.layout());
            let storage = &replica.storage;
            if let Some((_, is_gradient)) = flip.filter(|(of, _)| *of == rank) {
                let held = if is_gradient { storage.grads() } else { storage.values() };
                let mut values = held.tensor().write::<f32>().unwrap();
                let mut params = storage.layout().params().iter();
                let whole = params.find(|param| param.part.is_none()).unwrap();
                let value = &mut values[whole.start + 3];
                *value = f32::from_bits(value.to_bits() ^ 1);
            }
            optimizer.step(&replica.compute, storage).unwrap();
            compare(&replica, &optimizer, &strategy.exactness(replica.mesh.shape()), 7)
        };
        std::thread::scope(|scope| {
            let ranks = Group::threads(4).into_iter();
            let ranks: Vec<_> = ranks.map(|group| scope.spawn(|| rank(group))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn a_changed_bit_names_its_rank_and_tensor() {
        let flat: fn() -> Box<dyn Strategy> = || Box::new(FlatDdp);
        for (mesh, parts, flip, words) in [
            (
                "dp=4",
                1,
                (2, true),
                "after step 7, the gradient of fc0.weight has other values on rank 2 than on ranks 0, 1, 3",
            ),
            (
                "dp=4",
                1,
                (1, false),
                "after step 7, fc0.weight has other values on rank 1 than on ranks 0, 2, 3",
            ),
            (
                "tp=4",
                4,
                (3, false),
                "after step 7, fc1.bias has other values on rank 3 than on ranks 0-2",
            ),
        ] {
            let all = told(flat, mesh, parts, Some(flip));
            let Err(Failure::Run(said)) = &all[0] else { panic!("{:?}", all[0]) };
            assert!(said.starts_with(words), "{said}");
            assert!(all[1..].iter().all(|of| matches!(of, Err(Failure::Consequence(_)))));
        }
    }

    #[test]
    fn parts_of_ranks_add_up_to_the_digests_of_a_replica() {
        let flat: fn() -> Box<dyn Strategy> = || Box::new(FlatDdp);
        let sharded: fn() -> Box<dyn Strategy> =
            || Box::new(Sharded::new(ZeroStage::Three, ShardOptions::default()));
        let digests = |all: Vec<Told>| all.into_iter().map(|of| of.unwrap().unwrap());
        let whole: Vec<_> = digests(told(flat, "dp=4", 1, None)).collect();
        for mesh in ["shard=4", "dp=2,shard=2"] {
            assert!(digests(told(sharded, mesh, 1, None)).eq(whole.iter().cloned()), "{mesh}");
        }
        let whole: Vec<_> = digests(told(flat, "dp=4", 4, None)).collect();
        for (make, mesh) in [(flat, "tp=4"), (flat, "dp=2,tp=2"), (sharded, "shard=2,tp=2")] {
            assert!(digests(told(make, mesh, 4, None)).eq(whole.iter().cloned()), "{mesh}");
        }
    }
}
