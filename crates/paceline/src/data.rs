//! Which data set a run trains on.

use std::path::PathBuf;
use std::sync::Arc;

use paceline_data::{
    Cifar10, Dataset, Mnist, Split, SyntheticImages, SyntheticImagesConfig, SyntheticRegression,
    TargetSpec,
};
use serde::Serialize;

use crate::cli::{DataName, TrainArgs};
use crate::model_settings::ModelSettings;
use crate::{Failure, Result, resources};

/// Synthetic training images, where no number is given.
const DEFAULT_SAMPLES: usize = 8192;
/// Steps of an epoch of data that never ends, where no number is given.
const DEFAULT_STEPS: usize = 20;
/// Height, width and channels of synthetic images, where none are given.
const IMAGE: [usize; 3] = [28, 28, 1];

/// A data set by name, with what is needed to open it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataConfig {
    /// Its name.
    pub kind: DataName,
    /// Folder of its files.
    pub dir: Option<PathBuf>,
    /// Training samples of synthetic data.
    pub samples: Option<usize>,
    /// Height, width and channels of synthetic images.
    pub image: Option<[usize; 3]>,
    /// Inputs and outputs of synthetic vectors.
    pub vector_dims: Option<(usize, usize)>,
}

/// Decides on the data set for a model.
pub fn resolve(
    args: &TrainArgs,
    model: &ModelSettings,
    global_batch_size: usize,
) -> Result<DataConfig> {
    let (kind, dir) = (args.data, args.data_dir.clone());
    let is_synthetic = kind == DataName::Synthetic;
    let usage = |reason: String| Err(Failure::Usage(reason));
    if !is_synthetic && dir.is_none() {
        let name = kind.name();
        return usage(format!("--data {name} needs --data-dir, the folder of its files"));
    }
    if is_synthetic && dir.is_some() {
        return usage("--data-dir needs --data mnist or --data cifar10".into());
    }
    if args.samples.is_some() && (!is_synthetic || matches!(model, ModelSettings::Mlp { .. })) {
        return usage("--samples is for synthetic images only; leave it out".into());
    }
    if is_synthetic && args.download {
        return usage("--download needs --data mnist or --data cifar10, and --data-dir".into());
    }
    if let Some(mirror) = &args.mirror
        && !["http://", "https://"].iter().any(|scheme| mirror.starts_with(scheme))
    {
        return usage(format!("--mirror {mirror}: pass an address that begins with https://"));
    }
    if args.eval_every == Some(0) {
        return usage("--eval-every 0: pass the number of optimizer steps between two".into());
    }
    if args.image.is_some() && (!is_synthetic || matches!(model, ModelSettings::Mlp { .. })) {
        return usage("--image is for synthetic images only; leave it out".into());
    }
    let image = match args.image.as_deref() {
        None => IMAGE,
        Some(&[height, width, channels]) => [height, width, channels].map(|extent| extent as usize),
        Some(_) => return usage("--image takes height, width and channels".into()),
    };
    if image.contains(&0) {
        return usage(format!("--image {image:?}: every extent must be above zero"));
    }
    if args.samples == Some(0) {
        return usage("--samples 0: there must be something to train on".into());
    }
    let (samples, vector_dims) = match *model {
        ModelSettings::Cnn { .. } => {
            (is_synthetic.then(|| args.samples.unwrap_or(DEFAULT_SAMPLES)), None)
        }
        ModelSettings::Mlp { .. } if !is_synthetic => {
            return usage(
                "--model mlp trains on synthetic vectors; leave --data and --data-dir out".into(),
            );
        }
        ModelSettings::Mlp { .. } if args.evaluate || args.eval_every.is_some() => {
            let flag = if args.evaluate { "--evaluate" } else { "--eval-every" };
            return usage(format!(
                "{flag}: the vectors of --model mlp have no test part; leave it out"
            ));
        }
        ModelSettings::Mlp { input_dim, output_dim, .. } => {
            let steps = args.steps_per_epoch.unwrap_or(DEFAULT_STEPS);
            let Some(samples) = steps.checked_mul(global_batch_size) else {
                return usage(format!(
                    "--steps-per-epoch {steps}: too many for steps of {global_batch_size} samples; \
                     lower it"
                ));
            };
            (Some(samples), Some((input_dim, output_dim)))
        }
    };
    if vector_dims.is_none() {
        check_images_fit(samples, image)?;
    }
    let image = (is_synthetic && vector_dims.is_none()).then_some(image);
    Ok(DataConfig { kind, dir, samples, image, vector_dims })
}

/// Refuses more synthetic images than fit into memory, before they are made.
fn check_images_fit(samples: Option<usize>, image: [usize; 3]) -> Result<()> {
    let (Some(samples), Some(available)) = (samples, resources::available_bytes()) else {
        return Ok(());
    };
    let needed = samples as f64 * (image.iter().product::<usize>() * size_of::<f32>()) as f64;
    if needed <= available as f64 {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "not enough memory for --samples {samples}: the images take about {:.1} GB, and {:.1} GB are \
         available; lower it",
        needed / 1e9,
        available as f64 / 1e9
    )))
}

impl DataConfig {
    /// Opens the training part. An error names the flag.
    pub fn open_train(&self, seed: u64) -> Result<Arc<dyn Dataset>> {
        self.open(seed, Split::Train)
    }

    /// Opens the test part. An error names the flag.
    pub fn open_test(&self, seed: u64) -> Result<Arc<dyn Dataset>> {
        self.open(seed, Split::Test)
    }

    fn open(&self, seed: u64, split: Split) -> Result<Arc<dyn Dataset>> {
        let dir = self.dir.clone().unwrap_or_default();
        let samples = self.samples.unwrap_or(0);
        let opened: std::result::Result<Arc<dyn Dataset>, _> = match self.kind {
            DataName::Mnist => Mnist::load(dir, split).map(|data| Arc::new(data) as _),
            DataName::Cifar10 => Cifar10::load(dir, split).map(|data| Arc::new(data) as _),
            DataName::Synthetic => match self.vector_dims {
                Some((input_dim, output_dim)) => {
                    SyntheticRegression::new(input_dim, output_dim, samples, seed)
                        .map(|data| Arc::new(data) as _)
                }
                None => {
                    let len = match split {
                        Split::Train => samples,
                        Split::Test => samples.div_ceil(4),
                    };
                    let [height, width, channels] = self.image.unwrap_or(IMAGE);
                    let config = SyntheticImagesConfig {
                        height,
                        width,
                        channels,
                        num_classes: 10,
                        len,
                        seed,
                        split,
                    };
                    SyntheticImages::new(config).map(|data| Arc::new(data) as _)
                }
            },
        };
        let flag = if self.dir.is_some() { "--data-dir" } else { "--data synthetic" };
        opened.map_err(|e| Failure::Usage(format!("{flag}: {e}")))
    }

    /// Whether there is a part to evaluate on.
    pub fn has_test(&self) -> bool {
        self.vector_dims.is_none()
    }

    /// Whether samples are made anew each time they are read, which takes time.
    pub fn is_generated(&self) -> bool {
        self.vector_dims.is_some()
    }
}

/// Classes to tell apart, if there are classes.
pub fn num_classes(dataset: &dyn Dataset) -> Option<usize> {
    match dataset.target() {
        TargetSpec::Class { num_classes } => Some(num_classes),
        TargetSpec::Values { .. } => None,
    }
}

/// About how much memory the opened data set takes.
pub fn resident_bytes(config: &DataConfig, dataset: &dyn Dataset) -> f64 {
    let elem_bytes = match config.kind {
        _ if config.is_generated() => 0.0,
        DataName::Synthetic => 4.0,
        DataName::Mnist | DataName::Cifar10 => 1.0,
    };
    let elems: usize = dataset.input_shape().iter().product();
    dataset.len() as f64 * elems as f64 * elem_bytes
}
