//! `paceline generate`: the text with which a language model goes on.
//!
//! Takes a folder as Hugging Face stores it, and a prompt. Prints the prompt and the text that follows, as it comes. Trains
//! nothing, and has no ranks.

pub mod args;
mod folder;

use std::time::{Duration, Instant};

use paceline_data::text::{TextError, TextStream};
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::streams;
use paceline_host::text::plural;
use paceline_hub as hub;
use paceline_kernels::Compute;
use paceline_memory::{Allocator, DType};
use paceline_model::{Generator, LlamaConfig, ModelError, Sampler, Sampling};

use self::args::GenerateArgs;
use self::folder::Folder;

/// Runs `paceline generate`: checks the flags, the folder and the prompt, then generates.
pub fn generate(args: &GenerateArgs) -> Result<u8> {
    let sampling = sampling(args)?;
    let threads = threads(args)?;
    if args.max_tokens == 0 {
        return Err(usage("--max-tokens 0: pass the number of tokens to generate, at least 1"));
    }
    if args.prompt.is_empty() {
        return Err(usage("--prompt is empty; pass the text to go on from"));
    }
    let found = hub::find("--model", &args.folder, hub::Wanted::Weights)?;
    if let Some(note) = &found.note {
        streams::stderr().line(note);
    }
    let folder = Folder::open(&found.path)?;
    let tokens = prompt(args, &folder)?;
    let most = folder.config.max_position_embeddings;
    let max_len = most.min(tokens.len().saturating_add(args.max_tokens));
    let compute = Compute::new(threads, Allocator::new()).map_err(failed)?;
    let storage = folder.load(DType::F32, &compute.allocator)?;
    let mut generator =
        Generator::new(&compute, &folder.config, &storage, max_len).map_err(failed)?;
    let mut sampler = Sampler::new(sampling).map_err(failed)?;

    let print = |text: &str| streams::stdout().part(text);
    print(&args.prompt);
    let start = Instant::now();
    for token in &tokens {
        generator.read(*token).map_err(failed)?;
    }
    let read = start.elapsed();
    let mut stream = TextStream::new(&folder.tokenizer, &tokens);
    let (mut count, mut end) = (0, End::MaxTokens);
    loop {
        let token = sampler.choose(generator.logits().map_err(failed)?).map_err(failed)?;
        count += 1;
        if folder.ends.contains(&token) {
            end = End::Token;
            break;
        }
        print(&stream.next(token).map_err(unreadable)?);
        if count == args.max_tokens {
            break;
        }
        if tokens.len() + count == most {
            end = End::Positions;
            break;
        }
        generator.read(token).map_err(failed)?;
    }
    print(&stream.finish().map_err(unreadable)?);
    print("\n");
    let written = start.elapsed() - read;
    streams::stderr().line(&format!(
        "{} read in {:.2} s, {} generated in {:.2} s: {:.1} tokens/s, {}",
        plural(tokens.len(), "token"),
        read.as_secs_f64(),
        plural(count, "token"),
        written.as_secs_f64(),
        rate(count, written),
        end.words(most),
    ));
    Ok(0)
}

/// Why a text ends.
enum End {
    MaxTokens,
    Token,
    Positions,
}

impl End {
    fn words(&self, positions: usize) -> String {
        match self {
            Self::MaxTokens => "the number that --max-tokens allows".into(),
            Self::Token => "the model has ended the text".into(),
            Self::Positions => format!("the model knows no more than {positions} positions"),
        }
    }
}

fn rate(count: usize, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64().max(1e-9)
}

/// How tokens are chosen.
fn sampling(args: &GenerateArgs) -> Result<Sampling> {
    let is_random = args.temperature.is_some() || args.top_k.is_some();
    let given = [
        ("--temperature", args.temperature.is_some()),
        ("--top-k", args.top_k.is_some()),
        ("--seed", args.seed.is_some()),
    ];
    let given = given.into_iter().find(|(_, is_given)| *is_given).map(|(flag, _)| flag);
    let temperature = args.temperature.unwrap_or(1.0);
    if let (true, Some(flag)) = (args.greedy, given) {
        return Err(usage(format!("--greedy takes no {flag}; leave one of them out")));
    }
    if let (false, Some(flag)) = (is_random, given) {
        return Err(usage(format!(
            "{flag} decides random choices, and there are none; add --temperature T or --top-k K"
        )));
    }
    if !(temperature > 0.0 && temperature.is_finite()) {
        return Err(usage(format!(
            "--temperature {temperature}: pass a number above zero; for the likeliest tokens, leave it out"
        )));
    }
    if args.top_k == Some(0) {
        return Err(usage("--top-k 0: pass a number above zero; for all tokens, leave it out"));
    }
    Ok(match is_random {
        true => Sampling::Random { temperature, top_k: args.top_k, seed: args.seed.unwrap_or(0) },
        false => Sampling::Greedy,
    })
}

fn threads(args: &GenerateArgs) -> Result<usize> {
    match args.threads {
        Some(0) => Err(usage("--threads 0: pass 1 or more")),
        Some(threads) => Ok(threads),
        None => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
    }
}

/// The tokens of the prompt, which the model can read.
fn prompt(args: &GenerateArgs, folder: &Folder) -> Result<Vec<u32>> {
    let tokens = folder.tokenizer.encode_whole(&args.prompt).map_err(unreadable)?;
    let LlamaConfig { vocab_size, max_position_embeddings: most, .. } = folder.config;
    let is_unknown = |token: &&u32| **token as usize >= vocab_size;
    if let Some(token) = tokens.iter().find(is_unknown) {
        return Err(usage(format!(
            "--model {}: tokenizer.json makes token {token} of --prompt, and by config.json the model has {vocab_size} tokens; \
             use the tokenizer.json of this model",
            args.folder.printable()
        )));
    }
    if tokens.is_empty() {
        return Err(usage("--prompt has no token; pass the text to go on from"));
    }
    if tokens.len() >= most {
        return Err(usage(format!(
            "--prompt has {}, and the model knows {most} positions, one of which the first new token needs; shorten the prompt",
            plural(tokens.len(), "token")
        )));
    }
    Ok(tokens)
}

fn usage(problem: impl Into<String>) -> Failure {
    Failure::Usage(problem.into())
}

fn failed(error: impl Into<ModelError>) -> Failure {
    Failure::Run(error.into().to_string())
}

fn unreadable(error: TextError) -> Failure {
    Failure::Run(error.to_string())
}
