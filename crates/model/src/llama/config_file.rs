//! Reads and writes `config.json` as Hugging Face's `transformers` does.
//!
//! Input: the text of the file. Output: settings, or the setting that is missing, wrong or not supported.

use std::collections::BTreeSet;

use paceline_kernels::rotary::{Llama3Scaling, RotaryScaling};
use serde_json::{Map, Value, json};

use super::{LlamaConfig, LlamaTask, SpecialTokens};
use crate::{ModelError, Result};

/// The architectures that can be read, with what they predict.
const CAUSAL: &str = "LlamaForCausalLM";
const CLASSIFIER: &str = "LlamaForSequenceClassification";
/// The keys of tokens with a meaning of their own.
const BEGIN: &str = "bos_token_id";
const END: &str = "eos_token_id";
const PAD: &str = "pad_token_id";

/// The object of a `config.json`, or a part of it.
pub(super) struct ConfigObject<'a> {
    pub(super) object: &'a Map<String, Value>,
}

/// The object of a `config.json` with this text.
pub(super) fn object(text: &str) -> Result<Map<String, Value>> {
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(ModelError::Config("this is no JSON object".into())),
        Err(e) => Err(ModelError::Config(format!("this is no JSON ({e})"))),
    }
}

/// The first architecture that a file states.
pub(super) fn architecture<'a>(settings: &ConfigObject<'a>) -> Option<&'a str> {
    settings.get("architectures")?.as_array()?.first()?.as_str()
}

impl<'a> ConfigObject<'a> {
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// The value that `read` makes of a key, or the default, if there is one and the key is absent.
    pub(super) fn read<T>(
        &self,
        key: &str,
        needs: &str,
        default: Option<T>,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<T> {
        match (self.get(key), default) {
            (None, Some(default)) => Ok(default),
            (None, None) => Err(ModelError::Config(format!("{key} is missing"))),
            (Some(value), _) => read(value).ok_or_else(|| {
                ModelError::Config(format!("{key} is {value}, and must be {needs}"))
            }),
        }
    }

    pub(super) fn size(&self, key: &str, default: Option<usize>) -> Result<usize> {
        let read = |value: &Value| usize::try_from(value.as_u64()?).ok();
        self.read(key, "a whole number", default, read)
    }

    fn real(&self, key: &str, default: Option<f64>) -> Result<f64> {
        self.read(key, "a number", default, Value::as_f64)
    }

    pub(super) fn is_set(&self, key: &str) -> Result<bool> {
        self.read(key, "true or false", Some(false), Value::as_bool)
    }

    fn word(&self, key: &str, default: &'a str) -> Result<&'a str> {
        self.read(key, "a word", Some(default), Value::as_str)
    }

    /// The base of the rotary positions, if this object states it.
    fn theta(&self) -> Result<Option<f64>> {
        self.read("rope_theta", "a number", Some(None), |value| value.as_f64().map(Some))
    }

    fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>> {
        self.read(key, "an object", Some(None), |value| value.as_object().map(Some))
    }

    /// A token. Early files say -1 where there is none.
    fn token(&self, key: &str) -> Result<Option<u32>> {
        let read = |value: &Value| match value.as_i64()? {
            -1 => Some(None),
            token => u32::try_from(token).ok().map(Some),
        };
        self.read(key, "a token", Some(None), read)
    }

    /// A token or several, or none.
    fn tokens(&self, key: &str) -> Result<Vec<u32>> {
        let token = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let read = |value: &Value| match value {
            Value::Array(all) => all.iter().map(token).collect(),
            one => token(one).map(|token| vec![token]),
        };
        self.read(key, "a token or a list of tokens", Some(Vec::new()), read)
    }
}

impl LlamaConfig {
    /// Reads a `config.json`.
    ///
    /// Errors if the text is not a JSON object, if the architecture is another one, if a setting has no possible value,
    /// or if the model would need something that is not supported. The message names the setting, not the file.
    pub fn from_json(text: &str) -> Result<Self> {
        let object = object(text)?;
        let settings = ConfigObject { object: &object };
        let task = task(&settings)?;
        for (key, supported) in [("hidden_act", "silu"), ("model_type", "llama")] {
            let word = settings.word(key, supported)?;
            if word != supported {
                return Err(unsupported(key, word, supported));
            }
        }
        for key in ["attention_bias", "mlp_bias"] {
            if settings.is_set(key)? {
                return Err(unsupported(key, "true", "false"));
            }
        }
        let dropout = settings.real("attention_dropout", Some(0.0))?;
        if dropout != 0.0 {
            return Err(unsupported("attention_dropout", &dropout.to_string(), "0"));
        }
        if settings.get("quantization_config").is_some() {
            return Err(unsupported(
                "quantization_config",
                "set",
                "absent, with weights in f32, f16 or bf16",
            ));
        }
        let sizes = Self::of_sizes(&settings)?;
        let (rope_theta, rope_scaling) = rotary(&settings)?;
        let config = Self {
            rope_theta,
            rope_scaling,
            rms_norm_eps: settings.real("rms_norm_eps", Some(sizes.rms_norm_eps))?,
            initializer_range: settings.real("initializer_range", Some(sizes.initializer_range))?,
            task,
            special_tokens: SpecialTokens {
                begin: settings.token(BEGIN)?,
                ends: settings.tokens(END)?,
                pad: settings.token(PAD)?,
            },
            ..sizes
        };
        config.check()?;
        Ok(config)
    }

    /// A language model with the sizes that a file states. The other settings have their defaults.
    pub(super) fn of_sizes(settings: &ConfigObject) -> Result<Self> {
        let hidden_size = settings.size("hidden_size", None)?;
        let num_attention_heads = settings.size("num_attention_heads", None)?;
        Ok(Self {
            vocab_size: settings.size("vocab_size", None)?,
            hidden_size,
            intermediate_size: settings.size("intermediate_size", None)?,
            num_hidden_layers: settings.size("num_hidden_layers", None)?,
            num_attention_heads,
            num_key_value_heads: settings.size("num_key_value_heads", Some(num_attention_heads))?,
            head_dim: settings.size("head_dim", Some(hidden_size / num_attention_heads.max(1)))?,
            max_position_embeddings: settings.size("max_position_embeddings", Some(2048))?,
            rope_theta: 10_000.0,
            rope_scaling: None,
            rms_norm_eps: 1e-6,
            initializer_range: 0.02,
            tie_word_embeddings: settings.is_set("tie_word_embeddings")?,
            task: LlamaTask::LanguageModel,
            special_tokens: SpecialTokens::default(),
        })
    }

    /// The names of the classes in a `config.json`, in their order. Empty unless each class has a name of its own.
    pub fn class_names(text: &str) -> Vec<String> {
        let config: Value = serde_json::from_str(text).unwrap_or_default();
        let labels = config["id2label"].as_object();
        let of_class = |at: usize| Some(labels?.get(&at.to_string())?.as_str()?.to_owned());
        let names: Option<Vec<String>> = (0..labels.map_or(0, Map::len)).map(of_class).collect();
        let names = names.unwrap_or_default();
        let different: BTreeSet<&String> = names.iter().collect();
        let has_numbers = names.iter().enumerate().all(|(at, name)| *name == numbered(at));
        if has_numbers || different.len() < names.len() { Vec::new() } else { names }
    }

    /// The rotary positions, as `transformers` reads them.
    fn rope_parameters(&self) -> Value {
        let theta = self.rope_theta;
        match self.rope_scaling {
            None => json!({"rope_theta": theta, "rope_type": "default"}),
            Some(RotaryScaling::Linear { factor }) => {
                json!({"rope_theta": theta, "rope_type": "linear", "factor": factor})
            }
            Some(RotaryScaling::Llama3(scaling)) => json!({
                "rope_theta": theta,
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }),
        }
    }

    /// The settings as `transformers` reads them.
    pub fn to_json(&self) -> Value {
        // Versions before 5 read rope_theta and rope_scaling, later ones rope_parameters.
        let rope = self.rope_parameters();
        let mut config = json!({
            "architectures": [CAUSAL],
            "attention_bias": false,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_bias": false,
            "model_type": "llama",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": rope,
            "rope_scaling": self.rope_scaling.map(|_| &rope),
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "vocab_size": self.vocab_size,
        });
        if let LlamaTask::Classification { num_labels } = self.task {
            let names = (0..num_labels).map(|at| (at.to_string(), json!(numbered(at))));
            let numbers = (0..num_labels).map(|at| (numbered(at), json!(at)));
            config["architectures"] = json!([CLASSIFIER]);
            config["id2label"] = Value::Object(names.collect());
            config["label2id"] = Value::Object(numbers.collect());
        }
        let SpecialTokens { begin, ends, pad } = &self.special_tokens;
        let end = match ends[..] {
            [] => None,
            [end] => Some(json!(end)),
            _ => Some(json!(ends)),
        };
        // Unknown tokens are left out, as in the file that was read.
        for (key, value) in
            [(BEGIN, begin.map(Value::from)), (END, end), (PAD, pad.map(Value::from))]
        {
            if let Some(value) = value {
                config[key] = value;
            }
        }
        config
    }
}

/// The name that `transformers` gives a class without a name.
fn numbered(class: usize) -> String {
    format!("LABEL_{class}")
}

fn unsupported(key: &str, got: &str, supported: &str) -> ModelError {
    ModelError::Config(format!("{key} is {got}, which is not supported; it must be {supported}"))
}

fn task(settings: &ConfigObject) -> Result<LlamaTask> {
    let num_labels = || match settings.get("id2label").and_then(Value::as_object) {
        Some(labels) => Ok(labels.len()),
        // As in `transformers`.
        None => settings.size("num_labels", Some(2)),
    };
    match architecture(settings) {
        Some(CAUSAL) => Ok(LlamaTask::LanguageModel),
        Some(CLASSIFIER) => Ok(LlamaTask::Classification { num_labels: num_labels()? }),
        None => Err(ModelError::Config(format!(
            "architectures is missing; it must be [{CAUSAL:?}] or [{CLASSIFIER:?}]"
        ))),
        Some(other) => {
            Err(unsupported("the architecture", other, &format!("{CAUSAL} or {CLASSIFIER}")))
        }
    }
}

/// The base and the scaling of the rotary positions: under `rope_parameters`, or in files of versions before 5 under
/// `rope_theta` and `rope_scaling`. Versions read different ones, so all that are stated must agree.
fn rotary(settings: &ConfigObject) -> Result<(f64, Option<RotaryScaling>)> {
    whole_rotation(settings)?;
    let mut stated = None;
    let mut thetas = vec![("rope_theta", settings.theta()?)];
    for key in ["rope_parameters", "rope_scaling"] {
        // Like `transformers`, which takes an empty object for none.
        let Some(object) = settings.object(key)?.filter(|object| !object.is_empty()) else {
            continue;
        };
        let part = ConfigObject { object };
        let scaling = scaling(key, &part)?;
        if let Some((first, other)) = stated.filter(|(_, other)| *other != scaling) {
            return Err(ModelError::Config(format!(
                "{first} and {key} disagree ({}, {}), and versions of transformers differ in which they read; leave one of \
                 them out",
                words(other),
                words(scaling)
            )));
        }
        stated = Some((key, scaling));
        thetas.push((key, part.theta()?));
    }
    let mut thetas = thetas.into_iter().filter_map(|(key, theta)| theta.map(|theta| (key, theta)));
    let (first, theta) = thetas.next().unwrap_or(("", 10_000.0));
    match thetas.find(|(_, other)| *other != theta) {
        Some((key, other)) => Err(ModelError::Config(format!(
            "rope_theta is {theta} in {first} and {other} in {key}, and versions of transformers differ in which they read; \
             leave one of them out"
        ))),
        None => Ok((theta, stated.and_then(|(_, scaling)| scaling))),
    }
}

/// The scaling that one of the two objects states.
fn scaling(key: &str, part: &ConfigObject) -> Result<Option<RotaryScaling>> {
    whole_rotation(part)?;
    if let Some((layers, _)) = part.object.iter().find(|(_, value)| value.is_object()) {
        return Err(ModelError::Config(format!(
            "{key} states rotary positions of their own for {layers}, which is not supported; all layers must share them"
        )));
    }
    // Early files say "type".
    let kind = match (part.get("rope_type"), part.get("type")) {
        (Some(kind), Some(early)) if kind != early => {
            return Err(ModelError::Config(format!(
                "{key} has the rope_type {kind} and the type {early}; leave one of them out"
            )));
        }
        _ => part.word("rope_type", part.word("type", "default")?)?,
    };
    let factor = || part.real("factor", None);
    Ok(match kind {
        "default" => None,
        "linear" => Some(RotaryScaling::Linear { factor: factor()? }),
        "llama3" => Some(RotaryScaling::Llama3(Llama3Scaling {
            factor: factor()?,
            low_freq_factor: part.real("low_freq_factor", None)?,
            high_freq_factor: part.real("high_freq_factor", None)?,
            original_max_position: part.size("original_max_position_embeddings", None)?,
        })),
        other => return Err(unsupported("rope_type", other, "default, linear or llama3")),
    })
}

fn words(scaling: Option<RotaryScaling>) -> &'static str {
    match scaling {
        None => "default",
        Some(RotaryScaling::Linear { .. }) => "linear",
        Some(RotaryScaling::Llama3(_)) => "llama3",
    }
}

/// Errors if only a part of each head is rotated.
fn whole_rotation(part: &ConfigObject) -> Result<()> {
    let key = "partial_rotary_factor";
    match part.real(key, Some(1.0))? {
        1.0 => Ok(()),
        factor => Err(unsupported(key, &factor.to_string(), "1")),
    }
}
