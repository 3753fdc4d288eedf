//! Flags of `paceline generate`.

use std::path::PathBuf;

use clap::Args;
use paceline_failure::numbers::{above_zero, at_least, part};
use paceline_settings::named::PrecisionName;

const EXAMPLES: &str = "\
Examples:
  paceline generate --model SmolLM2-360M --prompt 'The capital of France is'
  paceline generate --model my-model --prompt 'Once' --temperature 0.8 --top-p 0.9 --seed 7
";

/// Flags of `paceline generate`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct GenerateArgs {
    /// A checkpoint, the folder of --save or a run folder, as training has left it; or a folder with config.json,
    /// model.safetensors (or its index) and tokenizer.json, as Hugging Face stores them; or a model of the Hugging Face Hub
    /// (paceline fetch model)
    #[arg(long = "model", value_name = "DIR|NAME")]
    pub folder: PathBuf,
    /// The text to go on from; each further --prompt begins another text
    #[arg(long = "prompt", value_name = "TEXT", allow_hyphen_values = true, required = true)]
    pub prompts: Vec<String>,
    /// Stop after N tokens, if the model has not ended the text before
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = at_least::<usize>(1))]
    pub max_tokens: usize,
    /// Always take the likeliest token. This is the default
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "seed"])]
    pub greedy: bool,
    /// Take tokens at random, by their probabilities: below 1, likely ones become likelier [default: 1 with --top-k or --top-p]
    #[arg(long, value_name = "T", value_parser = above_zero)]
    pub temperature: Option<f64>,
    /// Take tokens at random, among the K likeliest [default: all, with --temperature]
    #[arg(long, value_name = "K", value_parser = at_least::<usize>(1))]
    pub top_k: Option<usize>,
    /// Take tokens at random, among the likeliest that together have the probability P [default: all]
    #[arg(long, value_name = "P", value_parser = part)]
    pub top_p: Option<f64>,
    /// Make tokens that occurred less likely: divide their logits above zero by X, and multiply the others by it
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = above_zero)]
    pub repetition_penalty: f64,
    /// Let the model see the last N tokens at most; when it has seen as many, it begins again with the last half of them
    /// [default: for a checkpoint the length of the sequences that it was trained on; otherwise a text ends at the last
    /// position that the model knows]
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(2))]
    pub window: Option<usize>,
    /// Decides the random choices: the same seed gives the same text [default: 0]
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
    /// The type of the weights and of the operands of products: f32, or bf16, which takes half the memory and less time
    #[arg(long, value_enum, default_value_t = PrecisionName::F32)]
    pub precision: PrecisionName,
    /// Compute threads [default: the number of cores]
    #[arg(long, value_name = "T", value_parser = at_least::<usize>(1))]
    pub threads: Option<usize>,
}
