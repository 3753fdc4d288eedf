//! A language model by its `config.json` alone, as Hugging Face's `transformers` writes it.
//!
//! Input: the text of the file. Output: the number of its parameters, and the flags of a Llama whose products and activations have the
//! same shapes. The families differ from Llama in biases, norms, positions and in whether the feed-forward layers have a gate. All of
//! that is counted to the unit. A model with experts, with quantized weights or of another family is refused by name. Sources: the
//! implementations of `transformers`.

use paceline_model::{LlamaConfig, LlamaTask, SpecialTokens};
use serde_json::{Map, Value};

/// The families that are known, by `model_type`.
const FAMILIES: [&str; 6] = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2"];

/// Settings of models with experts.
const EXPERTS: [&str; 4] =
    ["num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size"];

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

/// The settings, with errors that name them.
struct ConfigJson(Map<String, Value>);

impl ConfigJson {
    fn size(&self, key: &str, default: Option<usize>) -> Result<usize, String> {
        match self.0.get(key).filter(|value| !value.is_null()) {
            None => default.ok_or_else(|| format!("{key} is missing")),
            Some(value) => {
                let size =
                    value.as_u64().filter(|size| (1..=LlamaConfig::MAX_SIZE as u64).contains(size));
                size.map(|size| size as usize).ok_or_else(|| {
                    format!(
                        "{key} is {value}, and must be a whole number from 1 to {}",
                        LlamaConfig::MAX_SIZE
                    )
                })
            }
        }
    }

    fn is_set(&self, key: &str, default: bool) -> Result<bool, String> {
        match self.0.get(key).filter(|value| !value.is_null()) {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| format!("{key} is {value}, and must be true or false")),
        }
    }

    /// The family. Errors for a model that is not known.
    fn family(&self) -> Result<&'static str, String> {
        let word = |key| self.0.get(key).and_then(Value::as_str);
        let stated = word("model_type").ok_or("model_type is missing")?;
        let family = FAMILIES.into_iter().find(|family| *family == stated);
        let family = family.ok_or_else(|| {
            format!(
                "model_type is {stated:?}, which is not known; known are {}",
                FAMILIES.join(", ")
            )
        })?;
        if let Some(key) = EXPERTS.iter().find(|key| self.0.contains_key(**key)) {
            return Err(format!("{key} is set: models with experts are not known"));
        }
        if self.0.get("quantization_config").is_some_and(|value| !value.is_null()) {
            return Err(
                "quantization_config is set: training of quantized weights is not known".into()
            );
        }
        let names = self.0.get("architectures").and_then(Value::as_array);
        let name = names.and_then(|names| names.first()).and_then(Value::as_str);
        let is_other =
            |name: &&str| !name.ends_with("ForCausalLM") && !name.ends_with("LMHeadModel");
        match name.filter(is_other) {
            Some(name) => Err(format!(
                "the architecture is {name:?}, and must be a language model, as LlamaForCausalLM"
            )),
            None if self.is_set("add_cross_attention", false)? => {
                Err("add_cross_attention is set: it is not known".into())
            }
            None => Ok(family),
        }
    }
}

impl Decoder {
    /// Reads a `config.json`. The error names the setting, not the file.
    pub fn from_json(text: &str) -> Result<Self, String> {
        let value: Value =
            serde_json::from_str(text).map_err(|e| format!("this is no JSON ({e})"))?;
        let Value::Object(object) = value else { return Err("this is no JSON object".into()) };
        let of = ConfigJson(object);
        let family = of.family()?;
        let is_gpt2 = family == "gpt2";
        let name = |own: &'static str, gpt2: &'static str| if is_gpt2 { gpt2 } else { own };
        let width = of.size(name("hidden_size", "n_embd"), None)?;
        let heads = of.size(name("num_attention_heads", "n_head"), None)?;
        let kv_heads = if is_gpt2 { heads } else { of.size("num_key_value_heads", Some(heads))? };
        // The defaults of the families' own classes.
        let default = match family {
            "gemma" => 256,
            "qwen3" => 128,
            _ => width / heads,
        };
        let head_dim = if is_gpt2 { width / heads } else { of.size("head_dim", Some(default))? };
        let ffn = of.size(name("intermediate_size", "n_inner"), is_gpt2.then_some(4 * width))?;
        let tied = of.is_set("tie_word_embeddings", ["gemma", "gpt2"].contains(&family))?;
        let layers = of.size(name("num_hidden_layers", "n_layer"), None)?;
        let positions = of.size(name("max_position_embeddings", "n_positions"), Some(1024))?;
        let llama = LlamaConfig {
            vocab_size: of.size("vocab_size", None)?,
            hidden_size: width,
            // A layer without a gate has two products instead of three.
            intermediate_size: if is_gpt2 { (2 * ffn).div_ceil(3) } else { ffn },
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim,
            max_position_embeddings: positions,
            rope_theta: 10_000.0,
            rope_scaling: None,
            rms_norm_eps: 1e-6,
            initializer_range: 0.02,
            tie_word_embeddings: tied,
            task: LlamaTask::LanguageModel,
            special_tokens: SpecialTokens::default(),
        };
        llama.check().map_err(|error| error.to_string())?;
        let params = params(&of, family, &llama, ffn)?;
        let windows = of.is_set("use_sliding_window", family == "mistral")?;
        let window = if windows {
            of.0.get("sliding_window").filter(|value| !value.is_null())
        } else {
            None
        };
        let window = window.map(|_| of.size("sliding_window", None)).transpose()?;
        Ok(Self { family, llama, params, window })
    }

    /// The flags of `paceline train` for the Llama of the same shapes, with values.
    pub fn flags(&self) -> Vec<(&'static str, usize)> {
        let of = &self.llama;
        vec![
            ("layers", of.num_hidden_layers),
            ("width", of.hidden_size),
            ("heads", of.num_attention_heads),
            ("kv-heads", of.num_key_value_heads),
            ("head-dim", of.head_dim),
            ("intermediate", of.intermediate_size),
            ("vocab", of.vocab_size),
        ]
    }
}

/// The parameters of a model whose feed-forward layers have this width.
fn params(of: &ConfigJson, family: &str, llama: &LlamaConfig, ffn: usize) -> Result<u64, String> {
    let (width, head_dim, is_gpt2) = (llama.hidden_size, llama.head_dim, family == "gpt2");
    let queries = llama.num_attention_heads * head_dim;
    let keys = llama.num_key_value_heads * head_dim;
    let of_attention =
        if is_gpt2 || of.is_set("attention_bias", false)? { queries + 2 * keys + width } else { 0 };
    let of_mlp = if of.is_set("mlp_bias", false)? { 2 * ffn + width } else { 0 };
    // Elements of a layer that a Llama without biases does not have.
    let more = match family {
        "llama" => of_attention + of_mlp,
        "qwen2" => queries + 2 * keys,
        "qwen3" => of_attention + 2 * head_dim,
        "gemma" => of_attention,
        "gpt2" => of_attention + ffn + width + 2 * width,
        _ => 0,
    };
    let products = (if is_gpt2 { 2 } else { 3 }) * ffn * width;
    let layer = 2 * (queries + keys) * width + products + 2 * width + more;
    let positions = if is_gpt2 { width + llama.max_position_embeddings * width } else { 0 };
    let embeddings = llama.vocab_size * width * if llama.tie_word_embeddings { 1 } else { 2 };
    Ok((embeddings + llama.num_hidden_layers * layer + width + positions) as u64)
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
        let refused =
            |from: &str, to: &str| Decoder::from_json(&mistral.replace(from, to)).unwrap_err();
        assert!(
            refused("\"mistral\"", "\"mixtral\\u001b[31m\"").contains("known are llama, mistral")
        );
        assert!(
            refused("\"vocab_size\"", "\"num_local_experts\": 8, \"vocab_size\"")
                .contains("experts")
        );
        assert!(
            refused("\"vocab_size\"", "\"quantization_config\": {}, \"vocab_size\"")
                .contains("quantization_config")
        );
        assert!(
            refused("MistralForCausalLM", "MistralForSequenceClassification")
                .contains("architecture")
        );
        assert_eq!(
            refused("\"hidden_size\": 4096", "\"hidden_size\": 1e99"),
            "hidden_size is 1e+99, and must be a whole number from 1 to 16777216"
        );
        assert_eq!(refused("\"vocab_size\": 32000", "\"x\": 1"), "vocab_size is missing");
        assert!(Decoder::from_json(&mistral[..40]).unwrap_err().contains("no JSON"));
        assert_eq!(Decoder::from_json("[]").unwrap_err(), "this is no JSON object");
    }
}
