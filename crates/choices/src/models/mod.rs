//! The models that `--model` can name.

mod cnn;
mod llama;
mod mlp;

use std::fmt::{self, Debug};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::builder::BoolishValueParser;
use clap::{ArgAction, ArgMatches, Args};
use paceline_data::Dataset;
use paceline_failure::Result;
use paceline_model::{Divided, Model, ModelError, Storage};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::registry::{FlagValues, Registry};

/// The file of a published model's tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";

/// The models. The first one is the default.
pub static MODELS: Registry<OfModel> =
    Registry::new("model", "Model", &[&cnn::CNN, &mlp::MLP, &llama::LLAMA]);

/// The part of a [choice](super::registry::Choice) that only models have.
pub struct OfModel {
    /// Its flags, without dashes, that are widths of hidden layers.
    pub width_flags: &'static [&'static str],
    /// Reads the flags, checks them and fills in the defaults.
    pub resolve: fn(&ArgMatches) -> Result<Arc<dyn ModelSettings>>,
}

/// A model with its settings, all defaults filled in.
pub trait ModelSettings: Debug + Send + Sync {
    /// The kind of samples that it trains on.
    fn samples(&self) -> Samples {
        Samples::Any
    }

    /// Whether some of its layers keep running statistics.
    fn has_batch_norm(&self) -> bool {
        false
    }

    /// The defaults of a run's flags with this model.
    fn defaults(&self) -> Defaults {
        Defaults::default()
    }

    /// The folder in which it was published, if any.
    fn folder(&self) -> Option<&Path> {
        None
    }

    /// The published `tokenizer.json`, if any.
    fn tokenizer(&self) -> Option<PathBuf> {
        let file = self.folder()?.join(TOKENIZER);
        file.is_file().then_some(file)
    }

    /// The class names in its folder, in order, if any.
    fn class_names(&self) -> &[String] {
        &[]
    }

    /// Lines that say where its files were found, for flags that name them without a folder.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// The revisions found for names, as flag, space, revision. They must be equal on all ranks.
    fn revisions(&self) -> Vec<String> {
        Vec::new()
    }

    /// Lines about the first weights, for a run that begins with them.
    fn notes_at_start(&self) -> Vec<String> {
        Vec::new()
    }

    /// The `config.json` of Hugging Face's `transformers`, if it has this model.
    fn hugging_face_config(&self) -> Option<Value> {
        None
    }

    /// Replaces the initial values that a rank holds, if they do not come from the seed.
    fn load(&self, _storage: &Storage) -> Result<()> {
        Ok(())
    }

    /// Builds the model for this data set on `world_size` ranks.
    fn build(
        &self,
        dataset: &dyn Dataset,
        world_size: usize,
    ) -> std::result::Result<Model, ModelError>;

    /// The same with layers in parts (`--mesh tp=2`). By default an error: a model says how its layers are divided.
    fn build_divided(
        &self,
        _dataset: &dyn Dataset,
        _world_size: usize,
        _divided: Divided,
    ) -> std::result::Result<Model, ModelError> {
        Err(ModelError::Config("the layers of this model cannot be divided".into()))
    }
}

/// The flag of models whose operations can be computed one by one.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
struct FuseFlag {
    /// CNN, MLP: compute each layer with its bias, activation and pool as one operation, without memory between them; off
    /// shows what that saves
    #[arg(
        long,
        alias = "jit",
        value_name = "BOOL",
        num_args = 0..=1,
        default_value = "true",
        default_missing_value = "true",
        value_parser = BoolishValueParser::new(),
        action = ArgAction::Set
    )]
    fuse: bool,
}

/// The kind of samples that a model trains on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Samples {
    /// Whatever the data set has; the builder of the model checks it.
    Any,
    /// Images with a class each.
    Images,
    /// Vectors, with vectors or classes as targets.
    Vectors {
        /// Number of elements of an input.
        input_dim: usize,
        /// Number of elements of a target, or of classes.
        output_dim: usize,
    },
    /// Sequences of tokens.
    Tokens {
        /// The number of tokens that the model knows.
        vocab: usize,
        /// The number of classes, if each sequence has one; otherwise tokens have tokens as targets.
        classes: Option<usize>,
    },
}

impl Samples {
    /// The plural word for the samples.
    pub fn plural(&self) -> &'static str {
        match self {
            Samples::Any => "anything",
            Samples::Images => "images",
            Samples::Vectors { .. } => "vectors",
            Samples::Tokens { .. } => "tokens",
        }
    }
}

impl fmt::Display for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Samples::Any => f.write_str("any samples"),
            Samples::Images => f.write_str("images with a class each"),
            Samples::Vectors { input_dim, output_dim } => {
                write!(
                    f,
                    "vectors of {input_dim} elements with {output_dim} values or one of {output_dim} classes each"
                )
            }
            Samples::Tokens { vocab, classes: None } => {
                write!(
                    f,
                    "sequences of tokens below {vocab} with a token as the target of each token"
                )
            }
            Samples::Tokens { vocab, classes: Some(classes) } => {
                write!(f, "sequences of tokens below {vocab} with one of {classes} classes each")
            }
        }
    }
}

/// Defaults of a run that depend on its model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Defaults {
    /// Passes over the data.
    pub epochs: usize,
    /// Samples of a batch, per rank.
    pub batch_size: usize,
    /// Size of a bucket of gradients, in MiB.
    pub bucket_cap_mb: f64,
}

impl Default for Defaults {
    fn default() -> Self {
        Self { epochs: 3, batch_size: 64, bucket_cap_mb: 25.0 }
    }
}

/// The model of a run.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    name: &'static str,
    settings: Arc<dyn ModelSettings>,
    flags: FlagValues,
    /// Units that are not trained.
    frozen: Vec<String>,
    /// The parts of its layers.
    divided: Divided,
}

impl ModelConfig {
    /// The model with this name.
    pub fn resolve(name: &str, frozen: Vec<String>, settings: &ArgMatches) -> Result<Self> {
        let choice = MODELS.get(name)?;
        let flags = FlagValues::of(choice, settings);
        let (settings, divided) = ((choice.of.resolve)(settings)?, Divided::NOT);
        Ok(Self { name: choice.name, settings, flags, frozen, divided })
    }

    /// The parts of its layers.
    pub fn divided(&self) -> Divided {
        self.divided
    }

    /// The same with layers in parts.
    pub fn in_parts(self, divided: Divided) -> Self {
        Self { divided, ..self }
    }

    /// Its name on the command line.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The flags that the model reads, with their values.
    pub fn flags(&self) -> Vec<(String, String)> {
        self.flags.typed()
    }

    /// The flags that are not switches.
    pub fn sizes(&self) -> Vec<String> {
        let is_size = |(_, value): &(String, String)| !["true", "false"].contains(&value.as_str());
        self.flags().into_iter().filter(is_size).map(|(flag, _)| flag).collect()
    }

    /// Builds the model, with its frozen units.
    pub fn build(
        &self,
        dataset: &dyn Dataset,
        world_size: usize,
    ) -> std::result::Result<Model, ModelError> {
        let mut model = match self.divided.parts {
            1 => self.settings.build(dataset, world_size)?,
            _ => self.settings.build_divided(dataset, world_size, self.divided)?,
        };
        if let Some(param) = model.layout.params().iter().find(|p| p.shape.num_elems() == 0) {
            let reason = format!("the parameter {} of {} has no elements", param.name, self.name);
            return Err(ModelError::Config(format!("{reason}: its shape is {}", param.shape)));
        }
        if !self.frozen.is_empty() {
            model.freeze(&self.frozen)?;
        }
        Ok(model)
    }
}

impl std::ops::Deref for ModelConfig {
    type Target = dyn ModelSettings;

    fn deref(&self) -> &Self::Target {
        self.settings.as_ref()
    }
}

impl Serialize for ModelConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut entries = self.flags.to_json();
        entries.insert("name".into(), json!(self.name));
        entries.insert("freeze".into(), json!(self.frozen));
        if self.divided.parts > 1 {
            entries.insert("tp_parts".into(), json!(self.divided.parts));
            entries.insert("sequence_parallel".into(), json!(self.divided.by_rows));
            entries.insert("overlap_tp".into(), json!(self.divided.overlaps));
        }
        let found = self.notes();
        if !found.is_empty() {
            entries.insert("found".into(), json!(found));
        }
        entries.serialize(serializer)
    }
}
