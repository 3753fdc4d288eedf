//! `--data synthetic`: generated from the seed. Images with a learnable pattern for a model that
//! classifies images; normally distributed vectors for a model that maps vectors to vectors; random tokens for a language
//! model.

use std::sync::Arc;

use clap::{ArgMatches, Args};
use paceline_data::{
    Dataset, Split, SyntheticImages, SyntheticImagesConfig, SyntheticRegression, SyntheticTokens,
};
use paceline_failure::{Failure, Result};
use paceline_host::resources;
use serde::Serialize;
use serde_json::{Value, json};

use super::arrays::ImageFlag;
use super::{DataSettings, OfData, RunNeeds, usage};
use crate::models::Samples;
use crate::registry::{Row, flags_of, read};

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
pub(super) const SYNTHETIC: Row<OfData> = Row {
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
    #[arg(long, value_name = "N")]
    samples: Option<usize>,
    #[command(flatten)]
    image: ImageFlag,
    /// Tokens of each synthetic sequence, or of each block of running text [default: 128]
    #[arg(long, value_name = "N")]
    seq_len: Option<usize>,
}

fn resolve(settings: &ArgMatches, run: &RunNeeds) -> Result<Arc<dyn DataSettings>> {
    let flags: Flags = read(settings)?;
    match run.samples {
        Samples::Any | Samples::Images => images(&flags, run.on_device),
        Samples::Vectors { input_dim, output_dim } => vectors(&flags, input_dim, output_dim, run),
        Samples::Tokens { vocab, classes: None } => tokens(&flags, vocab, run),
        Samples::Tokens { classes: Some(_), .. } => usage(format!(
            "--data synthetic has no sequences of tokens with classes, on which --model {} trains; pass \
             --data text",
            run.model
        )),
    }
}

fn images(flags: &Flags, on_device: bool) -> Result<Arc<dyn DataSettings>> {
    if flags.seq_len.is_some() {
        return usage("--seq-len is for synthetic tokens only; leave it out");
    }
    let samples = flags.samples.unwrap_or(SAMPLES);
    let image = flags.image.size()?.unwrap_or(IMAGE);
    if samples == 0 {
        return usage("--samples 0: pass the number of images to train on, at least 1");
    }
    if !on_device {
        check_images_fit(samples, image)?;
    }
    Ok(Arc::new(Images { samples, image, on_device }))
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

fn vectors(
    flags: &Flags,
    input_dim: usize,
    output_dim: usize,
    run: &RunNeeds,
) -> Result<Arc<dyn DataSettings>> {
    let given = [("--samples", flags.samples.is_some()), ("--image", flags.image.image.is_some())];
    if let Some((flag, _)) = given.iter().find(|(_, is_given)| *is_given) {
        return usage(format!("{flag} is for synthetic images only; leave it out"));
    }
    if flags.seq_len.is_some() {
        return usage("--seq-len is for synthetic tokens only; leave it out");
    }
    Ok(Arc::new(Vectors { samples: samples_of(run)?, input_dim, output_dim }))
}

fn tokens(flags: &Flags, vocab: usize, run: &RunNeeds) -> Result<Arc<dyn DataSettings>> {
    if flags.image.image.is_some() {
        return usage("--image is for synthetic images only; leave it out");
    }
    let seq_len = flags.seq_len.unwrap_or(SEQ_LEN);
    if seq_len == 0 {
        return usage("--seq-len 0: pass the number of tokens of a sequence");
    }
    let samples = match flags.samples {
        Some(0) => return usage("--samples 0: pass the number of sequences to train on"),
        Some(samples) => samples,
        None => samples_of(run)?,
    };
    Ok(Arc::new(Tokens { samples, vocab, seq_len }))
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

fn opened<T: Dataset + 'static>(
    opened: std::result::Result<T, paceline_data::DataError>,
) -> Result<Arc<dyn Dataset>> {
    let dataset = opened.map_err(|e| Failure::Usage(format!("--data synthetic: {e}")))?;
    Ok(Arc::new(dataset))
}

#[derive(Debug, Serialize)]
struct Images {
    samples: usize,
    image: [usize; 3],
    /// Otherwise the host makes all of them once, and keeps them.
    #[serde(skip)]
    on_device: bool,
}

impl DataSettings for Images {
    fn to_json(&self) -> Value {
        json!(self)
    }

    fn open(&self, seed: u64, split: Split) -> Result<Arc<dyn Dataset>> {
        let len = match split {
            Split::Train => self.samples,
            Split::Test => self.samples.div_ceil(4),
        };
        let [height, width, channels] = self.image;
        let num_classes = CLASSES;
        let config =
            SyntheticImagesConfig { height, width, channels, num_classes, len, seed, split };
        opened(if self.on_device {
            SyntheticImages::on_demand(config)
        } else {
            SyntheticImages::new(config)
        })
    }

    fn is_synthetic(&self) -> bool {
        true
    }

    fn is_generated(&self) -> bool {
        self.on_device
    }

    fn identity(&self) -> Option<Vec<(&'static str, String)>> {
        let image = format!("{:?}", self.image);
        Some(vec![("--samples", self.samples.to_string()), ("--image", image)])
    }
}

#[derive(Debug, Serialize)]
struct Vectors {
    samples: usize,
    input_dim: usize,
    output_dim: usize,
}

impl DataSettings for Vectors {
    fn to_json(&self) -> Value {
        json!(self)
    }

    fn open(&self, seed: u64, _: Split) -> Result<Arc<dyn Dataset>> {
        opened(SyntheticRegression::new(self.input_dim, self.output_dim, self.samples, seed))
    }

    fn has_test(&self) -> bool {
        false
    }

    fn is_synthetic(&self) -> bool {
        true
    }

    fn is_generated(&self) -> bool {
        true
    }

    fn is_new_each_epoch(&self) -> bool {
        true
    }

    fn identity(&self) -> Option<Vec<(&'static str, String)>> {
        Some(vec![("--samples", self.samples.to_string())])
    }
}

#[derive(Debug, Serialize)]
struct Tokens {
    samples: usize,
    vocab: usize,
    seq_len: usize,
}

impl DataSettings for Tokens {
    fn length_flag(&self) -> Option<&'static str> {
        Some("--seq-len")
    }

    fn to_json(&self) -> Value {
        json!(self)
    }

    fn open(&self, seed: u64, _: Split) -> Result<Arc<dyn Dataset>> {
        opened(SyntheticTokens::new(self.vocab, self.seq_len, self.samples, seed))
    }

    fn has_test(&self) -> bool {
        false
    }

    fn is_synthetic(&self) -> bool {
        true
    }

    fn is_generated(&self) -> bool {
        true
    }

    fn is_new_each_epoch(&self) -> bool {
        true
    }

    fn identity(&self) -> Option<Vec<(&'static str, String)>> {
        let seq_len = self.seq_len.to_string();
        Some(vec![("--samples", self.samples.to_string()), ("--seq-len", seq_len)])
    }
}
