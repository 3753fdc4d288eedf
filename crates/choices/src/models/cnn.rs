//! `--model cnn`: convolutions, each with ReLU and pooling, and one hidden layer.

use std::sync::Arc;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{ArgMatches, Args};
use paceline_data::Dataset;
use paceline_failure::Result;
use paceline_kernels::ImageLayout;
use paceline_model::{CnnConfig, Model, ModelError};

use super::{FuseFlag, ModelSettings, OfModel, Samples};
use crate::registry::{Choice, flags_of, read, width};

/// The choice.
pub(super) const CNN: Choice<OfModel> = Choice {
    name: "cnn",
    aliases: &[],
    about: "Convolutions with ReLU and pooling, one hidden layer",
    flags: flags_of::<Flags>,
    of: OfModel { width_flags: &["channels", "hidden"], resolve },
};

/// The flags. With all defaults filled in, they are the settings.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
struct Flags {
    /// CNN: output channels of each convolution
    #[arg(
        long,
        num_args = 1..,
        value_name = "C",
        default_values = ["32", "64", "128"],
        value_parser = width()
    )]
    channels: Vec<usize>,
    /// CNN: width of the hidden layer
    #[arg(long, value_name = "N", default_value = "512", value_parser = width())]
    hidden: usize,
    /// CNN: batch normalization between each convolution and its ReLU
    #[arg(long)]
    batch_norm: bool,
    /// CNN: a second head that the loss does not use, so that its parameters get no gradient
    #[arg(long)]
    unused_head: bool,
    /// CNN: how images lie in memory between the convolutions. It changes no bit of the weights
    #[arg(
        long,
        value_name = "NAME",
        default_value = "nhwc",
        value_parser = layouts().map(|name| layout_of(&name))
    )]
    layout: ImageLayout,
    /// CNN: compute all convolutions directly, without Winograd's minimal filtering, by which the processor computes those in f32
    /// with many channels
    #[arg(long)]
    direct_convolutions: bool,
    /// Whether operations are fused.
    #[command(flatten)]
    fuse: FuseFlag,
}

/// The names of the layouts.
fn layouts() -> PossibleValuesParser {
    PossibleValuesParser::new([
        PossibleValue::new(ImageLayout::Nhwc.name()).help("(batch, height, width, channels)"),
        PossibleValue::new(ImageLayout::Nchw.name()).help("(batch, channels, height, width)"),
    ])
}

/// The layout of this name, which is one of [`layouts`].
fn layout_of(name: &str) -> ImageLayout {
    let named = ImageLayout::ALL.into_iter().find(|layout| layout.name() == name);
    named.unwrap_or_default()
}

fn resolve(settings: &ArgMatches) -> Result<Arc<dyn ModelSettings>> {
    Ok(Arc::new(read::<Flags>(settings)?))
}

impl ModelSettings for Flags {
    fn samples(&self) -> Samples {
        Samples::Images
    }

    fn has_batch_norm(&self) -> bool {
        self.batch_norm
    }

    fn build(
        &self,
        dataset: &dyn Dataset,
        world_size: usize,
    ) -> std::result::Result<Model, ModelError> {
        let shape = dataset.input_shape();
        let image = shape.as_slice().try_into().map_err(|_| {
            ModelError::Config(format!("a CNN needs images, not samples of {shape:?}"))
        })?;
        let Some(num_classes) = dataset.num_classes() else {
            return Err(ModelError::Config("a CNN needs classes as targets".into()));
        };
        let config = CnnConfig {
            image,
            channels: self.channels.clone(),
            hidden: self.hidden,
            num_classes,
            batch_norm: self.batch_norm,
            unused_head: self.unused_head,
            layout: self.layout,
            direct_convolutions: self.direct_convolutions,
        };
        if self.fuse.fuse { config.build(world_size) } else { config.build_unfused(world_size) }
    }
}
