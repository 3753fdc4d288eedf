//! How long it takes to read a prompt in one pass, and token by token: a Llama of 135 M parameters, whose weights are random.
//!
//!     cargo run --release -p paceline-model --example prompt_speed -- bf16 2
//!
//! Takes the element type, f32 or bf16, and the number of threads. Prints one line of JSON: the best of three, in seconds.

use std::time::Instant;

use paceline_kernels::{Compute, cast};
use paceline_memory::{Allocator, DType};
use paceline_model::{Generator, LlamaConfig, Storage};

const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 49152,
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": true}"#;
const TOKENS: usize = 512;
const ROUNDS: usize = 3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (dtype, threads) = match &args[..] {
        [dtype, threads] if dtype == "f32" => (DType::F32, threads.parse()?),
        [dtype, threads] if dtype == "bf16" => (DType::BF16, threads.parse()?),
        _ => return Err("pass the element type, f32 or bf16, and the number of threads".into()),
    };
    let compute = Compute::new(threads, Allocator::new())?;
    let config = LlamaConfig::from_json(CONFIG)?;
    let layout = config.build(1)?.layout;
    let storage = Storage::private(layout.clone(), DType::F32, &compute.allocator)?;
    for (at, weight) in storage.values().tensor().write::<f32>()?.iter_mut().enumerate() {
        // Small, of both signs, and different: times do not depend on more.
        *weight = ((at * 7919) % 2003) as f32 * 2e-5 - 0.02;
    }
    let storage = match dtype {
        DType::F32 => storage,
        _ => {
            let rounded = Storage::private(layout, dtype, &compute.allocator)?;
            cast::narrow(&compute, storage.values().tensor(), rounded.values().tensor())?;
            rounded
        }
    };
    let mut generator = Generator::new(&compute, &config, &storage, TOKENS)?;
    let tokens: Vec<u32> = (0..TOKENS as u32).collect();
    let mut best = [f64::INFINITY; 2];
    for _ in 0..ROUNDS {
        generator.forget();
        let start = Instant::now();
        generator.read_all(&tokens)?;
        best[0] = best[0].min(start.elapsed().as_secs_f64());
        generator.forget();
        let start = Instant::now();
        for token in &tokens {
            generator.read(*token)?;
        }
        best[1] = best[1].min(start.elapsed().as_secs_f64());
    }
    println!(
        "{{\"tokens\": {TOKENS}, \"one_pass_s\": {}, \"one_by_one_s\": {}}}",
        best[0], best[1]
    );
    Ok(())
}
