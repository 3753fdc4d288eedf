//! Prints what a language model thinks of the next token: the logits after each token of a sequence, a line for each.
//!
//!     cargo run --release -p paceline-model --example logits -- FOLDER 1 5 7
//!
//! The folder is one as Hugging Face stores it, with `config.json` and the weights.

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use paceline_kernels::Compute;
use paceline_memory::{Allocator, DType};
use paceline_model::pretrained::Pretrained;
use paceline_model::{Generator, LlamaConfig, Storage};

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let folder = PathBuf::from(words.next().ok_or("usage: logits FOLDER TOKEN...")?);
    let tokens = words.map(|word| word.parse()).collect::<Result<Vec<u32>, _>>()?;

    let config = LlamaConfig::from_json(&fs::read_to_string(folder.join("config.json"))?)?;
    let weights = Pretrained::open(&folder)?;
    let (layout, new) = config.check_weights(&weights)?;
    let allocator = Allocator::new();
    let storage = Storage::private(layout, DType::F32, &allocator)?;
    weights.load(&storage, &new)?;

    let compute = Compute::new(1, allocator)?;
    let mut model = Generator::new(&compute, &config, &storage, tokens.len())?;
    for token in tokens {
        model.read(token)?;
        let logits = model.logits()?.read::<f32>()?;
        let logits: Vec<String> = logits.iter().map(f32::to_string).collect();
        println!("{}", logits.join(" "));
    }
    Ok(())
}
