//! Language models of other families by their `config.json`: described, not built.
//!
//! Input: the text of the file. Output: the number of parameters, and the Llama whose products and activations have the same shapes.
//! The families differ from Llama in biases, norms, positions and in whether the feed-forward layers have a gate. All of that is
//! counted to the unit. Models with experts, with quantized weights or of another family are refused by name. Sources: the
//! implementations of `transformers`.

use serde_json::{Value, json};

use super::LlamaConfig;
use super::config_file::{ConfigObject, architecture, object};
use crate::{ModelError, Result};

/// The families that are known, by `model_type`.
const FAMILIES: [&str; 6] = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2"];

/// GPT-2's names of settings, and those of all others.
const OF_GPT2: [(&str, &str); 5] = [
    ("n_embd", "hidden_size"),
    ("n_head", "num_attention_heads"),
    ("n_inner", "intermediate_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_positions", "max_position_embeddings"),
];

/// Settings of models with experts, with quantized weights, and with an encoder.
const UNKNOWN: [&str; 6] = [
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "quantization_config",
    "add_cross_attention",
];

/// A decoder that is described, not built.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoder {
    /// Its family.
    pub family: &'static str,
    /// The Llama of the same shapes.
    pub llama: LlamaConfig,
    /// The number of parameters.
    pub params: u64,
    /// The widest window of attention, if it is limited.
    pub window: Option<usize>,
}

impl Decoder {
    /// Reads a `config.json`. The error names the setting, not the file.
    pub fn from_json(text: &str) -> Result<Self> {
        let mut object = object(text)?;
        object.retain(|_, value| !value.is_null());
        let family = family(&ConfigObject { object: &object })?;
        let is_gpt2 = family == "gpt2";
        for (own, name) in OF_GPT2.into_iter().filter(|_| is_gpt2) {
            let value = object.remove(own);
            object.extend(value.map(|value| (name.to_owned(), value)));
        }
        let width = object.get("hidden_size").and_then(Value::as_u64).unwrap_or(0);
        // The defaults of the families' own classes.
        let defaults = match family {
            "mistral" => vec![("use_sliding_window", json!(true))],
            "qwen3" => vec![("head_dim", json!(128))],
            "gemma" => vec![("head_dim", json!(256)), ("tie_word_embeddings", json!(true))],
            "gpt2" => vec![
                ("intermediate_size", json!(width.saturating_mul(4))),
                ("max_position_embeddings", json!(1024)),
                ("tie_word_embeddings", json!(true)),
            ],
            _ => Vec::new(),
        };
        for (key, value) in defaults {
            object.entry(key).or_insert(value);
        }
        let of = ConfigObject { object: &object };
        let mut llama = LlamaConfig::of_sizes(&of)?;
        llama.check()?;
        let params = params(&of, family, &llama)?;
        if is_gpt2 {
            // A layer without a gate has two products instead of three.
            llama.intermediate_size = (2 * llama.intermediate_size).div_ceil(3);
        }
        let is_limited = of.is_set("use_sliding_window")? && of.get("sliding_window").is_some();
        let window = is_limited.then(|| of.size("sliding_window", None)).transpose()?;
        Ok(Self { family, llama, params, window })
    }
}

/// The family. Errors for a model that is not known.
fn family(of: &ConfigObject) -> Result<&'static str> {
    let stated = of.read("model_type", "a word", None, Value::as_str)?;
    let family = FAMILIES.into_iter().find(|family| *family == stated);
    let is_set = |key: &&str| of.get(key).is_some_and(|value| *value != json!(false));
    let is_other = |name: &&str| !name.ends_with("ForCausalLM") && !name.ends_with("LMHeadModel");
    let unknown = (UNKNOWN.into_iter().find(is_set), architecture(of).filter(is_other));
    Err(ModelError::Config(match (family, unknown) {
        (Some(family), (None, None)) => return Ok(family),
        (None, _) => format!(
            "model_type is {stated:?}, which is not known; known are {}",
            FAMILIES.join(", ")
        ),
        (_, (Some(key), _)) => format!("{key} is set: such models are not known"),
        (_, (_, Some(name))) => format!(
            "the architecture is {name:?}, and must be a language model, as LlamaForCausalLM"
        ),
    }))
}

/// The parameters of a model of this family with the sizes of this Llama.
fn params(of: &ConfigObject, family: &str, llama: &LlamaConfig) -> Result<u64> {
    let (width, ffn) = (llama.hidden_size, llama.intermediate_size);
    let queries = llama.num_attention_heads * llama.head_dim;
    let keys = llama.num_key_value_heads * llama.head_dim;
    let is_gpt2 = family == "gpt2";
    let has_biases = is_gpt2 || of.is_set("attention_bias")?;
    let of_attention = if has_biases { queries + 2 * keys + width } else { 0 };
    let of_mlp = if of.is_set("mlp_bias")? { 2 * ffn + width } else { 0 };
    // Elements of a layer that a Llama without biases does not have.
    let more = match family {
        "llama" => of_attention + of_mlp,
        "qwen2" => queries + 2 * keys,
        "qwen3" => of_attention + 2 * llama.head_dim,
        "gemma" => of_attention,
        "gpt2" => of_attention + ffn + width + 2 * width,
        _ => 0,
    };
    let gate = if is_gpt2 { ffn * width } else { 0 };
    let of_model = if is_gpt2 { width + llama.max_position_embeddings * width } else { 0 };
    let all = llama.num_params() as usize + of_model + llama.num_hidden_layers * more;
    Ok((all - llama.num_hidden_layers * gate) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parameters that `transformers` counts in models of these published configurations.
    #[test]
    fn parameters_are_counted_to_the_unit() {
        let published = [
            (include_str!("configs/llama-3.2-1b.json"), 1_235_814_400),
            (include_str!("configs/smollm2-135m.json"), 134_515_008),
            (include_str!("configs/qwen2.5-0.5b.json"), 494_032_768),
            (include_str!("configs/mistral-7b-v0.1.json"), 7_241_732_096),
            (include_str!("configs/gemma-2b.json"), 2_506_172_416),
            (include_str!("configs/gpt2.json"), 124_439_808),
        ];
        for (text, params) in published {
            assert_eq!(Decoder::from_json(text).unwrap().params, params, "{text}");
        }
    }

    #[test]
    fn models_that_are_not_known_are_refused_by_name() {
        let mistral = include_str!("configs/mistral-7b-v0.1.json");
        for (from, to, problem) in [
            ("\"mistral\"", "\"mixtral\\u001b[31m\"", "known are llama, mistral"),
            ("{", "{\"num_local_experts\": 8,", "num_local_experts is set"),
            ("{", "{\"quantization_config\": {},", "quantization_config is set"),
            ("MistralForCausalLM", "MistralForSequenceClassification", "the architecture is"),
            ("\"hidden_size\": 4096", "\"hidden_size\": 1e99", "hidden_size is 1e+99, and must be"),
            ("\"vocab_size\": 32000", "\"x\": 1", "vocab_size is missing"),
        ] {
            let error = Decoder::from_json(&mistral.replacen(from, to, 1)).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
        assert!(Decoder::from_json(&mistral[..40]).unwrap_err().to_string().contains("no JSON"));
        assert_eq!(Decoder::from_json("[]").unwrap_err().to_string(), "this is no JSON object");
    }
}
