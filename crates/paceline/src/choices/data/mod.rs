//! The data sets that `--data` can name.
//!
//! | file | data set |
//! |---|---|
//! | `synthetic.rs` | generated from the seed: images or vectors, depending on the model |
//! | `mnist.rs` | MNIST, and other data sets in its format |
//! | `cifar10.rs` | CIFAR-10 |

mod cifar10;
mod files;
mod mnist;
mod synthetic;

use std::fmt::Debug;
use std::sync::Arc;

use clap::ArgMatches;
use paceline_data::{Dataset, Split, TargetSpec};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::models::Samples;
use super::registry::{Choice, FlagValues, Registry};
use crate::{Failure, Result};

/// The data sets. The first one is the default.
pub static DATA_SETS: Registry<dyn DataChoice> = Registry::new(
    "data",
    "Data",
    &[&synthetic::Synthetic, &mnist::MnistFiles, &cifar10::Cifar10Files],
);

/// A data set that `--data` can name.
pub trait DataChoice: Choice {
    /// Reads its flags, checks them and fills in the defaults.
    fn resolve(&self, settings: &ArgMatches, run: &RunNeeds) -> Result<Arc<dyn DataSettings>>;
}

/// What a run needs of its data.
#[derive(Clone, Copy, Debug)]
pub struct RunNeeds<'a> {
    /// The name of the model.
    pub model: &'a str,
    /// What the model trains on.
    pub samples: Samples,
    /// Samples of a batch, on all ranks together.
    pub global_batch_size: usize,
    /// Batches of an epoch, if the run states them.
    pub steps_per_epoch: Option<usize>,
}

impl RunNeeds<'_> {
    /// Fails unless the model trains on images. `data` is the name of the data set.
    pub fn check_images(&self, data: &str) -> Result<()> {
        match self.samples {
            Samples::Any | Samples::Images => Ok(()),
            Samples::Vectors { .. } => Err(Failure::Usage(format!(
                "--model {} trains on vectors, and --data {data} has images; leave --data out, or pass another \
                 --model",
                self.model
            ))),
        }
    }
}

/// A data set with its settings, all defaults filled in.
pub trait DataSettings: Debug + Send + Sync {
    /// The settings, as `config.json` has them. `null` stands for the values of the flags.
    fn to_json(&self) -> Value {
        Value::Null
    }

    /// Opens the training or the test part. An error names the flag.
    fn open(&self, seed: u64, split: Split) -> Result<Arc<dyn Dataset>>;

    /// Whether there is a part to evaluate on.
    fn has_test(&self) -> bool {
        true
    }

    /// Whether samples are generated each time they are read, which takes time.
    fn is_generated(&self) -> bool {
        false
    }

    /// About how much memory the opened training part takes, in bytes. By default nothing if samples are generated,
    /// otherwise an f32 per element of an input.
    fn resident_bytes(&self, dataset: &dyn Dataset) -> f64 {
        let elems: usize = dataset.input_shape().iter().product();
        let bytes = dataset.len() as f64 * (elems * size_of::<f32>()) as f64;
        if self.is_generated() { 0.0 } else { bytes }
    }

    /// Downloads its missing files, if the run asks for that. Unless `quiet`, reports progress on
    /// standard error.
    fn download(&self, _quiet: bool) -> Result<()> {
        Ok(())
    }

    /// The settings that determine the samples, by flag. A run can only be continued with the same ones, and with the
    /// same data set and seed. `None` stands for all flags of the data set.
    fn identity(&self) -> Option<Vec<(&'static str, String)>> {
        None
    }
}

/// The data of a run.
#[derive(Clone, Debug)]
pub struct DataConfig {
    name: &'static str,
    settings: Arc<dyn DataSettings>,
    /// The values of the flags that the data set reads.
    flags: FlagValues,
    /// The name of the model, and the samples that it trains on.
    model: (String, Samples),
}

impl DataConfig {
    /// The data set with this name, from the settings of a run.
    pub fn resolve(name: &str, settings: &ArgMatches, run: &RunNeeds) -> Result<Self> {
        let choice = DATA_SETS.get(name)?;
        let flags = FlagValues::of(choice, settings);
        let model = (run.model.to_owned(), run.samples);
        Ok(Self { name: choice.name(), settings: choice.resolve(settings, run)?, flags, model })
    }

    /// Its name on the command line.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The data set and the settings that determine its samples, by flag.
    pub fn identity(&self) -> Vec<(String, String)> {
        let owned = |(flag, value): (&str, String)| (flag.to_owned(), value);
        let settings = match self.settings.identity() {
            Some(settings) => settings.into_iter().map(owned).collect(),
            None => self.flags.typed(),
        };
        [vec![("--data".to_owned(), self.name.to_owned())], settings].concat()
    }

    /// Opens the training part. An error names the flag.
    pub fn open_train(&self, seed: u64) -> Result<Arc<dyn Dataset>> {
        self.open_part(seed, Split::Train)
    }

    /// Opens the test part. An error names the flag.
    pub fn open_test(&self, seed: u64) -> Result<Arc<dyn Dataset>> {
        self.open_part(seed, Split::Test)
    }

    /// Opens a part, and checks that it has samples of the kind that the model trains on.
    fn open_part(&self, seed: u64, split: Split) -> Result<Arc<dyn Dataset>> {
        let dataset = self.settings.open(seed, split)?;
        let ((model, samples), name) = (&self.model, self.name);
        if dataset.is_empty() {
            let reason = format!("--data {name}: its {split:?} part has no samples");
            return Err(Failure::Usage(reason));
        }
        let (shape, target) = (dataset.input_shape(), dataset.target());
        let fits = match *samples {
            Samples::Any => true,
            Samples::Images => shape.len() == 3 && matches!(target, TargetSpec::Class { .. }),
            Samples::Vectors { input_dim, output_dim } => {
                shape == [input_dim] && target == TargetSpec::Values { dim: output_dim }
            }
        };
        if fits {
            return Ok(dataset);
        }
        let target = match target {
            TargetSpec::Class { num_classes } => format!("one of {num_classes} classes"),
            TargetSpec::Values { dim } => format!("{dim} values"),
        };
        Err(Failure::Usage(format!(
            "--data {name} has inputs of {shape:?} with {target} each, and --model {model} trains on {samples}; \
             leave --data out, or pass another --model"
        )))
    }
}

impl std::ops::Deref for DataConfig {
    type Target = dyn DataSettings;

    fn deref(&self) -> &Self::Target {
        self.settings.as_ref()
    }
}

impl Serialize for DataConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut value = match self.settings.to_json() {
            Value::Null => Value::Object(self.flags.to_json()),
            settings => settings,
        };
        value["name"] = json!(self.name);
        value.serialize(serializer)
    }
}
