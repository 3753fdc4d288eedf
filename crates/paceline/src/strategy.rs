//! Which strategy a run uses: from flags to the object that does it.

use paceline_model::Layout;
use paceline_strategies::{
    Alternating, Bucket, BucketCaps, BucketDdpAsync, Ddp, FlatDdp, HalfPrecision, LocalSgd, NoSync,
    ReplicaOptions, SimpleDdp, SimpleDdpAsync, SimpleDdpGa, SimpleDdpHook, Single, Strategy, TopK,
    plan_buckets,
};
use serde::Serialize;

use crate::cli::{StrategyArgs, StrategyName};
use crate::{Failure, Result};

/// A strategy with its settings, all defaults filled in.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StrategyConfig {
    /// Which one.
    pub name: StrategyName,
    /// Batches of an optimizer step.
    pub accumulate: usize,
    /// Size of a bucket.
    pub bucket_cap_mb: f64,
    /// Size of the first bucket.
    pub first_bucket_mb: f64,
    /// Whether gradients live in the buckets.
    pub gradient_view: bool,
    /// Whether parameters may be without a gradient.
    pub find_unused_parameters: bool,
    /// Whether they are the same ones in every step.
    pub static_graph: bool,
    /// Whether batch norm takes its statistics over the samples of all ranks.
    pub sync_batch_norm: bool,
    /// Whether rank 0's running statistics go to all others before each step.
    pub broadcast_buffers: bool,
    /// The part of the gradients that is sent.
    pub top_k: f64,
    /// Steps between two averages.
    pub sync_every: usize,
    /// Whether gradients are averaged then, and not parameters.
    pub local_sgd_as_published: bool,
    /// Steps of a block, if blocks of synchronised and unsynchronised steps alternate.
    pub sync_blocks: Option<usize>,
}

/// Checks the flags and fills in the defaults. What was given and has no effect is added to `warnings`.
pub fn resolve(
    args: &StrategyArgs,
    world_size: usize,
    is_mlp: bool,
    warnings: &mut Vec<String>,
) -> Result<StrategyConfig> {
    let default = if world_size == 1 { StrategyName::Single } else { StrategyName::Ddp };
    let name = args.name.unwrap_or(default);
    if name == StrategyName::Single && world_size > 1 {
        return usage(format!(
            "--strategy single trains on one rank, but there are {world_size}; pass --nproc 1, or \
             another strategy (simple_ddp, ddp)"
        ));
    }
    let is_ga = name == StrategyName::SimpleDdpGa;
    let accumulate = args.accumulate.unwrap_or(if is_ga { SimpleDdpGa::ACCUMULATION } else { 1 });
    if accumulate == 0 {
        return usage("--accumulate 0: a step needs at least one batch; pass 1 or more".into());
    }
    let bucket_cap_mb = size("--bucket-cap-mb", args.bucket_cap_mb)?;
    let bucket_cap_mb = bucket_cap_mb.unwrap_or(if is_mlp { 50.0 } else { 25.0 });
    let first_bucket_mb = size("--first-bucket-mb", args.first_bucket_mb)?;
    let first_bucket_mb = first_bucket_mb.unwrap_or(bucket_cap_mb.min(1.0));
    let top_k = args.top_k.unwrap_or(TopK::DEFAULT_K);
    TopK::new(top_k).map_err(|e| Failure::Usage(format!("--top-k: {e}")))?;
    let sync_every = args.sync_every.unwrap_or(LocalSgd::DEFAULT_EVERY);
    LocalSgd::new(sync_every).map_err(|e| Failure::Usage(format!("--sync-every: {e}")))?;
    if let Some(steps) = args.sync_blocks.filter(|steps| *steps < 2) {
        return usage(format!(
            "--sync-blocks {steps}: the first step of a block does not count; pass 2 or more"
        ));
    }
    if args.sync_blocks.is_some() && !name.synchronises_every_step() {
        return usage(format!(
            "--sync-blocks compares steps with and without synchronisation, and {} has none in every \
             step; pass another --strategy",
            name.name()
        ));
    }
    if args.sync_batch_norm && name == StrategyName::LocalSgd {
        return usage(
            "--sync-batch-norm communicates in every step, which local_sgd is there to avoid; leave it \
             out, or pass another --strategy"
                .into(),
        );
    }
    let synchronises = !matches!(name, StrategyName::Single | StrategyName::NoSync);
    let given = [
        ("--bucket-cap-mb", args.bucket_cap_mb.is_some(), name.has_buckets()),
        ("--first-bucket-mb", args.first_bucket_mb.is_some(), name.is_ddp()),
        ("--no-gradient-view", args.no_gradient_view, name.is_ddp()),
        ("--sync-batch-norm", args.sync_batch_norm, synchronises),
        ("--broadcast-buffers", args.broadcast_buffers, synchronises),
        ("--top-k", args.top_k.is_some(), name == StrategyName::TopK),
        ("--sync-every", args.sync_every.is_some(), name == StrategyName::LocalSgd),
        ("--local-sgd-as-published", args.local_sgd_as_published, name == StrategyName::LocalSgd),
    ];
    for (flag, _, _) in given.iter().filter(|(_, is_given, applies)| *is_given && !applies) {
        warnings.push(format!("{flag} has no effect on {}", name.name()));
    }
    if args.no_static_graph && !args.find_unused_parameters {
        warnings.push(
            "--no-static-graph has no effect without --find-unused-parameters: no parameter may be unused \
             anyway"
                .into(),
        );
    }
    Ok(StrategyConfig {
        name,
        accumulate,
        bucket_cap_mb,
        first_bucket_mb,
        gradient_view: !args.no_gradient_view,
        find_unused_parameters: args.find_unused_parameters,
        static_graph: !args.no_static_graph,
        sync_batch_norm: args.sync_batch_norm,
        broadcast_buffers: args.broadcast_buffers,
        top_k,
        sync_every,
        local_sgd_as_published: args.local_sgd_as_published,
        sync_blocks: args.sync_blocks,
    })
}

fn usage<T>(reason: String) -> Result<T> {
    Err(Failure::Usage(reason))
}

fn size(flag: &str, mb: Option<f64>) -> Result<Option<f64>> {
    match mb {
        Some(mb) if !(mb > 0.0 && mb.is_finite()) => {
            usage(format!("{flag} {mb}: pass a size above zero"))
        }
        mb => Ok(mb),
    }
}

/// Bytes of a flag's MB, which are binary, as PyTorch's are.
fn bytes(mb: f64) -> usize {
    (mb * 1024.0 * 1024.0) as usize
}

impl StrategyConfig {
    /// What the user asked for, in messages.
    pub fn words(&self) -> String {
        match self.sync_blocks {
            Some(steps) => format!("--sync-blocks {steps}"),
            None => format!("--strategy {}", self.name.name()),
        }
    }

    /// Whether the ranks hold the same parameters after every step.
    pub fn keeps_replicas_equal(&self) -> bool {
        self.name.synchronises_every_step() && self.sync_blocks.is_none()
    }

    /// The strategy itself.
    pub fn build(&self) -> Result<Box<dyn Strategy>> {
        let strategy = self.build_plain()?;
        Ok(match self.sync_blocks {
            Some(steps) => Box::new(Alternating::new(strategy, steps)?),
            None => strategy,
        })
    }

    fn build_plain(&self) -> Result<Box<dyn Strategy>> {
        Ok(match self.name {
            StrategyName::Single => Box::new(Single),
            StrategyName::SimpleDdp => Box::new(SimpleDdp),
            StrategyName::SimpleDdpGa => Box::new(SimpleDdpGa),
            StrategyName::SimpleDdpHook => Box::new(SimpleDdpHook::default()),
            StrategyName::SimpleDdpAsync => Box::new(SimpleDdpAsync::default()),
            StrategyName::BucketDdpAsync => {
                Box::new(BucketDdpAsync::new(bytes(self.bucket_cap_mb)))
            }
            StrategyName::Ddp => Box::new(self.ddp()),
            StrategyName::FlatDdp => Box::new(FlatDdp),
            StrategyName::TopK => Box::new(self.ddp().with_hook(TopK::new(self.top_k)?)),
            StrategyName::Fp16 => Box::new(self.ddp().with_hook(HalfPrecision::fp16())),
            StrategyName::Bf16 => Box::new(self.ddp().with_hook(HalfPrecision::bf16())),
            StrategyName::LocalSgd => {
                let local = LocalSgd::new(self.sync_every)?;
                Box::new(if self.local_sgd_as_published { local.as_published() } else { local })
            }
            StrategyName::NoSync => Box::new(NoSync),
        })
    }

    fn ddp(&self) -> Ddp {
        let ddp = Ddp::with_caps(self.caps());
        if self.gradient_view { ddp } else { ddp.without_view() }
    }

    /// What decides the weights that training ends with: the exact strategies are all alike.
    pub fn kind(&self) -> String {
        let name = self.name.name();
        match self.name {
            StrategyName::Fp16 | StrategyName::Bf16 | StrategyName::NoSync => name.to_owned(),
            StrategyName::TopK => {
                format!("{name}, with a part of {} in buckets of {:?}", self.top_k, self.caps())
            }
            StrategyName::LocalSgd if self.local_sgd_as_published => {
                format!("{name} as published, every {} steps", self.sync_every)
            }
            StrategyName::LocalSgd => format!("{name}, every {} steps", self.sync_every),
            _ => "any of the exact ones".to_owned(),
        }
    }

    /// How large the buckets of ddp are.
    pub fn caps(&self) -> BucketCaps {
        BucketCaps { first_bytes: bytes(self.first_bucket_mb), bytes: bytes(self.bucket_cap_mb) }
    }

    /// The names of the units in each bucket of ddp, those of the last layers first; none where there
    /// are no such buckets.
    pub fn bucket_units(&self, layout: &Layout) -> Vec<Vec<String>> {
        if !self.name.is_ddp() {
            return Vec::new();
        }
        let units = |bucket: Bucket| {
            let params = bucket.params.iter().rev().map(|id| layout.param(*id).unit);
            let mut units: Vec<usize> = params.collect();
            units.dedup();
            units.into_iter().map(|unit| layout.units()[unit].name.clone()).collect()
        };
        let buckets = plan_buckets(layout, size_of::<f32>(), self.caps());
        buckets.into_iter().map(units).collect()
    }

    /// What the training step does beyond gradients.
    pub fn options(&self) -> ReplicaOptions {
        ReplicaOptions {
            find_unused_parameters: self.find_unused_parameters,
            static_graph: self.static_graph,
            sync_batch_norm: self.sync_batch_norm,
            broadcast_buffers: self.broadcast_buffers,
        }
    }
}
