//! Flags of `paceline generate`.

use std::path::PathBuf;

use clap::Args;

const EXAMPLES: &str = "\
Examples:
  paceline generate --model SmolLM2-360M --prompt 'The capital of France is'
  paceline generate --model tuned --prompt 'Once' --temperature 0.8 --top-k 40 --seed 7
";

/// Flags of `paceline generate`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct GenerateArgs {
    /// Folder with config.json, model.safetensors (or its index) and tokenizer.json, as Hugging Face stores them, or a
    /// model of the Hugging Face Hub (paceline fetch model)
    #[arg(long = "model", value_name = "DIR|NAME")]
    pub folder: PathBuf,
    /// The text to go on from
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: String,
    /// Stop after N tokens, if the model has not ended the text before
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub max_tokens: usize,
    /// Always take the likeliest token. This is the default
    #[arg(long)]
    pub greedy: bool,
    /// Take tokens at random, by their probabilities: below 1, likely ones become likelier [default: 1 with --top-k]
    #[arg(long, value_name = "T")]
    pub temperature: Option<f64>,
    /// Take tokens at random, among the K likeliest [default: all, with --temperature]
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Decides the random choices: the same seed gives the same text [default: 0]
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
    /// Compute threads [default: the number of cores]
    #[arg(long, value_name = "T")]
    pub threads: Option<usize>,
}
