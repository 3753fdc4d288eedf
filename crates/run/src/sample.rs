//! Texts that a language model makes while it trains, which show its progress.
//!
//! Takes a trainer between two steps, and returns a text on rank 0. It computes with memory and threads of its own, so that
//! the figures of the run stay as they are. This file knows neither when a text is made nor where it goes.

use paceline_choices::data::DataConfig;
use paceline_choices::models::{ModelConfig, Samples};
use paceline_collectives::{Axis, MeshShape};
use paceline_data::text::Tokenizer;
use paceline_data::{Dataset, Field, OwnedSample};
use paceline_failure::{Failure, Result};
use paceline_kernels::Compute;
use paceline_launch::device::Device;
use paceline_memory::{Allocator, Category};
use paceline_model::{Generator, LlamaConfig, ModelError, Sampling, Storage, TokenSampler, UnitId};
use paceline_settings::config::TrainConfig;
use paceline_settings::flags::RunFlags;
use paceline_strategies::{Replica, Trainer};

/// Tokens of the beginning of a text, and tokens that follow. Together at most the length that the model is trained on.
const PROMPT_TOKENS: usize = 16;
const NEW_TOKENS: usize = 120;
/// How tokens are chosen: as texts are usually made with small models.
const TEMPERATURE: f64 = 0.8;
const TOP_P: f64 = 0.95;

/// Fails for `--sample-every` if nothing can make a text while the run trains.
pub(crate) fn check(
    flags: &RunFlags,
    model: &ModelConfig,
    data: &DataConfig,
    mesh: &MeshShape,
) -> Result<()> {
    let problem = match flags.evaluation.sample_every {
        None => return Ok(()),
        Some(_) if !matches!(model.samples(), Samples::Tokens { classes: None, .. }) => {
            format!("--model {} predicts no tokens", model.name())
        }
        Some(_) if model.hugging_face_config().is_none() => {
            format!(
                "texts are made with models of the Llama family, and not with --model {}",
                model.name()
            )
        }
        Some(_) if data.tokenizer().is_none() => {
            format!("--data {} has no tokenizer, which makes a text of tokens", data.name())
        }
        Some(_) if mesh.size(Axis::Pp) > 1 => {
            "no rank of a pipeline has the whole model".to_owned()
        }
        Some(_) if flags.ranks.device != Device::Cpu => {
            format!("texts are made on the processor, and not on --device {}", flags.ranks.device)
        }
        Some(_) => return Ok(()),
    };
    Err(Failure::Usage(format!("--sample-every: {problem}; leave it out")))
}

/// Makes texts, on rank 0.
pub(crate) struct TextSampler {
    config: LlamaConfig,
    tokenizer: Tokenizer,
    compute: Compute,
    prompt: Vec<u32>,
    /// Tokens of a text, with its beginning.
    len: usize,
    seed: u64,
}

impl TextSampler {
    /// Texts that begin as the data set does. `None` unless the run makes texts.
    pub fn new(config: &TrainConfig, data: &dyn Dataset) -> Result<Option<Self>> {
        let (Some(_), Some(source)) = (config.evaluation.sample_every, config.data.tokenizer())
        else {
            return Ok(None);
        };
        let Some(settings) = config.model.hugging_face_config() else { return Ok(None) };
        let settings = LlamaConfig::from_json(&settings.to_string()).map_err(failed)?;
        let tokenizer = source.load().map_err(|e| Failure::Usage(format!("--tokenizer: {e}")))?;
        let first = OwnedSample::read(data, 0, 0);
        let mut first = first.map_err(|e| Failure::Run(format!("--sample-every: {e}")))?;
        let tokens = first.i64(Field::INPUTS);
        let prompt = tokens.iter().take(PROMPT_TOKENS.min(tokens.len().div_ceil(2)));
        let prompt: Vec<u32> = prompt.map(|token| *token as u32).collect();
        let len = tokens.len().min(prompt.len() + NEW_TOKENS);
        let compute = Compute::new(config.threads, Allocator::new())?;
        Ok(Some(Self { config: settings, tokenizer, compute, prompt, len, seed: config.seed }))
    }

    /// A text of the model whose parameters these are.
    fn text(&self, storage: &Storage) -> Result<String> {
        let generator = Generator::new(&self.compute, &self.config, storage, self.len);
        let mut generator = generator.map_err(failed)?;
        let (temperature, top_p, seed) = (TEMPERATURE, Some(TOP_P), self.seed);
        let sampling = Sampling::Random { temperature, top_k: None, top_p, seed };
        let mut sampler = TokenSampler::new(sampling).map_err(failed)?;
        let mut tokens = self.prompt.clone();
        generator.read_all(&tokens).map_err(failed)?;
        while tokens.len() < self.len {
            let logits = generator.logits().map_err(failed)?;
            let token = sampler.choose(&logits, &tokens).map_err(failed)?;
            if self.config.special_tokens.ends.contains(&token) {
                break;
            }
            tokens.push(token);
            if tokens.len() < self.len {
                generator.read(token).map_err(failed)?;
            }
        }
        Ok(self.tokenizer.decode(&tokens)?)
    }
}

fn failed(error: ModelError) -> Failure {
    Failure::Run(format!("--sample-every: {error}"))
}

/// Makes a text where there is a sampler. All ranks call this together, because the parameters may be divided among them.
pub(crate) fn sample(
    sampler: Option<&TextSampler>,
    trainer: &mut Trainer,
) -> Result<Option<String>> {
    trainer.sync_replicas()?;
    let (strategy, mut cx) = trainer.parts();
    let whole = sampler.map(|sampler| whole(sampler, cx.replica)).transpose()?;
    let layout = &cx.replica.model.layout;
    for unit in (0..layout.units().len()).map(UnitId) {
        let values = strategy.gather_unit(&mut cx, unit)?;
        for param in layout.params().iter().filter(|of| of.unit == unit && of.is_first()) {
            let value = cx.replica.whole_param(param, Some(&values))?;
            let Some(whole) = &whole else { continue };
            let mut to = whole.layout().params().iter();
            let to = to.find(|to| to.name == param.name).expect("both are layouts of one model");
            whole.values().slice(to.range())?.copy_from(&value.view([value.num_elems()])?)?;
        }
    }
    // The time belongs to no step.
    cx.track.clear();
    sampler.zip(whole).map(|(sampler, whole)| sampler.text(&whole)).transpose()
}

/// Storage for all parameters of undivided layers, without gradients.
fn whole(sampler: &TextSampler, replica: &Replica) -> Result<Storage> {
    let layout = sampler.config.build(1).map_err(failed)?.layout;
    let allocator = &sampler.compute.allocator;
    let dtype = replica.storage.values().dtype();
    let values = allocator.allocate(layout.num_bytes(dtype), Category::Parameters)?;
    let none = allocator.allocate(0, Category::Gradients)?;
    let all = 0..layout.len();
    let (values, grads) = ((values, vec![all]), (none, Vec::new()));
    Ok(Storage::of_ranges(layout, dtype, values, grads, allocator)?)
}
