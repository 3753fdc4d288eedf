//! `--data synthetic`: generated from the seed. Images with a learnable pattern for a model that
//! classifies images; normally distributed vectors for a model that maps vectors to vectors; random tokens for a language
//! model.

use std::sync::Arc;

use clap::{ArgMatches, Args};
use paceline_data::{
    DataError, Dataset, Split, SyntheticImages, SyntheticImagesConfig, SyntheticRegression,
    SyntheticTokens,
};
use paceline_failure::numbers::at_least;
use paceline_failure::{Failure, Result, usage};
use paceline_host::resources;
use serde::Serialize;
use serde_json::{Value, json};

use super::arrays::ImageFlag;
use super::{DataSettings, OfData, RunNeeds};
use crate::models::Samples;
use crate::registry::{Choice, flags_of, read};

/// Default number of training images.
const SAMPLES: usize = 8192;
/// Default number of batches per epoch of vectors and tokens. The samples themselves never end.
const STEPS: usize = 20;
/// Default length of a sequence of tokens.
const SEQ_LEN: usize = 128;
/// Default height, width and channels of images.
const IMAGE: [usize; 3] = [28, 28, 1];
/// Number of classes of the images.
const CLASSES: usize = 10;

/// The choice.
pub(super) const SYNTHETIC: Choice<OfData> = Choice {
    name: "synthetic",
    aliases: &[],
    about: "Made from the seed: learnable images for the CNN, normal vectors for the MLP, tokens for language models",
    flags: flags_of::<Flags>,
    of: OfData::read_by(resolve),
};

#[derive(Debug, Args)]
#[command(next_help_heading = "Data")]
struct Flags {
    /// Number of synthetic training images [default: 8192]; a quarter as many are for evaluation
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1))]
    samples: Option<usize>,
    #[command(flatten)]
    image: ImageFlag,
    /// Tokens of each synthetic sequence, or of each block of running text [default: 128]
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1))]
    seq_len: Option<usize>,
}

fn resolve(settings: &ArgMatches, run: &RunNeeds) -> Result<Arc<dyn DataSettings>> {
    let flags: Flags = read(settings)?;
    let given = [
        ("--samples", "images", flags.samples.is_some()),
        ("--image", "images", flags.image.image.is_some()),
        ("--seq-len", "tokens", flags.seq_len.is_some()),
    ];
    let foreign = match run.samples {
        Samples::Any | Samples::Images => &given[2..],
        Samples::Vectors { .. } => &given[..],
        Samples::Tokens { classes: None, .. } => &given[1..2],
        Samples::Tokens { classes: Some(_), .. } => &[],
    };
    if let Some((flag, kind, _)) = foreign.iter().find(|(.., is_given)| *is_given) {
        return usage(format!("{flag} is for synthetic {kind} only; leave it out"));
    }
    let (samples, kind) = match run.samples {
        Samples::Any | Samples::Images => images(&flags, run.on_device)?,
        Samples::Vectors { input_dim, output_dim } => {
            (samples_of(run)?, Kind::Vectors { input_dim, output_dim })
        }
        Samples::Tokens { vocab, classes: None } => tokens(&flags, vocab, run)?,
        Samples::Tokens { classes: Some(_), .. } => {
            return usage(format!(
                "--data synthetic has no sequences of tokens with classes, on which --model {} trains; pass \
                 --data text",
                run.model
            ));
        }
    };
    Ok(Arc::new(Synthetic { samples, kind }))
}

fn images(flags: &Flags, on_device: bool) -> Result<(usize, Kind)> {
    let samples = flags.samples.unwrap_or(SAMPLES);
    let image = flags.image.size()?.unwrap_or(IMAGE);
    if !on_device {
        check_images_fit(samples, image)?;
    }
    Ok((samples, Kind::Images { image, on_device }))
}

/// Fails if the images do not fit into memory, before they are made.
fn check_images_fit(samples: usize, image: [usize; 3]) -> Result<()> {
    let Some(available) = resources::available_bytes() else { return Ok(()) };
    let needed = samples as f64 * (image.iter().product::<usize>() * size_of::<f32>()) as f64;
    if needed <= available as f64 {
        return Ok(());
    }
    usage(format!(
        "not enough memory for --samples {samples}: the images take about {:.1} GB, and {:.1} GB are \
         available; lower it",
        needed / 1e9,
        available as f64 / 1e9
    ))
}

fn tokens(flags: &Flags, vocab: usize, run: &RunNeeds) -> Result<(usize, Kind)> {
    let seq_len = flags.seq_len.unwrap_or(SEQ_LEN);
    let samples = match flags.samples {
        Some(samples) => samples,
        None => samples_of(run)?,
    };
    Ok((samples, Kind::Tokens { vocab, seq_len }))
}

/// The number of samples of an epoch that never ends by itself.
fn samples_of(run: &RunNeeds) -> Result<usize> {
    let steps = run.steps_per_epoch.unwrap_or(STEPS);
    steps.checked_mul(run.global_batch_size).map_or_else(
        || {
            usage(format!(
                "--steps-per-epoch {steps}: too many for batches of {} samples; lower it",
                run.global_batch_size
            ))
        },
        Ok,
    )
}

/// The settings.
#[derive(Debug, Serialize)]
struct Synthetic {
    samples: usize,
    #[serde(flatten)]
    kind: Kind,
}

/// The kind of samples, which the model decides.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Kind {
    Images {
        image: [usize; 3],
        /// Otherwise the host makes all of them once, and keeps them.
        #[serde(skip)]
        on_device: bool,
    },
    Vectors {
        input_dim: usize,
        output_dim: usize,
    },
    Tokens {
        vocab: usize,
        seq_len: usize,
    },
}

impl Synthetic {
    fn has_images(&self) -> bool {
        matches!(self.kind, Kind::Images { .. })
    }

    fn make(&self, seed: u64, split: Split) -> std::result::Result<Arc<dyn Dataset>, DataError> {
        Ok(match self.kind {
            Kind::Images { image: [height, width, channels], on_device } => {
                let len = match split {
                    Split::Train => self.samples,
                    Split::Test => self.samples.div_ceil(4),
                };
                let num_classes = CLASSES;
                let config = SyntheticImagesConfig {
                    height,
                    width,
                    channels,
                    num_classes,
                    len,
                    seed,
                    split,
                };
                let images =
                    if on_device { SyntheticImages::on_demand } else { SyntheticImages::new };
                Arc::new(images(config)?)
            }
            Kind::Vectors { input_dim, output_dim } => {
                Arc::new(SyntheticRegression::new(input_dim, output_dim, self.samples, seed)?)
            }
            Kind::Tokens { vocab, seq_len } => {
                Arc::new(SyntheticTokens::new(vocab, seq_len, self.samples, seed)?)
            }
        })
    }
}

impl DataSettings for Synthetic {
    fn to_json(&self) -> Value {
        json!(self)
    }

    fn open(&self, seed: u64, split: Split) -> Result<Arc<dyn Dataset>> {
        self.make(seed, split).map_err(|e| Failure::Usage(format!("--data synthetic: {e}")))
    }

    fn has_test(&self) -> bool {
        self.has_images()
    }

    fn is_synthetic(&self) -> bool {
        true
    }

    fn is_generated(&self) -> bool {
        !matches!(self.kind, Kind::Images { on_device: false, .. })
    }

    fn is_new_each_epoch(&self) -> bool {
        !self.has_images()
    }

    fn length_flag(&self) -> Option<&'static str> {
        matches!(self.kind, Kind::Tokens { .. }).then_some("--seq-len")
    }

    fn identity(&self) -> Option<Vec<(&'static str, String)>> {
        let shape = match self.kind {
            Kind::Images { image, .. } => Some(("--image", format!("{image:?}"))),
            Kind::Vectors { .. } => None,
            Kind::Tokens { seq_len, .. } => Some(("--seq-len", seq_len.to_string())),
        };
        Some([("--samples", self.samples.to_string())].into_iter().chain(shape).collect())
    }
}
