//! The data sets that `--data` can name.

mod arrays;
mod cifar10;
mod files;
mod mnist;
mod reviews;
mod synthetic;
mod text;

use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

use clap::ArgMatches;
use paceline_data::text::TokenizerSource;
use paceline_data::{BatchShape, Dataset, Field, Split};
use paceline_failure::{Failure, Result};
use paceline_hub::published::Source;
use paceline_memory::DType;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::models::{MODELS, Samples};
use super::registry::{FlagValues, Registry};

/// The data sets. The first one is the default.
pub static DATA_SETS: Registry<OfData> = Registry::new(
    "data",
    "Data",
    &[
        &synthetic::SYNTHETIC,
        &mnist::MNIST,
        &cifar10::CIFAR10,
        &text::TEXT,
        &reviews::REVIEWS,
        &arrays::IMAGES,
        &arrays::CSV,
        &arrays::NPY,
    ],
);

type Resolve = fn(&ArgMatches, &RunNeeds) -> Result<Arc<dyn DataSettings>>;

/// The part of a [choice](super::registry::Choice) that only data sets have.
pub struct OfData {
    /// Reads the flags, checks them and fills in the defaults.
    pub resolve: Resolve,
    /// The `tokenizer.json` that makes its tokens, if the program carries it.
    pub tokenizer: Option<&'static str>,
    /// Where `--download` and `paceline fetch data` find its files, if they can.
    pub source: Option<&'static Source>,
}

impl OfData {
    /// A data set without a tokenizer of its own and without a source.
    pub(crate) const fn read_by(resolve: Resolve) -> Self {
        Self { resolve, tokenizer: None, source: None }
    }
}

/// The requirements of a run on its data.
#[derive(Clone, Copy, Debug)]
pub struct RunNeeds<'a> {
    /// The name of the model.
    pub model: &'a str,
    /// The kind of samples that the model trains on.
    pub samples: Samples,
    /// Samples of a batch, on all ranks together.
    pub global_batch_size: usize,
    /// Batches of an epoch, if the run states them.
    pub steps_per_epoch: Option<usize>,
    /// Whether a device makes samples that are computed from the seed.
    pub on_device: bool,
    /// The `tokenizer.json` of the model, if it has one.
    pub tokenizer: Option<&'a Path>,
    /// The model's class names, in order, if it has any.
    pub class_names: &'a [String],
}

impl RunNeeds<'_> {
    /// Fails unless the model trains on images. `data` is the name of the data set.
    pub fn check_images(&self, data: &str) -> Result<()> {
        match self.samples {
            Samples::Any | Samples::Images => Ok(()),
            Samples::Vectors { .. } | Samples::Tokens { .. } => Err(Failure::Usage(format!(
                "--model {} trains on {}, and --data {data} has images; leave --data out, or pass another \
                 --model",
                self.model,
                self.samples.plural()
            ))),
        }
    }
}

/// A data set with its settings, all defaults filled in.
pub trait DataSettings: Debug + Send + Sync {
    /// The settings in `config.json`; `null` for the values of the flags.
    fn to_json(&self) -> Value {
        Value::Null
    }

    /// Opens the training or the test part. An error names the flag.
    fn open(&self, seed: u64, split: Split) -> Result<Arc<dyn Dataset>>;

    /// Lines that say where its files were found, for flags that name them without a folder.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// The revisions found for names, as flag, space, revision. They must be equal on all ranks.
    fn revisions(&self) -> Vec<String> {
        Vec::new()
    }

    /// The tokenizer that makes its tokens, if it reads texts.
    fn tokenizer(&self) -> Option<&TokenizerSource> {
        None
    }

    /// Whether there is a part to evaluate on.
    fn has_test(&self) -> bool {
        true
    }

    /// Whether samples are computed from the seed, so that a device can make them.
    fn is_synthetic(&self) -> bool {
        false
    }

    /// Whether samples are generated each time they are read, which takes time.
    fn is_generated(&self) -> bool {
        false
    }

    /// Whether each epoch has new samples, so that their order does not matter.
    fn is_new_each_epoch(&self) -> bool {
        false
    }

    /// The approximate memory of the opened training part, in bytes. By default nothing if samples are generated,
    /// otherwise the elements of each input.
    fn resident_bytes(&self, dataset: &dyn Dataset) -> f64 {
        let of_input = dataset.field(Field::INPUTS).map_or(0, |field| field.max_bytes());
        let bytes = dataset.len() as f64 * of_input as f64;
        if self.is_generated() { 0.0 } else { bytes }
    }

    /// Whether batches have samples of like length.
    fn groups_by_length(&self) -> bool {
        false
    }

    /// The flag that makes samples shorter, if there is one.
    fn length_flag(&self) -> Option<&'static str> {
        None
    }

    /// Called once, before the data set is opened, in the process that prepares a run. Downloads missing files, if the
    /// run asks for that. Unless `quiet`, progress may be reported on standard error, also while the data set is opened.
    fn prepare(&self, _quiet: bool) -> Result<()> {
        Ok(())
    }

    /// The settings that determine the samples, by flag; `None` for all flags of the data set. A run can only be
    /// continued with the same ones.
    fn identity(&self) -> Option<Vec<(&'static str, String)>> {
        None
    }
}

/// The data of a run.
#[derive(Clone, Debug)]
pub struct DataConfig {
    name: &'static str,
    settings: Arc<dyn DataSettings>,
    flags: FlagValues,
    /// The name of the model, and the samples that it trains on.
    model: (String, Samples),
}

impl DataConfig {
    /// The data set with this name.
    pub fn resolve(name: &str, settings: &ArgMatches, run: &RunNeeds) -> Result<Self> {
        let choice = DATA_SETS.get(name)?;
        let flags = FlagValues::of(choice, settings);
        let model = (run.model.to_owned(), run.samples);
        let settings = (choice.of.resolve)(settings, run)?;
        Ok(Self { name: choice.name, settings, flags, model })
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

    /// Opens a part, and checks that the model can train on it.
    fn open_part(&self, seed: u64, split: Split) -> Result<Arc<dyn Dataset>> {
        let dataset = self.settings.open(seed, split)?;
        let ((model, samples), name) = (&self.model, self.name);
        if dataset.is_empty() {
            let reason = format!("--data {name}: its {split:?} part has no samples");
            return Err(Failure::Usage(reason));
        }
        let shape = BatchShape::of(&*dataset);
        shape.check().map_err(|error| Failure::Usage(format!("--data {name}: {error}")))?;
        if fits(*samples, &*dataset) {
            return Ok(dataset);
        }
        let limit = dataset.field(Field::INPUTS).and_then(|field| field.limit());
        if let (Samples::Tokens { vocab, .. }, Some(limit)) = (*samples, limit) {
            check_vocab(name, limit, model, vocab)?;
        }
        let has = described(&*dataset);
        let fix =
            sizes(*samples, model, &*dataset).unwrap_or_else(|| "leave --data out".to_owned());
        Err(Failure::Usage(format!(
            "--data {name} has {has} each, and --model {model} trains on {samples}; {fix}, or pass another --model"
        )))
    }
}

/// The flags that fit a model of vectors to a data set.
fn sizes(samples: Samples, model: &str, dataset: &dyn Dataset) -> Option<String> {
    let flags = (MODELS.get(model).ok()?.flags)();
    let has = |flag: &str| flags.iter().any(|own| own.get_long() == Some(flag));
    let shape = dataset.input_shape();
    let (&[inputs], Samples::Vectors { .. }) = (shape.as_slice(), samples) else { return None };
    let targets = dataset.field(Field::TARGETS)?;
    let outputs = targets.num_classes().unwrap_or(targets.max_elems());
    let fits = fits(Samples::Vectors { input_dim: inputs, output_dim: outputs }, dataset);
    (fits && has("input-dim") && has("output-dim"))
        .then(|| format!("pass --input-dim {inputs} --output-dim {outputs}"))
}

/// Fails if a data set whose tokens are below `limit` has more than the model knows.
fn check_vocab(data: &str, limit: usize, model: &str, vocab: usize) -> Result<()> {
    if limit <= vocab {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "--data {data} has tokens up to {}, and --model {model} knows {vocab} of them; pass --vocab {limit}, or, with \
         --pretrained, the tokenizer of that model",
        limit - 1
    )))
}

/// Whether a model that trains on these samples can train on the data set.
fn fits(samples: Samples, dataset: &dyn Dataset) -> bool {
    let inputs = dataset.field(Field::INPUTS);
    let Some(inputs) = inputs.as_ref() else { return false };
    let targets = dataset.field(Field::TARGETS);
    let vector = |field: &Field, dim| {
        field.dtype() == DType::F32 && !field.is_ragged() && field.extents() == [dim]
    };
    match samples {
        Samples::Any => true,
        Samples::Images => {
            let is_image = inputs.dtype() == DType::F32 && inputs.extents().len() == 3;
            is_image && !inputs.is_ragged() && dataset.num_classes().is_some()
        }
        Samples::Vectors { input_dim, output_dim } => {
            let is_fitting = |field: Field| {
                field.num_classes() == Some(output_dim) || vector(&field, output_dim)
            };
            vector(inputs, input_dim) && targets.is_some_and(is_fitting)
        }
        Samples::Tokens { vocab, classes } => {
            let is_sequence = |field: &Field| {
                let known = field.limit().is_some_and(|limit| limit <= vocab);
                field.dtype() == DType::I64 && field.extents().len() == 1 && known
            };
            let alike = |field: &Field| {
                (field.is_ragged(), field.extents()) == (inputs.is_ragged(), inputs.extents())
            };
            is_sequence(inputs)
                && match classes {
                    Some(_) => dataset.num_classes() == classes,
                    None => targets.is_some_and(|field| is_sequence(&field) && alike(&field)),
                }
        }
    }
}

/// The contents of a data set, in words for an error.
fn described(dataset: &dyn Dataset) -> String {
    let targets = dataset.field(Field::TARGETS);
    let targets = match (dataset.num_classes(), &targets) {
        (Some(classes), _) => format!("one of {classes} classes"),
        (None, Some(field)) if field.dtype() == DType::F32 => {
            format!("{} values", field.max_elems())
        }
        (None, Some(field)) => format!("{} integers", field.max_elems()),
        (None, None) => "no targets".to_owned(),
    };
    let shape = dataset.input_shape();
    match dataset.field(Field::INPUTS) {
        Some(field) if field.dtype() == DType::I64 => {
            let most = if field.is_ragged() { "up to " } else { "" };
            let below = field.limit().map(|limit| format!(" below {limit}")).unwrap_or_default();
            format!("{most}{shape:?} integers{below} with {targets}")
        }
        _ => format!("inputs of {shape:?} with {targets}"),
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
        let found = self.settings.notes();
        if !found.is_empty() {
            value["found"] = json!(found);
        }
        value.serialize(serializer)
    }
}
