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
use paceline_data::{Dataset, Split};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::models::Samples;
use super::registry::{Choice, Registry};
use crate::Result;

/// All data sets. The first one is the default.
pub static DATA_SETS: Registry<dyn DataChoice> = Registry {
    key: "data",
    choices: &[&synthetic::Synthetic, &mnist::MnistFiles, &cifar10::Cifar10Files],
};

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

/// A data set with its settings, all defaults filled in.
pub trait DataSettings: Debug + Send + Sync {
    /// Its name on the command line.
    fn name(&self) -> &'static str;

    /// The settings, as `config.json` has them.
    fn to_json(&self) -> Value;

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

    /// About how much memory the opened training part takes, in bytes.
    fn resident_bytes(&self, dataset: &dyn Dataset) -> f64;

    /// Downloads its missing files, if the run asks for that. Unless `quiet`, reports progress on
    /// standard error.
    fn download(&self, _quiet: bool) -> Result<()> {
        Ok(())
    }

    /// The settings that determine the samples, by flag. A run can only be continued with the same ones.
    fn identity(&self) -> Vec<(&'static str, String)>;
}

/// The data of a run.
#[derive(Clone, Debug)]
pub struct DataConfig(Arc<dyn DataSettings>);

impl DataConfig {
    /// The data set with this name, from the settings of a run.
    pub fn resolve(name: &str, settings: &ArgMatches, run: &RunNeeds) -> Result<Self> {
        Ok(Self(DATA_SETS.get(name)?.resolve(settings, run)?))
    }

    /// Opens the training part. An error names the flag.
    pub fn open_train(&self, seed: u64) -> Result<Arc<dyn Dataset>> {
        self.open(seed, Split::Train)
    }

    /// Opens the test part. An error names the flag.
    pub fn open_test(&self, seed: u64) -> Result<Arc<dyn Dataset>> {
        self.open(seed, Split::Test)
    }
}

impl std::ops::Deref for DataConfig {
    type Target = dyn DataSettings;

    fn deref(&self) -> &Self::Target {
        self.0.as_ref()
    }
}

impl Serialize for DataConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut value = self.0.to_json();
        value["name"] = json!(self.0.name());
        value.serialize(serializer)
    }
}
