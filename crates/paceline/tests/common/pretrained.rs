//! A Llama of one block as a folder of Hugging Face, for tests that change something in it.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};

/// Writes a folder as Hugging Face stores it: the files of [`files`].
pub fn write(folder: &Path, change: impl Fn(&mut Value, &mut Vec<(String, Vec<usize>)>)) {
    let (config, weights) = files(change);
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("config.json"), config).unwrap();
    fs::write(folder.join("model.safetensors"), weights).unwrap();
}

/// A tokenizer that has the words t0, t1 and so on, between spaces.
pub fn tokenizer(vocab: usize) -> String {
    let words = (0..vocab).map(|token| (format!("t{token}"), json!(token)));
    let vocab = Value::Object(words.collect());
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "unk_token": "t0", "vocab": vocab},
    });
    tokenizer.to_string()
}

/// The contents of `config.json` and `model.safetensors`, with weights that repeat, after `change` has changed the settings
/// and the names and shapes of the tensors.
pub fn files(change: impl Fn(&mut Value, &mut Vec<(String, Vec<usize>)>)) -> (String, Vec<u8>) {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 41, "hidden_size": 8,
        "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
    });
    let layer = "model.layers.0";
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![41, 8]),
        (format!("{layer}.input_layernorm.weight"), vec![8]),
        (format!("{layer}.post_attention_layernorm.weight"), vec![8]),
        (format!("{layer}.mlp.gate_proj.weight"), vec![12, 8]),
        (format!("{layer}.mlp.up_proj.weight"), vec![12, 8]),
        (format!("{layer}.mlp.down_proj.weight"), vec![8, 12]),
        ("model.norm.weight".to_owned(), vec![8]),
    ];
    for part in ["q", "k", "v", "o"] {
        tensors.push((format!("{layer}.self_attn.{part}_proj.weight"), vec![8, 8]));
    }
    change(&mut config, &mut tensors);
    let data: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, shape)| {
            let elems = 0..shape.iter().product::<usize>();
            elems.flat_map(|at| (((at * 7) % 11) as f32 * 0.01).to_le_bytes()).collect()
        })
        .collect();
    let views: HashMap<String, TensorView> = tensors
        .iter()
        .zip(&data)
        .map(|((name, shape), data)| {
            (name.clone(), TensorView::new(Dtype::F32, shape.clone(), data).unwrap())
        })
        .collect();
    (config.to_string(), serialize(views, None).unwrap())
}
