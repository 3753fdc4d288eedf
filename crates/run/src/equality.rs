//! Whether the ranks that a strategy keeps equal are equal.
//!
//! The ranks compare checksums of each parameter, or of the part of it that several ranks hold. A difference comes from weights that differ
//! from the beginning (another folder of a pretrained model on another host), from a program or a machine that computes something else, or
//! from a strategy that does not keep its promise. Training would go on, and a checkpoint would mix the models.

use std::collections::BTreeMap;
use std::ops::Range;

use paceline_collectives::Group;
use paceline_failure::{Failure, Result};
use paceline_strategies::{Exactness, Replica};

use crate::agreement::in_ranges;

/// A part of a parameter by number, the same on all ranks that hold it, and its checksum.
type Part = ((usize, usize, usize), u64);

/// The checksums of a part of a parameter: each with the ranks that hold it.
type Found = Vec<(u64, Vec<usize>)>;

/// Fails if ranks hold different values of the same parameters after `steps` steps, unless the strategy lets models diverge. Replicas are
/// synchronized. Collective; rank 0 reports.
pub fn check(replica: &Replica, exactness: &Exactness, steps: u64) -> Result<()> {
    let Replica { world, group, storage, .. } = replica;
    let is_alone = group.world_size() == 1 && replica.tensor.is_none();
    if is_alone || matches!(exactness, Exactness::Unsynchronized(_)) {
        return Ok(());
    }
    let params = storage.layout().params();
    // By the number of the parameter, which is the same on all stages.
    let mut own: Vec<Part> = Vec::new();
    for (at, param) in params.iter().enumerate() {
        for (Range { start, end }, part) in storage.values().within(&param.range())? {
            let sum = crc32c::crc32c(&part.to_host()?.as_bytes().read::<u8>()?);
            own.push(((at, start - param.start, end - param.start), u64::from(sum)));
        }
    }
    compare(world, world, &own, steps, |(at, ..)| params[at].label().into_owned())
}

/// Fails if ranks of `group` hold different parts under the same numbers. `name` puts a part into words.
pub(crate) fn compare(
    world: &Group,
    group: &Group,
    own: &[Part],
    steps: u64,
    name: impl Fn((usize, usize, usize)) -> String,
) -> Result<()> {
    let mut found: BTreeMap<(usize, usize, usize), Found> = BTreeMap::new();
    for (rank, of_rank) in group.all_gather_object(&(world.rank(), own.to_vec()))? {
        for (part, sum) in of_rank {
            let sums = found.entry(part).or_default();
            match sums.iter_mut().find(|(known, _)| *known == sum) {
                Some((_, ranks)) => ranks.push(rank),
                None => sums.push((sum, vec![rank])),
            }
        }
    }
    let num_differing = found.values().filter(|sums| sums.len() > 1).count();
    let Some((part, sums)) = found.iter().find(|(_, sums)| sums.len() > 1) else {
        return Ok(());
    };
    let name = name(*part);
    let ranks = |ranks: &[usize]| match ranks {
        [rank] => format!("rank {rank}"),
        ranks => format!("ranks {}", in_ranges(ranks)),
    };
    let parts: Vec<String> = sums.iter().map(|(_, of)| ranks(of)).collect();
    let when = match steps {
        0 => "before the first step".to_owned(),
        steps => format!("after step {steps}"),
    };
    let problem = format!(
        "{when}, {name} has other values on {} than on {}",
        parts[1..].join(" and on "),
        parts[0]
    );
    Err(match group.rank() {
        0 => Failure::Run(format!(
            "{problem} ({num_differing} of {} parameters or parts of them differ), although the ranks must hold the same; \
             no checkpoint is written: look whether all hosts have the same files and the same program, \
             and whether one of them has faulty memory",
            found.len()
        )),
        _ => Failure::Consequence(problem),
    })
}

#[cfg(test)]
mod tests {
    use paceline_collectives::{Axis, Group, Mesh};
    use paceline_kernels::Compute;
    use paceline_memory::Allocator;
    use paceline_model::MlpConfig;
    use paceline_strategies::schedule::OneFOneB;
    use paceline_strategies::{
        ReplicaOptions, ShardOptions, Sharded, SimpleDdp, Stages, Strategy, ZeroStage,
    };

    use super::*;

    /// The result on each of four ranks of a mesh after `wrong` has changed a value that it holds.
    fn told(make: fn() -> Box<dyn Strategy>, mesh: &str, wrong: &[usize]) -> Vec<Result<()>> {
        let config = MlpConfig {
            input_dim: 8,
            hidden_dim: 8,
            output_dim: 4,
            num_layers: 2,
            tie_layers: false,
        };
        std::thread::scope(|scope| {
            let rank = |group: Group| {
                let (rank, config) = (group.rank(), config.clone());
                scope.spawn(move || {
                    let mesh = Mesh::new(group, &mesh.parse().unwrap()).unwrap();
                    let mut strategy = make();
                    let compute = Compute::new(1, Allocator::new()).unwrap();
                    let model = config.build(4).unwrap();
                    let (strategy, options) = (strategy.as_mut(), ReplicaOptions::DEFAULT);
                    let replica = if mesh.shape().size(Axis::Pp) > 1 {
                        let (stages, settings) = (Stages::even(OneFOneB, 1), (1, options));
                        Replica::in_stages(strategy, model, compute, mesh, &stages, settings)
                    } else {
                        Replica::new(strategy, model, compute, mesh, 1, options)
                    };
                    let replica = replica.unwrap();
                    if wrong.contains(&rank) {
                        replica.storage.values().tensor().write::<f32>().unwrap()[0] += 0.5;
                    }
                    check(&replica, &strategy.exactness(replica.mesh.shape()), 5)
                })
            };
            let ranks: Vec<_> = Group::threads(4).into_iter().map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_that_differ_are_named() {
        let ddp: fn() -> Box<dyn Strategy> = || Box::new(SimpleDdp);
        let sharded: fn() -> Box<dyn Strategy> =
            || Box::new(Sharded::new(ZeroStage::Three, ShardOptions::default()));
        for (make, mesh, wrong, words) in [
            (ddp, "dp=4", &[2][..], "on rank 2 than on ranks 0, 1, 3"),
            (ddp, "dp=4", &[0], "on ranks 1-3 than on rank 0"),
            // Ranks 1 and 3 hold the same shard.
            (sharded, "dp=2,shard=2", &[3], "on rank 3 than on rank 1"),
            // Ranks 2 and 3 hold the second stage.
            (ddp, "pp=2,dp=2", &[3], "on rank 3 than on rank 2"),
        ] {
            let all = told(make, mesh, wrong);
            let first = all[0].as_ref().unwrap_err();
            assert!(matches!(first, Failure::Run(_)), "{first:?}");
            let said = first.to_string();
            assert!(said.starts_with("after step 5, "), "{said}");
            assert!(said.contains(&format!("has other values {words} (1 of ")), "{said}");
            assert!(all[1..].iter().all(|of| matches!(of, Err(Failure::Consequence(_)))));
        }
        for (make, mesh, wrong) in [(ddp, "dp=4", &[][..]), (sharded, "shard=4", &[2])] {
            told(make, mesh, wrong).into_iter().for_each(|of| of.unwrap());
        }
    }
}
