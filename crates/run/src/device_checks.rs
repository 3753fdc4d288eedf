//! Checks that the device can do the work that a run asks for, before a rank starts.
//!
//! Takes a configuration. Errors with the flag that does not fit, and the value to pass instead.

use paceline_data::BatchShape;
use paceline_failure::{Failure, Result, usage};
use paceline_host::text::thousands;
use paceline_kernels::{CardNeeds, KernelError};
use paceline_launch::device::Device;
use paceline_model::Model;
use paceline_settings::config::TrainConfig;
use paceline_settings::flags::CopyFlags;
use paceline_settings::named::PrecisionName;
use paceline_strategies::GraphObstacle;

use crate::precision::{FLAG, rehearse};

/// Checks that the device can do the work of these settings, and that batches are copied to it if the settings say how.
pub(crate) fn check(
    config: &mut TrainConfig,
    local_ranks: usize,
    (model, samples): (&Model, &BatchShape),
) -> Result<()> {
    config.device.check(&[config.transport], local_ranks)?;
    check_cards(config, local_ranks, model, samples)?;
    if config.cuda_graph {
        check_graph(config, samples)?;
    }
    if config.tf32 && !matches!(config.device, Device::Cuda(_)) {
        return usage(
            "--tf32: the tensor cores of a card have TF32; leave it out, or pass --device cuda",
        );
    }
    if config.tf32 && config.precision != PrecisionName::F32 {
        return usage(format!(
            "--tf32 is about products in f32, and these are in {}; leave one of them out",
            config.precision.name()
        ));
    }
    let CopyFlags { pin_memory, non_blocking, copy_stream, generate_on_host } = config.copies;
    let switches = [
        ("--pin-memory", pin_memory),
        ("--non-blocking", non_blocking),
        ("--copy-stream", copy_stream),
    ];
    let switch = switches.iter().find(|(_, is_given)| *is_given).map(|(flag, _)| *flag);
    let of_generated_flag = generate_on_host.then_some("--generate-on-host");
    if config.device == Device::Cpu {
        let Some(flag) = switch.or(of_generated_flag) else { return Ok(()) };
        return usage(format!(
            "{flag}: on the processor no batch is copied to a device; leave {flag} out, or pass --device sim"
        ));
    }
    match (config.data.is_synthetic(), switch, of_generated_flag) {
        (true, Some(flag), None) if config.device.makes_data() => {
            return usage(format!(
                "{flag}: synthetic data is made on the device, so no batch is copied; leave {flag} out, or pass \
                 --generate-on-host too"
            ));
        }
        (false, _, Some(flag)) => {
            return usage(format!(
                "{flag} is about synthetic data, and this data is read; leave it out"
            ));
        }
        _ => {}
    }
    if config.device.is_emulated() {
        config.warnings.push(format!(
            "--device {}: the device is emulated on the processor, so no time of it is that of a card",
            match config.device {
                Device::Sim(_) => "sim".to_owned(),
                device => device.to_string(),
            }
        ));
    }
    Ok(())
}

/// Checks that the kernels of a step run on the cards of this host. A model with a layer of the user's own that cannot be rehearsed is
/// not checked.
fn check_cards(
    config: &TrainConfig,
    local_ranks: usize,
    model: &Model,
    samples: &BatchShape,
) -> Result<()> {
    let cards =
        config.device.cards(local_ranks).map_err(|error| Failure::Usage(error.to_string()))?;
    if cards.is_empty() {
        return Ok(());
    }
    let Ok(CardNeeds { capability: least, shared_bytes, missing }) =
        rehearse(config.precision, model, samples)
    else {
        return Ok(());
    };
    if let Some(name) = missing {
        return usage(format!("--device {}: {}", config.device, KernelError::NoCardBody(name)));
    }
    let precision = config.precision.name();
    for card in cards {
        let (name, has) = (format!("card {} ({})", card.index(), card.name()), card.capability());
        if has < least {
            return usage(format!(
                "{FLAG} {precision}: convolutions and attention in 16 bits need compute capability {}.{}, and {name} has {}.{}; \
                 pass {FLAG} f32",
                least.0, least.1, has.0, has.1
            ));
        }
        if card.shared_bytes() < shared_bytes {
            return usage(format!(
                "--device {}: attention with heads of this size in {precision} needs {} bytes of shared memory, and {name} has {}; \
                 choose a model with smaller heads{}",
                config.device,
                thousands(shared_bytes.into()),
                thousands(card.shared_bytes().into()),
                if config.precision == PrecisionName::F32 {
                    format!(", or pass {FLAG} bf16")
                } else {
                    String::new()
                }
            ));
        }
    }
    Ok(())
}

/// Checks that the passes of a step can be launched as a graph: a card does it, all steps are alike, and nothing communicates
/// within a pass.
fn check_graph(config: &TrainConfig, samples: &BatchShape) -> Result<()> {
    let refuse = |reason: String| usage(format!("--cuda-graph: {reason}"));
    if !matches!(config.device, Device::Cuda(_)) {
        return refuse("a card launches graphs; leave it out, or pass --device cuda".into());
    }
    let strategy = &config.strategy;
    let (built, accumulate) = (strategy.build()?, config.micro_batches_per_step());
    let is_stage = config.pipeline.is_some();
    let found =
        GraphObstacle::of(built.passes_are_local(), &strategy.options, is_stage, accumulate);
    let Some(obstacle) = found else {
        return match samples.max_length() {
            None => Ok(()),
            Some(_) => refuse(
                "the samples of this data have different lengths, and a graph is about batches of one shape; leave it out"
                    .into(),
            ),
        };
    };
    let of_strategy = strategy.words();
    refuse(match obstacle {
        GraphObstacle::Strategy => format!(
            "{}, or pass another --strategy (ddp, simple_ddp, zero1)",
            obstacle.text(&of_strategy)
        ),
        GraphObstacle::Stages => obstacle.text("--mesh pp"),
        GraphObstacle::SyncBatchNorm => obstacle.text("--sync-batch-norm"),
        GraphObstacle::OpenGraph => obstacle.text("--no-static-graph"),
        GraphObstacle::EveryPass => obstacle.text("--no-sync=false"),
        GraphObstacle::Tree => obstacle.text("--accumulation-order tree"),
    })
}
