//! Whether a model can compute in the element type that `--precision` names, and in which one a checkpoint was trained.
//!
//! It runs a step of one sample on the device without contents, where operations only check the types of their operands.

use clap::ValueEnum;
use paceline_checkpoint::Checkpoint;
use paceline_choices::models::ModelConfig;
use paceline_data::{BatchShape, Dataset};
use paceline_failure::{Failure, Result};
use paceline_kernels::{CardNeeds, Compute};
use paceline_memory::Allocator;
use paceline_model::{Model, ModelError, Rehearsal};
use paceline_observe::insight::memory::batch_of;
use paceline_settings::named::PrecisionName;

/// The flag.
pub const FLAG: &str = "--precision";

/// Fails if a processor, an emulated device included, would have to compute in fp16 without the flag to emulate it.
pub fn check_processor(precision: PrecisionName, emulates_fp16: bool) -> Result<()> {
    match (precision, emulates_fp16) {
        (PrecisionName::Fp16, false) => Err(Failure::Usage(format!(
            "{FLAG} fp16: this processor computes no fp16; pass --emulate-fp16 too, which rounds as fp16 would and takes longer than \
             f32, or {FLAG} bf16"
        ))),
        _ => Ok(()),
    }
}

/// A note for the user about `--emulate-fp16`, if it is stated.
pub fn note(precision: PrecisionName, emulates_fp16: bool) -> Option<String> {
    let text = match precision {
        PrecisionName::Fp16 => {
            "--emulate-fp16: fp16 is emulated on the processor, so no time of it is that of fp16 in hardware"
        }
        _ => "--emulate-fp16 has no effect without --precision fp16",
    };
    emulates_fp16.then(|| text.into())
}

/// Fails if a layer of the model, or its loss, does not compute in this element type. A layer of the user's own that
/// reads values is not tested; its first step will fail.
pub fn check(
    precision: PrecisionName,
    config: &ModelConfig,
    model: &Model,
    dataset: &dyn Dataset,
) -> Result<()> {
    check_step(precision, config.name(), model, &BatchShape::of(dataset))
}

fn check_step(
    precision: PrecisionName,
    name: &str,
    model: &Model,
    samples: &BatchShape,
) -> Result<()> {
    if precision == PrecisionName::F32 {
        return Ok(());
    }
    match rehearse(precision, model, samples) {
        Err(error) if error.is_about_types() => {
            let precision = precision.name();
            Err(Failure::Usage(format!(
                "{FLAG} {precision}: not all parts of --model {name} compute in {precision} ({error}); pass {FLAG} f32"
            )))
        }
        // Other checks find other faults.
        _ => Ok(()),
    }
}

/// Runs a step of one sample on the device without contents. Returns the requirements of its kernels on a card.
pub(crate) fn rehearse(
    precision: PrecisionName,
    model: &Model,
    samples: &BatchShape,
) -> std::result::Result<CardNeeds, ModelError> {
    let compute = Compute::new(1, Allocator::meta())?;
    let longest = samples.max_length().unwrap_or(1);
    let batch = batch_of(samples, &compute.allocator, 1, longest)?;
    Rehearsal::of(model, precision.into(), &compute, &[batch], None, false)?;
    Ok(compute.card_needs())
}

/// The element type of the run that wrote a checkpoint.
pub fn of_checkpoint(checkpoint: &Checkpoint) -> std::result::Result<PrecisionName, String> {
    let name = checkpoint.setting(FLAG).ok_or_else(|| format!("it does not say its {FLAG}"))?;
    PrecisionName::from_str(name, false).map_err(|_| {
        format!("it was trained with {FLAG} {name}, which this version does not know; pass {FLAG} f32 or bf16")
    })
}

#[cfg(test)]
mod tests {
    use paceline_data::SyntheticRegression;
    use paceline_kernels::elementwise;
    use paceline_memory::Tensor;
    use paceline_model::{Context, Half, Layer, LayoutBuilder, MeanSquaredError, Saved};

    use super::*;

    /// A layer whose operation does not know bf16.
    struct OnlyF32;

    impl Layer for OnlyF32 {
        fn forward(
            &self,
            cx: &mut Context,
            input: Tensor,
        ) -> std::result::Result<(Tensor, Saved), ModelError> {
            let output = cx.activation(input.shape())?;
            elementwise::divide(cx.compute, &output, 2.0)?;
            Ok((output, Saved::default()))
        }

        fn backward(
            &self,
            _: &mut Context,
            _: &mut Saved,
            d_output: Tensor,
            _: Half,
        ) -> std::result::Result<Option<Tensor>, ModelError> {
            Ok(Some(d_output))
        }
    }

    #[test]
    fn a_layer_without_bf16_is_named_with_the_flag() {
        let mut layout = LayoutBuilder::new();
        let blocks = [layout.block("only", |_| OnlyF32)];
        let model = Model::new("only", blocks, MeanSquaredError, layout.finish(1));
        let samples = BatchShape::of(&SyntheticRegression::new(3, 3, 1, 0).unwrap());
        check_step(PrecisionName::F32, "only", &model, &samples).unwrap();
        let failure = check_step(PrecisionName::Bf16, "only", &model, &samples).unwrap_err();
        assert!(matches!(failure, Failure::Usage(_)));
        assert_eq!(
            failure.to_string(),
            "--precision bf16: not all parts of --model only compute in bf16 (layer \
             OnlyF32 of unit only, whose input is of type f32: divide is not defined for \
             elements of type bf16); pass --precision f32"
        );
    }
}
